"""Parts of a model that fused kernels are bound to, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.kernels.arrays import Array, dtype_name
from weft.kernels.routing import Routing

UNGATED = ("relu2", "xielu", "gelu")  # activations of MLPs without a gate
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of the activation ``swiglu_oai``
_AT_MOST = "silu<="


def limited(activation: str, limit: float | None) -> str:
    """Return the name of an activation with a limit; None: it has none.

    Raises:
        ValueError: only ``silu`` has one, above 0.
    """
    if limit is None:
        return activation
    if activation != "silu" or not limit > 0:
        raise ValueError(f"{activation} with a limit of {limit}; silu with one above 0 is known")
    return f"{_AT_MOST}{limit!r}"


def limit_of(activation: str) -> float | None:
    """Return the limit of an activation's name, None where it has none."""
    if not activation.startswith(_AT_MOST):
        return None
    return float(activation.removeprefix(_AT_MOST))


@dataclass(frozen=True)
class Norms:
    """Weights of the norms of a layer of hidden size C, None where it has none.

    ``qk_norm`` has one weight per head: [H + Hkv, D], or where a norm spans all heads of Q and one
    those of K [(H + Hkv) * D]. ``router_scale`` is that of the norm of what
    the router reads beside an MLP, which never adds 1.
    """

    input_norm: Array  # [C]
    mlp_norm: Array | None  # [C]
    qk_norm: Array | None
    post_attention_norm: Array | None  # [C]
    post_mlp_norm: Array | None  # [C]
    router_scale: Array | None = None  # [C]
    dense_post_norm: Array | None = None  # [C]
    expert_norm: Array | None = None  # [C]
    expert_post_norm: Array | None = None  # [C]
    post_input_norm: Array | None = None  # [C]


@dataclass(frozen=True)
class Biases:
    """Biases of the products and norms of a layer, None where it has none."""

    qkv_bias: Array | None
    output_bias: Array | None
    gate_up_bias: Array | None  # without a gate that of ``up``
    down_bias: Array | None
    post_attention_norm_bias: Array | None = None  # of norms of sums, as the next one
    post_mlp_norm_bias: Array | None = None


@dataclass(frozen=True)
class LayerShape:
    """A layer's shape and constants, without its weights."""

    heads: int
    kv_heads: int  # 0: the layer reads KV that another one has written
    head_dim: int
    norm_eps: float
    norm_plus_one: bool  # norms multiply by 1 + weight
    activation: str  # see ``reference.act_mul``
    value_is_key: bool = False  # V is the K projection before its norm and rotation
    value_norm: bool = False  # V is normalised without a weight
    value_dim: int | None = None  # numbers of a head of V that are not 0; None: all
    value_scale: float = 1.0  # multiplies what has been attended, with ``value_dim``
    qk_norm_whole: bool = False  # one norm over all heads of Q, and one over those of K
    qk_norm_rotated: bool = False  # Q and K are normalised after their rotation
    residual_scale: float = 1.0  # multiplies what attention and the MLP add
    norm_centred: bool = False  # norms subtract the mean first
    parallel_block: bool = False  # the MLP reads the residual that attention reads
    own_query_angles: bool = False  # angles are [T, 2R]: those of keys, then those of queries
    post_eps: float | None = None  # of norms after attention and the MLP, if not ``norm_eps``
    feeds_forward: bool = True  # an MLP or experts follow attention
    gating: str | None = None  # ``sigmoid`` or ``softplus``, of a gate of attention's output
    norms_sums: bool = False  # norms after attention and the MLP are of sums with the residual


@dataclass(frozen=True)
class RoutedExperts:
    """E experts of a layer, as ``OpTable.pack`` made them, and how a token's are weighed.

    Attributes:
        gate_up: E matrices [2 J, C], gates first.
        down: E matrices [C, J].
        routing: how they are chosen and weighed.
        scale: [E], multiplies shares; None for nothing.
        correction_bias: [E] float32, see ``Routing``; scores are then not rounded from float32.
        router_bias: [E].
        gate_up_bias: [E, 2 J].
        down_bias: [E, C].
        mlp_gate: the router has one more output, by whose sigmoid the MLP beside is multiplied.
        activation: see ``reference.act_mul``.
    """

    gate_up: Any
    down: Any
    routing: Routing
    activation: str
    scale: Array | None = None
    correction_bias: Array | None = None
    router_bias: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None
    mlp_gate: bool = False


