"""The ops of a decoder: their signatures, and the table that holds one implementation of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from weft.kernels.advance import Advance
from weft.kernels.arrays import Array
from weft.kernels.collectives import ALONE, ONE_STAGE, Collectives, Link
from weft.kernels.conv import BindConv
from weft.kernels.delta import BindDelta, LayerStates, StateBatch
from weft.kernels.hosted import AwaitAnswer, await_answer
from weft.kernels.lanes import LaneOps
from weft.kernels.mamba2 import BindMamba2
from weft.kernels.parts import LayerParts, StackParts
from weft.kernels.routing import Routing
from weft.kernels.sampling import Penalise, ProcessLogits, VerifyDrafts
from weft.kernels.storage import PackedForm, Storage
from weft.kernels.tuning import Tuning

# What a table's ``pack`` made of a weight, for the ops of the same table: an array, or a ``Matrix``
# of the native kernels. Experts: one array, or a tuple with a matrix for each.
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
        programs: of decode attention on a GPU at the most, so that it leaves room for what runs
            beside it; None for as many as suit it. Results are the same.
        max_query_len: no row has more query tokens, known before they are: kernels for longer rows
            are then left out of a captured step. None: any row may have T.
        max_context: no row has more tokens in the cache. None: it is not known.
        derived: what ops have made of the lengths of rows, for all layers of the step.
    """

    block_tables: Array  # [R, B] int32, or flat [N] int32 with table_start
    query_start: Array  # [R + 1] int32, cumulative query tokens
    seq_lens: Array  # [R] int32, tokens in the cache after this step (start + count of the row)
    slot_mapping: Array  # [T] int64
    block_size: int
    table_start: Array | None = None  # [R] int32
    max_query_len: int | None = None
    max_context: int | None = None
    programs: int | None = None
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


class RmsNorm(Protocol):
    """See ``reference.rms_norm``."""

    def __call__(
        self, x: Array, weight: Array | None, eps: float, plus_one: bool, centred: bool = False
    ) -> Array: ...


class SquareSums(Protocol):
    """See ``reference.square_sums``."""

    def __call__(self, x: Array, first: int, /) -> Array: ...


class NormBySums(Protocol):
    """See ``reference.norm_by_sums``."""

    def __call__(
        self,
        x: Array,
        first: int,
        sums: Array,
        weight: Array,
        eps: float,
        plus_one: bool,
        ranks: int,
        /,
    ) -> Array: ...


@dataclass(frozen=True)
class WholeNorm:
    """Norms over all heads of Q and over all of K where ranks have some of them each."""

    sums: SquareSums
    by_sums: NormBySums


class Rope(Protocol):
    """See ``reference.rope``."""

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array: ...


class Angles(Protocol):
    """See ``reference.angles``."""

    def __call__(
        self, positions: Array, frequencies: Array, scale: float, /
    ) -> tuple[Array, Array]: ...


class ActMul(Protocol):
    """See ``reference.act_mul``."""

    def __call__(
        self, gate_up: Array, activation: str, numbers: Array | None = None, /
    ) -> Array: ...


class GateHeads(Protocol):
    """See ``reference.gate``."""

    def __call__(self, x: Array, gates: Array, kind: str, /) -> Array: ...


class Linear(Protocol):
    """See ``reference.linear``."""

    def __call__(self, x: Array, weight: Weight, bias: Array | None, /) -> Array: ...


class HeadProducts(Protocol):
    """See ``reference.heads``."""

    def __call__(self, x: Array, weights: Experts, /) -> Array: ...


class Logits(Protocol):
    """Product of hidden states [S, C] and the output head [V, C]: float32 [S, V]."""

    def __call__(self, hidden: Array, weight: Weight, /) -> Array: ...


class Embedding(Protocol):
    """Rows [T, C] of a table [V, C], which may be the packed output head, by ids [T] int64."""

    def __call__(self, ids: Array, table: Weight, /) -> Array: ...


