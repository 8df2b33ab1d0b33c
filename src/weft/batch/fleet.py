"""One batch for several servers: lines are split by measured speed, no loss of a server stops it.

At first every server takes lines as it has room, in random order, which measures its speed and
tells how long outputs are. Then ``weft.blend.partition`` cuts what is left into parts of that size,
each of which shares its prefixes within. Who has done its part takes over the tail of another
one's. The lines of a server that is lost, also those that it was answering, go to the others; if it
comes back, it takes part again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from weft.batch.order import Prompts
from weft.batch.ports import Asker, BatchLine, LineAnswer, NobodyAnswersError
from weft.batch.usage import usage_of
from weft.blend.density import Rates
from weft.blend.lengths import LengthCurves, LengthTable, as_bounds
from weft.blend.partition import partition
from weft.blend.tree import build_tree

MEASURED = 8  # lines that each server has answered when its speed is believed
PROBE_EVERY_S, PROBE_AGAIN_S, PROBE_TIMEOUT_S = 5.0, 1.0, 10.0
PROBES = 3  # that fail one after the other when a server is lost


class Server(Asker, Protocol):
    """Somebody who answers lines, and may be away."""

    url: str

    @property
    def silent_s(self) -> float:
        """How long nothing was heard of it."""

    async def alive(self, timeout_s: float) -> bool:
        """Whether it answers, and takes the key."""


@dataclass(eq=False)
class Member:
    """A server of the fleet.

    Attributes:
        at_once: lines that it has at most.
        queue: indices of the lines of its part that nobody has begun.
        lost: why it is out of the fleet at present.
        open: lines that it is answering.
        lines, tokens: that it has answered; tokens are those read and written.
    """

    server: Server
    at_once: int
    lost: str | None = None
    queue: deque[int] = field(default_factory=deque)
    open: int = 0
    lines: int = 0
    tokens: int = 0
    asking: set[asyncio.Task[LineAnswer]] = field(default_factory=set)
    _busy_s: float = 0.0
    _since: float = 0.0

    def take(self) -> None:
        """Count a line that it begins."""
        if not self.open:
            self._since = time.monotonic()
        self.open += 1

    def give(self) -> None:
        """Count a line that it has no longer."""
        self.open -= 1
        if not self.open:
            self._busy_s += time.monotonic() - self._since

    @property
    def speed(self) -> float:
        """Tokens a second while it had lines; 0 if it has answered none."""
        now = time.monotonic() - self._since if self.open else 0.0
        return self.tokens / max(self._busy_s + now, 1e-9)

    @property
    def room(self) -> int:
        """Lines that it may begin now."""
        return 0 if self.lost is not None else self.at_once - self.open


class Parts(Protocol):
    """Cuts lines into a part for each member."""

    def learn(self, index: int, output: int) -> None:
        """A line has so many output tokens."""

    def cut(self, waiting: Seq[int], weights: Seq[float]) -> list[list[int]]:
        """Lines in parts of these shares of the load, each in the order in which to ask them.

        Lines that it knows nothing of are in none; all parts are empty if there are too few.
        """


class PlannedParts:
    """Parts of lines whose prompts are known.

    Args:
        kind: ``dfs``, each part by its prefixes, or ``blend``, each with the mix of the whole.
    """

    def __init__(self, kind: str, prompts: Prompts, rates: Rates, block_size: int) -> None:
        self._kind, self._prompts, self._rates = kind, prompts, rates
        self._tree = build_tree(cast(Seq[Seq[int]], prompts.tokens), block_size)
        self._leaf = np.empty(len(prompts.tokens), np.int64)
        self._leaf[self._tree.leaves] = np.arange(len(prompts.tokens))
        self._place = {index: place for place, index in enumerate(prompts.planned)}
        self._lengths = LengthTable()
        self._nodes = self._lengths.places(prompts.tokens)
        self._bounds = as_bounds(prompts.longest, len(prompts.tokens))
        for place, output in prompts.done.items():
            self._add(place, output)

    def learn(self, index: int, output: int) -> None:
        place = self._place.get(index)
        if place is not None:
            self._add(place, -(-output // self._prompts.choices[place]))

    def _add(self, place: int, output: int) -> None:
        self._lengths.add(int(self._nodes[place]), output, int(self._bounds[place]))

    def cut(self, waiting: Seq[int], weights: Seq[float]) -> list[list[int]]:
        tree, leaves = self._tree, self._tree.leaves
        places = [self._place[index] for index in waiting if index in self._place]
        if len(places) < len(weights):
            return [[] for _ in weights]
        curves = LengthCurves(self._lengths.snapshot())
        outputs = curves.expected(self._nodes, 0, self._bounds)[leaves]
        present = np.zeros(len(leaves), bool)
        present[self._leaf[places]] = True
        found = partition(
            tree,
            outputs,
            self._rates,
            len(weights),
            weights=weights,
            present=present,
            choices=np.asarray(self._prompts.choices, np.int64)[leaves],
        )
        if self._kind == "dfs":
            found = [sorted(part, key=self._leaf.__getitem__) for part in found]
        return [[int(self._prompts.planned[place]) for place in part] for part in found]


class Fleet:
    """Asks several servers; it is the order of the lines as well, as it knows who has room.

    Args:
        waiting: indices of the lines to be asked, in the order in which they go until there are
            parts.
        count: how many these are.
        number_of: the number of a line.
        parts: cuts what is left when the speeds are known; None lets every server take the next
            line for good.
        patience_s: how long all servers may be lost before the batch stops.

    Attributes:
        changed: called when there may be a line to ask though none has ended.
        say: tells the user.
    """

    ready = True

    def __init__(
        self,
        members: Seq[Member],
        waiting: Iterable[int],
        count: int,
        number_of: Callable[[int], int],
        parts: Parts | None = None,
        patience_s: float = 300.0,
    ) -> None:
        self.members = list(members)
        self.changed: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda _: None
        self._common = iter(waiting) if parts is None else deque(waiting)
        self._left = count
        self._number_of = number_of
        self._parts = parts
        self._patience_s = patience_s
        self._of: dict[int, Member] = {}  # who has a line, by its number
        self._displaced = 0  # lines of lost servers that look for another one
        self._freed = asyncio.Event()
        self._cutting: asyncio.Task[None] | None = None
        self._all_lost_at: float | None = None

    # -- the order of the lines ----------------------------------------------------------------

    @property
    def remaining(self) -> int:
        return self._left

    def next(self) -> int | None:
        if not self._left or self._displaced:
            return None
        member = self._freest()
        if member is None:
            return None
        self._left -= 1
        index = self._line_for(member)
        member.take()
        self._of[self._number_of(index)] = member
        return index

    def ended(self, index: int, output: int | None) -> None:
        self._of.pop(self._number_of(index)).give()
        self._freed.set()
        if self._parts is None:
            return
        if output is not None:
            self._parts.learn(index, output)
        live = self._live()
        measured = all(member.lines >= MEASURED for member in live)
        if measured and self._cutting is None and len(self._common_left()) >= len(live) > 1:
            self._cutting = asyncio.get_running_loop().create_task(self._cut())

    def _freest(self) -> Member | None:
        """Who has most room for its size; None if nobody has any."""
        with_room = [member for member in self.members if member.room > 0]
        return max(with_room, key=lambda member: member.room / member.at_once, default=None)

    def _live(self) -> list[Member]:
        return [member for member in self.members if member.lost is None]

    def _common_left(self) -> deque[int]:
        assert isinstance(self._common, deque)
        return self._common

    def _line_for(self, member: Member) -> int:
        """The next line of a member's part; of another one's tail when its own is done."""
        if not member.queue:
            if not isinstance(self._common, deque):
                return next(self._common)
            if self._common:
                return self._common.popleft()
            self._steal(member)
        return member.queue.popleft()

    def _steal(self, thief: Member) -> None:
        """Take over the tail of the part that would be done last, half of it at most."""
        victim = max(self.members, key=_time_left)
        count = max(1, min(len(victim.queue) // 2, thief.at_once))
        thief.queue.extendleft(victim.queue.pop() for _ in range(count))

    async def _cut(self) -> None:
        """Give each live member its part of what nobody has begun."""
        assert self._parts is not None
        live, common = self._live(), self._common_left()
        waiting, weights = list(common), [member.speed for member in live]
        if min(weights) <= 0:
            weights = [1.0] * len(live)
        parts = await asyncio.to_thread(self._parts.cut, waiting, weights)
        still = set(common)  # some have been begun meanwhile
        for member, part in zip(live, parts, strict=True):
            member.queue.extend(index for index in part if index in still)
            still.difference_update(part)
        rest = [index for index in common if index in still]
        common.clear()
        common.extend(rest)
        self.say(
            "the rest is split by speed: "
            + ", ".join(f"{m.server.url} {len(m.queue)} lines" for m in live)
        )
        self.changed()

    # -- the asker -----------------------------------------------------------------------------

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:
        member = self._of[number]
        while True:
            answer = await self._asked(member, number, line)
            if answer is not None:
                usage = usage_of(answer.body)
                member.lines += 1
                member.tokens += usage.input_tokens + usage.output_tokens
                return answer
            member = await self._move(number, member)

    async def _asked(self, member: Member, number: int, line: BatchLine) -> LineAnswer | None:
        """The answer of a member; None if it is lost before there is one."""
        if member.lost is not None:
            return None
        asking = asyncio.ensure_future(member.server.ask(number, line))
        member.asking.add(asking)
        try:
            return await asking
        except NobodyAnswersError as error:
            self._lose(member, error.message)
            return None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if member.lost is None or (current is not None and current.cancelling()):
                raise
            return None
        finally:
            asking.cancel()
            member.asking.discard(asking)

    async def _move(self, number: int, lost: Member) -> Member:
        """Give a line of a lost member to one that has room for it."""
        lost.give()
        del self._of[number]
        self._displaced += 1
        try:
            while (member := self._freest()) is None:
                self._freed.clear()
                await self._freed.wait()
        finally:
            self._displaced -= 1
        member.take()
        self._of[number] = member
        if not self._displaced:
            self.changed()
        return member

    # -- who is there --------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after the servers for as long as the batch runs.

        Raises:
            NobodyAnswersError: all have been lost for too long.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(self._probe(member))
        except* NobodyAnswersError as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._cutting is not None:
                self._cutting.cancel()

    async def _probe(self, member: Member) -> None:
        failures = 0
        while True:
            await asyncio.sleep(PROBE_AGAIN_S if failures or member.lost else PROBE_EVERY_S)
            heard = member.server.silent_s < PROBE_EVERY_S and member.lost is None
            if heard or await member.server.alive(PROBE_TIMEOUT_S):
                failures = 0
                self._find(member)
                continue
            failures += 1
            if failures >= PROBES and member.lost is None:
                self._lose(member, f"it does not answer {PROBES} times in a row")
            self._check_patience()

    def _find(self, member: Member) -> None:
        if member.lost is None:
            return
        member.lost = None
        self._all_lost_at = None
        self.say(f"{member.server.url} answers again.")
        self._freed.set()
        self.changed()

    def _lose(self, member: Member, why: str) -> None:
        """Take a member out; the lines that it is answering are asked elsewhere."""
        if member.lost is not None:
            return
        member.lost = why
        left = len(self._live())
        others = f"{left} others go on" if left != 1 else "another one goes on"
        self.say(
            f"{member.server.url} is lost ({why}); "
            + (f"{others} with its lines." if left else "there is no other.")
        )
        if not left:
            self._all_lost_at = time.monotonic()
        for asking in list(member.asking):
            asking.cancel()
        self.changed()

    def _check_patience(self) -> None:
        at = self._all_lost_at
        if at is not None and time.monotonic() - at > self._patience_s:
            reasons = "; ".join(f"{m.server.url}: {m.lost}" for m in self.members)
            raise NobodyAnswersError(
                f"None of the {len(self.members)} servers has answered for {self._patience_s:g} s "
                f"({reasons}); what is done is kept: give the same command again to go on."
            )

    def report(self) -> str:
        """Who has done how much."""
        return "; ".join(
            f"{m.server.url} {m.lines} lines, {m.speed:.0f} tokens/s" for m in self.members
        )


def in_random_order(indices: Seq[int]) -> list[int]:
    """The same order for equal lists: what is asked first tells about all."""
    order = np.random.default_rng(0).permutation(len(indices)).tolist()
    return [indices[place] for place in order]


def _time_left(member: Member) -> float:
    """Something that grows with the time that a member needs for its queue."""
    if not member.queue:
        return -1.0
    speed = member.speed if member.lost is None else 0.0
    return len(member.queue) / max(speed, 1e-9)
