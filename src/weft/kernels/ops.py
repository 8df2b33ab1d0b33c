"""The op table: one implementation per op, chosen once at start, shown by ``weft info``.

There is no fallback at call time: an op that the machine cannot run is a ``KernelUnavailable`` when
the table is built, with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.kernels import choice, float8, reference, sampling
from weft.kernels.collectives import ALONE, Collectives
from weft.kernels.parts import Biases, Norms, Shape
from weft.kernels.sampling import Accept, Adjust
from weft.kernels.storage import Storage
from weft.kernels.tuning import Tuning
from weft.kernels.unavailable import KernelUnavailable

# What a table's ``pack`` made of a weight, for the ops of the same table: a tensor as it was, or a
# ``Matrix`` of the native kernels. Experts: one tensor, or a tuple with a matrix for each.
Weight: TypeAlias = Any
Experts: TypeAlias = Any

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION_CHOICES = ("auto", "cpu", "triton", "reference")
WEIGHTED = ("linear", "logits", "embedding", "moe")
TUNED = ("linear", "logits", "moe", "paged_attention")  # the launches of other ops are fixed
# What ops compute in whatever the dtype of the model is.
OP_DTYPES = {"angles": "float32", "adjust": "float32", "choose": "float32", "accept": "int64"}


@dataclass(frozen=True)
class AttentionBatch:
    """One KV group's metadata for the rows of one sub-batch (R rows, T query tokens in all).

    Buffers of a fixed size are padded. A row without query tokens is padding: its context and its
    table are not read. A token whose slot is negative is padding: its K and V are not written.
    Tokens from ``query_start[R]`` on belong to no row: their result is 0.

    Attributes:
        block_tables: block ids; blocks wholly before a window may be -1, unread.
        slots: block * block_size + offset where each query token's K/V is written.
        block_size: tokens per block of this group.
        table_start: where each row's table begins in flat ``block_tables``; the CPU's native
            kernels do not take it.
        most_queries: no row has more query tokens, known before they are: kernels for longer rows
            are then left out of a captured step. None: any row may have T.
    """

    block_tables: Tensor  # [R, B] int32, or flat [N] int32 with table_start
    query_start: Tensor  # [R + 1] int32, cumulative query tokens
    context_len: Tensor  # [R] int32, tokens in the cache after this step (start + count of the row)
    slots: Tensor  # [T] int64
    block_size: int
    table_start: Tensor | None = None  # [R] int32
    most_queries: int | None = None


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
    """Return an empty matrix of codes for a parameter, to be written output by output.

    A parameter of one matrix for each expert becomes a tuple.
    """

    def __call__(
        self, parameter: str, shape: torch.Size, dtype: torch.dtype, storage: Storage, /
    ) -> Weight | Experts: ...


class Route(Protocol):
    """See ``reference.route``."""

    def __call__(self, scores: Tensor, top_k: int, normalise: bool, /) -> tuple[Tensor, Tensor]: ...


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
    """Write a token for each row of logits [S, V] float32, as ``choice.choose_by`` chooses it.

    All tensors lie on the device of the logits, which may be changed. ``settings`` [S, 4] float64
    are those of ``choice.choose_by``; its numbers are functions of ``seeds`` and ``counters`` [S]
    int64. ``tokens`` [S] int64 and ``finite`` [S] bool are written.
    """

    def __call__(
        self,
        logits: Tensor,
        settings: Tensor,
        seeds: Tensor,
        counters: Tensor,
        tokens: Tensor,
        finite: Tensor,
        /,
    ) -> None: ...


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


class FusedLayer(Protocol):
    """The parts of a layer around attention; see ``cpu.layer.Layer``."""

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def post(self, attended: Tensor, residual: Tensor) -> Tensor: ...


class BindLayer(Protocol):
    """Bind the matrices ``qkv``, ``output``, ``gate_up`` and ``down`` of a layer.

    ``mixture`` takes the place of the last two: from normalised rows [T, C] to what experts add.
    """

    def __call__(
        self,
        shape: Shape,
        matrices: dict[str, Any],
        norms: Norms,
        biases: Biases,
        mixture: Callable[[Tensor], Tensor] | None = None,
        /,
    ) -> FusedLayer: ...


class FusedStack(Protocol):
    """A whole forward pass; see ``cpu.stack.Stack``."""

    def add_rope(self, frequencies: Tensor, scale: float) -> None: ...

    def add_layer(
        self,
        layer: Any,
        places: tuple[int, int],
        caches: tuple[Tensor, Tensor],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None: ...

    def run(self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionBatch]) -> Tensor: ...


@dataclass(frozen=True)
class Fused:
    """How layers run as few calls, and the whole model as one.

    Attributes:
        layer: binds a layer to its weights as ``OpTable.pack`` made them.
        stack: made of what precedes and follows the layers.
        described: how a model runs all of whose layers are bound, for people.
        mixtures: layers of experts may be bound, too.
        padded: ``stack`` takes batches with padding and ragged tables.
    """

    layer: BindLayer
    stack: Callable[[Weight, float, Tensor, float, bool], FusedStack]
    described: str
    mixtures: bool = False
    padded: bool = False


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
    route: Route
    moe: Moe
    paged_attention: PagedAttention
    adjust: Adjust
    choose: Choose
    accept: Accept
    pack: Pack
    quantise: Quantise
    computes: Callable[[Storage], bool]  # whether with weights that are stored so
    widens: bool  # weights that are stored in other ways become floats at load
    fused: Fused | None  # None: layers run op by op
    batch_invariant: bool  # a token's result depends on nothing but its own context
    names: dict[str, str] = field(repr=False)
    ranks: Collectives = ALONE  # those among which the weights are cut
    tuning: Tuning | None = None  # where launches come from, of the ops of ``TUNED``

    def describe(self) -> dict[str, str]:
        """Return op name -> implementation name, in table order."""
        return dict(self.names)


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    weights: Mapping[str, str] | None = None,
    tuning: str = "auto",
) -> OpTable:
    """Choose the implementation of every op for one device and dtype.

    Args:
        attention: ``auto`` for the kernels of the device: ``cpu``, the native ones, or ``triton``;
            ``reference`` for plain torch in every op, which is slow and whose results may differ by
            the batch.
        weights: how the weights of an op are stored, where it is not in ``dtype``.
        tuning: where launches on a GPU come from: ``auto``, ``heuristic``, or a file.

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
        return _reference_ops(device, weights or {})
    if device.type == "cuda" or attention == "triton":
        if attention == "cpu" or device.type not in ("cuda", "cpu"):
            raise _no_kernel(attention, device)
        return _triton_ops(device, str(dtype).removeprefix("torch."), weights or {}, tuning)
    if device.type != "cpu":
        raise _no_kernel(attention, device)
    if dtype == torch.float16:
        raise KernelUnavailable(
            "no CPU kernels compute in float16; choose bfloat16 or float32, or set "
            "attention='reference' (slow)"
        )
    return _native_ops(str(dtype).removeprefix("torch."), weights or {})


