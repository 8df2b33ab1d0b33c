"""Overlapped sub-batches on a device: the forward pass of ``overlap``, which can be captured.

Each token has a lane of its own (``kernels.lanes``), which is empty where the device attends. The
q, k and v of decodes on the host leave through the ``HostExchange`` beside what the device
computes. Results are awaited in each layer: in memory of the device, so that a captured step does
it, or on the host between two layers of an uncaptured one, which may have to load kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from weft.exec.attend import attend_over
from weft.exec.device import Device
from weft.exec.exchange import HostExchange
from weft.exec.host_prompts import PromptPiece
from weft.exec.store import KVStore
from weft.exec.sub_batches import run_overlapped
from weft.kernels.interface import AttentionMetadata
from weft.kernels.lanes import MOST_LOOKS, TicketRule
from weft.models.decoder import Decoder

# Returns once the results of a layer are on the device, for the rows of a sub-batch.
AwaitLayer: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class BatchTokens:
    """The N tokens of a sub-batch, on the device.

    Attributes:
        number: 0 or 1.
        ids, positions, hosted: [N]; see ``step_layout.overlapped_layout``.
        groups: attention of rows on the device.
        prompts: attention of prompts on the host.
        hosts: whether the host may attend for rows.
    """

    number: int
    ids: Tensor
    positions: Tensor
    hosted: Tensor
    groups: Seq[AttentionMetadata]
    prompts: Seq[PromptPiece] = ()
    hosts: bool = True


class OverlappedPass(HostExchange):
    """See the module docstring.

    Attributes:
        decoder, store, device: what it runs on.
        gave_up: [1] int64, 1 if results have not come in the latest captured pass.
    """

    def __init__(self, decoder: Decoder, store: KVStore, device: Device, rows: int) -> None:
        rule = TicketRule(decoder.spec.num_layers, 1)  # one layer of a row is on its way at a time
        super().__init__(decoder, device, rows, rule, hidden=0)
        self.decoder, self.store, self.device = decoder, store, device
        self.gave_up = torch.zeros(1, dtype=torch.int64, device=device.where)
        self._layers = torch.arange(rule.layers, device=device.where)

    def run(
        self, serial: Tensor, batches: Seq[BatchTokens], wait: AwaitLayer | None = None
    ) -> Tensor:
        """Run every layer of one or two sub-batches.

        Args:
            serial: [1] int64, the number of the step.
            wait: waits on the host for the results of a sub-batch in a layer; None: the device
                does.

        Returns:
            normalised hidden states [T, C] of all tokens.

        Raises:
            HostWorkerError: as ``wait`` does.
        """
        self.gave_up.zero_()
        tickets = serial * self.rule.layers + self._layers  # [L]
        lanes = [_DeviceLane(self, batch, tickets, wait) for batch in batches]
        return torch.cat(run_overlapped(lanes, self.rule.layers))


class _DeviceLane:
    """A sub-batch on its way through the layers, as ``sub_batches.Lane``."""

    def __init__(
        self, on: OverlappedPass, batch: BatchTokens, tickets: Tensor, wait: AwaitLayer | None
    ) -> None:
        self._pass, self._batch, self._tickets, self._wait = on, batch, tickets, wait
        decoder = self._decoder = on.decoder
        self._attend = attend_over(decoder, on.store, batch.groups)
        self._residual = decoder.embed(batch.ids)  # [N, C]
        self._inputs = decoder.layer_inputs(batch.ids, self._residual)  # [L, N, P] or None
        self._angles = decoder.angles(batch.positions)

    def enter(self, layer: int) -> None:
        q, k, v = self._decoder.pre(layer, self._residual, self._angles)
        if self._batch.hosts:
            self._send(layer, q, k, v)
        self._attended = self._attend(layer, q, k, v)  # [N, H, D]
        for piece in self._batch.prompts:
            piece.attend(layer, q, k, v, self._attended)

    def _send(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
        on, hosted = self._pass, self._batch.hosted
        with on.device.fork():
            self._decoder.ops.lanes.send(hosted, q, k, v, on.outbox)
            on.state.jobs.index_copy_(0, hosted, self._tickets[layer].expand(len(hosted)))
            on.tickets.copy_(on.state.jobs, non_blocking=True)
        self._sent = q, k, v  # not given to others before the fork has read them

    def leave(self, layer: int) -> None:
        on, hosted, lanes = self._pass, self._batch.hosted, self._decoder.ops.lanes
        if self._batch.hosts:
            on.device.rejoin()  # so that nothing waits before the host has what it waits for
            if self._wait is None:
                ticket = self._tickets[layer : layer + 1]
                lanes.wait(on.state, hosted, ticket, on.gave_up, MOST_LOOKS)
            else:
                self._wait(self._batch.number, layer)
            lanes.receive(on.state, hosted, self._attended)
        inputs = None if self._inputs is None else self._inputs[layer]
        self._residual = self._decoder.post(layer, self._attended, self._residual, inputs)

    def end(self) -> Tensor:
        if self._batch.prompts:
            self._pass.device.join()
        hidden: Tensor = self._decoder.finish(self._residual)
        return hidden
