"""The graph executor: pack, one upload, replay, one small copy back; a step ahead of the host.

    launch(n)    pack, upload, forward pass, sampling, copy back, event     (device)
    launch(n+1)  the same; reads the tokens of step n on the device          (device)
    result(n)    wait for the event of step n, append its tokens to the rows (host)

The forward pass and sampling are captured once for each size and replayed (``captured``). They read
nothing but the uploaded buffer and tensors that stay where they are.

Rows whose attention the host computes are carried in lanes, of which captured steps have a fixed
number (``lane_pass``, ``lane_rows``). Steps that carry none run without lanes.

Overlapped sub-batches wait for the host in each layer (``overlap_pass``). They are packed as one,
and nothing is ordered behind them before they have ended: the first use of a kernel may have to
wait for all that runs on a device. The halves of a step are packed likewise, but wait for nobody:
the dense layers of one run beside the attention of the other (``halves_pass``).

Log probabilities are computed behind the tokens, uncaptured, and come back with them. What few
requests need is done on the host between two steps: restricted tokens, log probabilities of
prompts, embeddings. The next step then waits for it. Grammars alone make masks (``masked_rows``).

Where a plan leases its rows, more steps of them follow without plans or uploads (``replayed``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from weft.core.errors import HostWorkerError, InvariantError
from weft.core.plan import StepPlan, StepResult, SubBatch, Tier
from weft.exec.captured import CapturedSteps
from weft.exec.collect import (
    OutOfMemoryGuard,
    StepOutput,
    StepTicket,
    no_memory,
    score_prompt,
    split_rows,
)
from weft.exec.courier import rows_of
from weft.exec.device import Device
from weft.exec.device_rows import DeviceRows
from weft.exec.functions import StepFunctions
from weft.exec.host_prompts import HostPrompts
from weft.exec.input_batch import InputBatch
from weft.exec.lane_rows import LaneRows
from weft.exec.launched import LaunchedBatch
from weft.exec.masked_rows import MaskedRows
from weft.exec.overlap_pass import OverlappedPass
from weft.exec.overlapped_rows import OverlappedRows
from weft.exec.replayed import DeviceLease, ReplayedSteps
from weft.exec.sample import Sampled, sample
from weft.exec.scored_rows import ScoredRows
from weft.exec.setup import Steps as Steps
from weft.exec.step_layout import LaneSizes, PairSizes, captured_sizes, padded_size
from weft.exec.step_packer import NOTHING, Carried, PackedStep, StepPacker
from weft.exec.store import KVStore
from weft.exec.sub_batches import check_overlaps, merged
from weft.exec.tiers import HostTier, check_computes
from weft.kernels.sampling import NOT_FINITE
from weft.models.decoder import Decoder


class GraphExecutor:
    """See the module docstring; implements ``weft.core.ports.Executor``.

    Attributes:
        captured: functions that are replayed.
        tier: the KV of the host; None if there is no such tier.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        table: InputBatch,
        device: Device,
        steps: Steps,
        tier: HostTier | None = None,
    ) -> None:
        self.depth = steps.depth
        self.overlaps = steps.halves is not None
        self.tier = tier
        max_tokens, sizes = steps.max_tokens, steps.sizes
        self._decoder = decoder
        self._store = store
        self._table = table
        self._device = device
        self._most_samples = padded_size(min(steps.max_samples, max_tokens), sizes)
        vocabulary = decoder.spec.vocab_size
        if not decoder.spec.stage.ends:  # only the last stage has logits, and chooses
            self._most_samples = vocabulary = 0
        windows = [group.window for group in decoder.spec.kv_groups]
        attends = tier is not None and tier.attention is not None
        lanes, pairs = None, None
        if tier is not None and tier.overlaps:
            pairs = PairSizes.up_to(max_tokens, sizes)
            self._prompts = HostPrompts(decoder, tier.host, table, device)
        elif attends:
            lanes = LaneSizes(decoder.spec.num_layers, steps.lanes, len(table.sequence_ids))
        if steps.halves is not None:
            pairs = PairSizes.halves(steps.halves.sizes)
        self._packer = StepPacker(
            table, store.block_size, windows, device, max_tokens, sizes, lanes, pairs,
            steps.buffers, states=store.states is not None,
        )  # fmt: skip
        self._rows = DeviceRows(table, vocabulary, device)
        self._masks = MaskedRows(table, self._rows.state.masks, device)
        self._functions = StepFunctions(
            decoder, store, self._packer, device, self._rows.state, steps.halves
        )
        results = self._functions.results.numel()
        self._results = [device.host_memory(results, torch.int64) for _ in range(steps.buffers)]
        self._scored = ScoredRows(
            table, self._functions, device, self._packer.max_tokens, steps.buffers
        )
        self._launched: deque[LaunchedBatch] = deque()
        self._steps = CapturedSteps(self._functions, self._packer, device)
        device.synchronize()  # weights and KV were not ordered as its work
        leases = steps.leases and store.states is None  # which a lease would have to alternate
        if steps.capture:
            self._steps.prepare(
                captured_sizes(max_tokens, sizes), self._most_samples, leases=leases
            )
            self._functions.check_host()
        self._leases: ReplayedSteps | None = None
        if leases:
            self._leases = ReplayedSteps(table, self._functions, self._steps, device)
        self._lanes: LaneRows | None = None
        if tier is not None and tier.attention is not None and self._functions.lanes is not None:
            self._lanes = LaneRows(table, tier.attention, self._functions.lanes, device)
        self._overlapped: OverlappedRows | None = None
        exchange = self._functions.overlap
        if tier is not None and tier.attention is not None and isinstance(exchange, OverlappedPass):
            self._overlapped = OverlappedRows(table, tier.attention, exchange, device)

    @property
    def captured(self) -> int:
        return len(self._steps)

    def limit_attention(self, programs: int | None) -> None:
        """See ``CapturedSteps.limit_attention``."""
        self._finish_all()
        self._steps.limit_attention(programs)

    @property
    def resident(self) -> bool:
        """Whether plans may lease their rows."""
        return self._leases is not None

    def launch(self, plan: StepPlan) -> StepTicket:
        """Order a step. Before it, what steps in flight need of the host is done."""
        check_computes(plan, self.tier)
        held = (*plan.drop, *plan.abort, *plan.piggybacked)
        while self._launched and (self._launched[-1].needs_host or self._holds(held)):
            self._finish(self._launched.popleft())
        output = StepOutput(self._table, self._decoder)
        lease: DeviceLease | None = None
        with self._device.work():
            if self._lanes is not None:
                self._lanes.before(plan)
            self._prepare_kv(plan)
            self._table.apply(plan)
            for add in plan.add:
                self._add_row(add.row, output)
            batches = plan.batches
            if plan.piggybacks and self._lanes is not None:
                batches = batches[1:]
                self._carry(plan, self._lanes, output)
            if self._overlapped is not None and any(batch.tiers for batch in batches):
                self._launch_overlapped(batches, self._overlapped, output)
            elif self.overlaps and len(batches) > 1:
                self._launch_overlapped(batches, None, output)
            else:
                lease = None if self._leases is None else self._leases.lease(plan)
                for batch in batches:
                    self._launch_batch(batch, output, 0 if lease is None else plan.lease)
            if self.tier is not None:
                if self._overlapped is not None and any(move.after_layer for move in plan.moves):
                    self._finish_all()  # copies may pin memory, for which a driver may wait
                self.tier.after(plan, self._table)
        if self._decoder.ops.ranks.rank > 0 and self._launched and self._launched[-1].needs_host:
            self._finish_all()  # all ranks do it together, and this one does not hear when
        collect = partial(self._collect, plan.step_id, output, plan.piggybacks, lease)
        return StepTicket(plan.step_id, collect, lease)

    def _prepare_kv(self, plan: StepPlan) -> None:
        """Order zeros and copies; what comes back to the device is there before the step computes.

        Blocks that earlier steps have moved may be taken now, so their copies come first, as do
        those of blocks that this step writes. The host reads KV of rows only after the step has
        told it of them, so what comes to the host is there before the step, too.
        """
        if self.tier is not None:
            self._device.join()
        for group, block in plan.zero:
            self._store.zero(group, block)
        if self.tier is not None:
            self.tier.before(plan)
            back = any(move.to is Tier.DEVICE for move in plan.moves)
            if back or plan.spills or plan.fills or plan.piggybacked or plan.attends_on_host:
                self._device.join()

    def close(self) -> None:
        """Wait for what is launched, and end who attends on the host. May be called twice."""
        self._device.synchronize()
        if self._lanes is not None:
            self._lanes.close()
        if self._overlapped is not None:
            self._overlapped.close()
        if self._functions.experts is not None:
            self._functions.experts.close()

    def _holds(self, rows: Seq[int]) -> bool:
        """Whether a step in flight computes one of these rows."""
        return any(not part.rows_computed.isdisjoint(rows) for part in self._launched)

    def _collect(
        self, step_id: int, output: StepOutput, piggybacks: bool, lease: DeviceLease | None
    ) -> StepResult:
        if lease is not None and self._leases is not None:
            take = lambda: self._finish(self._launched.popleft())  # noqa: E731
            self._leases.run(self._launched, output, lease, take)
        while any(part.output is output for part in self._launched):
            self._finish(self._launched.popleft())
        if piggybacks and self._lanes is not None:
            output.piggyback_layers = self._lanes.in_layers()
        return output.result(step_id)

    # -- on the device ------------------------------------------------------------------------

    def _launch_batch(self, batch: SubBatch, output: StepOutput, ahead: int = 0) -> None:
        """Launch a sub-batch; if memory runs out, its rows one by one to find the cause.

        Computing a row again is safe: it writes the same KV to the same slots. Drafts are left out
        then, so that they cannot be the cause.
        """
        if self._fits(batch, output, ahead=ahead):
            return
        for row in batch.rows:  # its tokens of this step may have been counted
            self._add_row(row, output)
        if len(batch.rows) == 1 and not batch.drafts:
            output.out_of_memory(batch)
            return
        for single in split_rows(batch):
            self._launch_batch(single, output)
            self._finish_all()

    def _fits(
        self, batch: SubBatch, output: StepOutput, carried: Carried | None = None, ahead: int = 0
    ) -> bool:
        """Launch a sub-batch; False if memory runs out, with nothing in flight then."""
        return self._order(partial(self._run, batch, output, carried, ahead))

    def _order(self, run: Callable[[], LaunchedBatch]) -> bool:
        most = len(self._packer.buffers)
        while self._launched and (self._launched[-1].needs_host or len(self._launched) == most):
            self._finish(self._launched.popleft())
        with self._memory_guard() as memory:
            self._launched.append(run())
        if memory.ran_out:
            self._device.synchronize()  # what was uploaded may be overwritten now
            self._finish_all()
        return not memory.ran_out

    def _launch_overlapped(
        self, batches: Seq[SubBatch], rows: OverlappedRows | None, output: StepOutput
    ) -> None:
        """Launch overlapped sub-batches; if memory runs out, their rows one by one.

        Args:
            rows: of the host; None for halves, which have none.
        """
        check_overlaps(batches)
        if self._order(partial(self._run_overlapped, batches, rows, output)):
            return
        if rows is not None:
            rows.give_up()
        singles = [single for batch in batches for single in split_rows(batch)]
        for single in singles:
            self._add_row(single.rows[0], output)
        if len(singles) == 1 and not batches[0].drafts:
            output.out_of_memory(singles[0])
            return
        for single in singles:
            if Tier.HOST in single.tiers:
                self._launch_overlapped((single,), rows, output)
            else:
                self._launch_batch(single, output)
            self._finish_all()

    def _carry(self, plan: StepPlan, rows: LaneRows, output: StepOutput) -> None:
        """Launch the first sub-batch, if there is one, with lanes if they have something to do."""
        if not plan.batches:
            self._finish_all()  # so that it is known what was taken
            if plan.piggyback_limits and len(rows.on_way) and not plan.piggybacked:
                rows.wait()
        carried = rows.carry(plan, output)
        if carried is not None:
            self._carry_with(plan.batches[0] if plan.batches else NOTHING, carried, rows, output)
        elif plan.batches:
            self._launch_batch(plan.batches[0], output)

    def _carry_with(
        self, batch: SubBatch, carried: Carried, rows: LaneRows, output: StepOutput
    ) -> None:
        """Launch a sub-batch with lanes.

        If memory runs out, lanes go apart from it; if they find none alone, their tokens end.
        """
        if self._fits(batch, output, carried):
            return
        for row in (*batch.rows, *rows.undo(carried)):
            self._add_row(row, output)
        if batch.rows:
            self._launch_batch(batch, output)
            self._finish_all()
        alone = rows.again(carried)
        if not self._fits(NOTHING, output, alone):
            rows.give_up(alone, output)

    def _add_row(self, row: int, output: StepOutput) -> None:
        """Add a row on the device; if its memory runs out, end its sequence alone.

        Until then its steps run on; they may read the parameters of an earlier row, which affects
        no other sequence.
        """
        with self._memory_guard() as memory:
            self._rows.add_row(row)
        if memory.ran_out:
            output.fault(row, no_memory(int(self._table.length[row])))

    def _memory_guard(self) -> OutOfMemoryGuard:
        return OutOfMemoryGuard(self._decoder.ops.processes)

    def _run(
        self, batch: SubBatch, output: StepOutput, carried: Carried | None, ahead: int
    ) -> LaunchedBatch:
        packed = self._packer.pack(batch, carried, ahead)
        self._steps.upload(packed)
        return self._end_launch(batch, packed, self._steps.forward(packed), output)

    def _run_overlapped(
        self, batches: Seq[SubBatch], rows: OverlappedRows | None, output: StepOutput
    ) -> LaunchedBatch:
        packed = self._packer.pack_overlapped(batches, 0 if rows is None else rows.next_step())
        of, steps = packed.overlapped, self._steps
        assert of is not None
        if rows is not None:
            rows.begin(of.hosted)
        steps.upload(packed)
        if rows is None:
            read = steps.overlapped(packed, ((), ()), None)
            return self._end_launch(merged(batches), packed, read, output)
        prompts = [self._prompts.pieces(first, some) for first, some in of.prompts]
        read = steps.overlapped(packed, prompts, rows.wait)
        if self._table.scored or not steps.is_captured(packed):
            self._device.record().wait()  # what comes now may have to load kernels
        return self._end_launch(merged(batches), packed, read, output)

    def _end_launch(
        self, batch: SubBatch, packed: PackedStep, read: int, output: StepOutput
    ) -> LaunchedBatch:
        """Order what follows the forward pass, which reads by the layout with this hash."""
        inputs, functions = packed.inputs, self._functions
        masked, faults = self._masks.send(inputs.sample_rows, self._finish_all)
        reads = read, self._steps.sample(packed)
        count = 1 + len(inputs.sample_rows)
        if packed.carries and packed.sample is not None:
            count = 1 + packed.sample.size + 2 * self._packer.lanes
        found = functions.results[:count].view(-1)
        self._device.download(found, self._results[packed.buffer][: len(found)])
        scored, scores = self._scored.order(packed)
        on_way: frozenset[int] = frozenset()
        if packed.carries and functions.lanes is not None and self._lanes is not None:
            functions.lanes.release()  # memory cannot run out any more
            on_way = frozenset(self._lanes.on_way.tolist())
        return LaunchedBatch(
            batch,
            packed,
            reads,
            inputs.sample_rows.copy(),
            scored,
            scores,
            (self._overlapped is not None and packed.overlapped is not None)
            or self._table.needs_host(batch),
            self._device.record(),
            output,
            on_way,
            masked,
            faults,
        )

    # -- on the host --------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while self._launched:
            self._finish(self._launched.popleft())

    def _finish(self, part: LaunchedBatch) -> None:
        """Wait for a sub-batch, do what the host must do of it, and hand its tokens out."""
        part.done.wait()
        self._functions.check_host()
        found = self._results[part.packed.buffer].view(-1, 2)[: 1 + len(part.rows)].numpy()
        was = tuple(found[0].tolist())
        if part.packed.overlapped is not None and self._overlapped is not None:
            self._end_overlapped(part, self._overlapped, attended=was[0] != 0)
        if was != part.read:
            raise InvariantError(f"numbers laid out as {was} were read as if by {part.read}")
        tokens, taken = found[1:, 0], found[1:, 1].copy()
        sampled = Sampled(np.maximum(tokens, 0), tokens != NOT_FINITE, {}, {}, taken)
        self._masks.advance(part, sampled)
        if part.scored:
            self._scored.describe(part, sampled)
        if part.needs_host:
            with self._device.work(), torch.inference_mode():
                self._score_prompts(part)
                table = self._table
                at = [i for i, row in enumerate(part.rows.tolist()) if row in table.on_host]
                if at:
                    self._sample_on_host(part, at, sampled)
        if len(part.rows):
            hidden, sample_at = self._functions.hidden, part.packed.inputs.sample_at
            part.output.take(part.batch, part.rows, sampled, lambda i: hidden[int(sample_at[i])])
        if part.packed.carries and self._lanes is not None:
            self._end_carried(part, self._lanes)

    def _end_overlapped(self, part: LaunchedBatch, rows: OverlappedRows, *, attended: bool) -> None:
        """End what the host has of a step; HostWorkerError if it has not attended in time."""
        if not attended:
            rows.courier.check()
            raise HostWorkerError("The host has not attended to the rows of a step in time.")
        for row, error in rows.end().items():
            part.output.fault(row, error)

    def _end_carried(self, part: LaunchedBatch, rows: LaneRows) -> None:
        """Hand out the tokens of piggybacked rows that have come through the last layer."""
        assert part.packed.sample is not None
        first, count = 1 + part.packed.sample.size, self._packer.lanes
        results = self._results[part.packed.buffer].view(-1, 2)[first:].numpy()
        tokens, ended = results[:count, 0].copy(), results[count : 2 * count, 0]
        (lanes,) = np.nonzero(ended < self._packer.max_rows)
        if len(lanes):
            came, tokens = rows_of(ended[lanes].tolist()), tokens[lanes]
            part.output.take_piggybacked(came, np.maximum(tokens, 0), tokens != NOT_FINITE)
            rows.finish(came)

    def _sample_on_host(self, part: LaunchedBatch, at: list[int], sampled: Sampled) -> None:
        """Sample on the host the samples that depend on the host's state of their rows."""
        inputs, rows = part.packed.inputs, part.rows[at]
        with self._memory_guard() as memory:
            of = torch.from_numpy(inputs.sample_at[at]).to(self._device.where)
            logits = self._decoder.logits(self._functions.hidden[of])  # [n, V]
        if memory.ran_out:
            several = list(dict.fromkeys(rows.tolist()))
            if len(several) == 1:
                sampled.faults[several[0]] = no_memory(1)
                return
            for row in several:
                self._sample_on_host(part, [i for i in at if part.rows[i] == row], sampled)
            return
        ops = self._decoder.ops
        some = sample(logits, rows, self._table, ops, inputs.sample_lengths[at])
        sampled.tokens[at], sampled.finite[at] = some.tokens, some.finite
        sampled.taken[at] = 0
        sampled.logprobs.update({at[i]: entry for i, entry in some.logprobs.items()})
        sampled.faults.update(some.faults)

    def _score_prompts(self, part: LaunchedBatch) -> None:
        decoder, table, output = self._decoder, self._table, part.output
        inputs, overlapped = part.packed.inputs, part.packed.overlapped
        for index, row in enumerate(inputs.rows.tolist()):
            if row not in table.prompt_scored:
                continue
            hidden = self._functions.hidden
            if overlapped is not None:
                hidden = hidden[overlapped.shift_of(index) :]
            with self._memory_guard() as memory:
                output.score(row, score_prompt(decoder, table, inputs, index, hidden))
            if memory.ran_out:
                output.fault(row, no_memory(int(inputs.counts[index])))
