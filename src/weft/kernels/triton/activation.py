"""Gates times what they let through, optionally rounded for the next product; softcap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.parts import SWIGLU_ALPHA, SWIGLU_LIMIT, limit_of
from weft.kernels.triton.fp8 import codes_dtype, not_finite, row_scale, to_e4m3
from weft.kernels.triton.launch import last_contiguous

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")  # kernels take their places, or less a limit
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
GATINGS = ("sigmoid", "softplus")
_BLOCK = 1024
_ROW_BLOCK = 4096  # numbers that a program looks at at once which rounds a whole row


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return activated gates times others of float32 numbers; see ``reference.act_mul``."""
    if ACTIVATION == 2:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        turn = _ALPHA * gate
    elif ACTIVATION == 1:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        turn = gate
    opened = gate / (1.0 + tl.exp(-turn))
    if ACTIVATION < 0:
        opened = tl.where(opened > -ACTIVATION, -ACTIVATION, opened)
        up = tl.where(up > -ACTIVATION, -ACTIVATION, tl.where(up < ACTIVATION, ACTIVATION, up))
    return opened * up


def place_of(activation: str | None) -> float:
    """Return what kernels take for an activation: 0 for a product without one.

    Raises:
        ValueError: kernels do not compute it.
    """
    if activation is None:
        return 0
    if (limit := limit_of(activation)) is not None:
        return -limit
    if activation not in ACTIVATIONS:
        raise ValueError(f"no kernel for {activation}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(activation)


@triton.jit
def _product(gate_up, column, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Activated gates times values in float32; see ``reference.act_mul``."""
    mask = column < SIZE
    gate = tl.load(gate_up + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    return gated(gate, up, ACTIVATION)


@triton.jit
def _act_mul(
    gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _product(gate_up + row * stride, column, SIZE, ACTIVATION)
    tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _act_mul_round(
    gate_up, static, out, scales, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, SIZE, BLOCK):
        y = _product(gate_up + row * stride, start + tl.arange(0, BLOCK), SIZE, ACTIVATION)
        y = y.to(gate_up.dtype.element_ty).to(tl.float32)
        most = tl.maximum(most, tl.abs(y))
        wrong |= not_finite(y).to(tl.int32)
    finite = tl.max(wrong, axis=0) == 0
    scale, factor = row_scale(tl.max(most, axis=0), finite, static, STATIC)
    tl.store(scales + row, scale)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _product(gate_up + row * stride, column, SIZE, ACTIVATION)
        y = y.to(gate_up.dtype.element_ty).to(tl.float32)
        y = to_e4m3(tl.where(finite, y * factor, 0.0))
        tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def softplus(x):
    """Log(1 + exp(x)) of float32 numbers."""
    power = tl.exp(-tl.abs(x))
    near = power * (1.0 - power * (0.5 - power * (1.0 / 3.0)))  # where 1 + power loses digits
    return tl.maximum(x, 0.0) + tl.where(power < 0.01, near, tl.log(1.0 + power))


@triton.jit
def _gate(
    x, gates, out, stride_gates,
    SIZE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    y = tl.load(x + row * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * stride_gates + column // EACH, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    if SOFTPLUS:
        gate = softplus(gate)
    else:
        gate = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(out + row * SIZE + column, (y * gate).to(out.dtype.element_ty), mask=mask)


def gate(x: Tensor, gates: Tensor, kind: str) -> Tensor:
    """Return heads x [T, H, D] times ``kind`` of their gates; see ``reference.gate``.

    Raises:
        ValueError: shapes do not fit, or there is no such kind.
    """
    tokens, heads, dim = x.shape
    if gates.shape not in ((tokens, heads), (tokens, heads * dim)) or kind not in GATINGS:
        known = ", ".join(GATINGS)
        raise ValueError(f"no {kind} gate of {list(gates.shape)} for {list(x.shape)}; {known} are")
    x, gates = x.contiguous(), last_contiguous(gates)
    out, size = torch.empty_like(x), heads * dim
    if tokens:
        _gate[(tokens, triton.cdiv(size, _BLOCK))](
            x, gates, out, gates.stride(0), SIZE=size, EACH=size // gates.shape[1], BLOCK=_BLOCK,
            SOFTPLUS=kind == "softplus", num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _softcap(logits, out, cap, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < count, other=0.0) / cap
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    near = tl.abs(x) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))  # where far cancels
    size = tl.where(tl.abs(x) < 0.05, near, far)
    tl.store(out + at, cap * tl.where(x < 0.0, -size, size), mask=at < count)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) of float32 logits [S, V].

    Raises:
        ValueError: they are of another type, or the cap is not positive.
    """
    if logits.dtype != torch.float32 or not cap > 0:
        raise ValueError(f"cannot cap {list(logits.shape)} of {logits.dtype} at {cap}")
    logits = logits.contiguous()
    out, count = torch.empty_like(logits), logits.numel()
    if count:
        _softcap[(triton.cdiv(count, _BLOCK),)](
            logits, out, cap, count, BLOCK=_BLOCK, num_warps=4, num_stages=1
        )
    return out


@triton.jit
def _xielu(x, numbers, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    y = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    slope, largest = tl.load(numbers + 2), tl.load(numbers + 3)
    rise, fall = softplus(tl.load(numbers)), slope + softplus(tl.load(numbers + 1))
    low = tl.where(y > largest, largest, y)
    near = 1.3888888889e-3 + low * (1.9841269841e-4 + low * 2.4801587302e-5)
    near = 0.5 + low * (
        1.6666666667e-1 + low * (4.1666666667e-2 + low * (8.3333333333e-3 + low * near))
    )
    beyond = tl.where(low > -0.5, near * (low * low), tl.exp(low) - 1.0 - low)  # where it cancels
    below = (beyond + (low - y)) * fall
    y = tl.where(y > 0.0, rise * y * y, below) + slope * y
    tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def relu2(x):
    """Return the squares of numbers above 0, and 0 for others."""
    x = tl.where(x < 0.0, 0.0, x)
    return x * x


@triton.jit
def _relu2(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    y = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, relu2(y).to(out.dtype.element_ty), mask=mask)


def act_mul(gate_up: Tensor, activation: str, numbers: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up of ``gate_up`` [T, 2I], gate first -> [T, I].

    Of ``relu2``, which has no gate, and ``xielu``, which has ``numbers`` instead, it is that of [T,
    I].

    Raises:
        ValueError: the activation is not known, or the shape does not fit.
    """
    if activation == "xielu" and numbers is not None and numbers.shape == (4,):
        x, (rows, size) = last_contiguous(gate_up), gate_up.shape
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
        if rows:
            _xielu[(rows, triton.cdiv(size, _BLOCK))](
                x, numbers, out, x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4, num_stages=1
            )
        return out
    if activation == "relu2":
        x, (rows, size) = last_contiguous(gate_up), gate_up.shape
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
        if rows:
            _relu2[(rows, triton.cdiv(size, _BLOCK))](
                x, out, x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4, num_stages=1
            )
        return out
    gate_up, rows, size = _check(gate_up, activation)
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _act_mul[(rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK,
            ACTIVATION=place_of(activation), num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def act_mul_for(inputs: str | Tensor, gate_up: Tensor, activation: str) -> Tensor | Rounded:
    """Return ``act_mul`` as a product with such ``inputs`` takes it; see ``float8.Float8``."""
    if isinstance(inputs, str) and inputs == "float":
        return act_mul(gate_up, activation)
    gate_up, rows, size = _check(gate_up, activation)
    out = torch.empty((rows, size), dtype=codes_dtype(gate_up.device), device=gate_up.device)
    scales = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    if rows:
        _act_mul_round[(rows,)](
            gate_up, inputs if isinstance(inputs, Tensor) else None, out, scales,
            gate_up.stride(0), SIZE=size, BLOCK=_ROW_BLOCK,
            ACTIVATION=place_of(activation), STATIC=isinstance(inputs, Tensor),
            num_warps=8, num_stages=1,
        )  # fmt: skip
    return Rounded(out, scales)


def _check(gate_up: Tensor, activation: str) -> tuple[Tensor, int, int]:
    place_of(activation)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"no kernel for {activation} of {list(gate_up.shape)}")
    return last_contiguous(gate_up), gate_up.shape[0], gate_up.shape[1] // 2
