"""Where steps of a device and the host worker meet: what the device keeps, and memory of the host.

The device writes q, k and v of its rows to an outbox in memory of the host, and tickets behind them
(``kernels.lanes``). What comes back is written to the device by a ``Courier``, with tickets, too.
"""

from __future__ import annotations

import torch

from weft.exec.device import Device
from weft.kernels.lanes import LaneOutbox, LaneState, TicketRule
from weft.models.decoder import Decoder
from weft.models.spec import ModelSpec


def lane_widths(spec: ModelSpec) -> tuple[int, int]:
    """Return the numbers of a token's queries and of its keys, of the widest layer of each."""
    queries = max(spec.heads(layer) * layer.head_dim for layer in spec.layers)
    return queries, max(layer.num_kv_heads * layer.head_dim for layer in spec.layers)


class HostExchange:
    """See the module docstring.

    Attributes:
        rule: how tickets are made.
        state: what the device keeps of rows.
        outbox: q, k and v of rows, in memory of the host.
        tickets: [R + 1] int64 in memory of the host, a copy of ``state.jobs``: where one is new,
            the outbox has what it is for.
    """

    def __init__(
        self, decoder: Decoder, device: Device, rows: int, rule: TicketRule, *, hidden: int
    ) -> None:
        """Make room for so many rows, and so many numbers of the residual of each."""
        spec, where = decoder.spec, device.where
        queries, keys = lane_widths(spec)
        self.rule = rule
        self.state = LaneState.empty(rows, queries, hidden, decoder.dtype, where)
        kind, width = getattr(torch, decoder.dtype), queries + 2 * keys
        memory = device.exchange_memory(rows * width, kind).view(rows, width)
        address = torch.tensor([memory.data_ptr()], device=where)
        self.outbox = LaneOutbox(memory, address, queries, queries + keys)
        self.tickets = device.exchange_memory(rows + 1, torch.int64)
