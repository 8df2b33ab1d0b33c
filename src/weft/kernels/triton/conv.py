"""Gated short convolutions in Triton: tokens and blocks of channels side by side.

A token's program finds the row that it belongs to, so that a long prompt takes no longer than its
numbers need. Rows, slots and marks are read from device memory, so that a captured step can be
replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.conv import ConvParts
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.triton.launch import last_contiguous, power_of_2
from weft.kernels.triton.recurrent import WARPS, by_token, check_given, convolved, keep_inputs

_BLOCK = 512  # channels that a program has


@triton.jit
def _row_of(token, bounds, rows, HALVINGS: tl.constexpr):
    """Return the last row that begins at a token or before it."""
    low, high = token * 0, rows + token * 0 - 1
    for _ in tl.static_range(HALVINGS):
        middle = (low + high + 1) // 2
        begun = tl.load(bounds + middle) <= token
        low, high = tl.where(begun, middle, low), tl.where(begun, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["rows"])
def _short_convolution(
    x, weights, biases, inputs, bounds, reads, writes, marks, out, stride, rows,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr,
    HALVINGS: tl.constexpr,
):  # fmt: skip
    """Convolve channels at a token; see ``reference_conv``. 0 for tokens that belong to no row."""
    token, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    result = tl.zeros([BLOCK], tl.float32)
    if token < tl.load(bounds + rows):
        row = _row_of(token, bounds, rows, HALVINGS)
        start, slot = tl.load(bounds + row), tl.load(reads + row).to(tl.int64)
        read = slot >= 0
        kept = inputs + tl.where(read, slot, 0) * (TAPS - 1) * CHANNELS
        if BIASED:
            result = tl.load(biases + channel, mask=mask, other=0.0)
        result = convolved(
            result, x, kept, weights, token, start, channel, mask, stride, read, TAPS, CHANNELS,
            2 * CHANNELS,
        )  # fmt: skip
        opened = x + token.to(tl.int64) * stride + CHANNELS + channel
        result *= tl.load(opened, mask=mask, other=0.0).to(tl.float32)
        target = tl.load(marks + token).to(tl.int64)
        if target >= 0:
            copy = inputs + target * (TAPS - 1) * CHANNELS
            keep_inputs(
                x, kept, copy, token, start, channel, mask, stride, read, TAPS, CHANNELS,
                2 * CHANNELS,
            )  # fmt: skip
        if token + 1 == tl.load(bounds + row + 1):
            copy = inputs + tl.load(writes + row).to(tl.int64) * (TAPS - 1) * CHANNELS
            keep_inputs(
                x, kept, copy, token, start, channel, mask, stride, read, TAPS, CHANNELS,
                2 * CHANNELS,
            )  # fmt: skip
    at = out + token.to(tl.int64) * CHANNELS + channel
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


class TritonConv:
    """A layer of a gated short convolution; see ``reference_conv.ReferenceConv``."""

    def __init__(self, parts: ConvParts) -> None:
        """Bind a layer to its parameters.

        Raises:
            ValueError: no kernel computes such a layer.
        """
        self._shape = parts.shape
        if parts.shape.taps < 2:
            raise ValueError(f"no kernel for recurrent layers of {parts.shape}")
        self._conv = parts.conv.float().T.contiguous()  # [K, C]
        self._bias = None if parts.bias is None else parts.bias.float()

    def __call__(self, x: Tensor, _gates: None, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, C] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, 3 C]: B, C and the input.

        Raises:
            ValueError: shapes do not fit.
        """
        shape, tokens = self._shape, len(x)
        check_given(shape, (x, 3 * shape.channels), None, states)
        x = last_contiguous(x)
        out = torch.empty(tokens, shape.channels, dtype=x.dtype, device=x.device)
        if not tokens:
            return out
        block, rows = min(_BLOCK, power_of_2(shape.channels)), len(batch.reads)
        _short_convolution[(tokens, triton.cdiv(shape.channels, block))](
            x, self._conv, self._conv if self._bias is None else self._bias, states.inputs,
            batch.bounds, batch.reads, batch.writes, by_token(batch.marks, tokens), out,
            x.stride(0), rows,
            CHANNELS=shape.channels, TAPS=shape.taps, BLOCK=block, BIASED=self._bias is not None,
            HALVINGS=rows.bit_length(), num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        return out
