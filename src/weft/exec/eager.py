"""The eager executor: one forward pass a sub-batch, kernels called one by one.

Sub-batches with rows on the host go through the layers together (``overlap``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import StepPlan, StepResult, SubBatch, Tier
from weft.exec.attend import bind_stack, forward_over, forward_recurrent
from weft.exec.collect import (
    OutOfMemoryGuard,
    StepOutput,
    StepTicket,
    no_memory,
    pooled_states,
    score_prompt,
    split_rows,
)
from weft.exec.disk_blocks import DiskBlocks
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import InputPacker, StepInputs
from weft.exec.layerwise import LayerwiseForward
from weft.exec.lease import bind_leases
from weft.exec.overlap import OverlappedForward
from weft.exec.piggyback import PiggybackedRows, Rows
from weft.exec.sample import sample, unsampled
from weft.exec.seen import find_seen, forward_seeing
from weft.exec.states import state_batch
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier, check_computes
from weft.kernels.arrays import Array, to_torch
from weft.kernels.cpu._native import Lease
from weft.models.decoder import Decoder

Answer: TypeAlias = "SimpleQueue[StepResult | BaseException]"
Step: TypeAlias = Callable[[], StepResult]
NOTHING = SubBatch((), (), (), ())
NO_ROWS: Rows = np.zeros(0, np.int32)


class EagerExecutor:
    """Computes a plan on the thread that collects it, or on a worker thread.

    On a worker thread the next plan is made while the model computes. Where the model takes all
    cores that gains nothing, and each step waits for two threads to wake.

    Args:
        depth: launched steps that may wait for collection while another is launched. Without any
            there is no worker thread, and an exception of a signal may break a step.
        resident: whether a plan may lease its rows for steps without Python.

    Attributes:
        store: the KV.
        tier: the KV of the host; None if there is no such tier.
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
        *,
        resident: bool = False,
    ) -> None:
        self.depth = depth
        self.disk = disk
        self.overlaps = False
        self._decoder = decoder
        self.store = store
        self.tier = tier
        stack = bind_stack(decoder, store)
        self._compute = forward_over(decoder, store, stack)
        self._recur = None if store.states is None else forward_recurrent(decoder, store, stack)
        self._table = table
        self._leases = bind_leases(decoder, stack, table, store.block_size) if resident else None
        self._wrap = (lambda array: array) if decoder.on_numpy else to_torch
        pack = partial(InputPacker, table, store.block_size, self._wrap)
        self._packer = pack()
        self._rows: PiggybackedRows | None = None
        self._overlapped: OverlappedForward | None = None
        if tier is not None and (host := tier.attention) is not None:
            self._rows = PiggybackedRows(decoder, table, host)
            self._layerwise = LayerwiseForward(decoder, store, self._rows)
            if tier.overlaps:
                stores = store, tier.host
                self._overlapped = OverlappedForward(decoder, stores, table, host, pack)
        self._worker = Worker() if depth else None

    @property
    def resident(self) -> bool:
        """Whether plans may lease their rows."""
        return self._leases is not None

    def launch(self, plan: StepPlan) -> StepTicket:
        lease = Lease() if plan.lease and self._leases is not None else None
        run = partial(self._run, plan, lease)
        wait = run if self._worker is None else self._worker.begin(run)
        return StepTicket(plan.step_id, wait, lease)

    def close(self) -> None:
        """End the workers after the steps that are launched. May be called twice."""
        if self._worker is not None:
            self._worker.close()
        if self._rows is not None:
            self._rows.host.close()

    def _run(self, plan: StepPlan, lease: Lease | None) -> StepResult:
        check_computes(plan, self.tier)
        if plan.saves or plan.loads:
            self._on_disk(plan).save(plan.saves)
        for group, block in plan.zero:
            self.store.zero(group, block)
        if self._rows is not None:
            self._rows.before(plan)
        if self.tier is not None:
            self.tier.before(plan)
        self._table.apply(plan)
        if plan.loads:
            self._on_disk(plan).load(plan.loads)
        output = StepOutput(self._table, self._decoder)
        if self._rows is not None:
            output.lost, output.places = self._rows.lost(), self._rows.places()
        batches, began = plan.batches, time.perf_counter()
        if plan.piggybacks and self._rows is not None:
            batches = batches[1:]
            self._carry(plan, self._rows, output)
        if self._overlapped is not None and any(batch.tiers for batch in batches):
            self._run_overlapped(batches, self._overlapped, output)
        else:
            for batch in batches:
                self._run_batch(batch, output)
        if self.tier is not None:
            self.tier.after(plan, self._table)
        if lease is not None and self._leases is not None:
            (batch,) = plan.batches
            step_s = time.perf_counter() - began
            self._leases.run(batch, plan.lease, lease, output, step_s)
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
        with OutOfMemoryGuard(self._decoder.ops.processes) as memory:
            self._forward(batch, output)
        if not memory.ran_out:
            return
        if len(batch.rows) == 1 and not batch.drafts:
            output.out_of_memory(batch)
            return
        for single in split_rows(batch):
            self._run_batch(single, output)

    def _run_overlapped(
        self, batches: Seq[SubBatch], overlapped: OverlappedForward, output: StepOutput
    ) -> None:
        """Run sub-batches with rows of both tiers; if memory runs out, their rows one by one."""
        with OutOfMemoryGuard(self._decoder.ops.processes) as memory:
            results = overlapped.run(batches)
        if memory.ran_out:
            overlapped.give_up()
            self._run_apart(batches, overlapped, output)
            return
        for batch, result in zip(batches, results, strict=True):
            for row, error in result.failed.items():
                output.fault(row, error)
            with OutOfMemoryGuard(self._decoder.ops.processes) as memory:
                self._finish(batch, result.inputs, result.hidden, output)
            if memory.ran_out:
                self._run_apart((batch,), overlapped, output)

    def _run_apart(
        self, batches: Seq[SubBatch], overlapped: OverlappedForward, output: StepOutput
    ) -> None:
        """Run rows of both tiers one by one; one that has been alone already ends."""
        singles = [single for batch in batches for single in split_rows(batch)]
        if len(singles) == 1 and not batches[0].drafts:
            output.out_of_memory(singles[0])
            return
        for single in singles:
            if Tier.HOST in single.tiers:
                self._run_overlapped((single,), overlapped, output)
            else:
                self._run_batch(single, output)

    def _carry(self, plan: StepPlan, rows: PiggybackedRows, output: StepOutput) -> None:
        """Run the first sub-batch, if there is one, and piggybacked rows along with it.

        Where the host has no result yet, the step is one as without piggybacked rows.
        """
        begun, limits = rows.present(plan.piggybacked), plan.piggyback_limits
        nothing_else = bool(limits) and not (begun or plan.batches)
        for row, error in rows.look(wait=nothing_else).items():
            output.fail_piggybacked(row, error)
        if begun or (limits and rows.done_counts().any()):
            batch = plan.batches[0] if plan.batches else NOTHING
            self._carry_with(batch, rows, begun, limits, output)
        elif plan.batches:
            self._run_batch(plan.batches[0], output)
        output.piggyback_layers = rows.in_layers

    def _carry_with(
        self,
        batch: SubBatch,
        rows: PiggybackedRows,
        begun: Seq[int],
        limits: Seq[int],
        output: StepOutput,
    ) -> None:
        """Run a sub-batch with piggybacked rows.

        If memory runs out, they are computed apart from it; one that finds none alone ends.
        """
        with OutOfMemoryGuard(self._decoder.ops.processes) as memory:
            self._forward_with(rows, batch, begun, limits, output)
        if not memory.ran_out:
            return
        rows.put_back()
        if batch.rows:
            self._run_batch(batch, output)
        for row in rows.not_begun(begun):
            self._carry_alone(rows, (row,), (), output)
        self._carry_alone(rows, (), [min(1, limit) for limit in limits], output)

    def _carry_alone(
        self, rows: PiggybackedRows, begun: Seq[int], limits: Seq[int], output: StepOutput
    ) -> None:
        """Carry one row at a time; if memory runs out, its sequence ends."""
        with OutOfMemoryGuard(self._decoder.ops.processes) as memory:
            self._forward_with(rows, NOTHING, begun, limits, output)
        if memory.ran_out:
            for row in rows.give_up(begun):
                output.fail_piggybacked(row, no_memory(1))

    def _forward_with(
        self,
        rows: PiggybackedRows,
        batch: SubBatch,
        begun: Seq[int],
        limits: Seq[int],
        output: StepOutput,
    ) -> None:
        inputs = self._packer.pack(batch)
        hidden, came = self._layerwise.run(inputs, begun, limits)  # [T + F, C]
        self._finish(batch, inputs, hidden, output, came)
        rows.finish(came)

    def _forward(self, batch: SubBatch, output: StepOutput) -> None:
        inputs = self._packer.pack(batch)
        images = self._table.images
        seen = find_seen(batch, inputs, lambda row: images.get(row, ())) if images else None
        if seen is not None:
            hidden = forward_seeing(self._decoder, self.store, inputs, seen)  # [T, C]
            self._finish(batch, inputs, hidden, output)
            return
        if self._recur is not None:
            states = state_batch(batch, self._wrap)
            hidden = self._recur(inputs.input_ids, inputs.positions, inputs.groups, states)
            self._finish(batch, inputs, hidden, output)
            return
        hidden = self._compute(inputs.input_ids, inputs.positions, inputs.groups)  # [T, C]
        self._finish(batch, inputs, hidden, output)

    def _finish(
        self,
        batch: SubBatch,
        inputs: StepInputs,
        hidden: Array,
        output: StepOutput,
        came: Rows = NO_ROWS,
    ) -> None:
        """Choose the next tokens, and keep those of drafts that came out as guessed.

        Args:
            hidden: [T + F, C] of the step's own tokens and of piggybacked rows.
            came: [F] the latter.
        """
        table, decoder, own = self._table, self._decoder, len(inputs.sample_rows)
        scores = {
            row: score_prompt(decoder, table, inputs, index, hidden)
            for index, row in enumerate(batch.rows if table.prompt_scored else ())
        }
        rows, at, lengths = inputs.sample_rows, inputs.sample_at, inputs.sample_lengths
        if len(came):
            rows = np.concatenate((rows, came))
            at = np.concatenate((at, np.arange(len(hidden) - len(came), len(hidden))))
            lengths = np.concatenate((lengths, table.length[came]))
        if len(rows):
            states = hidden if len(rows) == len(hidden) else hidden[at]  # [S + F, C]
            if decoder.ops.processes == 1 and table.only_pooled(rows):
                sampled = unsampled(states)
            else:
                sampled = sample(decoder.logits(states), rows, table, decoder.ops, lengths)
            first = sampled.first(own) if len(came) else sampled
            state, kind = states.__getitem__, decoder.spec.pooled
            if kind != "last":
                counts = dict(zip(inputs.rows.tolist(), inputs.counts.tolist(), strict=True))
                state = pooled_states(kind, hidden, at, [counts[row] for row in rows.tolist()])
            output.take(batch, inputs.sample_rows, first, state)
            output.take_piggybacked(came, sampled.tokens[own:], sampled.finite[own:])
        for row, score in scores.items():
            output.score(row, score)


class Worker:
    """A thread that computes one step after the other."""

    def __init__(self) -> None:
        self._begun: SimpleQueue[tuple[Step, Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="weft-executor", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> Step:
        """Compute a step after those begun before; what is returned waits for its result."""
        answer: Answer = SimpleQueue()
        self._begun.put((step, answer))
        return partial(_await, answer)

    def close(self) -> None:
        """End after the steps that were begun. May be called twice."""
        self._begun.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (begun := self._begun.get()) is not None:
            step, answer = begun
            try:
                answer.put(step())
            except BaseException as error:
                answer.put(error)


def _await(answer: Answer) -> StepResult:
    result = answer.get()
    if isinstance(result, BaseException):
        raise result
    return result
