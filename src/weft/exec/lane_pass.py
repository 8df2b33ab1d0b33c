"""The forward pass of a step with lanes: what it keeps on the device, and where it meets the host.

A lane carries a piggybacked row through one layer. The residual, position and sampling parameters
of a row's token stay on the device, by executor row; its q, k and v leave through the
``HostExchange``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.exec.attend import attend_over
from weft.exec.device import Device
from weft.exec.exchange import HostExchange
from weft.exec.step_layout import LaneSizes
from weft.exec.store import KVStore
from weft.kernels.interface import AttentionMetadata
from weft.kernels.lanes import TicketRule
from weft.kernels.sampling import SETTINGS, SampleBatch
from weft.models.decoder import Decoder


class LanePass(HostExchange):
    """See the module docstring. All that it does can be captured.

    Attributes:
        ended: [K] int64 rows that have come through the last layer of the latest step, then R.
    """

    def __init__(self, decoder: Decoder, store: KVStore, device: Device, sizes: LaneSizes) -> None:
        where, rows = device.where, sizes.rows
        rule, hidden = TicketRule(sizes.layers, sizes.lanes), decoder.spec.hidden_size
        super().__init__(decoder, device, rows, rule, hidden=hidden)
        self._decoder, self._store, self._device = decoder, store, device
        self._lanes = [torch.full((sizes.lanes,), rows, device=where) for _ in range(2)]
        self.ended = self._lanes[0].clone()
        self._sampled = {
            "seed": torch.zeros(rows + 1, dtype=torch.int64, device=where),
            "counter": torch.zeros(rows + 1, dtype=torch.int64, device=where),
            "settings": torch.zeros(rows + 1, len(SETTINGS), dtype=torch.float64, device=where),
            "changes": torch.zeros(rows + 1, dtype=torch.int32, device=where),
        }
        self._no_guesses = torch.full((sizes.lanes,), -1, dtype=torch.int32, device=where)

    def run(
        self,
        told: Mapping[str, Tensor],
        ids: Tensor,
        positions: Tensor,
        groups: Seq[AttentionMetadata],
    ) -> Tensor:
        """Run every layer over the step's own tokens and what is in its lanes.

        Args:
            told: the parts of ``step_layout.lane_layout``.
            ids, positions: [T].

        Returns:
            normalised hidden states [T + K, C], of lanes those of the rows ``ended``.
        """
        decoder, ops, state, rule = self._decoder, self._decoder.ops.lanes, self.state, self.rule
        tokens, (lanes, chosen) = len(ids), self._lanes
        self._begin(told)
        lanes.copy_(told["begun"])
        positions = torch.cat((positions, told["positions"]))
        residual = decoder.embed(torch.cat((ids, told["ids"])))  # [T + K, C]
        attend = attend_over(decoder, self._store, groups)
        for layer in range(rule.layers):
            qkv = decoder.pre(layer, residual, decoder.angles(positions))
            ops.keep(state, lanes, residual, told["serial"], layer, rule)
            with self._device.fork():
                ops.send(lanes, *qkv, self.outbox)
                self.tickets.copy_(state.jobs, non_blocking=True)
            attended = attend(layer, *(None if x is None else x[:tokens] for x in qkv))
            ops.choose(state, told["limits"], layer, rule, chosen)
            attended = ops.join(state, chosen, attended, residual, positions)
            residual = decoder.post(layer, attended, residual)
            lanes, chosen = chosen, lanes  # the fork may still read the old ones
        with self._device.fork():
            self.tickets.copy_(state.jobs, non_blocking=True)
        self._device.rejoin()
        self.ended.copy_(lanes)
        hidden: Tensor = decoder.finish(residual)
        return hidden

    def _begin(self, told: Mapping[str, Tensor]) -> None:
        """Drop tokens, and keep what the tokens that begin need later."""
        self.state.jobs.mul_(told["stays"])
        rows = told["begun"]
        self.state.positions.index_copy_(0, rows, told["positions"])
        for name, kept in self._sampled.items():
            kept.index_copy_(0, rows, told[name])

    def samples(self, own: SampleBatch) -> SampleBatch:
        """Return the samples of a step, and behind them those of the rows that have ended.

        Empty lanes have the row of padding.
        """
        rows = self.ended
        return SampleBatch(
            torch.cat((own.rows, rows)),
            torch.cat((own.counters, self._sampled["counter"][rows])),
            torch.cat((own.changes, self._sampled["changes"][rows])),
            torch.cat((own.guesses, self._no_guesses)),
        )

    def settings(self, own: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return settings and seeds of a step's samples, and of the rows that have ended."""
        rows = self.ended
        settings = torch.cat((own, self._sampled["settings"][rows]))
        return settings, torch.cat((seeds, self._sampled["seed"][rows]))

    def release(self) -> None:
        """The tokens of the rows that have ended are there. Takes no memory."""
        self.state.jobs.index_fill_(0, self.ended, 0)

    def put_back(self) -> None:
        """What a pass has taken and not handed on can be taken again."""
        self.state.jobs.abs_()
