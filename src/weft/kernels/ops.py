"""The op table: one implementation per op, chosen once at start, shown by ``weft info``.

There is no fallback at call time: an op that the machine cannot run is a ``KernelUnavailable`` when
the table is built, with a sentence that says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels import reference
from weft.kernels.invariant import InvariantLinear
from weft.kernels.unavailable import KernelUnavailable

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION_CHOICES = ("auto", "cpu", "reference")


@dataclass(frozen=True)
class AttentionBatch:
    """One KV group's metadata for the rows of one sub-batch (R rows, T query tokens in all)."""

    block_tables: Tensor  # [R, B] int32 block ids; blocks wholly before a window may be -1, unread
    query_start: Tensor  # [R + 1] int32, cumulative query tokens
    context_len: Tensor  # [R] int32, tokens in the cache after this step (start + count of the row)
    slots: Tensor  # [T] int64, block * block_size + offset where each query token's K/V is written
    block_size: int  # tokens per block of this group


class RmsNorm(Protocol):
    """See ``reference.rms_norm``."""

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor: ...


class Rope(Protocol):
    """See ``reference.rope``."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class ActMul(Protocol):
    """See ``reference.act_mul``."""

    def __call__(self, gate_up: Tensor, activation: str) -> Tensor: ...


class Linear(Protocol):
    """See ``reference.linear``."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...


class Moe(Protocol):
    """See ``reference.moe``."""

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        activation: str,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """See ``reference.paged_attention``."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class OpTable:
    """Every op that a decoder calls, and the name of the implementation behind each."""

    rms_norm: RmsNorm
    rope: Rope
    act_mul: ActMul
    linear: Linear
    moe: Moe
    paged_attention: PagedAttention
    batch_invariant: bool
    names: dict[str, str] = field(repr=False)

    def describe(self) -> dict[str, str]:
        """Return op name -> implementation name, in table order."""
        return dict(self.names)


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    *,
    batch_invariant: bool = False,
) -> OpTable:
    """Choose the implementation of every op for one device and dtype.

    Args:
        attention: ``auto`` (the native kernel of the device), or an implementation by name.
        batch_invariant: whether a token's result may depend on nothing but its own context.

    Raises:
        KernelUnavailable: the device, the dtype or the wished attention cannot be served.
    """
    if dtype not in FLOAT_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise KernelUnavailable(f"no kernels compute in {dtype}; choose one of: {known}")
    attention_name, paged_attention = _select_attention(device, attention)
    if batch_invariant and attention_name == "reference":
        raise KernelUnavailable(
            "the reference attention is not batch-invariant; set attention='cpu', or turn "
            "batch_invariant off"
        )
    linear: Linear = InvariantLinear() if batch_invariant else functional.linear
    linear_name = "torch, batch-invariant" if batch_invariant else "torch"
    return OpTable(
        rms_norm=reference.rms_norm,
        rope=reference.rope,
        act_mul=reference.act_mul,
        linear=linear,
        moe=partial(reference.moe, linear=linear),
        paged_attention=paged_attention,
        batch_invariant=batch_invariant,
        names={
            "rms_norm": "reference",
            "rope": "reference",
            "act_mul": "reference",
            "linear": linear_name,
            "moe": linear_name,
            "paged_attention": attention_name,
        },
    )


def _select_attention(device: torch.device, wish: str) -> tuple[str, PagedAttention]:
    if wish not in ATTENTION_CHOICES:
        known = ", ".join(ATTENTION_CHOICES)
        raise KernelUnavailable(f"unknown attention kernel '{wish}'; choose one of: {known}")
    if wish == "reference":
        return "reference", reference.paged_attention
    if device.type != "cpu":
        raise KernelUnavailable(
            f"attention '{wish}' has no kernel for device '{device}'; "
            "run on the CPU, or set attention='reference' (slow)"
        )
    try:
        from weft.kernels.cpu import attention as native
    except ImportError as error:
        raise KernelUnavailable(
            "the native CPU attention kernel is not built; install weft with a C++ compiler "
            f"present, or set attention='reference' (slow): {error}"
        ) from error
    return "cpu", native.paged_attention
