"""The gated delta rule in Triton: token by token within a row, rows, heads and slabs side by side.

One kernel convolves and goes through the recurrence, with a slab of a head's state in registers;
it serves prompts and decodes alike. A second one has the norm and the gate of all values of a head.
Rows, slots and marks are read from device memory, so that a captured step can be replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.delta import DeltaParts, LayerStates, StateBatch
from weft.kernels.triton.activation import softplus
from weft.kernels.triton.launch import last_contiguous, power_of_2
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


@triton.jit
def _forgetting(times, rate, FLOOR: tl.constexpr):
    """Return the decays of time steps; see ``DeltaParts``, 0 standing for no floor."""
    if FLOOR < 0:
        return tl.exp(FLOOR / (1.0 + tl.exp(-rate * times)))
    return tl.exp(-rate * softplus(times))


@triton.jit
def _delta_rule(
    x, gates, weights, decays, biases, matrices, inputs, bounds, reads, writes, marks, out,
    stride, stride_gates,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, SLAB: tl.constexpr, TILED: tl.constexpr,
    BY_CHANNEL: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Take a row's tokens through a slab of a head's state; see ``reference_delta``."""
    row, head, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(bounds + row), tl.load(bounds + row + 1)
    if start < stop:
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
        EACH: tl.constexpr = HEADS // KEY_HEADS
        SIZE: tl.constexpr = HEADS * KEY * VALUE
        key, value = tl.arange(0, BLOCK), slab * SLAB + tl.arange(0, SLAB)
        keys, values = key < KEY, value < VALUE
        cells = keys[:, None] & values[None, :]
        cell = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
        of_query = (head % KEY_HEADS if TILED else head // EACH) * KEY + key
        of_key = KEY_HEADS * KEY + of_query
        of_value = 2 * KEY_HEADS * KEY + head * VALUE + value
        # One program keeps the inputs that heads of values share.
        first = keys & (slab == 0) & (head < KEY_HEADS if TILED else head % EACH == 0)
        slot = tl.load(reads + row).to(tl.int64)
        read = slot >= 0
        slot = tl.where(read, slot, 0)
        kept = inputs + slot * (TAPS - 1) * CHANNELS
        state = tl.load(matrices + slot * SIZE + cell, mask=cells & read, other=0.0)
        rate = tl.exp(tl.load(decays + head))
        of_decay = head * KEY + key if BY_CHANNEL else head
        some = keys if BY_CHANNEL else True
        bias = tl.load(biases + of_decay, mask=some, other=0.0)
        for token in range(bound(start), bound(stop)):
            at = start * 0 + token
            none, nothing = tl.zeros([BLOCK], tl.float32), tl.zeros([SLAB], tl.float32)
            q = convolved(
                none, x, kept, weights, at, start, of_query, keys, stride, read, TAPS, CHANNELS
            )
            k = convolved(
                none, x, kept, weights, at, start, of_key, keys, stride, read, TAPS, CHANNELS
            )
            v = convolved(
                nothing, x, kept, weights, at, start, of_value, values, stride, read, TAPS, CHANNELS
            )
            q, k, v = silu(q), silu(k), silu(v)
            q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * (KEY**-0.5)
            k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
            opened = gates + at.to(tl.int64) * stride_gates
            beta = 1.0 / (1.0 + tl.exp(-tl.load(opened + head).to(tl.float32)))
            times = tl.load(opened + HEADS + of_decay, mask=some, other=0.0).to(tl.float32)
            g = _forgetting(times + bias, rate, FLOOR)
            if BY_CHANNEL:
                state *= g[:, None]
                g = 1.0
            by_key = tl.sum(state * k[:, None], axis=0)
            by_query = tl.sum(state * q[:, None], axis=0)
            change = (v - g * by_key) * beta
            result = g * by_query + tl.sum(k * q, axis=0) * change
            state = g * state + k[:, None] * change[None, :]
            tl.store(out + (at.to(tl.int64) * HEADS + head) * VALUE + value, result, mask=values)
            target = tl.load(marks + at).to(tl.int64)
            if target >= 0:
                tl.store(matrices + target * SIZE + cell, state, mask=cells)
                copy = inputs + target * (TAPS - 1) * CHANNELS
                keep_inputs(x, kept, copy, at, start, of_query, first, stride, read, TAPS, CHANNELS)
                keep_inputs(x, kept, copy, at, start, of_key, first, stride, read, TAPS, CHANNELS)
                keep_inputs(
                    x, kept, copy, at, start, of_value, values, stride, read, TAPS, CHANNELS
                )
        target = tl.load(writes + row).to(tl.int64)
        tl.store(matrices + target * SIZE + cell, state, mask=cells)
        copy, last = inputs + target * (TAPS - 1) * CHANNELS, stop - 1
        keep_inputs(x, kept, copy, last, start, of_query, first, stride, read, TAPS, CHANNELS)
        keep_inputs(x, kept, copy, last, start, of_key, first, stride, read, TAPS, CHANNELS)
        keep_inputs(x, kept, copy, last, start, of_value, values, stride, read, TAPS, CHANNELS)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x, z, weight, bounds, out, stride, rows,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Norm of a head's values times what its gate opens; 0 for tokens that belong to no row."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.arange(0, BLOCK)
    mask = value < VALUE
    known = mask & (token < tl.load(bounds + rows))
    y = tl.load(x + (token * HEADS + head) * VALUE + value, mask=known, other=0.0)
    gate = tl.load(z + token * stride + head * VALUE + value, mask=known, other=0.0)
    gate = gate.to(tl.float32)
    y = y / tl.sqrt(tl.sum(y * y, axis=0) / VALUE + EPS)
    factor = gate if SILU else 1.0
    y = y * tl.load(weight + value, mask=mask, other=0.0) * factor / (1.0 + tl.exp(-gate))
    place = out + (token * HEADS + head) * VALUE + value
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


class TritonDelta:
    """A layer by the gated delta rule; see ``reference_delta.ReferenceDelta``."""

    def __init__(self, parts: DeltaParts) -> None:
        """Bind a layer to its parameters.

        Raises:
            ValueError: no kernel computes such a layer.
        """
        self._shape, self._eps, self._gating = parts.shape, parts.norm_eps, parts.gating
        self._floor = parts.floor or 0.0
        odd = parts.shape.value_heads % parts.shape.key_heads or parts.shape.taps < 2
        if odd or parts.gating not in ("silu", "sigmoid") or self._floor > 0:
            raise ValueError(f"no kernel for recurrent layers of {parts.shape}")
        self._conv = parts.conv.float().T.contiguous()  # [K, channels]
        self._decay, self._bias = parts.decay.float(), parts.bias.float()
        self._norm = parts.norm.float()

    def __call__(self, x: Tensor, gates: Tensor, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, Hv, Dv] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, channels + Hv * Dv]: q, k and v before the convolution, then the norm's gate.
            gates: [T, Hv + decays]: those of beta, then of the time step.

        Raises:
            ValueError: shapes do not fit.
        """
        shape, tokens = self._shape, len(x)
        wide, opening = shape.channels + shape.values, shape.value_heads + shape.decays
        check_given(shape, (x, wide), (gates, opening), states)
        x, gates = last_contiguous(x), last_contiguous(gates)
        found = torch.empty(
            tokens, shape.value_heads, shape.value_dim, dtype=torch.float32, device=x.device
        )
        out = torch.empty_like(found, dtype=x.dtype)
        if not tokens:
            return out
        block, rows = power_of_2(shape.key_dim), len(batch.reads)
        slab = slab_of(shape.value_dim, block)
        _delta_rule[(rows, shape.value_heads, triton.cdiv(shape.value_dim, slab))](
            x, gates, self._conv, self._decay, self._bias, states.matrices, states.inputs,
            batch.bounds, batch.reads, batch.writes, by_token(batch.marks, tokens), found,
            x.stride(0), gates.stride(0),
            KEY_HEADS=shape.key_heads, HEADS=shape.value_heads, KEY=shape.key_dim,
            VALUE=shape.value_dim, TAPS=shape.taps, BLOCK=block, SLAB=slab, TILED=shape.tiled,
            BY_CHANNEL=shape.by_channel, FLOOR=self._floor, num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        _gated_norm[(tokens, shape.value_heads)](
            found, x[:, shape.channels :], self._norm, batch.bounds, out, x.stride(0), rows,
            HEADS=shape.value_heads, VALUE=shape.value_dim, BLOCK=power_of_2(shape.value_dim),
            EPS=self._eps, SILU=self._gating == "silu", num_warps=1, num_stages=1,
        )  # fmt: skip
        return out
