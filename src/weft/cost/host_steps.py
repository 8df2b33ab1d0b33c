"""Hand-made steps that move KV between the tiers, or carry piggybacked rows of the host."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import NamedTuple, Protocol

from weft.core.errors import ProfileError
from weft.core.plan import KVMove, RowAdd, StepPlan, StepResult, Tier
from weft.core.types import NEUTRAL, SamplingParams
from weft.cost.steps import Run, Stage, Step, StepRoom, StepRow, scattered

FIRST_ID = 10**9  # of the sequences here; those of a Stage have smaller ones
ALONE = 7  # steps without rows of the host, before those that carry some
LOST_S = 60.0  # without a result, after which the host is taken to be lost


class HostCounts(NamedTuple):
    """What a host worker has done.

    Attributes:
        jobs: rows that it has attended to, each in one layer.
        busy_s: seconds that it spent on them.
        round_trip_s: seconds from the submission to the result, summed over the jobs.
    """

    jobs: int = 0
    busy_s: float = 0.0
    round_trip_s: float = 0.0


class HostRun(Protocol):
    """Computes plans as an engine does, and knows what its host worker has done."""

    def run(self, plans: Seq[StepPlan]) -> list[float]:
        """Seconds that each plan took."""

    def follow(self, plans: Iterable[StepPlan]) -> Iterator[tuple[float, StepResult]]:
        """The same one after the other, each with its result.

        Plans are taken from the iterable while earlier ones are in flight.
        """

    def counted(self) -> HostCounts:
        """What the worker has done so far."""


@dataclass
class Visit:
    """Steps that carried piggybacked rows, all with the same rows of the device.

    Attributes:
        alone: seconds of the same steps without rows of the host, just before.
        seconds: of each step.
        crossed: for each step and layer, how many rows went through that layer.
        finished: tokens that each step ended.
        round_trip_s: seconds from the submission of a row to its result, on average over all jobs;
            summed over the layers.
        attend_s: seconds that the host attended for a token of all rows; summed over the layers.
    """

    alone: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    crossed: list[tuple[int, ...]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    round_trip_s: float = 0.0
    attend_s: float = 0.0


class MoveTimes(NamedTuple):
    """Seconds of steps that move KV to the host, that move it back, and that move none."""

    out: list[float]
    back: list[float]
    without: list[float]


class _HostRow(NamedTuple):
    """A row with a table in each tier."""

    row: int
    context: int
    device: tuple[tuple[int, ...], ...]
    host: tuple[tuple[int, ...], ...]
    state: tuple[int, int] | None = None

    def move(self, to: Tier) -> KVMove:
        tables, state = (self.device, self.host), self.state
        if to is Tier.DEVICE:
            tables, state = tables[::-1], state and state[::-1]
        return KVMove(self.row, to, *tables, state=state)


class HostStage:
    """Brings rows into an executor and moves their KV between the tiers.

    What KV holds does not change what copies and attention cost, so the blocks of the device are
    those that a ``Stage`` has filled. Rows of the host are the last ones of the executor.
    """

    def __init__(self, run: Run, room: StepRoom) -> None:
        assert room.host is not None, "there is a host tier"
        self._run, self._room, self._host = run, room, room.host
        self._stage = Stage(run, room)
        self._draw = random.Random(0)
        self._ids = count(FIRST_ID)
        self._text = tuple(self._draw.choices(range(room.vocab_size), k=room.longest))
        self._sampling = SamplingParams(temperature=0, seed=0).with_defaults(NEUTRAL)
        self._rows: dict[int, int] = {}  # by sequence

    def holds(self, own: Step, rows: int, context: int) -> bool:
        """Whether a step of the device and so many rows of the host fit, of so many tokens each."""
        return self.holds_each(own, (context,) * rows)

    def holds_each(self, own: Step, contexts: Seq[int]) -> bool:
        """The same for rows of the host with a context each."""
        if len(own) + len(contexts) > self._room.rows or (own and not self._room.holds(own)):
            return False
        if not 1 < min(contexts) <= max(contexts) <= min(self._room.longest, self._room.kv_tokens):
            return False
        taken = [0] * len(self._host.groups)
        for context, rows in Counter(contexts).items():
            for group, blocks in enumerate(self._table(StepRow(context - 1, 1))):
                taken[group] += rows * sum(block >= 0 for block in blocks)
        groups = zip(taken, self._host.groups, strict=True)
        return all(blocks <= group.num_blocks for blocks, group in groups)

    def close(self) -> None:
        """Leave no row behind."""
        self._leave()
        self._stage.close()

    # -- moves -----------------------------------------------------------------------------------

    def shuttle(self, own: Step, tokens: int, repeats: int, *, both: bool = False) -> MoveTimes:
        """Move the KV of a row of so many tokens to the host and back, along with a step.

        Args:
            own: rows of the device that compute meanwhile; none for a step that only moves.
            both: a second row comes back while the first one leaves, and the other way round.
        """
        rows = self._put(own, [StepRow(tokens - 1, 1)] * (1 + both))
        where = [Tier.HOST] * len(rows)  # to which each goes next
        if both:
            self._run([replace(self._stage.plan(()), moves=(rows[1].move(Tier.HOST),))])
            where[1] = Tier.DEVICE
        plans: list[StepPlan] = []
        for _ in range(2 * (1 + repeats)):
            moves = tuple(row.move(to) for row, to in zip(rows, where, strict=True))
            plans += [replace(self._stage.plan(own), moves=moves), self._stage.plan(own)]
            where = [Tier.DEVICE if to is Tier.HOST else Tier.HOST for to in where]
        times = self._run(plans)[4:]
        self._leave()
        return MoveTimes(times[0::4], times[2::4], times[1::2])

    # -- rows ------------------------------------------------------------------------------------

    def _put(self, own: Step, wanted: Seq[StepRow]) -> list[_HostRow]:
        """Seat a step, and further rows on the device."""
        self._stage.seat(own)
        size = self._room.block_size
        there = scattered(tuple(wanted), self._host.groups, size, self._draw)
        rows = []
        for index, (wish, table) in enumerate(zip(wanted, there, strict=True)):
            row, slots = self._room.rows - 1 - index, self._host.slots
            state = (2 * row, index % slots) if slots else None
            rows.append(_HostRow(row, wish.start + 1, self._table(wish), table, state))
        added = tuple(
            RowAdd(
                row.row, next(self._ids), self._text[: row.context], row.context, self._sampling,
                frozenset(), row.device,
            )
            for row in rows
        )  # fmt: skip
        self._run([replace(self._stage.plan(()), add=added)])
        self._rows = {add.sequence_id: add.row for add in added}
        return rows

    def _table(self, row: StepRow) -> tuple[tuple[int, ...], ...]:
        """Blocks of the device; other rows may have the same ones."""
        (table,) = scattered((row,), self._room.groups, self._room.block_size, self._draw)
        return table

    def _leave(self) -> None:
        """Drop the rows of the host."""
        if self._rows:
            rows = tuple(self._rows.values())
            aborted = rows if self._host.attends else ()
            self._run([replace(self._stage.plan(()), drop=rows, abort=aborted)])
        self._rows = {}


class CarryStage(HostStage):
    """Also has rows of the host carried by steps of the device."""

    def __init__(self, run: HostRun, room: StepRoom, layers: int) -> None:
        super().__init__(run.run, room)
        self._host_run, self._layers = run, layers

    def carry(self, own: Step, rows: int, context: int, tokens: int, *, spread: bool) -> Visit:
        """Run steps of the device that carry rows of the host, until each has so many tokens.

        Args:
            own: rows of the device; at least one, so that no step waits for the host.
            context: tokens of each row of the host at first.
            spread: the rows begin one after the other, so that they wait in different layers; else
                all together, and again when all have their token.

        Raises:
            ProfileError: the host fails, or gives no result for a minute.
        """
        put = self._put(own, [StepRow(context - 1, 1 + tokens)] * rows)
        moves = tuple(row.move(Tier.HOST) for row in put)
        self._run([replace(self._stage.plan(()), moves=moves)])
        alone = self._run([self._stage.plan(own) for _ in range(1 + ALONE)])[1:]
        visit, turns = Visit(alone), _Turns(self._rows, tokens, self._layers, spread)
        layers = (rows,) * self._layers
        before, began = self._host_run.counted(), time.monotonic()
        for seconds, result in self._host_run.follow(self._carrying(own, turns, layers)):
            if result.faults:
                raise ProfileError(f"the host failed: {next(iter(result.faults.values()))}")
            if time.monotonic() - began > LOST_S:
                raise ProfileError(f"the host did not finish its rows within {LOST_S:g} s")
            if turns.ended:
                continue  # the last steps were launched before that was known
            finished = [sequence for sequence, _ in result.piggybacked_results]
            visit.crossed.append(turns.advance(result.piggyback_layers, finished))
            visit.seconds.append(seconds)
            visit.finished.append(len(finished))
        after = self._host_run.counted()
        share = self._layers / max(after.jobs - before.jobs, 1)
        visit.round_trip_s = share * (after.round_trip_s - before.round_trip_s)
        visit.attend_s = rows * share * (after.busy_s - before.busy_s)
        self._leave()
        return visit

    def _carrying(self, own: Step, turns: _Turns, limits: tuple[int, ...]) -> Iterator[StepPlan]:
        while not turns.ended:
            begun = turns.begin()
            yield replace(self._stage.plan(own), piggybacked=begun, piggyback_limits=limits)


class _Turns:
    """Which rows begin a token with which step, and how many go through each layer in it.

    Args:
        rows: of the host, by the sequence in each.
        tokens: that each of them is to get.
        spread: see ``HostStage.carry``.
    """

    def __init__(self, rows: Mapping[int, int], tokens: int, layers: int, spread: bool) -> None:
        self._rows = rows
        self._left = dict.fromkeys(rows.values(), tokens)
        self._waiting = list(rows.values())  # without a token on their way
        self._spread, self._share = spread, -(-len(rows) // layers) if spread else len(rows)
        self._begun: deque[int] = deque()  # rows, by launched step
        self._in_layers = [0] * layers

    @property
    def ended(self) -> bool:
        """Whether every row has its tokens."""
        return not any(self._left.values())

    def begin(self) -> tuple[int, ...]:
        """The rows whose next token begins with the step that is launched now."""
        ready = [row for row in self._waiting if self._left[row]]
        if not self._spread and len(ready) < len(self._rows):
            ready = []
        begun = ready[: self._share]
        self._waiting = [row for row in self._waiting if row not in begun]
        self._begun.append(len(begun))
        return tuple(begun)

    def advance(self, in_layers: Seq[int], finished: Iterable[int]) -> tuple[int, ...]:
        """Record the oldest launched step; return how many rows went through each layer in it.

        A row waits in one layer at a time and goes only upward, so that what entered the layers up
        to one and is not there any more has gone through it.

        Args:
            in_layers: rows that wait in each layer now.
            finished: sequences whose token is there.
        """
        begun = self._begun.popleft()
        before, after = accumulate(self._in_layers), accumulate(in_layers)
        crossed = tuple(begun + old - new for old, new in zip(before, after, strict=True))
        self._in_layers = list(in_layers)
        for sequence in finished:
            row = self._rows[sequence]
            self._left[row] -= 1
            self._waiting.append(row)
        return crossed
