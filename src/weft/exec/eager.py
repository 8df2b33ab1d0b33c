"""The eager executor: one forward pass a sub-batch, kernels called one by one."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import InvariantError, NonFiniteLogitsError, OutOfMemoryError, WeftError
from weft.core.plan import PromptLogprobs, StepPlan, StepResult, SubBatch
from weft.core.types import TokenLogprob
from weft.exec.pack import Packer, StepInputs
from weft.exec.rows import RowTable
from weft.exec.sample import count_taken, sample, token_logprobs
from weft.exec.store import KVStore
from weft.models.decoder import Decoder

SCORED_TOKENS_AT_ONCE = 64

Answer: TypeAlias = "SimpleQueue[StepResult | BaseException]"


class EagerTicket:
    """A launched step; ``result`` waits for it."""

    def __init__(self, step_id: int, answer: Answer) -> None:
        self.step_id = step_id
        self._answer: Answer | None = answer

    def result(self) -> StepResult:
        """Return what the step gave. Raises InvariantError when called a second time."""
        if self._answer is None:
            raise InvariantError(f"step {self.step_id} was collected twice")
        answer, self._answer = self._answer, None
        result = answer.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def __del__(self) -> None:
        if self._answer is not None:
            raise InvariantError(f"step {self.step_id} was never collected")


class _Collected:
    """Results of a step while its sub-batches run."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprob] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.faults: dict[int, WeftError] = {}
        self.accepted: dict[int, tuple[tuple[int, TokenLogprob | None], ...]] = {}
        self.embeddings: dict[int, bytes] = {}


