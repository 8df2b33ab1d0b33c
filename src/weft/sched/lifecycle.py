"""The sequences of a scheduler: who waits, who runs, and who gives back its row and its blocks."""

from __future__ import annotations

from bisect import insort

from weft.core.errors import InvariantError
from weft.core.types import FinishReason, Sequence, SequenceState
from weft.kv.tiers import AnyCache
from weft.sched.invariants import check_rows
from weft.sched.queues import WaitingQueue
from weft.sched.sharing import SharedPrefixes
from weft.sched.step import Totals


def by_order(sequence: Sequence) -> tuple[int, int]:
    """Key of the order in which sequences are served."""
    return sequence.order


class Lifecycle:
    """Moves sequences from arrival to end, and takes rows and blocks back when they are free.

    Attributes:
        waiting: sequences without a row.
        running: sequences that are planned, in order.
        closing: ended or preempted ones whose launched steps are not committed yet.
        free_rows: rows that nobody holds.
        dropped: rows given back since the last launched step.
    """

    def __init__(self, cache: AnyCache, num_rows: int) -> None:
        self.cache = cache
        self.shared = SharedPrefixes(cache.groups[0].block_size)
        self.totals = Totals()
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.closing: list[Sequence] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.dropped: list[int] = []
        self._num_rows = num_rows

    def find(self, sequence_id: int) -> Sequence | None:
        """Return a sequence that has not ended."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.state is SequenceState.FINISHED:
            return None
        return sequence

    def arrive(self, sequence: Sequence) -> None:
        """Queue a sequence that has never run."""
        self.cache.register(sequence.id, sequence.request.cache_salt)
        self.totals.requests += 1
        self.sequences[sequence.id] = sequence
        self.waiting.add(sequence)

    def start(self, sequence: Sequence, hit: int, now_ns: int) -> None:
        """Give a row to a sequence that has its blocks, ``hit`` tokens of them from the cache.

        Whoever queued it takes it from the queue.
        """
        sequence.move_to(SequenceState.RUNNING)
        sequence.row = self.free_rows.pop()
        sequence.computed = sequence.planned = sequence.reused = hit
        sequence.seal_at = hit + 1
        if sequence.cached < 0:
            sequence.cached = min(hit, sequence.num_prompt)  # a recovered one may find output too
            self.totals.cached_tokens += sequence.cached
            self.totals.prompt_tokens += sequence.num_prompt
            sequence.scheduled_ns = now_ns
        if self.cache.prefix_caching:
            digests = self.cache.prompt_digests(sequence.id, sequence.tokens)
            self.shared.lead(sequence.id, sequence.order[0], digests, hit)
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
        self.shared.abandon(sequence.id)
        if queued:
            self._forget(sequence)
        elif not pausing:
            self.closing.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Queue a running sequence again, to be computed from its tokens when it is resumed."""
        self.running.remove(sequence)
        self.totals.preemptions += 1
        sequence.preemptions += 1
        self.shared.abandon(sequence.id)
        sequence.move_to(SequenceState.PAUSING)
        self.closing.append(sequence)
        self.close()

    def reorder(self, sequence: Sequence, rank: int) -> None:
        """Serve a waiting or running sequence with another rank from now on."""
        order = (rank, sequence.order[1])
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
            sequence.row, sequence.capacity = -1, 0
            sequence.computed = sequence.planned = 0
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
        del self.sequences[sequence.id]

    def check(self) -> None:
        """Raise InvariantError if sequences, rows, queue or blocks do not agree."""
        self.cache.check()
        self.waiting.check()
        check_rows(self.running, self.closing, self.free_rows, self._num_rows, self.cache)
        if len(self.running) + len(self.closing) + len(self.waiting) != len(self.sequences):
            raise InvariantError("a sequence is lost or listed twice")
        if not self.sequences and not self.shared.empty():
            raise InvariantError("a shared prefix is announced by nobody")
