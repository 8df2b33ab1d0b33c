"""Attention piggybacking in virtual time: the host attends, and a later step takes the results.

OmniServe section 3.2, layer by layer. A piggybacked row's token begins with the embedding and the
first QKV, which a step computes along with its own rows. Then q, k and v of layer i go to a host,
whose CPUs attend for all rows that wait in a layer in one call, the layer of the oldest job first.
The device never waits: the result piggybacks with the first step that executes the rest of layer i
after it is back, if the step's cap for the layer allows; that step also computes QKV of layer
i + 1, and so on up to the token. So a piggybacked row usually comes one layer further with each
step, and a token takes as many steps as there are layers.

The states of the jobs are those of an engine's mailbox (``mailbox``); here are only their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import NamedTuple

from weft.core.errors import InvariantError
from weft.core.plan import StepPlan
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.kv.places import choose_host
from weft.sim.mailbox import JobStates

PROBE_TOKENS = 4096  # context of which the attention is costed


class Piggybacked(NamedTuple):
    """The piggybacked work of a step.

    Attributes:
        finished: rows whose token is complete, in the order in which it happened.
        by_layer: piggybacked rows that each layer carried.
    """

    finished: list[int]
    by_layer: list[int]


class _HostCall(NamedTuple):
    """Jobs that a host computes together.

    Attributes:
        back_s: when the device has the results.
    """

    back_s: float
    number: int  # equal times keep their order
    rows: list[int]


class _TokenOnHost(NamedTuple):
    """A token on its way: the context that its attention reads, and where it is.

    Attributes:
        arrives_s: when its q, k and v are with the host.
    """

    context: int
    host: int
    layer: int
    arrives_s: float


class Piggyback:
    """The piggybacked rows of an executor.

    Times never go back from one call to the next.

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
        self._each_way_s = [0.0] + [latency_s / 2] * (hosts - 1)
        self._room = room
        self._free_at = [0.0] * hosts
        self._held = [0] * hosts
        self._kept: dict[int, tuple[int, int]] = {}  # row -> host, tokens
        self._jobs = JobStates(layers, hosts)
        self._rows: dict[int, _TokenOnHost] = {}
        self._calls: list[_HostCall] = []  # that have begun; a heap
        self._count = 0
        self._aborted: set[int] = set()  # rows that a host is computing still

    def __contains__(self, row: int) -> bool:
        """Whether a token of the row is on its way."""
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def in_layers(self) -> tuple[int, ...]:
        """The number of piggybacked rows that wait for each layer or its attention."""
        counts = [0] * self._layers
        for waiting in self._rows.values():
            counts[waiting.layer] += 1
        return tuple(counts)

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

    def before(self, plan: StepPlan, at_s: float) -> float:
        """Drop the tokens that a plan aborts.

        Returns:
            when the step may begin: where it writes KV of the host, no sooner than the hosts have
            ended what they compute for aborted rows, whose blocks may be another row's now.

        Raises:
            InvariantError: it limits other layers than there are.
        """
        if plan.piggyback_limits and len(plan.piggyback_limits) != self._layers:
            raise InvariantError(
                f"step {plan.step_id} has no limit for each of {self._layers} layers"
            )
        for row in plan.abort:
            self.abort(row, at_s)
        if not self._aborted or not plan.writes_host:
            return at_s
        ends = (call.back_s for call in self._calls if not self._aborted.isdisjoint(call.rows))
        self._serve(at_s := max(at_s, *ends))
        return at_s

    def abort(self, row: int, at_s: float) -> None:
        """Drop the token of a row; one that has none on its way is ignored.

        The host attends in vain to what it has begun.
        """
        if row not in self._rows:
            return
        self._serve(at_s)
        self._aborted.update(self._jobs.abort([row]))
        del self._rows[row]

    def begin(self, contexts: Mapping[int, int], at_s: float) -> None:
        """Tokens of rows begin; their q, k and v of the first layer leave together at that time.

        Args:
            contexts: tokens of each row, this one included.

        Raises:
            InvariantError: a token of a row is on its way already, or a host computes one that was
                aborted.
        """
        self._serve(at_s)
        for row, context in contexts.items():
            if row in self._rows:
                raise InvariantError(f"row {row} has a token on its way already")
            host, tokens = self._kept[row]
            self._jobs.begin([row], host)
            self._kept[row] = (host, tokens + 1)
            self._held[host] += 1
            self._rows[row] = _TokenOnHost(context, host, 0, at_s)
        self._submit(list(contexts), 0, at_s)

    def next_back_s(self) -> float:
        """When the next result is back, or was; infinity if there are no piggybacked rows."""
        if any(self._jobs.done_counts()):
            return -math.inf
        while True:
            begins_s, host = min((self._begins_s(host), host) for host in range(len(self._held)))
            back_s = self._calls[0].back_s if self._calls else math.inf
            if begins_s >= back_s or begins_s == math.inf:
                return back_s
            self._call(host)

    def piggyback(self, start_s: float, seconds: float, caps: Seq[int]) -> Piggybacked:
        """Let results piggyback with a step that executes its layers evenly over its time.

        Args:
            caps: for each layer, how many may piggyback; none may if it is empty.
        """
        finished: list[int] = []
        by_layer = [0] * self._layers
        if not caps or not self._rows:
            return Piggybacked(finished, by_layer)
        for layer in range(self._layers):
            at_s = start_s + seconds * (layer + 1) / self._layers
            self._serve(at_s)
            rows = self._jobs.done(layer, caps[layer])
            by_layer[layer] = len(rows)
            if not rows:
                continue
            self._jobs.take(rows, layer)
            if layer + 1 < self._layers:
                self._submit(rows, layer + 1, at_s)
            else:
                self._jobs.release(rows)
                finished += rows
                for row in rows:
                    del self._rows[row]
        return Piggybacked(finished, by_layer)

    # -- the hosts -------------------------------------------------------------------------------

    def _submit(self, rows: list[int], layer: int, at_s: float) -> None:
        self._jobs.submit(rows, layer)
        for row in rows:
            context, host, *_ = self._rows[row]
            arrives_s = at_s + self._each_way_s[host]
            self._rows[row] = _TokenOnHost(context, host, layer, arrives_s)

    def _serve(self, to_s: float) -> None:
        """Let the hosts do what they do until a time."""
        for host in range(len(self._held)):
            while self._begins_s(host) <= to_s:
                self._call(host)
        while self._calls and self._calls[0].back_s <= to_s:
            rows = heappop(self._calls).rows
            self._jobs.finish(rows)
            self._aborted.difference_update(rows)

    def _begins_s(self, host: int) -> float:
        """When a host begins its next call; infinity if no job waits."""
        oldest = self._jobs.oldest(host)
        if oldest is None:
            return math.inf
        return max(self._free_at[host], self._rows[oldest].arrives_s)

    def _call(self, host: int) -> None:
        """A host attends for all jobs of a layer, once the last of them has arrived."""
        rows = self._jobs.claim(host)
        waiting = [self._rows[row] for row in rows]
        begins_s = max(self._free_at[host], *(each.arrives_s for each in waiting))
        ends_s = begins_s + sum(self._attention_s(each.context) for each in waiting)
        self._free_at[host] = ends_s
        self._count += 1
        heappush(self._calls, _HostCall(ends_s + self._each_way_s[host], self._count, rows))


def on_hosts(
    cost: CostModel, hosts: int = 1, latency_s: float = 0.0, room: float = math.inf
) -> Piggyback:
    """Piggybacked rows on hosts that each attend as fast as a cost model says of one."""
    probe = Work(tokens=1, host_decodes=1, host_context=PROBE_TOKENS)
    token_s = cost.terms(probe).cpu_attention / cost.layers / PROBE_TOKENS
    return Piggyback(cost.layers, lambda context: context * token_s, hosts, latency_s, room)
