"""The ops of a decoder: their signatures, and the table that holds one implementation of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.kernels.collectives import ALONE, Collectives
from weft.kernels.parts import Biases, LayerShape, Norms
from weft.kernels.sampling import ProcessLogits, VerifyDrafts
from weft.kernels.storage import Storage
from weft.kernels.tuning import Tuning

# What a table's ``pack`` made of a weight, for the ops of the same table: a tensor as it was, or a
# ``Matrix`` of the native kernels. Experts: one tensor, or a tuple with a matrix for each.
Weight: TypeAlias = Any
Experts: TypeAlias = Any


@dataclass(frozen=True)
class AttentionMetadata:
    """One KV group's metadata for the rows of one sub-batch (R rows, T query tokens in all).

    Buffers of a fixed size are padded. A row without query tokens is padding: its context and its
    table are not read. A token whose slot is negative is padding: its K and V are not written.
    Tokens from ``query_start[R]`` on belong to no row: their result is 0.

    Attributes:
        block_tables: block ids; blocks wholly before a window may be -1, unread.
        slot_mapping: block * block_size + offset where each query token's K/V is written.
        block_size: tokens per block of this group.
        table_start: where each row's table begins in flat ``block_tables``; the CPU's native
            kernels do not take it.
        max_query_len: no row has more query tokens, known before they are: kernels for longer rows
            are then left out of a captured step. None: any row may have T.
    """

    block_tables: Tensor  # [R, B] int32, or flat [N] int32 with table_start
    query_start: Tensor  # [R + 1] int32, cumulative query tokens
    seq_lens: Tensor  # [R] int32, tokens in the cache after this step (start + count of the row)
    slot_mapping: Tensor  # [T] int64
    block_size: int
    table_start: Tensor | None = None  # [R] int32
    max_query_len: int | None = None


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


class Sample(Protocol):
    """Write a token for each row of logits [S, V] float32, as ``reference_sampling.sample_rows``
    chooses it.

    All tensors lie on the device of the logits, which may be changed. ``settings`` float64 [S,
    len(SETTINGS)] are those of ``reference_sampling.sample_rows``; its numbers are functions of
    ``seeds`` and ``counters`` [S] int64. ``tokens`` [S] int64 and ``finite`` [S] bool are written.
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
        batch: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor: ...


class FusedLayer(Protocol):
    """The parts of a layer around attention; see ``cpu.layer.CpuLayer``."""

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def post(self, attended: Tensor, residual: Tensor) -> Tensor: ...


class BindLayer(Protocol):
    """Bind the matrices ``qkv``, ``output``, ``gate_up`` and ``down`` of a layer.

    ``moe`` takes the place of the last two: from normalised rows [T, C] to what experts add.
    """

    def __call__(
        self,
        shape: LayerShape,
        matrices: dict[str, Any],
        norms: Norms,
        biases: Biases,
        moe: Callable[[Tensor], Tensor] | None = None,
        /,
    ) -> FusedLayer: ...


class FusedStack(Protocol):
    """A whole forward pass; see ``cpu.stack.CpuStack``."""

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

    def run(
        self, ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]
    ) -> Tensor: ...


@dataclass(frozen=True)
class Fused:
    """Fused calls: layers as few calls, and the whole model as one.

    Attributes:
        layer: binds a layer to its weights as ``OpTable.pack`` made them.
        stack: made of what precedes and follows the layers.
        described: a readable description of how a model runs if all its layers are bound.
        moe_layers: layers of experts may be bound, too.
        padded: ``stack`` takes batches with padding and ragged tables.
    """

    layer: BindLayer
    stack: Callable[[Weight, float, Tensor, float, bool], FusedStack]
    described: str
    moe_layers: bool = False
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
    process_logits: ProcessLogits
    sample: Sample
    verify_drafts: VerifyDrafts
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
