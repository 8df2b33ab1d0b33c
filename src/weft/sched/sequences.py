"""The sequences of a scheduler: waiting, running, or releasing their rows and blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Seq

from weft.core.errors import InvariantError
from weft.core.types import FinishReason, Sequence, SequenceState
from weft.kv.tiers import AnyCache
from weft.sched.batch import Totals
from weft.sched.invariants import check_rows
from weft.sched.prefix_wait import PrefixWait
from weft.sched.waiting import WaitingQueue


def by_order(sequence: Sequence) -> tuple[int, int]:
    """Key of the order in which sequences are served."""
    return sequence.order


class SequenceManager:
    """Moves sequences from arrival to end, and takes rows and blocks back when they are free.

    Attributes:
        waiting: sequences without a row.
        running: sequences that are planned, in order.
        closing: ended or preempted ones whose launched steps are not committed yet.
        free_rows: rows that no sequence holds.
        dropped: rows given back since the last launched step.
    """

    def __init__(self, cache: AnyCache, num_rows: int) -> None:
        self.cache = cache
        self.prefix_wait = PrefixWait(cache.groups[0].block_size)
        self.totals = Totals()
        self.by_id: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.closing: list[Sequence] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.dropped: list[int] = []
        self._num_rows = num_rows

    def find(self, sequence_id: int) -> Sequence | None:
        """Return a sequence that has not ended."""
        sequence = self.by_id.get(sequence_id)
        if sequence is None or sequence.state is SequenceState.FINISHED:
            return None
        return sequence

    def priorities(self) -> list[int]:
        """Ranks that have running or waiting sequences, the best one first."""
        priorities = set(self.waiting.priorities())
        if self.running:
            priorities.update(range(self.running[0].order[0], self.running[-1].order[0] + 1))
        return sorted(priorities)

    def running_of(self, priority: int) -> list[Sequence]:
        """Running sequences of a priority, in order."""
        low = bisect_left(self.running, (priority, 0), key=by_order)
        high = bisect_left(self.running, (priority + 1, 0), key=by_order)
        return self.running[low:high]

    def arrive(self, sequence: Sequence) -> None:
        """Queue a sequence that has never run."""
        request = sequence.request
        self.cache.register(sequence.id, request.cache_salt, request.images)
        self.totals.requests += 1
        self.by_id[sequence.id] = sequence
        self.waiting.add(sequence)

    def start(self, sequence: Sequence, hit: int, now_ns: int) -> None:
        """Give a row to a sequence that has its blocks, ``hit`` tokens of them from the cache.

        Whoever queued it takes it from the queue.
        """
        sequence.move_to(SequenceState.RUNNING)
        sequence.start(self.free_rows.pop(), hit)
        if sequence.cached < 0:
            sequence.cached = min(hit, sequence.num_prompt)  # a recovered one may find output too
            self.totals.cached_tokens += sequence.cached
            self.totals.prompt_tokens += sequence.num_prompt
            sequence.scheduled_ns = now_ns
        if self.cache.prefix_caching:
            block_hashes = self.cache.prompt_hashes(sequence.id, sequence.tokens)
            self.prefix_wait.lead(sequence.id, sequence.order[0], block_hashes, hit)
        insort(self.running, sequence, key=by_order)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for its client; its memory follows when no launched step touches it."""
        queued = sequence.state in (SequenceState.WAITING, SequenceState.PAUSED)
        if queued:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        pausing = sequence.state is SequenceState.PAUSING
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish = reason
        self.totals.count_end(reason)
        self.prefix_wait.abandon(sequence.id)
        if queued:
            self._forget(sequence)
        elif not pausing:
            self.closing.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Queue a running sequence again, to be computed from its tokens when it is resumed."""
        self.running.remove(sequence)
        self.totals.preemptions += 1
        sequence.preemptions += 1
        self.prefix_wait.abandon(sequence.id)
        sequence.move_to(SequenceState.PAUSING)
        self.closing.append(sequence)
        self.close()

    def reorder(self, sequence: Sequence, priority: int) -> None:
        """Serve a waiting or running sequence with another priority from now on."""
        order = (priority, sequence.order[1])
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            sequence.order = order
            insort(self.running, sequence, key=by_order)
            return
        self.waiting.remove(sequence)
        sequence.order = order
        sequence.waiting_on = b""
        if sequence.state is SequenceState.WAITING:
            self.waiting.add(sequence)
        else:
            self.waiting.resume(sequence)

    def close(self) -> None:
        """Take rows and blocks back from ended and preempted sequences with nothing in flight."""
        if not self.closing:
            return
        ready = [sequence for sequence in self.closing if sequence.pending == 0]
        self.closing = [sequence for sequence in self.closing if sequence.pending]
        for sequence in ready:
            self.dropped.append(sequence.row)
            self.free_rows.append(sequence.row)
            faulty_from = sequence.reused if sequence.error is not None else None
            self.cache.release(sequence.id, faulty_from=faulty_from)
            sequence.stop()
            if sequence.state is SequenceState.PAUSING:
                sequence.move_to(SequenceState.PAUSED)
                self.waiting.resume(sequence)
            else:
                self._forget(sequence)

    def take_dropped(self) -> tuple[int, ...]:
        """Return the rows that the next launched step must drop first."""
        dropped, self.dropped = tuple(self.dropped), []
        return dropped

    def _forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence.id)
        del self.by_id[sequence.id]

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        self.cache.check()
        self.waiting.check()
        check_rows(self.running, self.closing, self.free_rows, self._num_rows, self.cache)
        if len(self.running) + len(self.closing) + len(self.waiting) != len(self.by_id):
            raise InvariantError("a sequence is lost or listed twice")
        if not self.by_id and not self.prefix_wait.empty():
            raise InvariantError("a shared prefix is announced by nobody")


def schedule_single_tokens(
    sequences: Seq[Sequence], go_on: Callable[[Sequence], bool]
) -> tuple[list[Sequence], list[int], list[Sequence]]:
    """Schedule the next token of each sequence that needs one token.

    In steady state every sequence passes through here once a token.

    Args:
        go_on: whether a sequence that has come to its capacity may compute one token more.

    Returns:
        The sequences that were scheduled, the position of the token of each, and the sequences
        that need more than one token.
    """
    more: list[Sequence] = []
    chosen: list[Sequence] = []
    starts: list[int] = []
    choose, start_at = chosen.append, starts.append
    running = SequenceState.RUNNING
    for sequence in sequences:
        known, start = sequence.known, sequence.planned
        if known - start != 1:
            if known > start:
                more.append(sequence)
            continue
        if known >= sequence.end or sequence.state is not running:
            continue
        if start >= sequence.capacity and not go_on(sequence):
            continue
        choose(sequence)
        start_at(start)
        sequence.planned = known  # as `Sequence.schedule` does, without the cost of a call
        sequence.known = known + 1
    return chosen, starts, more