@dataclass(frozen=True)
class LatentParts:
    """What latent attention has beside the matrices of a layer (DeepSeek-V2 2024, section 2.1).

    Attributes:
        rotated: numbers of a head, and of the row that all heads share, which are rotated.
        norm_eps: of the norms of latents.
        query_up: matrix [H * (plain + rotated), Q] of the queries' latent; None: they have none.
        query_norm: [Q].
        row_norm: [rank].
        key_up: H matrices [rank, plain].
        value_up: H matrices [value, rank].
    """

    rotated: int
    norm_eps: float
    query_up: Any | None
    query_norm: Array | None
    row_norm: Array
    key_up: Any
    value_up: Any

    def query_rows(self) -> int:
        """Outputs of the product that gives queries, or their latent."""
        if self.query_up is not None:
            return int(self.query_up.shape[1])
        return len(self.key_up) * (int(self.key_up[0].shape[1]) + self.rotated)


@dataclass(frozen=True)
class MixedParts:
    """What takes attention's place in a recurrent layer, as ``OpTable`` bound it.

    Attributes:
        mixer: such as a ``kernels.delta.DeltaLayer``.
        inputs: numbers of a token that it mixes.
        gates: numbers of the gates of its state; 0: it has none.
        projected: numbers that ``qkv`` gives: inputs, and behind all of these gates.
        gate_rows: numbers that ``state_gates`` gives: the first gates, and then the inner ones of
            low-rank products (KDA).
        rank: inner numbers of ``state_gate_up``, which gives the last inputs, and as many of
            ``forget_up``, which gives the last gates; 0: there are none.
    """

    mixer: Any
    inputs: int
    gates: int
    projected: int
    gate_rows: int
    rank: int = 0


@dataclass(frozen=True)
class LayerParts:
    """A layer: its shape and its weights.

    Attributes:
        matrices: ``qkv`` and ``output``; ``output_gate`` of what that reads; ``gate_up`` and
            ``down`` of an MLP, or ``up`` and ``down`` of one without a gate; ``router`` of experts;
            ``input_gate`` and ``input_projection`` of a layer with per-layer inputs;
            ``state_gates`` of a recurrent layer, ``state_gate_up`` and ``forget_up``. A layer may
            have neither MLP nor experts.
        experts: in place of the MLP; beside it as routed ones beside shared ones; or, where what
            the MLP gives has a norm, with norms of their own (Gemma 4).
        scalar: [1], multiplies what leaves the layer.
        activation: [4] float32, the numbers of an activation that has some.
        latent: of a layer with latent attention, whose ``qkv`` gives queries, or their latent, and
            the row that all heads share.
        mixed: of a recurrent layer, whose heads are those that its mixer gives.
    """

    shape: LayerShape
    matrices: Mapping[str, Any]
    norms: Norms
    biases: Biases
    experts: RoutedExperts | None = None
    scalar: Array | None = None
    activation: Array | None = None
    latent: LatentParts | None = None
    mixed: MixedParts | None = None


@dataclass(frozen=True)
class LayerInputs:
    """What gives each token an input of size P to each of L layers (Gemma 4).

    Attributes:
        table: [V', L * P], looked up by token.
        projection: matrix [L * P, C] that the token's embedding is multiplied with.
        norm: [P], the weight of the norm of the product.
    """

    table: Array
    projection: Any
    norm: Array


@dataclass(frozen=True)
class StackParts:
    """What precedes and follows the layers of a model.

    Attributes:
        embedding: [V, C], an array or a packed matrix.
        embedding_scale: multiplies embeddings; rounded to their dtype before.
        norm: [C], the weight of the final norm; ``norm_plus_one`` adds 1 to it, and with
            ``norm_centred`` it subtracts the mean first.
        embedding_norm: embeddings are normalised without a weight.
        embed: gives embeddings [T, C] of ids and positions [T], in place of the above.
        normalises: there is a final norm, else layers end with one.
    """

    embedding: Any
    embedding_scale: float
    norm: Array
    norm_eps: float
    norm_plus_one: bool
    inputs: LayerInputs | None = None
    norm_centred: bool = False
    embedding_norm: bool = False
    embed: Callable[[Array, Array], Array] | None = None
    normalises: bool = True