def _no_kernel(attention: str, device: torch.device) -> KernelUnavailable:
    return KernelUnavailable(
        f"attention '{attention}' has no kernel for device '{device}'; "
        "run on the CPU or a CUDA device, or set attention='reference' (slow)"
    )


def _reference_ops(device: torch.device, weights: Mapping[str, str]) -> OpTable:
    stored = {op: f"torch, {weights[op]} weights" if op in weights else "torch" for op in WEIGHTED}
    return OpTable(
        rms_norm=reference.rms_norm,
        rope=reference.rope,
        angles=reference.angles,
        act_mul=reference.act_mul,
        linear=reference.product,
        logits=reference.logits,
        embedding=reference.embedding,
        route=reference.route,
        moe=partial(reference.moe, linear=reference.product),
        paged_attention=reference.paged_attention,
        adjust=sampling.adjust,
        choose=choice.choose,
        accept=sampling.accept,
        pack=reference.keep,
        quantise=partial(float8.quantised, device=device),
        computes=float8.computes,
        widens=True,
        fused=None,
        batch_invariant=False,
        names={
            "rms_norm": "reference",
            "rope": "reference",
            "angles": "reference",
            "act_mul": "reference",
            "route": "torch",
            **stored,
            "paged_attention": "reference",
            "adjust": "reference",
            "choose": "reference",
            "accept": "reference",
        },
    )


def _native_ops(dtype: str, weights: Mapping[str, str]) -> OpTable:
    try:
        from weft.kernels.cpu import attention, choose, layer, matrix, stack
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
        route=reference.route,
        moe=partial(reference.moe, linear=matrix.linear),
        paged_attention=attention.paged_attention,
        adjust=sampling.adjust,
        choose=choose.choose,
        accept=sampling.accept,
        pack=matrix.pack,
        quantise=matrix.quantised,
        computes=matrix.computes,
        widens=False,
        fused=Fused(layer.Layer, stack.Stack, "all in one native call"),
        batch_invariant=True,
        names={
            "rms_norm": "cpu",
            "rope": "reference",
            "angles": "cpu",
            "act_mul": "reference",
            "route": "torch",
            **stored,
            "paged_attention": "cpu",
            "adjust": "torch",
            "choose": "cpu",
            "accept": "torch",
        },
    )


def _triton_ops(
    device: torch.device, dtype: str, weights: Mapping[str, str], tuning: str
) -> OpTable:
    try:
        from weft.kernels.triton import (
            activation,
            adjust,
            attention,
            layer,
            matrix,
            moe,
            norm,
            rope,
            route,
            sample,
            stack,
            tuned,
        )
        from weft.kernels.triton.launch import interpreted
    except ImportError as error:
        raise KernelUnavailable(
            f"the kernels for GPUs need Triton: {error}; install the triton package, or set "
            "attention='reference' (slow)"
        ) from error
    if device.type == "cpu" and not interpreted():
        raise KernelUnavailable(
            "attention 'triton' has no kernel for device 'cpu' but in Triton's interpreter, for "
            "tests: set TRITON_INTERPRET=1 before the start, or attention='cpu'"
        )
    found = tuned.find_tuning(tuning, device)
    stored = {op: f"triton, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    return OpTable(
        rms_norm=norm.rms_norm,
        rope=rope.rope,
        angles=rope.angles,
        act_mul=activation.act_mul,
        linear=matrix.linear,
        logits=matrix.logits,
        embedding=matrix.embedding,
        route=route.route,
        moe=moe.moe,
        paged_attention=partial(attention.paged_attention, tuning=found),
        adjust=adjust.adjust,
        choose=sample.choose,
        accept=adjust.accept,
        pack=partial(matrix.pack, tuning=found),
        quantise=partial(matrix.quantised, device=device, tuning=found),
        computes=matrix.computes,
        widens=False,
        fused=Fused(
            layer.Layer, partial(stack.Stack, tuning=found), "all of fused kernels", True, True
        ),
        batch_invariant=False,
        names={
            "rms_norm": "triton",
            "rope": "triton",
            "angles": "triton",
            "act_mul": "triton",
            "route": "triton",
            **stored,
            "paged_attention": "triton",
            "adjust": "triton",
            "choose": "triton",
            "accept": "triton",
        },
        tuning=found,
    )
