"""The op table: one implementation per op, chosen once at start, shown by ``weft info``.

There is no fallback at call time: an op that the machine cannot run is a ``KernelUnavailable`` when
the table is built, with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from weft.kernels import choice, reference
from weft.kernels.storage import Storage
from weft.kernels.unavailable import KernelUnavailable

# What a table's ``pack`` made of a weight, for the ops of the same table: a tensor as it was, or a
# ``Matrix`` of the native kernels. Experts: one tensor, or a tuple with a matrix for each.
Weight: TypeAlias = Any
Experts: TypeAlias = Any

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION_CHOICES = ("auto", "cpu", "reference")
WEIGHTED = ("linear", "logits", "embedding", "moe")


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


class Angles(Protocol):
    """See ``reference.angles``."""

    def __call__(
        self, positions: Tensor, frequencies: Tensor, scale: float, /
    ) -> tuple[Tensor, Tensor]: ...


class ActMul(Protocol):
    """See ``reference.act_mul``."""

    def __call__(self, gate_up: Tensor, activation: str) -> Tensor: ...


class Linear(Protocol):
    """See ``reference.linear``."""

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None, /) -> Tensor: ...


class Logits(Protocol):
    """Product of hidden states [S, C] and the output head [V, C]: float32 [S, V]."""

    def __call__(self, hidden: Tensor, weight: Weight, /) -> Tensor: ...


class Embedding(Protocol):
    """Rows [T, C] of a table [V, C], which may be the packed output head, by ids [T] int64."""

    def __call__(self, ids: Tensor, table: Weight, /) -> Tensor: ...


class Pack(Protocol):
    """Turn a parameter into what the ops take, as soon as it is loaded; others stay as they are.

    ``parameter`` is a name of ``layout.parameters``; the embedding of a model whose output head is
    tied to it comes as ``lm_head``. A parameter of one matrix for each expert becomes a tuple.
    """

    def __call__(self, parameter: str, tensor: Tensor, /) -> Weight | Experts: ...


class Quantise(Protocol):
    """Return an empty matrix of integers for a parameter, to be written output by output.

    A parameter of one matrix for each expert becomes a tuple.
    """

    def __call__(
        self, parameter: str, shape: torch.Size, dtype: torch.dtype, storage: Storage, /
    ) -> Weight | Experts: ...


class Moe(Protocol):
    """See ``reference.moe``."""

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: Experts,
        down: Experts,
        activation: str,
    ) -> Tensor: ...


class Choose(Protocol):
    """See ``choice.choose``."""

    def __call__(
        self, logits: Tensor, settings: NDArray[np.float64], draws: NDArray[np.float64], /
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]: ...


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
    angles: Angles
    act_mul: ActMul
    linear: Linear
    logits: Logits
    embedding: Embedding
    moe: Moe
    paged_attention: PagedAttention
    choose: Choose
    pack: Pack
    quantise: Quantise | None  # None: only floats are computed with
    fused_layers: bool  # packed matrices may be bound by ``cpu.layer``
    batch_invariant: bool  # a token's result depends on nothing but its own context
    names: dict[str, str] = field(repr=False)

    def describe(self) -> dict[str, str]:
        """Return op name -> implementation name, in table order."""
        return dict(self.names)


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    weights: Mapping[str, str] | None = None,
) -> OpTable:
    """Choose the implementation of every op for one device and dtype.

    Args:
        attention: ``auto`` or ``cpu`` for the native kernels; ``reference`` for plain torch in
            every op, which is slow and whose results may differ by the batch.
        weights: how the weights of an op are stored, where it is not in ``dtype``.

    Raises:
        KernelUnavailable: the device, the dtype or the wished attention cannot be served.
    """
    if dtype not in FLOAT_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise KernelUnavailable(f"no kernels compute in {dtype}; choose one of: {known}")
    if attention not in ATTENTION_CHOICES:
        known = ", ".join(ATTENTION_CHOICES)
        raise KernelUnavailable(f"unknown attention kernel '{attention}'; choose one of: {known}")
    if attention == "reference":
        return _reference_ops()
    if device.type != "cpu":
        raise KernelUnavailable(
            f"attention '{attention}' has no kernel for device '{device}'; "
            "run on the CPU, or set attention='reference' (slow)"
        )
    if dtype == torch.float16:
        raise KernelUnavailable(
            "no CPU kernels compute in float16; choose bfloat16 or float32, or set "
            "attention='reference' (slow)"
        )
    return _native_ops(str(dtype).removeprefix("torch."), weights or {})


def _reference_ops() -> OpTable:
    return OpTable(
        rms_norm=reference.rms_norm,
        rope=reference.rope,
        angles=reference.angles,
        act_mul=reference.act_mul,
        linear=functional.linear,
        logits=reference.logits,
        embedding=functional.embedding,
        moe=partial(reference.moe, linear=functional.linear),
        paged_attention=reference.paged_attention,
        choose=choice.choose,
        pack=reference.keep,
        quantise=None,
        fused_layers=False,
        batch_invariant=False,
        names={
            "rms_norm": "reference",
            "rope": "reference",
            "angles": "reference",
            "act_mul": "reference",
            "linear": "torch",
            "logits": "torch",
            "embedding": "torch",
            "moe": "torch",
            "paged_attention": "reference",
            "choose": "reference",
        },
    )


def _native_ops(dtype: str, weights: Mapping[str, str]) -> OpTable:
    try:
        from weft.kernels.cpu import attention, choose, matrix, stack
    except ImportError as error:
        raise KernelUnavailable(
            "the native CPU kernels are not built; install weft with a C++ compiler "
            f"present, or set attention='reference' (slow): {error}"
        ) from error
    stored = {op: f"cpu, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    return OpTable(
        rms_norm=stack.rms_norm,
        rope=reference.rope,
        angles=stack.angles,
        act_mul=reference.act_mul,
        linear=matrix.linear,
        logits=matrix.logits,
        embedding=matrix.embedding,
        moe=partial(reference.moe, linear=matrix.linear),
        paged_attention=attention.paged_attention,
        choose=choose.choose,
        pack=matrix.pack,
        quantise=matrix.quantised,
        fused_layers=True,
        batch_invariant=True,
        names={
            "rms_norm": "cpu",
            "rope": "reference",
            "angles": "cpu",
            "act_mul": "reference",
            **stored,
            "paged_attention": "cpu",
            "choose": "cpu",
        },
    )
