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

from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.triton.launch import last_contiguous, power_of_2
from weft.kernels.triton.loop import bound

_SLAB = 32  # values of a head that a program has
_CELLS = 4096  # of the state that it has at the most: 32 registers of each of its threads
_WARPS = 4


@triton.jit
def _input(
    x, kept, token, start, channel, mask, stride, read, AGO: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """What the convolution was given ``AGO`` tokens before one, of this step or of the state."""
    place = token - AGO
    here = place >= start
    new = tl.load(x + place.to(tl.int64) * stride + channel, mask=mask & here, other=0.0)
    row = TAPS - 1 + place - start  # of the inputs that the state has
    old = tl.load(kept + row * CHANNELS + channel, mask=mask & (place < start) & read, other=0.0)
    return new.to(tl.float32) + old


@triton.jit
def _convolved(
    x, kept, weights, token, start, channel, mask, stride, read, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolution at a token."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(weights + tap * CHANNELS + channel, mask=mask, other=0.0)
        total += weight * _input(
            x, kept, token, start, channel, mask, stride, read, TAPS - 1 - tap, TAPS, CHANNELS
        )
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _keep(
    x, kept, out, token, start, channel, mask, stride, read, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the latest inputs of the convolution as a token leaves them."""
    for row in tl.static_range(TAPS - 1):
        found = _input(
            x, kept, token, start, channel, mask, stride, read, TAPS - 2 - row, TAPS, CHANNELS
        )
        tl.store(out + row * CHANNELS + channel, found, mask=mask)


@triton.jit
def _delta_rule(
    x, gates, weights, decays, biases, matrices, inputs, bounds, reads, writes, marks, out,
    stride, stride_gates,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, SLAB: tl.constexpr, TILED: tl.constexpr,
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
        rate = -tl.exp(tl.load(decays + head))
        bias = tl.load(biases + head)
        for token in range(bound(start), bound(stop)):
            at = start * 0 + token
            q = _convolved(
                x, kept, weights, at, start, of_query, keys, stride, read, TAPS, CHANNELS
            )
            k = _convolved(x, kept, weights, at, start, of_key, keys, stride, read, TAPS, CHANNELS)
            v = _convolved(
                x, kept, weights, at, start, of_value, values, stride, read, TAPS, CHANNELS
            )
            q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * (KEY**-0.5)
            k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
            opened = gates + at.to(tl.int64) * stride_gates + head
            beta = 1.0 / (1.0 + tl.exp(-tl.load(opened).to(tl.float32)))
            time = tl.load(opened + HEADS).to(tl.float32) + bias
            power = tl.exp(-tl.abs(time))
            near = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))
            time = tl.maximum(time, 0.0) + tl.where(power < 0.01, near, tl.log(1.0 + power))
            g = tl.exp(rate * time)
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
                _keep(x, kept, copy, at, start, of_query, first, stride, read, TAPS, CHANNELS)
                _keep(x, kept, copy, at, start, of_key, first, stride, read, TAPS, CHANNELS)
                _keep(x, kept, copy, at, start, of_value, values, stride, read, TAPS, CHANNELS)
        target = tl.load(writes + row).to(tl.int64)
        tl.store(matrices + target * SIZE + cell, state, mask=cells)
        copy, last = inputs + target * (TAPS - 1) * CHANNELS, stop - 1
        _keep(x, kept, copy, last, start, of_query, first, stride, read, TAPS, CHANNELS)
        _keep(x, kept, copy, last, start, of_key, first, stride, read, TAPS, CHANNELS)
        _keep(x, kept, copy, last, start, of_value, values, stride, read, TAPS, CHANNELS)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x, z, weight, bounds, out, stride, rows,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Norm of a head's values times silu of its gate; 0 for tokens that belong to no row."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.arange(0, BLOCK)
    mask = value < VALUE
    known = mask & (token < tl.load(bounds + rows))
    y = tl.load(x + (token * HEADS + head) * VALUE + value, mask=known, other=0.0)
    gate = tl.load(z + token * stride + head * VALUE + value, mask=known, other=0.0)
    gate = gate.to(tl.float32)
    y = y / tl.sqrt(tl.sum(y * y, axis=0) / VALUE + EPS)
    y = y * tl.load(weight + value, mask=mask, other=0.0) * gate / (1.0 + tl.exp(-gate))
    place = out + (token * HEADS + head) * VALUE + value
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


class TritonDelta:
    """A layer by the gated delta rule; see ``reference_delta.ReferenceDelta``."""

    def __init__(self, parts: DeltaParts) -> None:
        """Bind a layer to its parameters.

        Raises:
            ValueError: no kernel computes such a layer.
        """
        self._shape, self._eps = parts.shape, parts.norm_eps
        odd = parts.shape.value_heads % parts.shape.key_heads or parts.shape.taps < 2
        if odd or parts.shape.by_channel or parts.gating != "silu":
            raise ValueError(f"no kernel for recurrent layers of {parts.shape}")
        self._conv = parts.conv.float().T.contiguous()  # [K, channels]
        self._decay, self._bias = parts.decay.float(), parts.bias.float()
        self._norm = parts.norm.float()

    def __call__(self, x: Tensor, gates: Tensor, states: LayerStates, batch: StateBatch) -> Tensor:
        """Return [T, Hv, Dv] in the dtype of x, and write the states of all rows.

        Args:
            x: [T, channels + Hv * Dv]: q, k and v before the convolution, then the norm's gate.
            gates: [T, 2 Hv]: those of beta, then of the time step.

        Raises:
            ValueError: shapes do not fit.
        """
        shape, tokens = self._shape, len(x)
        check_shapes(shape, x, gates, states)
        x, gates = last_contiguous(x), last_contiguous(gates)
        found = torch.empty(
            tokens, shape.value_heads, shape.value_dim, dtype=torch.float32, device=x.device
        )
        out = torch.empty_like(found, dtype=x.dtype)
        if not tokens:
            return out
        block, rows = power_of_2(shape.key_dim), len(batch.reads)
        slab = min(_SLAB, power_of_2(shape.value_dim), max(1, _CELLS // block))
        _delta_rule[(rows, shape.value_heads, triton.cdiv(shape.value_dim, slab))](
            x, gates, self._conv, self._decay, self._bias, states.matrices, states.inputs,
            batch.bounds, batch.reads, batch.writes, by_token(batch.marks, tokens), found,
            x.stride(0), gates.stride(0),
            KEY_HEADS=shape.key_heads, HEADS=shape.value_heads, KEY=shape.key_dim,
            VALUE=shape.value_dim, TAPS=shape.taps, BLOCK=block, SLAB=slab, TILED=shape.tiled,
            num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
        _gated_norm[(tokens, shape.value_heads)](
            found, x[:, shape.channels :], self._norm, batch.bounds, out, x.stride(0), rows,
            HEADS=shape.value_heads, VALUE=shape.value_dim, BLOCK=power_of_2(shape.value_dim),
            EPS=self._eps, num_warps=1, num_stages=1,
        )  # fmt: skip
        return out


def by_token(marks: Tensor, tokens: int) -> Tensor:
    """Return the slot of each token [T] int32, -1 for none, of marks as ``StateBatch`` has them."""
    if marks.dim() == 1:
        return marks
    slots = torch.full((tokens,), -1, dtype=torch.int32, device=marks.device)
    slots[marks[:, 0].long()] = marks[:, 1]
    return slots


def check_shapes(shape: DeltaShape, x: Tensor, gates: Tensor, states: LayerStates) -> None:
    """Raise ValueError if what a layer is given does not fit its shape."""
    wanted = (len(x), shape.channels + shape.values), (len(x), 2 * shape.value_heads)
    kept = states.matrices.shape[1:], states.inputs.shape[1:]
    floats = states.matrices.dtype == states.inputs.dtype == torch.float32
    if (x.shape, gates.shape) != wanted or kept != (shape.matrix, shape.kept_inputs) or not floats:
        raise ValueError(
            f"a recurrent layer of {shape} takes no {list(x.shape)} with {list(gates.shape)} "
            f"and states of {[list(size) for size in kept]}"
        )
