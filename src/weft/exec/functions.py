"""A step on a device as functions that can be captured: the forward pass and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.exec.attend import bind_padded
from weft.exec.device import Device
from weft.exec.halves_pass import HalvesPass, HalvesSetup
from weft.exec.host_prompts import PromptPiece
from weft.exec.hosted_experts import host_experts
from weft.exec.lane_pass import LanePass
from weft.exec.logprobs import SCORED_TOKENS_AT_ONCE, score
from weft.exec.overlap_pass import AwaitLayer, BatchTokens, OverlappedPass
from weft.exec.step_layout import LaneSizes, Layout
from weft.exec.step_packer import StepPacker
from weft.exec.store import KVStore
from weft.kernels.advance import LeaseBounds, StepBuffer
from weft.kernels.delta import StateBatch
from weft.kernels.interface import AttentionMetadata
from weft.kernels.reference import known_ids
from weft.kernels.sampling import RowState, SampleBatch
from weft.models.decoder import Decoder


class StepFunctions:
    """The forward pass and sampling as functions of tensors that never move.

    Attributes:
        uploaded: the buffer of ``layout``, on the device.
        hidden: [tokens + K, C] of the latest forward pass; those of K lanes come last.
        results: [1 + samples + 2K, 2] int64 of the latest step: the hashes that came with what it
            read, as ``Buffer`` has them, then of each sample what ``sampling.verify_drafts`` says.
            With lanes, right behind the samples of the step: the same of each lane, then the row
            that has ended in each lane, or R.
        bounds: of leases.
        lanes: None where steps carry no piggybacked rows.
        overlap: None where sub-batches do not overlap, neither with attention on the host nor as
            halves of a step.
        experts: None where all experts are on the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        packer: StepPacker,
        device: Device,
        state: RowState,
        halves: HalvesSetup | None = None,
    ) -> None:
        """Take what steps read.

        Args:
            halves: how halves of a step overlap; None where sub-batches overlap with the host's
                attention, or not at all.
        """
        self._decoder = decoder
        self._compute = bind_padded(decoder, store)
        self._recurs = store.states is not None
        self._block_size = store.block_size
        self._packer = packer
        self._state = state
        most, where = packer.max_tokens, device.where
        told, self.lanes, count = packer.layout.lanes, None, 0
        if told is not None:
            count = told.size
            sizes = LaneSizes(decoder.spec.num_layers, count, packer.max_rows)
            self.lanes = LanePass(decoder, store, device, sizes)
        self.overlap: OverlappedPass | HalvesPass | None = None
        padding = 0  # of the second sub-batch
        if halves is not None:
            self.overlap, padding = HalvesPass(decoder, store, device, halves), most
        elif packer.pairs is not None:
            self.overlap, padding = OverlappedPass(decoder, store, device, packer.max_rows), most
        self.experts = host_experts(decoder, device, most)
        self.bounds = LeaseBounds.empty(
            packer.most_decodes,
            packer.windows,
            device.exchange_memory(1, torch.int32),
            packer.max_rows,
            where,
        )
        self.uploaded = torch.zeros(packer.layout.words, dtype=torch.int32, device=where)
        self.hidden = torch.zeros(
            most + max(count, padding),
            decoder.spec.hidden_size,
            dtype=getattr(torch, decoder.dtype),
            device=where,
        )
        self.results = torch.zeros(1 + most + 2 * count, 2, dtype=torch.int64, device=where)
        self._tokens = torch.zeros(most + count, dtype=torch.int64, device=where)
        self._finite = torch.zeros(most + count, dtype=torch.bool, device=where)

    @torch.inference_mode()
    def forward(self, layout: Layout, max_query_len: int | None, carries: bool = False) -> None:
        """Compute the hidden states of the tokens in the buffer.

        Args:
            max_query_len: tokens that a row has at the most; None for any number.
            carries: whether lanes carry piggybacked rows.
        """
        pivot = self._packer.layout.pivot
        parts = layout.views(self.uploaded, pivot)
        tables = self.uploaded[pivot + layout.words :]
        ids, positions = parts["ids"], parts["positions"]
        groups = self._groups(parts, tables, layout.size, max_query_len)
        if self.experts is not None:
            self.experts.begin(parts["query_start"])
        self.results[0].copy_(self._packer.layout.hashes(self.uploaded))
        if not carries:
            hidden = self.hidden[: layout.size]
            states: tuple[StateBatch, ...] = ()
            if self._recurs:
                slots = (parts[name] for name in ("query_start", "reads", "writes", "marks"))
                states = (StateBatch(*slots),)
            self._compute(ids, positions, groups, self._state.last_token, hidden, *states)
            return
        told = self._told()
        hidden = self._lane_pass.run(told, self._known(ids), positions, groups)
        self.hidden[: layout.size].copy_(hidden[: layout.size])
        self.hidden[self._packer.max_tokens :].copy_(hidden[layout.size :])

    def wake_host(self) -> None:
        """A forward pass has been ordered, in which the host may have a part."""
        if self.experts is not None:
            self.experts.wake()

    def check_host(self) -> None:
        """Raise HostWorkerError if the host did not compute its part of a step in time."""
        if self.experts is not None:
            self.experts.check()

    @torch.inference_mode()
    def overlapped(
        self,
        sizes: tuple[int, ...],
        max_query_len: int | None,
        hosts: Seq[bool] = (True, True),
        prompts: Seq[Seq[PromptPiece]] = ((), ()),
        wait: AwaitLayer | None = None,
    ) -> None:
        """Compute the hidden states of the overlapped sub-batches in the buffer.

        Where the host is to attend and has not in time, the first hash of the results is 0.

        Args:
            sizes: tokens of each, padding included; 0 for none.
            max_query_len: tokens that a row on the device has at the most; None for any number.
            hosts: of each, whether the host may attend for rows.
            prompts: of each, those on the host.
            wait: see ``OverlappedPass.run``.
        """
        assert self.overlap is not None
        layout, pivot = self._packer.overlapped_layout(sizes), self._packer.layout.pivot
        parts = layout.views(self.uploaded, pivot)
        tables, ids = self.uploaded[pivot + layout.words :], self._known(parts["ids"])
        batches = []
        for number, size in enumerate(sizes):
            here = slice(sum(sizes[:number]), sum(sizes[:number]) + size)
            tokens = ids[here], parts["positions"][here], parts["hosted"][here]
            groups = self._groups(parts, tables, size, max_query_len, str(number))
            if size:
                more = prompts[number], hosts[number]
                batches.append(BatchTokens(number, *tokens, groups, *more))
        self.results[0].copy_(self._packer.layout.hashes(self.uploaded))
        self.hidden[: layout.size].copy_(self.overlap.run(parts["serial"], batches, wait))
        if isinstance(self.overlap, OverlappedPass):
            self.results[0, :1].mul_(1 - self.overlap.gave_up)

    def _known(self, ids: Tensor) -> Tensor:
        """The tokens [T] of a buffer, those in flight among them."""
        return known_ids(ids, self._state.last_token)

    def _groups(
        self,
        parts: Mapping[str, Tensor],
        tables: Tensor,
        tokens: int,
        max_query_len: int | None,
        number: str = "",
    ) -> list[AttentionMetadata]:
        """The metadata of each KV group, of a step or a sub-batch of it."""
        slot_mapping, table_start = (parts[n + number] for n in ("slot_mapping", "table_start"))
        seq_lens = parts["seq_lens" + number]
        return [
            AttentionMetadata(
                block_tables=tables,
                query_start=parts["query_start" + number],
                seq_lens=seq_lens,
                slot_mapping=slots[:tokens],
                block_size=self._block_size,
                table_start=start[: len(seq_lens)],
                max_query_len=max_query_len,
                max_context=self._packer.max_context,
            )
            for slots, start in zip(slot_mapping, table_start, strict=True)
        ]

    @property
    def _lane_pass(self) -> LanePass:
        assert self.lanes is not None
        return self.lanes

    def _told(self) -> dict[str, Tensor]:
        """What the buffer tells the lanes."""
        layout = self._packer.layout
        assert layout.lanes is not None
        return layout.lanes.views(self.uploaded, layout.lanes_at)

    @torch.inference_mode()
    def sample(self, layout: Layout, carries: bool = False) -> None:
        """Choose the tokens that the samples in the buffer ask for, and take them.

        Args:
            carries: also those of the rows that have ended in lanes.
        """
        parts = layout.views(self.uploaded, self._packer.sample_at(layout))
        samples = SampleBatch(parts["row"], parts["counter"], parts["changes"], parts["guesses"])
        settings, seeds, hidden = parts["settings"], parts["seed"], self.hidden[parts["at"]]
        if carries:
            lanes = self._lane_pass
            samples = lanes.samples(samples)
            settings, seeds = lanes.settings(settings, seeds)
            hidden = torch.cat((hidden, self.hidden[self._packer.max_tokens :]))
        count, ops = len(hidden), self._decoder.ops
        logits = self._decoder.logits(hidden)
        tokens, finite = self._tokens[:count], self._finite[:count]
        ops.process_logits(logits, samples, self._state)
        ops.sample(logits, settings, seeds, samples.counters, tokens, finite)
        ops.verify_drafts(tokens, finite, samples, self._state, self.results[1 : 1 + count])
        if carries:
            ended = self._lane_pass.ended
            self.results[1 + count : 1 + count + len(ended), 0].copy_(ended)

    @torch.inference_mode()
    def go_on(self, forward: Layout, sample: Layout) -> None:
        """Compute the next step of the rows in the buffer, a token each, after their latest one.

        If their lease has ended, the step is padding, and the hashes of the results are 0 and why.
        """
        size, pivot = forward.size, self._packer.layout.pivot
        tokens = forward.views(self.uploaded, pivot)
        samples = sample.views(self.uploaded, self._packer.sample_at(sample))
        step = StepBuffer(
            **tokens,
            **{name: samples[name] for name in ("row", "counter", "changes")},
            tables=self.uploaded[pivot + forward.words :],
            hashes=self._packer.layout.hashes(self.uploaded),
            block_size=self._block_size,
        )
        self._decoder.ops.advance(step, self.bounds, self.results[1 : 1 + size])
        self.forward(forward, 1, carries=False)
        self.sample(sample)

    @torch.inference_mode()
    def score(self, layout: Layout, samples: Tensor, alternatives: bool) -> Tensor:
        """Score the tokens of some of the samples that were just chosen; not to be captured.

        Their logits are computed again, as the choice has changed them.

        Args:
            samples: [M] int64 indices.
            alternatives: whether the likeliest tokens are wanted as well.

        Returns:
            [M, 2 + 2W] float64; see ``logprobs.score``.
        """
        at = layout.views(self.uploaded, self._packer.sample_at(layout))["at"]
        scores = []
        for start in range(0, len(samples), SCORED_TOKENS_AT_ONCE):
            some = samples[start : start + SCORED_TOKENS_AT_ONCE]
            logits = self._decoder.logits(self.hidden[at[some]])
            ops = self._decoder.ops
            found = score(ops.log_softmax(logits), self._tokens[some], alternatives, ops.top_k)
            scores.append(found)
        return torch.cat(scores)
