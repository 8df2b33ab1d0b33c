"""Commits collected steps: appends tokens, hashes full blocks, ends sequences."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from weft.core.errors import InvariantError
from weft.core.plan import LeasedTokens, PromptLogprobs, StepOutputs, StepResult, Update
from weft.core.types import FinishReason, Sequence, SequenceState
from weft.kv.tiers import MovePin, TieredCache
from weft.sched.batch import Launched, end_after, spread, update_of
from weft.sched.sequences import SequenceManager


class Committer:
    """Takes steps in, in the order in which they were planned.

    Args:
        synchronous: whether each token is planned only when the one before it is on the host.
    """

    def __init__(self, sequences: SequenceManager, *, synchronous: bool = False) -> None:
        self._sequences = sequences
        self._synchronous = synchronous

    def commit(self, step: Launched, result: StepResult, now_ns: int) -> StepOutputs:
        """Commit the oldest launched step and return its outputs."""
        if step.step_id != result.step_id:
            raise InvariantError(f"step {result.step_id} committed, {step.step_id} expected")
        earlier, updates = self._advance_leased(step, result.leased)
        updates += self._fault(result)
        self._embed(result, updates, now_ns)
        self._deliver_prompt_logprobs(result, updates)
        tokens, due = self._advance(step, result, updates, now_ns)
        self._sequences.totals.output_tokens += len(result.tokens) - len(result.embeddings)
        for sequence, draft in step.drafts:
            self._accept(sequence, draft, result, StepOutputs(tokens, updates), due)
        self.hash_full_blocks(due)
        self._sequences.close()
        return StepOutputs(earlier + tokens, updates)

    def _advance_leased(
        self, step: Launched, leased: LeasedTokens | None
    ) -> tuple[list[tuple[int, int]], list[Update]]:
        """Count steps that were computed under a lease, and append their tokens.

        None of them ends a sequence. One that was cancelled meanwhile has its end already.

        Returns:
            The tokens that are still to be published, without and with log probabilities.
        """
        plain: list[tuple[int, int]] = []
        updates: list[Update] = []
        if leased is None:
            return plain, updates
        steps, chosen = len(leased.steps), step.sequences
        self._sequences.totals.output_tokens += steps * len(chosen)
        for sequence, tokens in zip(chosen, zip(*leased.steps, strict=True), strict=True):
            sequence.follow(steps)
            if sequence.finish is None:
                sequence.tokens += tokens
        late = [s.id not in leased.published and s.finish is None for s in chosen]
        if not any(late):
            return plain, updates
        for tokens, logprobs in zip(leased.steps, leased.logprobs or [{}] * steps, strict=True):
            for sequence, token in compress(zip(chosen, tokens, strict=True), late):
                logprob = logprobs.get(sequence.id)
                if logprob is None:
                    plain.append((sequence.id, token))
                else:
                    updates.append(update_of(sequence, token, logprob))
        return plain, updates

    def _advance(
        self, step: Launched, result: StepResult, updates: list[Update], now_ns: int
    ) -> tuple[list[tuple[int, int]], list[Sequence]]:
        """Count what was computed and append the sampled tokens.

        Returns the tokens about which there is nothing else to say, and the sequences in which
        blocks became full. With the planning of single tokens this loop is the cost of a step.
        """
        due: list[Sequence] = []
        special: set[int] = set()
        logprobs = result.logprobs
        for sequence, count, sequence_id, token in zip(
            step.sequences, step.counts, *spread(step.samples, result), strict=True
        ):
            computed = sequence.computed = sequence.computed + count  # `commit`, without a call
            if computed >= sequence.block_full_at:
                due.append(sequence)
                if not sequence.prefilled_ns and computed >= sequence.num_prompt:
                    sequence.prefilled_ns = now_ns
            if token < 0:
                continue
            if sequence_id != sequence.id:
                raise InvariantError(f"a token of sequence {sequence_id} came out of order")
            if sequence.finish is not None:
                special.add(sequence_id)
                continue
            tokens = sequence.tokens
            tokens.append(token)
            if token in sequence.stop_ids or len(tokens) >= sequence.end:
                stopped = token in sequence.stop_ids
                self._sequences.finish(
                    sequence, FinishReason.STOP if stopped else FinishReason.LENGTH
                )
            elif not logprobs or sequence_id not in logprobs:
                continue
            special.add(sequence_id)
            updates.append(update_of(sequence, token, logprobs.get(sequence_id)))
        plain = list(zip(result.sequence_ids, result.tokens, strict=True))
        if special:
            plain = [pair for pair in plain if pair[0] not in special]
        return plain, due

    def piggyback(self, sequence: Sequence, token: int, outputs: StepOutputs) -> None:
        """Append the token of a piggybacked row, which an earlier step has begun."""
        sequence.commit(1)
        if sequence.finish is not None:
            return
        self._sequences.totals.output_tokens += 1
        self._sequences.totals.host_tokens += 1
        sequence.tokens.append(token)
        if sequence.computed >= sequence.block_full_at:
            self.hash_full_blocks([sequence])
        if (end := end_after(sequence, token)) is None:
            outputs.tokens.append((sequence.id, token))
            return
        self._sequences.finish(sequence, end)
        outputs.updates.append(update_of(sequence, token))

    def _accept(
        self,
        sequence: Sequence,
        draft: tuple[int, ...],
        result: StepResult,
        outputs: StepOutputs,
        due: list[Sequence],
    ) -> None:
        """Append the tokens that came out as they were guessed, up to the end of the sequence.

        The KV of the others lies beyond what counts as computed, and is written again. So is that
        of tokens behind the last recurrent state that no wrong guess has touched.
        """
        totals, accepted = self._sequences.totals, result.accepted.get(sequence.id, ())
        totals.drafted_tokens += len(draft)
        if sequence.finish is not None:
            return
        totals.accepted_tokens += len(accepted)
        totals.output_tokens += len(accepted)
        for token, logprob in accepted:
            sequence.accept(token)
            if (end := end_after(sequence, token)) is not None:
                self._sequences.finish(sequence, end)
            if end is not None or logprob is not None:
                outputs.updates.append(update_of(sequence, token, logprob))
            else:
                outputs.tokens.append((sequence.id, token))
            if end is not None:
                break
        sequence.keep(self._sequences.cache.settle(sequence.id, sequence.computed))
        if sequence.computed >= sequence.block_full_at and sequence not in due:
            due.append(sequence)
        assert sequence.drafter is not None
        rest = sequence.drafter.learn(len(draft), len(accepted))
        if not self._synchronous:
            sequence.synchronous_from = sequence.known + rest

    def _embed(self, result: StepResult, updates: list[Update], now_ns: int) -> None:
        """End sequences whose embedding is ready."""
        for sequence_id, vector in result.embeddings.items():
            sequence = self._sequences.find(sequence_id)
            if sequence is not None:
                sequence.prefilled_ns = sequence.prefilled_ns or now_ns
                self._sequences.finish(sequence, FinishReason.STOP)
                updates.append(update_of(sequence)._replace(embedding=vector))

    def _fault(self, result: StepResult) -> list[Update]:
        """End faulty sequences, each with its own error; share nothing that they computed."""
        updates = []
        for sequence_id, error in result.faults.items():
            sequence = self._sequences.find(sequence_id)
            if sequence is not None:
                sequence.error = error
                self._sequences.finish(sequence, FinishReason.ERROR)
                updates.append(update_of(sequence))
        return updates

    def _deliver_prompt_logprobs(self, result: StepResult, updates: list[Update]) -> None:
        for sequence_id, scores in result.prompt_logprobs.items():
            sequence = self._sequences.find(sequence_id)
            if sequence is None:
                continue
            end = scores.start + len(scores.entries)
            if end > sequence.prompt_scored:
                # A preempted prompt is scored again from its start: pass on what is new.
                start = max(scores.start, sequence.prompt_scored)
                new = PromptLogprobs(start, scores.entries[start - scores.start :])
                sequence.prompt_scored = end
                updates.append(Update(sequence_id, None, prompt_logprobs=new))

    def complete_moves(self, tiers: TieredCache, pins: Iterable[MovePin]) -> None:
        """Release the source blocks of committed moves; hash blocks that waited for them."""
        for pin in pins:
            tiers.complete_move(pin)
            sequence = self._sequences.find(pin.sequence_id)
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                self.hash_full_blocks([sequence])

    def hash_full_blocks(self, due: list[Sequence]) -> None:
        """Seal the blocks of these sequences that are full, and give up what they are done with."""
        for sequence in due:
            if sequence.error is not None:
                continue
            full_at = self._sequences.cache.commit(sequence.id, sequence.tokens, sequence.computed)
            prompt = sequence.num_prompt  # its end is looked at as well, to be dated
            sequence.block_full_at = (
                full_at if sequence.computed >= prompt else min(full_at, prompt)
            )
            self._sequences.prefix_wait.advance(sequence.id, sequence.computed)
