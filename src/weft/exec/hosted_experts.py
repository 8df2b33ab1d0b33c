"""Carries rows between a device and experts on the host, in steps that can be captured.

    device   x, router choices -> host memory, ticket ... dense MLP ... wait | copy back, go on
    host                                              compute, answer       |

All of it is ordered on the one stream of the device: copies of rows, a copy of the ticket behind
them, a program that waits for the answer, and a copy of the results. So a captured step does it as
an uncaptured one does, and the next layer's rows are written only after the answer to the last ones
has been taken: one of everything is enough.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from weft.core.errors import HostWorkerError
from weft.exec.device import Device
from weft.kernels.arrays import to_numpy
from weft.kernels.cpu.expert_server import ExpertMemory, ExpertServer
from weft.kernels.hosted import MOST_LOOKS, AwaitAnswer, HostedExperts, HostWord
from weft.models.decoder import Decoder


class HostExperts:
    """See the module docstring; implements ``kernels.hosted.ExpertLink``.

    Attributes:
        server: computes.
    """

    def __init__(
        self,
        layers: Seq[HostedExperts],
        sizes: tuple[int, int, int],
        dtype: str,
        device: Device,
        await_answer: AwaitAnswer,
    ) -> None:
        """Take memory that both sides see, and start the server.

        Args:
            sizes: rows of a step at the most, hidden size, experts of a token.
            dtype: the name of that of the rows.

        Raises:
            HostWorkerError: experts and rows do not fit together.
        """
        rows, hidden, top_k = sizes
        kind, where = getattr(torch, dtype), device.where
        exchange = device.exchange_memory
        self._x = exchange(rows * hidden, kind).view(rows, hidden)
        self._out = exchange(rows * hidden, kind).view(rows, hidden)
        self._shares = exchange(rows * top_k, torch.float32).view(rows, top_k)
        self._experts = exchange(rows * top_k, torch.int64).view(rows, top_k)
        self._tokens = exchange(1, torch.int32)
        self._asked = exchange(1, torch.int64)
        self._answered, self._gave_up = (
            HostWord(memory, torch.tensor([memory.data_ptr()], device=where))
            for memory in (exchange(1, torch.int64) for _ in range(2))
        )
        self._tickets = torch.arange(len(layers), device=where)  # of the latest pass, by layer
        self._await_answer = await_answer
        memory = ExpertMemory(
            *(
                to_numpy(tensor)
                for tensor in (
                    self._asked,
                    self._tokens,
                    self._x,
                    self._shares,
                    self._experts,
                    self._answered.memory,
                    self._out,
                )
            )
        )
        self.server = ExpertServer(memory, layers)
        for place, layer in enumerate(layers):
            layer.attach(self, place)

    def begin(self, query_start: Tensor) -> None:
        """Order the begin of a pass.

        Args:
            query_start: [R + 1] int32; its last number is that of tokens which are not padding.
        """
        self._tickets.add_(len(self._tickets))
        self._tokens.copy_(query_start[-1:], non_blocking=True)

    def send(self, place: int, x: Tensor, shares: Tensor, experts: Tensor) -> None:
        """Order copies of rows to the host, and behind them that of their ticket."""
        count = len(x)
        self._x[:count].copy_(x, non_blocking=True)
        self._shares[:count].copy_(shares, non_blocking=True)
        self._experts[:count].copy_(experts, non_blocking=True)
        self._asked.copy_(self._tickets[place : place + 1], non_blocking=True)

    def receive(self, place: int, x: Tensor) -> Tensor:
        """Order the wait for the answer and a copy of it [T, C]; padding has no meaning."""
        ticket = self._tickets[place : place + 1]
        self._await_answer(self._answered, ticket, self._gave_up, MOST_LOOKS)
        out = torch.empty_like(x)
        out.copy_(self._out[: len(x)], non_blocking=True)
        return out

    def check(self) -> None:
        """Raise HostWorkerError if the host did not compute what a step has waited for."""
        if self.server.error is not None:
            raise self.server.error
        if int(self._gave_up.memory[0]):
            raise HostWorkerError("The host has not computed the experts of a step in time.")

    def wake(self) -> None:
        """A pass has been ordered."""
        self.server.wake()

    def close(self) -> None:
        """End the server, with nothing in flight. May be called twice."""
        self.server.close()


def host_experts(decoder: Decoder, device: Device, rows: int) -> HostExperts | None:
    """Link the experts of a decoder that lie on the host; None if all are on the device.

    Args:
        rows: of a step, at the most.
    """
    spec = decoder.spec
    layers = [one.expert_down for one in decoder.layers]
    hosted = [experts for experts in layers if isinstance(experts, HostedExperts)]
    if not hosted or spec.moe is None:
        return None
    sizes = rows, spec.hidden_size, spec.moe.top_k
    return HostExperts(hosted, sizes, decoder.dtype, device, decoder.ops.await_answer)