class Pack(Protocol):
    """Turn a parameter, numpy's array on the host, into what the ops take, once it is loaded.

    ``parameter`` is a name of ``layout.parameters``; the embedding of a model whose output head is
    tied to it comes as ``lm_head``. A parameter of one matrix for each expert becomes a tuple.
    """

    def __call__(self, parameter: str, tensor: Array, /) -> Weight | Experts: ...


class Quantise(Protocol):
    """Return an empty matrix of codes for a parameter, to be written output by output.

    A parameter of one matrix for each expert becomes a tuple.
    """

    def __call__(
        self, parameter: str, shape: Sequence[int], dtype: str, storage: Storage, /
    ) -> Weight | Experts: ...


class Route(Protocol):
    """See ``reference.route``."""

    def __call__(
        self, scores: Array, routing: Routing, bias: Array | None = None, /
    ) -> tuple[Array, Array]: ...


class Softcap(Protocol):
    """See ``reference.softcap``."""

    def __call__(self, logits: Array, cap: float, /) -> Array: ...


class Moe(Protocol):
    """See ``reference.moe``."""

    def __call__(
        self,
        x: Array,
        weights: Array,
        experts: Array,
        gate_up: Experts,
        down: Experts,
        activation: str,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Array: ...


class Sample(Protocol):
    """Write a token for each row of logits [S, V] float32, as ``reference_sampling.sample_rows``
    chooses it.

    All tensors lie on the device of the logits, which may be changed. ``settings`` float64 [S,
    len(SETTINGS)] are those of ``reference_sampling.sample_rows``; its numbers are functions of
    ``seeds`` and ``counters`` [S] int64. ``tokens`` [S] int64 and ``finite`` [S] bool are written.
    """

    def __call__(
        self,
        logits: Array,
        settings: Array,
        seeds: Array,
        counters: Array,
        tokens: Array,
        finite: Array,
        /,
    ) -> None: ...


class LogSoftmax(Protocol):
    """Log probabilities [S, V] float32 of logits [S, V] float32."""

    def __call__(self, logits: Array, /) -> Array: ...


class TopK(Protocol):
    """The k largest numbers of each row [S, V], descending, and their places: each [S, k]."""

    def __call__(self, numbers: Array, k: int, /) -> tuple[Array, Array]: ...


class PagedAttention(Protocol):
    """See ``reference.paged_attention``."""

    def __call__(
        self,
        q: Array,
        k: Array | None,
        v: Array | None,
        k_cache: Array,
        v_cache: Array,
        batch: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None = None,
        value_dim: int | None = None,
        causal: bool = True,
    ) -> Array: ...


class FusedLayer(Protocol):
    """The parts of a layer around attention; see ``cpu.layer.CpuLayer``."""

    def pre(self, residual: Array, cos: Array, sin: Array) -> Array: ...

    def post(self, attended: Array, residual: Array, inputs: Array | None = None) -> Array: ...


class FusedStack(Protocol):
    """A whole forward pass; see ``cpu.stack.CpuStack``."""

    def add_rope(
        self, frequencies: Array, scale: float, query_scales: Array | None = None, step: int = 0
    ) -> None: ...

    def add_layer(
        self,
        layer: Any,
        places: tuple[int, int],
        caches: tuple[Array, Array],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None = None,
        causal: bool = True,
    ) -> None: ...

    def run(self, ids: Array, positions: Array, groups: Sequence[AttentionMetadata]) -> Array: ...


class RecurrentStack(FusedStack, Protocol):
    """A whole forward pass with recurrent layers; see ``cpu.stack.CpuStack``."""

    def add_recurrent(self, layer: Any, states: LayerStates) -> None: ...

    def run_recurrent(
        self,
        ids: Array,
        positions: Array,
        groups: Sequence[AttentionMetadata],
        states: StateBatch,
    ) -> Array: ...


class PaddedLane(Protocol):
    """A batch on its way through the layers of a stack, or of a model without one.

    Attention stands apart, so that it can run beside what another batch does between its own.
    """

    def enter(self, layer: int) -> Callable[[], Array]:
        """Compute what precedes attention; return what attends, and gives [T, H, D]."""

    def leave(self, layer: int, attended: Array) -> None:
        """Compute what follows attention."""

    def finish(self) -> Array:
        """Return the normalised hidden states [T, C], after all layers."""


class PaddedStack(FusedStack, Protocol):
    """A whole forward pass that can be captured; see ``triton.stack.TritonStack``."""

    def lane(
        self, ids: Array, positions: Array, groups: Sequence[AttentionMetadata]
    ) -> PaddedLane: ...

    def run_into(
        self,
        ids: Array,
        positions: Array,
        groups: Sequence[AttentionMetadata],
        in_flight: Array,
        out: Array,
    ) -> None: ...


@dataclass(frozen=True)
class Fused:
    """Fused calls: layers as few calls, and the whole model as one.

    Attributes:
        layer: binds a layer to its weights as ``OpTable.pack`` made them.
        stack: made of what precedes and follows the layers.
        described: a readable description of how a model runs if all its layers are bound.
        every_layer: also layers that read another one's KV and those with the extras of Gemma 4
            are bound.
        mixes: recurrent layers are bound, and layers whose MLP has no gate or that have none;
            ``stack`` is a ``RecurrentStack``.
        padded: ``stack`` takes batches with padding and ragged tables; it is a ``PaddedStack``.
        hosted: experts may be ``HostedExperts``.
    """

    layer: Callable[[LayerParts], FusedLayer]
    stack: Callable[[StackParts], FusedStack]
    described: str
    every_layer: bool = False
    mixes: bool = False
    padded: bool = False
    hosted: bool = False


@dataclass(frozen=True)
class PackedMatrices:
    """Packed matrices as bytes that processes share.

    Attributes:
        layout: a name that changes where the bytes of equal weights may.
        mapped: makes a matrix of what its bytes mean, and memory that is only read.
    """

    layout: Callable[[], str]
    mapped: Callable[[PackedForm, memoryview], Weight]


@dataclass(frozen=True)
class OpTable:
    """Every op that a decoder calls, and the name of the implementation behind each."""

    rms_norm: RmsNorm
    whole_norm: WholeNorm
    rope: Rope
    angles: Angles
    act_mul: ActMul
    gate: GateHeads
    linear: Linear
    heads: HeadProducts
    logits: Logits
    softcap: Softcap
    embedding: Embedding
    route: Route
    moe: Moe
    paged_attention: PagedAttention
    process_logits: ProcessLogits
    penalise: Penalise
    sample: Sample
    log_softmax: LogSoftmax
    top_k: TopK
    verify_drafts: VerifyDrafts
    advance: Advance
    lanes: LaneOps  # of steps that can be captured
    pack: Pack
    quantise: Quantise
    # Whether with weights that are stored so; those stored in other ways are ``computed_as``.
    computes: Callable[[Storage], bool]
    fused: Fused | None  # None: layers run op by op
    batch_invariant: bool  # a token's result depends on nothing but its own context
    names: dict[str, str] = field(repr=False)
    ranks: Collectives = ALONE  # those among which the weights are cut
    link: Link = ONE_STAGE  # the stages into which the layers are split
    # None: what ``pack`` makes cannot be kept in files, and it takes no lists of arrays.
    packed: PackedMatrices | None = None
    tuning: Tuning | None = None  # where launches come from, of the ops of ``TUNED``
    isa: str = ""  # the instruction set of native kernels
    delta: BindDelta | None = None  # recurrent layers; None: there is no kernel for them
    conv: BindConv | None = None  # the same of other kinds
    mamba2: BindMamba2 | None = None
    await_answer: AwaitAnswer = await_answer  # of a host that computes experts; can be captured

    @property
    def processes(self) -> int:
        """Processes that compute each step together."""
        return self.ranks.size * self.link.stages

    @property
    def process(self) -> int:
        """The number of this process among them; those of the first stage come first."""
        return self.link.stage * self.ranks.size + self.ranks.rank

    def describe(self) -> dict[str, str]:
        """Return op name -> implementation name, in table order."""
        return dict(self.names)
