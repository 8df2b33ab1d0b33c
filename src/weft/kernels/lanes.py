"""Lanes: rows that a captured step carries through its layers beside its own.

They are the piggybacked rows of OmniServe (section 3.2).

A step has a fixed number of lanes, so that it can be captured. Which piggybacked row is in which
lane is decided on the device, layer by layer, by the results of the host that have arrived in the
device's own memory. So nothing waits for the host, and nothing reads its memory.

Sub-batches that overlap with the host's attention (NEO) have a lane for each of their tokens, which
stays where it is. They wait for the results of a layer, in memory of the device too.

A *ticket* names one job of the host: it says which step handed it over, in which layer and lane.
Later jobs have larger tickets, so their order is that of submission, and a result that comes for a
token which has ended meanwhile matches no job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from weft.kernels.arrays import Array

AT_ONCE = 256  # results that go to the device in one piece
MOST_LANES = 64  # one tile of the products of a GPU; a step of the paper carries fewer
MOST_ROWS = 4096  # that one small program of a GPU looks through in each layer
MOST_LOOKS = 2**27  # at results that do not come: minutes, if nobody ends the wait before


def lanes_for(rows: int) -> int:
    """Return how many lanes the steps of an executor of so many rows have: 32 or 64."""
    return MOST_LANES // 2 if rows <= MOST_LANES // 2 else MOST_LANES


@dataclass(frozen=True)
class TicketRule:
    """How tickets are made: ``(serial * layers + layer) * lanes + lane``, the serial from 1 on."""

    layers: int
    lanes: int

    def first(self, serial: int) -> int:
        """The smallest ticket of a step; all of earlier steps are smaller."""
        return serial * self.layers * self.lanes

    def layer_of(self, tickets: Any) -> Any:
        """The layers of tickets, a number or an array of them."""
        return tickets // self.lanes % self.layers


@dataclass(frozen=True)
class LaneState:
    """What a device keeps of piggybacked rows: by executor row [R], and one more row for none.

    Whoever waits gives up once the last of ``arrived``, that of no row, is not 0.

    Attributes:
        jobs: [R + 1] int64, the ticket of what the host attends to, or has attended to and no step
            has taken; its negative once a step has taken the result; 0 for no token on its way.
        arrived: [R + 1] int64, the ticket of the latest result that is here.
        results: [R + 1, W], attention of the host, W numbers of a token at most.
        residuals: [R + 1, C].
        positions: [R + 1] int64, of the token.
    """

    jobs: Array
    arrived: Array
    results: Array
    residuals: Array
    positions: Array

    @classmethod
    def empty(cls, rows: int, width: int, hidden: int, dtype: str, device: Any) -> LaneState:
        """Return the state of so many rows on a torch device, none of which has a token."""
        import torch

        def zeros(*more: int, kind: str = "int64") -> Array:
            return torch.zeros(rows + 1, *more, dtype=getattr(torch, kind), device=device)

        return cls(zeros(), zeros(), zeros(width, kind=dtype), zeros(hidden, kind=dtype), zeros())


def lane_state_bytes(rows: int, width: int, hidden: int, element: int) -> int:
    """Return the bytes of ``LaneState.empty``, whose numbers have ``element`` bytes."""
    return (rows + 1) * (3 * 8 + element * (width + hidden))


@dataclass(frozen=True)
class LaneOutbox:
    """Where a device writes q, k and v of its rows, in memory of the host.

    Attributes:
        memory: [R, N], of a row its queries, keys and values.
        address: [1] int64 on the device, where the memory begins.
        keys, values: where those begin in a row; queries begin at 0.
    """

    memory: Array
    address: Array
    keys: int
    values: int


class ChooseLanes(Protocol):
    """See ``reference_lanes.choose_lanes``."""

    def __call__(
        self, state: LaneState, limits: Array, layer: int, rule: TicketRule, lanes: Array, /
    ) -> None: ...


class JoinLanes(Protocol):
    """See ``reference_lanes.join_lanes``."""

    def __call__(
        self,
        state: LaneState,
        lanes: Array,
        attended: Array,
        residual: Array,
        positions: Array,
        /,
    ) -> Array: ...


class KeepLanes(Protocol):
    """See ``reference_lanes.keep_lanes``."""

    def __call__(
        self,
        state: LaneState,
        lanes: Array,
        residual: Array,
        serial: Array,
        layer: int,
        rule: TicketRule,
        /,
    ) -> None: ...


class SendLanes(Protocol):
    """See ``reference_lanes.send_lanes``."""

    def __call__(
        self, lanes: Array, q: Array, k: Array | None, v: Array | None, outbox: LaneOutbox, /
    ) -> None: ...


class WaitForLanes(Protocol):
    """See ``reference_lanes.wait_for_lanes``."""

    def __call__(
        self, state: LaneState, lanes: Array, ticket: Array, gave_up: Array, looks: int, /
    ) -> None: ...


class ReceiveLanes(Protocol):
    """See ``reference_lanes.receive_lanes``."""

    def __call__(self, state: LaneState, lanes: Array, attended: Array, /) -> None: ...


@dataclass(frozen=True)
class LaneOps:
    """The ops of steps with rows that the host attends for; all can be captured."""

    choose: ChooseLanes
    join: JoinLanes
    keep: KeepLanes
    send: SendLanes
    wait: WaitForLanes
    receive: ReceiveLanes
