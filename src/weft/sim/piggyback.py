"""Attention piggybacking in virtual time: the host attends, and a later step takes the results.

OmniServe section 3.2, layer by layer. A piggybacked row's token begins with the embedding and the
first QKV, which a step computes along with its own rows. Then q, k and v of layer i go to a host,
whose CPUs attend in the order of arrival. The device never waits: the result piggybacks with the
first step that executes the rest of layer i after it is back, if the step's cap for the layer
allows; that step also computes QKV of layer i + 1, and so on up to the token. So a piggybacked row
usually comes one layer further with each step, and a token takes as many steps as there are layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from weft.core.errors import InvariantError
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.kv.places import choose_host

PROBE_TOKENS = 4096  # context of which the attention is costed


class PiggybackRow(NamedTuple):
    """A token on its way: the context that its attention reads, and the host that has its KV."""

    row: int
    context: int
    host: int


class Piggybacked(NamedTuple):
    """The piggybacked work of a step.

    Attributes:
        finished: rows whose token is complete, in the order in which it happened.
        by_layer: piggybacked rows that each layer carried.
    """

    finished: list[int]
    by_layer: list[int]


class Piggyback:
    """The piggybacked rows of an executor.

    Args:
        attention_s: seconds for which one host attends for one layer to a context of so many
            tokens.
        hosts: hosts that keep KV and attend. The first is the device's own: a row goes there while
            it has room, then to the remote one with the fewest tokens (OmniServe section 4).
        latency_s: seconds that q, k, v and the result of a remote host take on their way, both ways
            together.
        room: tokens that fill the first one.
    """

    def __init__(
        self,
        layers: int,
        attention_s: Callable[[int], float],
        hosts: int = 1,
        latency_s: float = 0.0,
        room: float = math.inf,
    ) -> None:
        self._layers = layers
        self._attention_s = attention_s
        self._latency_s = [0.0] + [latency_s] * (hosts - 1)
        self._room = room
        self._free_at = [0.0] * hosts
        self._held = [0] * hosts
        self._kept: dict[int, tuple[int, int]] = {}  # row -> host, tokens
        self._rows: set[int] = set()
        self._count = 0
        # For each layer, results by the time at which they are back.
        self._back: list[list[tuple[float, int, PiggybackRow]]] = [[] for _ in range(layers)]

    def __contains__(self, row: int) -> bool:
        """Whether a token of the row is on its way."""
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def in_layers(self) -> tuple[int, ...]:
        """The number of piggybacked rows that wait for each layer or its attention."""
        return tuple(len(results) for results in self._back)

    def keep(self, row: int, tokens: int) -> None:
        """A row's KV of so many tokens comes to the hosts."""
        others = len(self._held) - 1
        own = not others or self._held[0] + tokens <= self._room
        host = choose_host([own, *[True] * others], self._held)
        assert host is not None, "remote hosts have room"
        self._kept[row] = (host, tokens)
        self._held[host] += tokens

    def give_up(self, row: int) -> None:
        """The KV of a row leaves the hosts; one that has none there is ignored.

        Raises:
            InvariantError: a token of the row is on its way.
        """
        if row in self._rows:
            raise InvariantError(f"row {row} leaves the host while its token is on its way")
        host, tokens = self._kept.pop(row, (0, 0))
        self._held[host] -= tokens

    def abort(self, row: int) -> None:
        """Drop the token of a row; one that has none on its way is ignored.

        The host attends in vain to what it has begun.
        """
        if row not in self._rows:
            return
        self._rows.remove(row)
        for results in self._back:
            kept = [result for result in results if result[2].row != row]
            if len(kept) < len(results):
                results[:] = kept
                heapify(results)

    def next_back_s(self) -> float:
        """When the next result is back; infinity if there are no piggybacked rows."""
        return min((results[0][0] for results in self._back if results), default=float("inf"))

    def begin(self, row: int, context: int, at_s: float) -> None:
        """A token of a row begins; its q, k and v of the first layer leave at that time."""
        if row in self._rows:
            raise InvariantError(f"row {row} has a token on its way already")
        host, tokens = self._kept[row]
        self._kept[row] = (host, tokens + 1)
        self._held[host] += 1
        self._rows.add(row)
        self._attend(PiggybackRow(row, context, host), 0, at_s)

    def _attend(self, piggybacked_row: PiggybackRow, layer: int, at_s: float) -> None:
        each_way_s = self._latency_s[piggybacked_row.host] / 2
        arrives = at_s + each_way_s
        done = max(arrives, self._free_at[piggybacked_row.host]) + self._attention_s(
            piggybacked_row.context
        )
        self._free_at[piggybacked_row.host] = done
        self._count += 1  # equal times keep their order
        heappush(self._back[layer], (done + each_way_s, self._count, piggybacked_row))

    def piggyback(self, start_s: float, seconds: float, caps: Seq[int]) -> Piggybacked:
        """Let results piggyback with a step that executes its layers evenly over its time.

        Args:
            caps: for each layer, how many may piggyback; none may if it is empty.
        """
        finished: list[int] = []
        by_layer = [0] * self._layers
        if not caps:
            return Piggybacked(finished, by_layer)
        for layer, results in enumerate(self._back):
            at_s = start_s + seconds * (layer + 1) / self._layers
            carried = 0
            while results and carried < caps[layer] and results[0][0] <= at_s:
                piggybacked_row = heappop(results)[2]
                carried += 1
                if layer + 1 < self._layers:
                    self._attend(piggybacked_row, layer + 1, at_s)
                else:
                    self._rows.remove(piggybacked_row.row)
                    finished.append(piggybacked_row.row)
            by_layer[layer] = carried
        return Piggybacked(finished, by_layer)


def on_hosts(
    cost: CostModel, hosts: int = 1, latency_s: float = 0.0, room: float = math.inf
) -> Piggyback:
    """Piggybacked rows on hosts that each attend as fast as a cost model says of one."""
    probe = Work(tokens=1, host_decodes=1, host_context=PROBE_TOKENS)
    token_s = cost.terms(probe).cpu_attention / cost.layers / PROBE_TOKENS
    return Piggyback(cost.layers, lambda context: context * token_s, hosts, latency_s, room)
