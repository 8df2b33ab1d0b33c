"""Gated short convolutions in plain torch: the truth of the tests of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.conv import ConvParts
from weft.kernels.delta import LayerStates, StateBatch


class ReferenceConv:
    """A layer of a gated short convolution (LFM2 2025): ``C * conv(B * x)``, in float32.

    Its state is the last products ``B * x``.
    """

    def __init__(self, parts: ConvParts) -> None:
        self._shape = parts.shape
        self._conv = parts.conv.float().T.contiguous()  # [K, C]
        self._bias = torch.zeros(parts.shape.channels)
        if parts.bias is not None:
            self._bias = parts.bias.float()

    def __call__(self, x: Tensor, _gates: None, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, C] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, 3 C]: B, C and the input.
        """
        taps = self._shape.taps
        before, after, inputs = x.float().chunk(3, dim=-1)  # [T, C] each
        products, out = before * inputs, torch.empty(len(x), self._shape.channels)
        bounds, marks = batch.bounds.tolist(), dict(batch.marks.tolist())
        for row, read in enumerate(batch.reads.tolist()):
            start, stop = bounds[row], bounds[row + 1]
            kept = torch.zeros(self._shape.kept_inputs) if read < 0 else states.inputs[read]
            whole = torch.cat((kept, products[start:stop]))  # [K - 1 + n, C]
            mixed = self._bias.expand(stop - start, -1)
            for tap, weight in enumerate(self._conv):
                mixed = mixed + whole[tap : tap + stop - start] * weight
            out[start:stop] = mixed
            for token in range(start, stop):
                if token in marks:
                    at = token + 1 - start
                    states.inputs[marks[token]] = whole[at : at + taps - 1]
            states.inputs[int(batch.writes[row])] = whole[stop - start :]
        return (after * out).to(x.dtype)
