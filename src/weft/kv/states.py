"""Slots of recurrent state: which one a sequence reads and writes next, and which are kept.

A slot holds the state of all recurrent layers after some tokens of one sequence. A step never
writes the slot that it reads:

    tokens   0 . . . . 16. . . . 32. . . . 48. .
    step 1   reads zeros, writes A           and a mark M at 32, in the middle of it
    step 2   reads A, writes B               from now on A is spare
    step 3   reads B, writes A               which comes to 64, a mark: A is kept, C is spare
    step 4   reads A, writes C

So a step that failed half-way can be computed again, and what others share is never written.

A mark is a slot whose tokens fill whole blocks: it is hashed as the last of them, and then found
like a block of a window of one token. Marks are given up as soon as they are hashed: they cost
nothing where slots run short, since those that were used longest ago are written over. Of a
conversation the next turn needs the newest mark: that of its prompt and the one that it began with,
if that was an output's, are written over first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.errors import InvariantError
from weft.core.plan import NO_STATE, StateRow
from weft.kv.pool import BlockPool

MARK_EVERY = 4096  # tokens of a long prompt between two marks
LIVE = 2  # slots that a running sequence has of its own


class Prefix(NamedTuple):
    """What was looked up for a sequence: where it will have marks.

    Attributes:
        end: of the last full block of its tokens that a hit can cover.
        branch: of the blocks of attention that are there, where their state is not.
    """

    end: int = 0
    branch: int = 0


@dataclass(slots=True)
class LiveSlots:
    """The slots of a sequence. Each place here is one reference.

    Attributes:
        now: what the next step reads; ``NO_STATE`` before the first token.
        kept: whether ``now`` may be read by others, and so is never written.
        spare: what steps may write.
        retired: with the tokens computed by which no launched step reads them.
        marks: with the tokens that they hold, of launched steps.
        rolling: hash of the latest mark of the output, which the next one replaces.
        passed: hashes of marks that nobody needs much who has that of the output.
    """

    prefix: Prefix
    now: int = NO_STATE
    kept: bool = False
    spare: list[int] = field(default_factory=list)
    retired: deque[tuple[int, int]] = field(default_factory=deque)
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    rolling: bytes = b""
    passed: list[bytes] = field(default_factory=list)

    def slots(self) -> list[int]:
        """All references."""
        now = [] if self.now == NO_STATE else [self.now]
        return [*now, *self.spare, *(slot for _, slot in (*self.retired, *self.marks))]


class StateSlots:
    """The slots of all sequences.

    Args:
        block_size: tokens between places where marks may lie.
        alignment: a multiple of that, of which prefix hits are multiples.
        marks: whether any are made.
    """

    def __init__(self, num_slots: int, block_size: int, alignment: int, *, marks: bool) -> None:
        self.pool = BlockPool(num_slots)
        self.block_size, self._alignment, self._marks = block_size, alignment, marks
        self._live: dict[int, LiveSlots] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._outputs: set[int] = set()  # slots that a mark of an output was in last

    # -- opening -------------------------------------------------------------------------------

    def find(self, sequence_id: int, hashes: Seq[bytes], known: int, attention: int) -> int:
        """Return the largest hit of at most ``attention`` tokens whose state is there.

        Args:
            hashes: of the blocks of the sequence.
            known: its tokens.
            attention: the hit of the groups of attention.
        """
        hit = attention
        while hit > 0 and self.pool.find(hashes[hit // self.block_size - 1]) is None:
            hit -= self._alignment
        end = (known - 1) // self._alignment * self._alignment
        self._prefixes[sequence_id] = Prefix(end, attention if attention > hit else 0)
        return hit

    def open(self, sequence_id: int, block_hash: bytes | None) -> None:
        """Let a sequence begin: after the tokens of a block that ``find`` has found, or before any.

        Raises:
            InvariantError: the state is not there any more.
        """
        live = self._live[sequence_id] = LiveSlots(self._prefixes.get(sequence_id, Prefix()))
        if block_hash is None:
            return
        slot = self.pool.find(block_hash)
        if slot is None:
            raise InvariantError("the prefix cache changed between find and open")
        self.pool.share(slot)
        live.now, live.kept = slot, True
        if slot in self._outputs:
            live.passed.append(block_hash)

    def forget(self, sequence_id: int) -> None:
        """Drop what was found for a sequence that will not be opened again."""
        self._prefixes.pop(sequence_id, None)

    def needed(self, sequence_ids: Iterable[int]) -> int:
        """Slots that must be available for these sequences to compute."""
        return sum(LIVE - self._own(self._live[i]) for i in sequence_ids)

    def reserve(self, sequence_id: int) -> bool:
        """Take the slots that a sequence always has of its own; whether there were any."""
        live = self._live[sequence_id]
        if not (missing := LIVE - self._own(live)):
            return True
        slots = self.pool.allocate(missing)
        live.spare += slots or ()
        return slots is not None

    @staticmethod
    def _own(live: LiveSlots) -> int:
        return len(live.spare) + (live.now != NO_STATE and not live.kept)

    # -- computing -----------------------------------------------------------------------------

    def plan(self, sequence_id: int, start: int, count: int) -> StateRow:
        """Return what a step reads and writes that computes tokens [start, start + count).

        Steps of a sequence are planned in the order in which they are computed.
        """
        live, end, marks = self._live[sequence_id], start + count, list[tuple[int, int]]()
        read, write = live.now, live.spare.pop()
        kept = False
        for place in self._places(live.prefix, start, end) if self._marks else ():
            found = self.pool.allocate(1)
            if found is None:
                break
            (slot,) = found
            if place < end:
                marks.append((place, slot))
                live.marks.append((place, slot))
            else:
                kept = True
                live.spare.append(slot)
                self.pool.share(write)
                live.marks.append((end, write))
        if read != NO_STATE and live.kept:
            live.retired.append((end, read))
        elif read != NO_STATE:
            live.spare.append(read)
        live.now, live.kept = write, kept
        return StateRow(read, write, tuple(marks))

    def _places(self, prefix: Prefix, start: int, end: int) -> list[int]:
        """Where a step has marks, in their order."""
        every = MARK_EVERY // self._alignment * self._alignment or self._alignment
        places = set(range(start // every * every + every, end + 1, every))
        places |= {place for place in prefix if start < place <= end}
        if end - start == 1 and end % self._alignment == 0:
            places.add(end)
        return sorted(places)

    def commit(self, sequence_id: int, hashes: Seq[bytes], computed: int) -> int | None:
        """Hash the marks that are computed; return when to call again, None if only at a block.

        Args:
            hashes: of all blocks that are full.
        """
        live, pool = self._live[sequence_id], self.pool
        while live.retired and live.retired[0][0] <= computed:
            pool.release(live.retired.popleft()[1])
        while live.marks and live.marks[0][0] <= computed:
            place, slot = live.marks.popleft()
            block_hash = hashes[place // self.block_size - 1]
            pool.register_hash(slot, block_hash)
            pool.release(slot)
            self._outputs.discard(slot)
            if place > max(live.prefix):
                self._outputs.add(slot)
                self._replace_rolling(live, block_hash, place)
            elif place == live.prefix.end:
                live.passed.append(block_hash)
        return live.retired[0][0] if live.retired else None

    def _replace_rolling(self, live: LiveSlots, block_hash: bytes, place: int) -> None:
        """Give up the mark before the latest one of the output, unless somebody reads it."""
        old = self.pool.find(live.rolling) if live.rolling else None
        if old is not None and live.rolling != block_hash and not self.pool.references(old):
            self.pool.evict([old])
        live.rolling = b"" if place % MARK_EVERY == 0 else block_hash
        for passed in live.passed:
            slot = self.pool.find(passed)
            if slot is not None:
                self.pool.demote(slot)
        live.passed.clear()

    # -- releasing -----------------------------------------------------------------------------

    def close(self, sequence_id: int, faulty: Seq[bytes] = ()) -> None:
        """Release the slots of a sequence.

        Args:
            faulty: hashes of blocks that it has computed wrongly: nobody may find their states.
        """
        for slot in self._live.pop(sequence_id).slots():
            self.pool.release(slot)
        for block_hash in faulty:
            slot_of = self.pool.find(block_hash)
            if slot_of is not None and self.pool.references(slot_of):
                self.pool.invalidate(slot_of)
            elif slot_of is not None:
                self.pool.evict([slot_of])

    def freed(self, sequence_ids: Iterable[int]) -> int:
        """Slots that only these sequences hold."""
        held = Counter(slot for i in sequence_ids for slot in self._live[i].slots())
        return sum(self.pool.references(slot) == count for slot, count in held.items())

    def check(self, sequence_ids: Iterable[int]) -> None:
        """Raise InvariantError if a slot is lost, or may be written while others read it.

        Args:
            sequence_ids: those that have blocks.
        """
        if self._live.keys() != set(sequence_ids):
            raise InvariantError("the sequences with states are not those with blocks")
        held = Counter(slot for live in self._live.values() for slot in live.slots())
        self.pool.check(held)
        for sequence_id, live in self._live.items():
            written = [*live.spare, *([] if live.kept else [live.now])]
            if any(held[slot] > 1 for slot in written if slot != NO_STATE):
                raise InvariantError(f"sequence {sequence_id} may write a state that is shared")
            if self._own(live) not in (0, LIVE, LIVE + 1):
                raise InvariantError(f"sequence {sequence_id} has {self._own(live)} slots")
