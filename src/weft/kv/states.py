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

A state cannot be taken back where a draft fails. So a step with drafts writes the state after its
certain tokens, as if it had none, and another one after the last guess:

    tokens   77 . 78 . 79 . 80 . 81 . 82 . 83
    step 9   A -> B ------> M ------------> C    one token, and five guesses

When it is committed, ``settle`` picks the last of these whose tokens all came out as guessed: C if
all did, else M, or B. The right tokens behind it are computed again, by the next step of the
sequence. States behind a wrong guess get no hash, ever: their slots are spare.

Steps under a lease are planned by nobody: they take turns in the slots that ``lend`` gives, one
more than others have. That one holds the state at the newest boundary that they have passed, which
``take_back`` makes a mark.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.errors import InvariantError
from weft.core.plan import NO_STATE, LentSlots, StateRow
from weft.kv.lease_turns import LeaseTurns
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
        lent: with the tokens after which they go on, what leased steps take turns in.
        guesses: with the tokens that they hold, of a launched step with drafts, of which ``now`` is
            to be one; the first after certain tokens. ``now`` is ``NO_STATE`` until then.
        rolling: hash of the latest mark of the output, which the next one replaces.
        passed: hashes of marks that nobody needs much who has that of the output.
    """

    prefix: Prefix
    now: int = NO_STATE
    kept: bool = False
    spare: list[int] = field(default_factory=list)
    retired: deque[tuple[int, int]] = field(default_factory=deque)
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    lent: tuple[int, LentSlots] | None = None
    guesses: list[tuple[int, int]] = field(default_factory=list)
    rolling: bytes = b""
    passed: list[bytes] = field(default_factory=list)

    def slots(self) -> list[int]:
        """All references."""
        now = [] if self.now == NO_STATE else [self.now]
        placed = (*self.retired, *self.marks, *self.guesses)
        return [*now, *self.spare, *(slot for _, slot in placed)]

    def own(self) -> int:
        """Slots that steps may write, or have written for this sequence alone to go on from."""
        return len(self.spare) + (self.now != NO_STATE and not self.kept) + 2 * bool(self.guesses)


class StateSlots:
    """The slots of all sequences.

    Args:
        block_size: tokens between places where marks may lie.
        alignment: a multiple of that, of which prefix hits are multiples.
        marks: whether any are made.
        on_evict: see ``BlockPool``.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        alignment: int,
        *,
        marks: bool,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.pool = BlockPool(num_slots, on_evict)
        self.block_size, self._alignment, self._marks = block_size, alignment, marks
        self._live: dict[int, LiveSlots] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._outputs: set[int] = set()  # slots that a mark of an output was in last

    # -- opening -------------------------------------------------------------------------------

    def find(
        self,
        sequence_id: int,
        hashes: Seq[bytes],
        known: int,
        attention: int,
        covers: Callable[[int], bool],
    ) -> int:
        """Return the largest hit of at most ``attention`` tokens whose state is there.

        Args:
            hashes: of the blocks of the sequence.
            known: its tokens.
            attention: the hit of the groups of attention.
            covers: whether these have all that a query at a place can read; of windows some places
                before their hit may lack blocks.
        """
        hit, find = attention, self.pool.find
        while hit > 0 and (find(hashes[hit // self.block_size - 1]) is None or not covers(hit)):
            hit -= self._alignment
        end = (known - 1) // self._alignment * self._alignment
        self._prefixes[sequence_id] = Prefix(end, attention if attention > hit else 0)
        return hit

    def open(self, sequence_id: int, hashes: Seq[bytes], hit: int, loaded: int = 0) -> None:
        """Let a sequence begin after the ``hit`` tokens that ``find`` has found, or before any.

        Args:
            hashes: of the blocks of the sequence.
            loaded: tokens behind these that come from a level below: if the state after them is
                not here, it comes with ``enter``.

        Raises:
            InvariantError: the state is not there any more.
        """
        live = self._live[sequence_id] = LiveSlots(self._prefixes.get(sequence_id, Prefix()))
        if not hit + loaded:
            return
        block_hash = hashes[(hit + loaded) // self.block_size - 1]
        slot = self.pool.find(block_hash)
        if slot is None and loaded:
            return
        if slot is None:
            raise InvariantError("the prefix cache changed between find and open")
        self.pool.share(slot)
        live.now, live.kept = slot, True
        if slot in self._outputs:
            live.passed.append(block_hash)

    def attention(self, sequence_id: int, hit: int) -> int:
        """Tokens of which ``find`` was told that attention has them, where it found ``hit``."""
        return max(hit, self._prefixes[sequence_id].branch)

    def enter(self, sequence_id: int, slot: int, block_hash: bytes) -> None:
        """Let a sequence that was opened before any token begin with the state in a new slot.

        Its content comes before the next step computes, from a level below; others may share it.
        """
        live = self._live[sequence_id]
        self.pool.register_hash(slot, block_hash, written=False)
        live.now, live.kept = slot, True

    def forget(self, sequence_id: int) -> None:
        """Drop what was found for a sequence that will not be opened again."""
        self._prefixes.pop(sequence_id, None)

    def needed(self, sequence_ids: Iterable[int]) -> int:
        """Slots that must be available for these sequences to compute."""
        return sum(max(0, LIVE - self._live[i].own()) for i in sequence_ids)

    def reserve(self, sequence_id: int, *, drafts: bool = False) -> bool:
        """Take the slots that a sequence always has of its own; whether there were any.

        Args:
            drafts: and one more, for a step with drafts.
        """
        live = self._live[sequence_id]
        missing = LIVE + drafts - live.own()
        if missing <= 0:
            return True
        slots = self.pool.allocate(missing)
        live.spare += slots or ()
        return slots is not None

    # -- computing -----------------------------------------------------------------------------

    def plan(self, sequence_id: int, start: int, count: int, drafts: int = 0) -> StateRow:
        """Return what a step reads and writes that computes tokens [start, start + count).

        Steps of a sequence are planned in the order in which they are computed; after one with
        drafts the next one is planned when ``settle`` was called.

        Args:
            drafts: guesses that are computed after these tokens.

        Raises:
            InvariantError: drafts are to be settled, or lent slots to be taken back, before.
        """
        live, end, marks = self._live[sequence_id], start + count, list[tuple[int, int]]()
        if live.guesses:
            raise InvariantError(f"sequence {sequence_id} is planned before its drafts are settled")
        if live.lent is not None:
            raise InvariantError(f"sequence {sequence_id} is planned before its lease has ended")
        read, write = live.now, live.spare.pop()
        last = live.spare.pop() if drafts else NO_STATE
        kept = False
        for place in self._places(live.prefix, start, end) if self._marks else ():
            if drafts and place == end:
                break  # whether it is kept is settled later
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
        if drafts:
            between = self._between(end, end + drafts)
            live.guesses = [(end, write), *between, (end + drafts, last)]
            live.now, live.kept = NO_STATE, False
            return StateRow(read, last, (*marks, *live.guesses[:-1]))
        live.now, live.kept = write, kept
        return StateRow(read, write, tuple(marks))

    def _between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Slots for the states at the boundaries among guesses, as far as there are any."""
        found = []
        first = start // self._alignment * self._alignment + self._alignment
        for place in range(first, end, self._alignment) if self._marks else ():
            if (slot := self.pool.allocate(1)) is None:
                break
            found.append((place, slot[0]))
        return found

    def settle(self, sequence_id: int, upto: int) -> int:
        """Pick the state from which a sequence goes on after a step with drafts.

        Args:
            upto: tokens that are computed, guesses included that came out right.

        Returns:
            the tokens that the state holds; those behind them must be computed again.

        Raises:
            InvariantError: no drafts are to be settled.
        """
        live, pool = self._live[sequence_id], self.pool
        guesses, live.guesses = live.guesses, []
        right = sum(place <= upto for place, _ in guesses)
        if not right:
            raise InvariantError(f"sequence {sequence_id} has no drafts of {upto} tokens to settle")
        place, live.now = guesses.pop(right - 1)
        at_boundary = [g for g in guesses[: right - 1] if g[0] % self._alignment == 0]
        live.kept = self._marks and place % self._alignment == 0
        if live.kept:
            pool.share(live.now)
            live.marks.append((place, live.now))
        elif self._marks and at_boundary:
            live.marks.append(at_boundary[-1])
            guesses.remove(at_boundary[-1])
        live.spare += [slot for _, slot in guesses]
        while live.own() > LIVE:
            pool.release(live.spare.pop())
        return place

    @staticmethod
    def room(tokens: int) -> int:
        """Steps that may be leased after so many tokens: marks that stay are planned."""
        return MARK_EVERY - tokens % MARK_EVERY

    def lend(self, sequence_id: int, tokens: int) -> LentSlots:
        """Return what leased steps write that follow the planned one; ``take_back`` must follow.

        Without a slot more they leave no mark.

        Args:
            tokens: that the planned step ends with.
        """
        live = self._live[sequence_id]
        more = self.pool.allocate(1) if self._marks else None
        live.spare[:0] = more or ()
        lent = LentSlots(tuple(live.spare), live.kept, self._alignment if more else 0)
        live.lent = tokens, lent
        return lent

    def take_back(self, sequence_id: int, steps: int) -> None:
        """Go on from the state after so many leased steps, which are computed."""
        live = self._live.get(sequence_id)
        if live is None or live.lent is None:
            return
        (first, lent), live.lent = live.lent, None
        turns = LeaseTurns(live.now, lent)
        for tokens in range(first + 1, first + steps + 1):
            turns.computed(tokens)
        if steps and lent.kept:
            self.pool.release(live.now)  # a mark of an earlier step has it, too
        if turns.newest is not None:
            live.marks.append(turns.newest)
        if steps and turns.kept:
            self.pool.share(turns.now)
        live.now, live.kept, live.spare = turns.now, turns.kept, turns.spare
        while live.own() > LIVE:
            self.pool.release(live.spare.pop())

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

    # -- moving --------------------------------------------------------------------------------

    def live(self, sequence_id: int) -> LiveSlots:
        """The slots of a sequence that has some."""
        return self._live[sequence_id]

    def open_like(self, sequence_id: int, other: LiveSlots) -> bool:
        """Take a slot for the state of a sequence of another tier; whether there was one."""
        if (slots := self.pool.allocate(1)) is None:
            return False
        self._live[sequence_id] = LiveSlots(
            other.prefix, slots[0], rolling=other.rolling, passed=list(other.passed)
        )
        return True

    def detach(self, sequence_id: int) -> LiveSlots:
        """Detach the slots from their sequence; the caller must ``free`` them."""
        return self._live.pop(sequence_id)

    # -- releasing -----------------------------------------------------------------------------

    def close(self, sequence_id: int) -> None:
        """Release the slots of a sequence."""
        self.free(self.detach(sequence_id))

    def free(self, live: LiveSlots) -> None:
        """Release detached slots."""
        for slot in live.slots():
            self.pool.release(slot)

    def disown(self, faulty: Seq[bytes]) -> None:
        """Let nobody find states of these hashes, of blocks that were computed wrongly."""
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

    def check(self, sequence_ids: Iterable[int], detached: Iterable[LiveSlots] = ()) -> None:
        """Raise InvariantError if a slot is lost, or may be written while others read it.

        Args:
            sequence_ids: those that have blocks.
            detached: slots that are not given up yet.
        """
        if self._live.keys() != set(sequence_ids):
            raise InvariantError("the sequences with states are not those with blocks")
        everybody = (*self._live.values(), *detached)
        held = Counter(slot for live in everybody for slot in live.slots())
        self.pool.check(held)
        for sequence_id, live in self._live.items():
            written = [*live.spare, *(slot for _, slot in live.guesses)]
            written += [] if live.kept else [live.now]
            if any(held[slot] > 1 for slot in written if slot != NO_STATE):
                raise InvariantError(f"sequence {sequence_id} may write a state that is shared")
            if live.own() not in (0, 1, LIVE, LIVE + 1):
                raise InvariantError(f"sequence {sequence_id} has {live.own()} slots")