class Packed(Protocol):
    """A packed matrix: outputs and inputs, and the dtype of the activations it multiplies."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...


def check_parts(parts: LayerParts) -> None:
    """Raise ValueError if a part of a layer is missing or does not fit the others."""
    _check_complete(parts)
    shape, matrices = parts.shape, parts.matrices
    hidden, dtype = matrices["qkv"].shape[1], dtype_name(matrices["qkv"].dtype)
    size = matrices["down"].shape[1] if "down" in matrices else 0
    width = matrices["input_gate"].shape[0] if "input_gate" in matrices else 0
    experts = 0 if parts.experts is None else len(parts.experts.down)
    router = experts + (parts.experts is not None and parts.experts.mlp_gate)
    heads, dim = shape.heads, shape.head_dim
    qkv, attended = (heads + (1 if shape.value_is_key else 2) * shape.kv_heads) * dim, heads * dim
    if shape.value_dim is not None:
        qkv = (heads + shape.kv_heads) * dim + shape.kv_heads * shape.value_dim
        attended = heads * shape.value_dim
    if parts.latent is not None:
        qkv = parts.latent.query_rows() + dim
        attended = heads * int(parts.latent.value_up[0].shape[0])
    if parts.mixed is not None:
        qkv = parts.mixed.projected
    wanted = {
        **_of_states(parts.mixed, hidden),
        "qkv": (qkv, hidden),
        "output": (hidden, attended),
        "output_gate": (_gates(parts), hidden),
        "gate_up": (2 * size, hidden),
        "up": (size, hidden),
        "down": (hidden, size),
        "router": (router, hidden),
        "router_bias": (router,),
        "input_gate": (width, hidden),
        "input_projection": (hidden, width),
        "qkv_bias": (qkv,),
        "output_bias": (hidden,),
        "gate_up_bias": (size if "up" in matrices else 2 * size,),
        "down_bias": (hidden,),
        "qk_norm": (
            ((heads + shape.kv_heads) * dim,)
            if shape.qk_norm_whole
            else (heads + shape.kv_heads, dim)
        ),
        "scalar": (1,),
        "expert_scale": (experts,),
        **{name: (hidden,) for name in vars(parts.norms) if name != "qk_norm"},
        "post_attention_norm_bias": (hidden,),
        "post_mlp_norm_bias": (hidden,),
    }
    given_parts = {**matrices, **vars(parts.norms), **vars(parts.biases), "scalar": parts.scalar}
    if parts.experts is not None:
        parts.experts.routing.check(experts)
        given_parts["expert_scale"] = parts.experts.scale
        given_parts["router_bias"] = parts.experts.router_bias
    for name, given in given_parts.items():
        if given is not None and (
            tuple(given.shape) != wanted[name] or dtype_name(given.dtype) != dtype
        ):
            raise ValueError(
                f"{name} {list(given.shape)} of {given.dtype}: expected {list(wanted[name])} of "
                f"{dtype}"
            )


def _of_states(mixed: MixedParts | None, hidden: int) -> dict[str, tuple[int, int]]:
    """Shapes of the products of the gates of a recurrent layer."""
    if mixed is None:
        return {}
    forgetting = mixed.gates - mixed.gate_rows + 2 * mixed.rank
    return {
        "state_gates": (mixed.gate_rows, hidden),
        "state_gate_up": (mixed.inputs - mixed.projected, mixed.rank),
        "forget_up": (forgetting, mixed.rank),
    }


def _gates(parts: LayerParts) -> int:
    """Outputs of the gate of attention's output: one a head, or one for each of its numbers."""
    heads, gate = parts.shape.heads, parts.matrices.get("output_gate")
    return heads if gate is not None and gate.shape[0] == heads else heads * parts.shape.head_dim


def _check_complete(parts: LayerParts) -> None:
    """Raise ValueError if a part is missing that another one needs."""
    given = {name for name, norm in vars(parts.norms).items() if norm is not None}
    given |= set(parts.matrices)
    given |= {"experts"} if parts.experts is not None else set()
    own_norms = ("router_scale", "dense_post_norm", "expert_norm", "expert_post_norm")
    beside = not given.isdisjoint(own_norms)
    gated, mixed = parts.shape.activation not in UNGATED, parts.mixed
    alone = "experts" not in given and parts.shape.feeds_forward
    of_mlp = "down" in given or alone or beside
    needs = {
        "qkv": True,
        "output": True,
        "output_gate": parts.shape.gating is not None,
        "state_gates": mixed is not None and mixed.gates > 0,
        **dict.fromkeys(("state_gate_up", "forget_up"), mixed is not None and mixed.rank > 0),
        "gate_up": of_mlp and gated,
        "up": of_mlp and not gated,
        "down": "gate_up" in given or "up" in given,
        "router": "experts" in given,
        "experts": "router" in given or beside,
        **dict.fromkeys(own_norms, beside),
        **dict.fromkeys(("input_projection", "post_input_norm"), "input_gate" in given),
    }
    given |= {"numbers of its activation"} if parts.activation is not None else set()
    needs["numbers of its activation"] = parts.shape.activation == "xielu"
    missing = [name for name, needed in needs.items() if needed and name not in given]
    if missing:
        raise ValueError(f"a layer lacks {', '.join(missing)}")