class EagerExecutor:
    """Runs plans on a worker thread, so that the next plan is made while the model computes.

    Args:
        depth: launched steps that may wait for collection while another is launched.
    """

    def __init__(self, decoder: Decoder, store: KVStore, table: RowTable, depth: int) -> None:
        self.depth = depth
        self._decoder = decoder
        self._store = store
        self._stack = decoder.bind(store.keys, store.values)
        self._table = table
        self._packer = Packer(table, store.block_size)
        self._launched: SimpleQueue[tuple[StepPlan, Answer] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="weft-executor", daemon=True)
        self._worker.start()

    def launch(self, plan: StepPlan) -> EagerTicket:
        answer: Answer = SimpleQueue()
        self._launched.put((plan, answer))
        return EagerTicket(plan.step_id, answer)

    def close(self) -> None:
        """End the worker after the steps that are launched. May be called twice."""
        self._launched.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (step := self._launched.get()) is not None:
            plan, answer = step
            try:
                answer.put(self._run(plan))
            except BaseException as error:
                answer.put(error)

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.needs_host:
            raise InvariantError(f"step {plan.step_id} needs a host tier, which is not here")
        for group, block in plan.zero:
            self._store.zero(group, block)
        self._table.apply(plan)
        collected = _Collected()
        for batch in plan.batches:
            self._run_batch(batch, collected)
        return StepResult(
            plan.step_id,
            tuple(collected.ids),
            tuple(collected.tokens),
            collected.logprobs,
            collected.prompt_logprobs,
            collected.faults,
            collected.accepted,
            collected.embeddings,
        )

    def _run_batch(self, batch: SubBatch, collected: _Collected) -> None:
        """Run a sub-batch; if memory runs out, run its rows one by one to find who is to blame.

        Computing a row again is safe: it writes the same KV to the same slots. Drafts are left out
        then, so that they cannot be to blame.
        """
        try:
            self._forward(batch, collected)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch.rows) > 1 or batch.drafts:
                for single in split_rows(batch):
                    self._run_batch(single, collected)
                return
            (row,) = batch.rows
            sequence_id = self._table.sequence_ids[row]
            collected.faults[sequence_id] = OutOfMemoryError(
                f"There is not enough memory to compute {batch.counts[0]} tokens of this request."
            )
            if batch.samples[0]:
                self._deliver(row, 0, collected)

    def _forward(self, batch: SubBatch, collected: _Collected) -> None:
        inputs = self._packer.pack(batch)
        hidden = self._compute(inputs)
        scores = self._score_prompts(inputs, hidden)
        if len(inputs.sample_rows):
            self._sample(batch, inputs, hidden, collected)
        collected.prompt_logprobs.update(scores)

    def _compute(self, inputs: StepInputs) -> Tensor:
        """Return the normalised hidden states [T, C]."""
        if self._stack is None:
            attend = self._attend(inputs)
            return self._decoder.forward(inputs.input_ids, inputs.positions, attend)
        return self._stack.run(inputs.input_ids, inputs.positions, inputs.groups)

    def _sample(
        self, batch: SubBatch, inputs: StepInputs, hidden: Tensor, collected: _Collected
    ) -> None:
        """Choose the next tokens, and keep those of drafts that came out as guessed."""
        table, decoder, rows = self._table, self._decoder, inputs.sample_rows
        with torch.inference_mode():
            states = hidden if len(rows) == len(hidden) else hidden[inputs.sample_at]  # [S, C]
            logits = decoder.logits(states)  # [S, V]
            sampled = sample(logits, rows, table, decoder.ops.choose, inputs.sample_lengths)
        special = batch.drafts or table.embedding or sampled.logprobs or sampled.faults
        if not special and sampled.finite.all():
            self._deliver_all(rows, sampled.tokens, collected)
            return
        tokens, finite = sampled.tokens.tolist(), sampled.finite.tolist()
        first = 0
        for row, samples in zip(batch.rows, batch.samples, strict=True):
            if not samples:
                continue
            sequence_id, draft = table.sequence_ids[row], batch.drafts.get(row, ())
            here = slice(first, first + len(draft) + 1)
            self._deliver(row, tokens[first], collected)
            if first in sampled.logprobs:
                collected.logprobs[sequence_id] = sampled.logprobs[first]
            if not finite[first]:
                collected.faults[sequence_id] = NonFiniteLogitsError(
                    "The model produced logits that are not finite for this request."
                )
            elif row in sampled.faults:
                collected.faults[sequence_id] = sampled.faults[row]
            elif row in table.embedding:
                collected.embeddings[sequence_id] = normalised(states[first])
            elif draft:
                taken = count_taken(tokens[here], finite[here], draft)
                more = range(first + 1, first + taken)
                for i in more:
                    table.append_token(row, tokens[i])
                collected.accepted[sequence_id] = tuple(
                    (tokens[i], sampled.logprobs.get(i)) for i in more
                )
            first = here.stop

    def _deliver_all(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], collected: _Collected
    ) -> None:
        """``_deliver`` for rows of which there is nothing else to say."""
        self._table.append_tokens(rows, tokens)
        ids = self._table.sequence_ids
        collected.ids += [ids[row] for row in rows.tolist()]
        collected.tokens += tokens.tolist()

    def _deliver(self, row: int, token: int, collected: _Collected) -> None:
        self._table.append_token(row, token)
        collected.ids.append(self._table.sequence_ids[row])
        collected.tokens.append(token)

    def _attend(self, inputs: StepInputs):  # type: ignore[no-untyped-def]
        """The attention of this step: write K and V into the store, attend over it."""
        decoder, store = self._decoder, self._store

        def attend(
            layer: int,
            q: Tensor,
            k: Tensor | None,
            v: Tensor | None,
            residual: Tensor,
            positions: Tensor,
        ) -> tuple[Tensor, Tensor, Tensor]:
            params = decoder.attention_params(layer)
            out = decoder.ops.paged_attention(
                q,
                k,
                v,
                store.keys[params.group][params.index],
                store.values[params.group][params.index],
                inputs.groups[params.group],
                scale=params.scale,
                window=params.window,
                softcap=params.softcap,
            )
            return out, residual, positions

        return attend

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor) -> dict[int, PromptLogprobs]:
        """Log probabilities of the prompt tokens that follow each computed prompt token."""
        scores: dict[int, PromptLogprobs] = {}
        if not self._table.prompt_scored:
            return scores
        ends = np.cumsum(inputs.counts)
        for i, row in enumerate(inputs.rows.tolist()):
            params = self._table.params[row]
            start = int(inputs.starts[i])
            stop = min(start + int(inputs.counts[i]), int(self._table.num_prompt[row]) - 1)
            if params is None or params.prompt_logprobs is None or stop <= start:
                continue
            first = int(ends[i] - inputs.counts[i])
            entries: list[TokenLogprob] = []
            for low in range(start, stop, SCORED_TOKENS_AT_ONCE):
                high = min(low + SCORED_TOKENS_AT_ONCE, stop)
                logits = self._decoder.logits(hidden[first + low - start : first + high - start])
                logprobs = torch.log_softmax(logits, dim=-1)  # [P, V]
                following = self._table.tokens[row, low + 1 : high + 1].astype(np.int64)
                entries += token_logprobs(
                    logprobs, following, [params.prompt_logprobs] * (high - low)
                )
            scores[self._table.sequence_ids[row]] = PromptLogprobs(start + 1, tuple(entries))
        return scores


def normalised(state: Tensor) -> bytes:
    """Return a hidden state [C] at length one, as float32 bytes."""
    vector = state.double()
    unit = vector / vector.norm().clamp(min=1e-30)
    return bytes(unit.float().numpy().tobytes())


def split_rows(batch: SubBatch) -> list[SubBatch]:
    """Return one sub-batch for each row of the batch."""
    return [
        SubBatch((row,), (start,), (count,), (samples,))
        for row, start, count, samples in zip(
            batch.rows, batch.starts, batch.counts, batch.samples, strict=True
        )
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or Python says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)
