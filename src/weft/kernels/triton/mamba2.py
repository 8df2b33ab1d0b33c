"""Mamba-2 in Triton: token by token within a row, rows, heads and slabs side by side.

One kernel convolves and goes through the recurrence, with a slab of a head's state in registers;
it serves prompts and decodes alike. A second one has the gate and the norm of a group of heads.
Rows, slots and marks are read from device memory, so that a captured step can be replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts
from weft.kernels.triton.activation import softplus
from weft.kernels.triton.launch import last_contiguous, power_of_2, warps
from weft.kernels.triton.loop import bound
from weft.kernels.triton.recurrent import (
    WARPS,
    by_token,
    check_given,
    convolved,
    keep_inputs,
    silu,
    slab_of,
)

_LARGEST = torch.finfo(torch.float32).max  # stands for no limit


@triton.jit
def _first(biases, channel, mask, BIASED: tl.constexpr):
    """Return what a convolution begins with: its biases, or 0."""
    if BIASED:
        return tl.load(biases + channel, mask=mask, other=0.0)
    return tl.zeros(channel.shape, tl.float32)


@triton.jit
def _mamba2(
    x, gates, weights, conv_biases, decays, biases, skips, matrices, inputs, bounds, reads, writes,
    marks, out, stride, stride_gates,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, SLAB: tl.constexpr, BIASED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Take a row's tokens through a slab of a head's state; see ``reference_mamba2``."""
    row, head, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(bounds + row), tl.load(bounds + row + 1)
    if start < stop:
        CHANNELS: tl.constexpr = HEADS * DIM + 2 * GROUPS * STATE
        EACH: tl.constexpr = HEADS // GROUPS
        SIZE: tl.constexpr = HEADS * STATE * DIM
        key, value = tl.arange(0, BLOCK), slab * SLAB + tl.arange(0, SLAB)
        keys, values = key < STATE, value < DIM
        cells = keys[:, None] & values[None, :]
        cell = head * STATE * DIM + key[:, None] * DIM + value[None, :]
        of_value = head * DIM + value
        of_key = HEADS * DIM + head // EACH * STATE + key
        of_query = GROUPS * STATE + of_key
        # One program keeps the inputs that heads share.
        first = keys & (slab == 0) & (head % EACH == 0)
        slot = tl.load(reads + row).to(tl.int64)
        read = slot >= 0
        slot = tl.where(read, slot, 0)
        kept = inputs + slot * (TAPS - 1) * CHANNELS
        state = tl.load(matrices + slot * SIZE + cell, mask=cells & read, other=0.0)
        rate, bias = tl.exp(tl.load(decays + head)), tl.load(biases + head)
        skip = tl.load(skips + head)
        for token in range(bound(start), bound(stop)):
            at = start * 0 + token
            # Biases are read anew for each token, as the state leaves no registers for them.
            v = _first(conv_biases, of_value, values, BIASED)
            k = _first(conv_biases, of_key, keys, BIASED)
            q = _first(conv_biases, of_query, keys, BIASED)
            v = convolved(
                v, x, kept, weights, at, start, of_value, values, stride, read, TAPS, CHANNELS
            )
            k = convolved(
                k, x, kept, weights, at, start, of_key, keys, stride, read, TAPS, CHANNELS
            )
            q = convolved(
                q, x, kept, weights, at, start, of_query, keys, stride, read, TAPS, CHANNELS
            )
            v, k, q = silu(v), silu(k), silu(q)
            time = tl.load(gates + at.to(tl.int64) * stride_gates + head).to(tl.float32)
            time = softplus(time + bias)
            time = tl.where(time < LEAST, LEAST, tl.where(time > MOST, MOST, time))
            state = tl.exp(-rate * time) * state + k[:, None] * (time * v)[None, :]
            result = tl.sum(state * q[:, None], axis=0) + skip * v
            tl.store(out + (at.to(tl.int64) * HEADS + head) * DIM + value, result, mask=values)
            target = tl.load(marks + at).to(tl.int64)
            if target >= 0:
                tl.store(matrices + target * SIZE + cell, state, mask=cells)
                copy = inputs + target * (TAPS - 1) * CHANNELS
                keep_inputs(
                    x, kept, copy, at, start, of_value, values, stride, read, TAPS, CHANNELS
                )
                keep_inputs(x, kept, copy, at, start, of_key, first, stride, read, TAPS, CHANNELS)
                keep_inputs(x, kept, copy, at, start, of_query, first, stride, read, TAPS, CHANNELS)
        target = tl.load(writes + row).to(tl.int64)
        tl.store(matrices + target * SIZE + cell, state, mask=cells)
        copy, last = inputs + target * (TAPS - 1) * CHANNELS, stop - 1
        keep_inputs(x, kept, copy, last, start, of_value, values, stride, read, TAPS, CHANNELS)
        keep_inputs(x, kept, copy, last, start, of_key, first, stride, read, TAPS, CHANNELS)
        keep_inputs(x, kept, copy, last, start, of_query, first, stride, read, TAPS, CHANNELS)


