"""The eager executor: one forward pass a sub-batch, kernels called one by one."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from weft.core.errors import InvariantError
from weft.core.plan import StepPlan, StepResult, SubBatch
from weft.exec.attend import bind_forward
from weft.exec.collect import (
    OutOfMemoryGuard,
    StepOutput,
    StepTicket,
    score_prompt,
    split_rows,
)
from weft.exec.disk_blocks import DiskBlocks
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import InputPacker, StepInputs
from weft.exec.sample import sample
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier, check_computes
from weft.kernels.arrays import Array, to_torch
from weft.models.decoder import Decoder

Answer: TypeAlias = "SimpleQueue[StepResult | BaseException]"


class EagerExecutor:
    """Runs plans on a worker thread, so that the next plan is made while the model computes.

    Args:
        depth: launched steps that may wait for collection while another is launched.
        tier: the KV of the host; None if there is no such tier.

    Attributes:
        store: the KV.
        disk: keeps cached prefixes; None where nothing does.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        table: InputBatch,
        depth: int,
        tier: HostTier | None = None,
        disk: DiskBlocks | None = None,
    ) -> None:
        self.depth = depth
        self.disk = disk
        self.overlaps = False
        self._decoder = decoder
        self.store = store
        self._tier = tier
        self._compute = bind_forward(decoder, store)
        self._table = table
        wrap = (lambda array: array) if decoder.on_numpy else to_torch
        self._packer = InputPacker(table, store.block_size, wrap)
        self._launched: SimpleQueue[tuple[StepPlan, Answer] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="weft-executor", daemon=True)
        self._worker.start()

    def launch(self, plan: StepPlan) -> StepTicket:
        answer: Answer = SimpleQueue()
        self._launched.put((plan, answer))
        return StepTicket(plan.step_id, partial(_await, answer))

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
        check_computes(plan, self._tier)
        if plan.saves or plan.loads:
            self._on_disk(plan).save(plan.saves)
        for group, block in plan.zero:
            self.store.zero(group, block)
        if self._tier is not None:
            self._tier.before(plan)
        self._table.apply(plan)
        if plan.loads:
            self._on_disk(plan).load(plan.loads)
        output = StepOutput(self._table)
        for batch in plan.batches:
            self._run_batch(batch, output)
        if self._tier is not None:
            self._tier.after(plan, self._table)
        return output.result(plan.step_id)

    def _on_disk(self, plan: StepPlan) -> DiskBlocks:
        if self.disk is None:
            raise InvariantError(f"step {plan.step_id} needs a disk, which is not here")
        return self.disk

    def _run_batch(self, batch: SubBatch, output: StepOutput) -> None:
        """Run a sub-batch; if memory runs out, run its rows one by one to find the cause.

        Computing a row again is safe: it writes the same KV to the same slots. Drafts are left out
        then, so that they cannot be the cause.
        """
        with OutOfMemoryGuard(self._decoder.ops.ranks.size) as memory:
            self._forward(batch, output)
        if not memory.ran_out:
            return
        if len(batch.rows) == 1 and not batch.drafts:
            output.out_of_memory(batch)
            return
        for single in split_rows(batch):
            self._run_batch(single, output)

    def _forward(self, batch: SubBatch, output: StepOutput) -> None:
        inputs = self._packer.pack(batch)
        hidden = self._compute(inputs.input_ids, inputs.positions, inputs.groups)  # [T, C]
        scores = {
            row: score_prompt(self._decoder, self._table, inputs, index, hidden)
            for index, row in enumerate(batch.rows if self._table.prompt_scored else ())
        }
        if len(inputs.sample_rows):
            self._sample(batch, inputs, hidden, output)
        for row, score in scores.items():
            output.score(row, score)

    def _sample(
        self, batch: SubBatch, inputs: StepInputs, hidden: Array, output: StepOutput
    ) -> None:
        """Choose the next tokens, and keep those of drafts that came out as guessed."""
        table, decoder, rows = self._table, self._decoder, inputs.sample_rows
        states = hidden if len(rows) == len(hidden) else hidden[inputs.sample_at]  # [S, C]
        logits = decoder.logits(states)  # [S, V]
        sampled = sample(logits, rows, table, decoder.ops, inputs.sample_lengths)
        output.take(batch, rows, sampled, states.__getitem__)


def _await(answer: Answer) -> StepResult:
    result = answer.get()
    if isinstance(result, BaseException):
        raise result
    return result
