"""Admission: gives waiting sequences a row and blocks, if need be from lower classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.core.images import uncut
from weft.core.plan import RowAdd, Tier
from weft.core.types import Sequence
from weft.kv.cache import KVCache
from weft.kv.lower_prefixes import LowerPrefixes
from weft.kv.opened import find_opened
from weft.sched.batch import BatchBuilder
from weft.sched.memory_device import DeviceMemory
from weft.sched.preempt import choose_victim, covers
from weft.sched.sequences import SequenceManager

LOOK_UPS_A_STEP = 64  # waiting prompts that one step hashes and looks up at most
FETCHES_A_STEP = 8  # the same, of which more is read from disk


class Admission:
    """Gives rows and blocks to waiting sequences, in order.

    Attributes:
        growing: running sequences for which blocks are left, if the policy says so.
        arrivals: requests so far.
        planned_ns: when the plan was begun that starts sequences now.
    """

    def __init__(
        self, sequences: SequenceManager, memory: DeviceMemory, max_num_batched_tokens: int
    ) -> None:
        self._sequences = sequences
        self._memory = memory
        self._cache = memory.cache
        self._chunk = max_num_batched_tokens
        self.growing: Callable[[], Iterable[Sequence]] = memory.growing
        self.arrivals = 0
        self.planned_ns = 0

    def admit(
        self, step: BatchBuilder, priority: int, waiting: Iterable[Sequence] | None = None
    ) -> None:
        """Start waiting sequences of the priority in order, until one does not fit.

        While blocks come back for that one, lower classes start nothing: they would take the blocks
        and be preempted for it in turn, for ever.

        Args:
            waiting: those of the priority in the order in which they are to be considered; None for
                preempted ones, then new ones by arrival.
        """
        if step.admission_blocked:
            return
        admitted = []
        looked_up = fetched = 0
        sequences, memory, lower = self._sequences, self._memory, self._cache.lower
        for sequence in sequences.waiting.of_priority(priority) if waiting is None else waiting:
            if step.room(0, 1) <= 0 or looked_up == LOOK_UPS_A_STEP or not memory.is_next(sequence):
                break
            if sequence.waiting_on and sequences.prefix_wait.in_progress(sequence.waiting_on):
                continue
            if lower is not None and lower.pending(sequence):
                continue
            hit = self._find_hit(sequence)
            looked_up += 1
            if sequence.waiting_on:
                continue
            if lower is not None and self._may_reuse(sequence) and lower.awaited(sequence, hit):
                fetched += 1
                if fetched == FETCHES_A_STEP:
                    break
                continue
            reused = lower if self._may_reuse(sequence) else None
            if not self._may_have_row(sequence) or not self._open(step, sequence, hit, reused):
                step.admission_blocked = memory.blocks_come_back()
                break
            admitted.append(sequence)
        for sequence in admitted:
            sequences.waiting.remove(sequence)

    def _may_have_row(self, sequence: Sequence) -> bool:
        """Whether ``find_row`` may find a row without preemption."""
        return bool(self._sequences.free_rows) or self._row_victim(sequence) is not None

    def find_row(self, sequence: Sequence) -> bool:
        """Whether a row is free, taking one from a lower class if need be."""
        if not self._sequences.free_rows:
            victim = self._row_victim(sequence)
            if victim is not None:
                self._memory.preempt(victim)
        return bool(self._sequences.free_rows)

    def _row_victim(self, sequence: Sequence) -> Sequence | None:
        """The sequence to preempt for its row; None while launched steps will free rows."""
        if self._sequences.closing:
            return None
        return choose_victim(self._memory.row_victims(), self._below(sequence))

    def _below(self, sequence: Sequence) -> tuple[int, int]:
        """The order after which only lower classes come."""
        return (sequence.order[0], self.arrivals)

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Whether a sequence may have KV that others have computed: not where it is scored."""
        scored = sequence.request.sampling.prompt_logprobs is not None
        return self._cache.prefix_caching and not scored

    def _find_hit(self, sequence: Sequence) -> int:
        """Look up the prefix cache; sets ``waiting_on`` if another sequence computes more."""
        sequence.waiting_on = b""
        if not self._may_reuse(sequence):
            return 0
        hit = self._cache.find_prefix(sequence.id, sequence.tokens)
        hit = find_opened(self._cache, sequence.id, sequence.tokens, hit)
        block_hashes = self._cache.prompt_hashes(sequence.id, sequence.tokens)
        wait = self._sequences.prefix_wait
        sequence.waiting_on = wait.awaited(sequence.order[0], block_hashes, hit)
        return hit

    def _open(
        self, step: BatchBuilder, sequence: Sequence, hit: int, lower: LowerPrefixes | None
    ) -> bool:
        """Give the sequence a row and blocks for its first chunk, if all its tokens fit now.

        What ``lower`` has of its prompt behind the first ``hit`` tokens comes into blocks of its
        own. If taking those has cost the host some of it, it is computed.
        """
        cache, start, upto = self._cache, hit, 0
        cache.open(sequence.id, hit)
        fits = step.room(hit, len(sequence.tokens) - hit) > 0 and self._make_fit(step, sequence)
        if fits and self.find_row(sequence):
            if lower is not None and (start := lower.found(sequence, hit)) > hit:
                cache.release(sequence.id)
                cache.open(sequence.id, hit, start - hit)
            count, images = step.room(start, len(sequence.tokens) - start), sequence.request.images
            count = uncut(images, start, count, step.image_room) if images else count
            upto = min(start + count, cache.growable(sequence.id))
            upto = start + uncut(images, start, upto - start, upto - start)
            if step.whole and upto < start + count:
                upto = start
        if upto <= start or cache.extend(sequence.id, upto) is None:
            cache.release(sequence.id)
            return False
        if lower is not None and start > hit:
            filled = lower.load(sequence, hit, start)
            if filled is None:
                cache.release(sequence.id)
                hit = cache.find_prefix(sequence.id, sequence.tokens)  # it may have lost some, too
                return self._open(step, sequence, hit, None)
            if filled:
                self._sequences.totals.blocks_to_device += filled
                step.count_move(Tier.DEVICE, start - hit)
        if cache.lower is not None:
            cache.lower.forget(sequence.id)
        self.start(step, sequence, start, cache, Tier.DEVICE)
        step.put(sequence, upto - start)
        priority, own = sequence.order[0], self._memory.needed_soon([sequence])
        step.reserves[priority] = [a + b for a, b in zip(step.reserves[priority], own, strict=True)]
        return True

    def _make_fit(self, step: BatchBuilder, sequence: Sequence) -> bool:
        """Preempt lower classes until the sequence fits; none if that would not suffice.

        It fits if there is room for all its tokens beside what the sequences that run, and need not
        give way to it, will ask for soon: else they would have to give way to each other. Of lower
        classes only its own room is taken now: the others will take theirs when they need it, and
        until then those that have it would grow into whatever was set free for them.
        """
        priority, after = sequence.order[0], self._below(sequence)
        cache, memory = self._cache, self._memory
        if priority not in step.reserves:
            stay = (running for running in self.growing() if running.order <= after)
            step.reserves[priority] = memory.needed_soon(stay)
        own = cache.needs(sequence.id, len(sequence.tokens), self._chunk)
        needs = [a + b for a, b in zip(own, step.reserves[priority], strict=True)]
        spare = cache.available()
        if covers(spare, needs):
            return True
        victims = [victim.id for victim in memory.victims() if victim.order > after]
        freed = cache.freed(victims) if victims else [0] * len(spare)
        if not covers([a + b for a, b in zip(spare, freed, strict=True)], needs):
            return False
        while not covers(cache.available(), own):
            if not memory.make_room(step, after):
                return False
        return True

    def start(
        self, step: BatchBuilder, sequence: Sequence, hit: int, cache: KVCache, tier: Tier
    ) -> None:
        """Give a row to a sequence that has its blocks in the cache of a tier."""
        self._cache.drop_opened(sequence.id)  # which one that starts on the host leaves behind
        self._sequences.start(sequence, hit, self.planned_ns)
        sequence.cover(cache.capacity(sequence.id))
        step.adds.append(
            RowAdd(
                row=sequence.row,
                sequence_id=sequence.id,
                tokens=tuple(sequence.tokens),
                num_prompt=sequence.num_prompt,
                sampling=sequence.request.sampling,
                stop_ids=sequence.stop_ids,
                tables=cache.tables(sequence.id),
                embed=sequence.request.embed,
                tier=tier,
                images=sequence.request.images,
            )
        )