@triton.jit(do_not_specialize=["rows"])
def _gated_group_norm(
    x, z, weight, bounds, out, stride, rows,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm of a group's values times silu of their gates; 0 for tokens that belong to no row."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    mask = place < SIZE
    known = mask & (token < tl.load(bounds + rows))
    at = group * SIZE + place
    y = tl.load(x + token * GROUPS * SIZE + at, mask=known, other=0.0)
    y *= silu(tl.load(z + token * stride + at, mask=known, other=0.0).to(tl.float32))
    y = y / tl.sqrt(tl.sum(y * y, axis=0) / SIZE + EPS)
    y *= tl.load(weight + at, mask=mask, other=0.0)
    tl.store(out + token * GROUPS * SIZE + at, y.to(out.dtype.element_ty), mask=mask)


class TritonMamba2:
    """A layer by Mamba-2; see ``reference_mamba2.ReferenceMamba2``."""

    def __init__(self, parts: Mamba2Parts) -> None:
        """Bind a layer to its parameters.

        Raises:
            ValueError: no kernel computes such a layer.
        """
        self._shape, self._eps = parts.shape, parts.norm_eps
        if parts.shape.heads % parts.shape.groups or parts.shape.taps < 2:
            raise ValueError(f"no kernel for recurrent layers of {parts.shape}")
        self._limits = [min(limit, _LARGEST) for limit in parts.time_limits]
        self._conv = parts.conv.float().T.contiguous()  # [K, channels]
        self._conv_bias = None if parts.conv_bias is None else parts.conv_bias.float()
        self._decay, self._bias = parts.decay.float(), parts.bias.float()
        self._skip, self._norm = parts.skip.float(), parts.norm.float()

    def __call__(self, x: Tensor, gates: Tensor, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, H, P] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, channels + H * P]: x, B and C before the convolution, then the norm's gate.
            gates: [T, H]: those of the time step.

        Raises:
            ValueError: shapes do not fit.
        """
        shape, tokens = self._shape, len(x)
        check_given(shape, (x, shape.channels + shape.values), (gates, shape.heads), states)
        x, gates = last_contiguous(x), last_contiguous(gates)
        found = torch.empty(
            tokens, shape.heads, shape.head_dim, dtype=torch.float32, device=x.device
        )
        out = torch.empty_like(found, dtype=x.dtype)
        if not tokens:
            return out
        block, rows = power_of_2(shape.state_dim), len(batch.reads)
        slab, biased = slab_of(shape.head_dim, block), self._conv_bias is not None
        _mamba2[(rows, shape.heads, triton.cdiv(shape.head_dim, slab))](
            x, gates, self._conv, self._conv_bias if biased else self._conv, self._decay,
            self._bias, self._skip, states.matrices, states.inputs, batch.bounds, batch.reads,
            batch.writes, by_token(batch.marks, tokens), found, x.stride(0), gates.stride(0),
            HEADS=shape.heads, DIM=shape.head_dim, GROUPS=shape.groups, STATE=shape.state_dim,
            TAPS=shape.taps, BLOCK=block, SLAB=slab, BIASED=biased,
            LEAST=self._limits[0], MOST=self._limits[1], num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        size = shape.values // shape.groups
        wide = power_of_2(size)
        _gated_group_norm[(tokens, shape.groups)](
            found, x[:, shape.channels :], self._norm, batch.bounds, out, x.stride(0), rows,
            GROUPS=shape.groups, SIZE=size, BLOCK=wide, EPS=self._eps,
            num_warps=warps(wide), num_stages=1,
        )  # fmt: skip
        return out
