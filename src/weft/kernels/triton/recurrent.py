"""Shared parts of recurrent layers' kernels: the convolution, its latest inputs, marks and checks.

Inputs of a row are those of this step, and before its first token those that its state keeps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.conv import ConvShape
from weft.kernels.delta import DeltaShape, LayerStates
from weft.kernels.mamba2 import Mamba2Shape

_SLAB = 32  # values of a head that a program has
_CELLS = 4096  # of the state that it has at the most: 32 registers of each of its threads
WARPS = 4


@triton.jit
def silu(x):
    """Return x times its logistic function."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _input(
    x, kept, token, start, channel, mask, stride, read, AGO: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """What the convolution was given ``AGO`` tokens before one, of this step or of the state."""
    place = token - AGO
    here = place >= start
    at = x + place.to(tl.int64) * stride + channel
    new = tl.load(at, mask=mask & here, other=0.0).to(tl.float32)
    if FACTOR:
        new *= tl.load(at + FACTOR, mask=mask & here, other=0.0).to(tl.float32)
    row = TAPS - 1 + place - start  # of the inputs that the state has
    old = tl.load(kept + row * CHANNELS + channel, mask=mask & (place < start) & read, other=0.0)
    return new + old


@triton.jit
def convolved(
    total, x, kept, weights, token, start, channel, mask, stride, read, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, FACTOR: tl.constexpr = 0,
):  # fmt: skip
    """Return the convolution at a token, added to ``total``.

    ``FACTOR``: a product is convolved, with the number so many places behind; 0: there is none.
    """
    for tap in tl.static_range(TAPS):
        weight = tl.load(weights + tap * CHANNELS + channel, mask=mask, other=0.0)
        total += weight * _input(
            x, kept, token, start, channel, mask, stride, read, TAPS - 1 - tap, TAPS, CHANNELS,
            FACTOR,
        )  # fmt: skip
    return total


@triton.jit
def keep_inputs(
    x, kept, out, token, start, channel, mask, stride, read, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, FACTOR: tl.constexpr = 0,
):  # fmt: skip
    """Write the latest inputs of the convolution as a token leaves them."""
    for row in tl.static_range(TAPS - 1):
        found = _input(
            x, kept, token, start, channel, mask, stride, read, TAPS - 2 - row, TAPS, CHANNELS,
            FACTOR,
        )  # fmt: skip
        tl.store(out + row * CHANNELS + channel, found, mask=mask)


def slab_of(values: int, block: int) -> int:
    """Return how many columns of a head's state a program has in registers.

    Args:
        values: columns of the state.
        block: its rows, rounded up to a power of 2.
    """
    return min(_SLAB, int(triton.next_power_of_2(values)), max(1, _CELLS // block))


def by_token(marks: Tensor, tokens: int) -> Tensor:
    """Return the slot of each token [T] int32, -1 for none, of marks as ``StateBatch`` has them."""
    if marks.dim() == 1:
        return marks
    slots = torch.full((tokens,), -1, dtype=torch.int32, device=marks.device)
    slots[marks[:, 0].long()] = marks[:, 1]
    return slots


def check_given(
    shape: DeltaShape | ConvShape | Mamba2Shape,
    x: tuple[Tensor, int],
    gates: tuple[Tensor, int] | None,
    states: LayerStates,
) -> None:
    """Check what a layer is given.

    Args:
        x, gates: each with the numbers that a token should have.

    Raises:
        ValueError: it does not fit the shape.
    """
    tokens = len(x[0])
    fits = all(
        part.shape == (tokens, wide) for part, wide in ((x,) if gates is None else (x, gates))
    )
    kept = states.matrices.shape[1:], states.inputs.shape[1:]
    floats = states.matrices.dtype == states.inputs.dtype == torch.float32
    if not fits or kept != (shape.matrix, shape.kept_inputs) or not floats:
        beside = "" if gates is None else f" with {list(gates[0].shape)}"
        raise ValueError(
            f"a recurrent layer of {shape} takes no {list(x[0].shape)}{beside} and states of "
            f"{[list(size) for size in kept]}"
        )
