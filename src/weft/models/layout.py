"""Every parameter of a model: its shape, and the checkpoint tensors that fill it. Torch-free.

The one description serves the loader, the parameter count and the memory estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.kernels.parts import UNGATED
from weft.kernels.storage import GATED, Storage, computed_as
from weft.models.encoder_layout import beside_tokens, dense
from weft.models.latent_layout import latent_up
from weft.models.parameter import Parameter, Piece, Shape, renamed_on_disk, stack, whole
from weft.models.quant_config import GGUF, StoredWeights
from weft.models.shard import WHOLE, Shard, cut, has_mlp
from weft.models.spec import (
    CheckpointLayout,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
)
from weft.models.state_layout import recurrence

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# What ``quantize`` rounds, beside the output head and with it a tied embedding. Everything else
# stays in floats: it is small (norms, biases, routers), or only looked up (an embedding that is not
# tied). An error in the head goes straight into the logits: with int4 it has the smallest groups,
# with fp8 it stays in floats unless ``FP8_HEAD`` is asked for.
ROUNDED = {"qkv", "output", "output_gate", "gate_up", "down", "expert_gate_up", "expert_down"}
ROUNDED |= {"query_up", "up", "expert_up"}
HEAD_GROUP = 32
FP8_HEAD = "fp8-head"  # as ``fp8``, the output head as well
FP8 = Storage(8, None, "float32", format="e4m3")
# Whatever the dtype of the model: it separates close weights, says how fast states decay, or is a
# number that all of an MLP is multiplied with.
KEPT_FLOAT32 = {"correction_bias", "forget_rate", "forget_bias", "activation"}
KEPT_FLOAT32 |= {"dense", "dense_bias", "dense_norm"}  # of single vectors, multiplied on the host
XIELU: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def parameters(spec: ModelSpec, *, stacked_experts: bool = False) -> Iterator[Parameter]:
    """Yield every parameter of the model, or of a stage of it, layer by layer.

    Layers of a stage are numbered from 0; tensors are those of the whole model. A tied embedding is
    that of the first stage and the output head of the last one.

    Args:
        stacked_experts: the checkpoint stores the experts of a layer as one tensor.
    """
    hidden, stage = spec.hidden_size, spec.stage
    renamed = spec.layout.renamed
    if stage.embeds or (stage.ends and spec.tied_embeddings):
        yield whole("embed", embedding_name(spec), (spec.vocab_size, hidden))
    if spec.per_layer_input_size and stage.embeds:
        width = spec.total_layers * spec.per_layer_input_size
        table = (spec.per_layer_vocab_size, width)
        yield whole("per_layer_embed", "embed_tokens_per_layer.weight", table)
        projection = "per_layer_model_projection.weight"
        yield whole("per_layer_projection", projection, (width, hidden))
        norm = "per_layer_projection_norm.weight"
        yield whole("per_layer_norm", norm, (spec.per_layer_input_size,))
    for number, layer in enumerate(spec.layers):
        inside = [
            *_mixer(spec, layer),
            *_norms(spec, layer),
            *_mlp(spec, layer),
            *_experts(spec, layer, stacked_experts),
            *_per_layer_input(spec),
        ]
        for parameter in inside:
            stored = _stored_number(layer, stage.first + number, parameter)
            yield _within_layer(number, stored, parameter, spec.layout)
    if not stage.ends:
        return
    yield from beside_tokens(spec)
    yield from dense(spec)
    if not spec.norms_sums:
        yield whole("norm", renamed_on_disk("norm.weight", renamed), (hidden,))
    if spec.head == "score" and not spec.dense:
        yield whole("score", "score.weight", (1, hidden))
    if not spec.tied_embeddings:
        yield whole("lm_head", "lm_head.weight", (spec.vocab_size, hidden))


def embedding_name(spec: ModelSpec) -> str:
    """Return what the embedding is called on disk, without a prefix."""
    return renamed_on_disk("embed_tokens.weight", spec.layout.renamed)


def num_parameters(spec: ModelSpec) -> int:
    """Return how many numbers the checkpoint holds for this model."""
    pieces = (piece for parameter in parameters(spec) for piece in parameter.pieces)
    shapes = {piece.tensor: piece.shape for piece in pieces}  # one may fill several parameters
    return sum(map(math.prod, shapes.values()))


def storage_of(parameter: str, quantize: str, group: int) -> Storage | None:
    """Return how a parameter is rounded at load, None for one that stays in floats.

    Args:
        parameter: its name; ``lm_head`` for an embedding that the output head is tied to.
        quantize: ``none``, ``fp8``, ``FP8_HEAD`` and ``int8`` (a scale an output), ``int4`` (one
            for ``group`` inputs).
    """
    name = parameter.rpartition(".")[2]
    if quantize == "none" or name not in ROUNDED | {"lm_head"}:
        return None
    if quantize in ("fp8", FP8_HEAD):
        return FP8 if name != "lm_head" or quantize == FP8_HEAD else None
    if quantize == "int8":
        return Storage(8, None)
    return Storage(4, HEAD_GROUP if name == "lm_head" else group)


def weight_bytes(
    spec: ModelSpec,
    dtype: str,
    quantize: str = "none",
    group: int = 0,
    shard: Shard = WHOLE,
    computes: Callable[[Storage], bool] = lambda _: True,
    wanted: Callable[[str], bool] = lambda _: True,
) -> int:
    """Return the bytes of all weights of a rank in memory for a dtype name such as ``bfloat16``.

    Args:
        quantize, group: see ``storage_of``. Of a checkpoint whose weights are stored quantised, all
            those of layers are taken to be.
        computes: with which codes the kernels multiply: weights of others are ``computed_as``.
        wanted: which parameters count, by their names.
    """
    total = 0
    for parameter in cut(parameters(spec), spec, shard):
        if not wanted(parameter.name):
            continue
        tied = parameter.name == "embed" and spec.tied_embeddings
        storage = storage_of("lm_head" if tied else parameter.name, quantize, group)
        if storage is None and spec.stored_weights is not None:
            stored = stored_as(spec.stored_weights, parameter, tied=tied)
            storage = stored and computed_as(stored, computes)
        if storage is None:
            kind = "float32" if is_kept_float32(parameter.name) else dtype
            total += DTYPE_BYTES[kind] * math.prod(parameter.shape)
        else:
            *experts, rows, columns = parameter.shape
            gated = parameter.name.rpartition(".")[2] in GATED
            total += math.prod(experts) * storage.nbytes(rows, columns, gated=gated)
    return total


def is_kept_float32(parameter: str) -> bool:
    """Whether a parameter, by its name, stays in float32 whatever the dtype of the model."""
    return parameter.rpartition(".")[2] in KEPT_FLOAT32


def stored_as(stored: StoredWeights, parameter: Parameter, *, tied: bool = False) -> Storage | None:
    """Return how a parameter is stored whose pieces are quantised, None for one of floats.

    Args:
        tied: it is the embedding that the output head is tied to.
    """
    name = parameter.name.rpartition(".")[2]
    if stored.method == GGUF:
        if name not in ROUNDED | {"lm_head"} and not tied:
            return None
        return stored.common(piece.tensor for piece in parameter.pieces)
    if name not in ROUNDED or (stored.method == "mxfp4" and not name.startswith("expert")):
        return None
    return stored.storage(parameter.shape[-1])


def _within_layer(
    number: int, stored: int, parameter: Parameter, layout: CheckpointLayout
) -> Parameter:
    """The parameter of a layer, and its tensors, which may be those of another number."""
    renamed = layout.renamed

    def name(tensor: str) -> str:
        named = renamed_on_disk(tensor, renamed) if renamed else tensor
        return f"{layout.layers}.{stored}.{named}"

    pieces = tuple(replace(piece, tensor=name(piece.tensor)) for piece in parameter.pieces)
    return Parameter(f"layers.{number}.{parameter.name}", parameter.shape, pieces)


def _stored_number(layer: LayerSpec, number: int, parameter: Parameter) -> int:
    """The number on disk of the layer that has a parameter: a mixer's, or that of its MLP."""
    if layer.stored is None:
        return number
    of_mlp = parameter.name == "mlp_norm" or parameter.pieces[0].tensor.startswith("mlp.")
    return layer.stored[of_mlp]


def _mixer(spec: ModelSpec, layer: LayerSpec) -> Iterator[Parameter]:
    if layer.state is not None:
        return recurrence(spec, layer.state)
    if spec.latent is not None:
        return _latent(spec, spec.latent)
    return _attention(spec, layer)


def _attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Parameter]:
    hidden, dim, heads = spec.hidden_size, layer.head_dim, spec.heads(layer)
    q_rows, kv_rows = heads * dim, layer.num_kv_heads * dim
    parts = [("q_proj", q_rows)]
    if layer.kv_source is None:
        parts.append(("k_proj", kv_rows))
        if not layer.value_is_key:
            parts.append(("v_proj", layer.num_kv_heads * (spec.value_dim or dim)))
    if spec.layout.fused_qkv:
        parts = [("qkv_proj", q_rows + 2 * kv_rows)]
    qkv = _by_halves(spec, layer, stack("qkv", _named("weight", parts), hidden))
    yield _beside_gates(spec, layer, qkv) if spec.layout.gate_in_q else qkv
    if spec.qkv_bias:
        yield _by_halves(spec, layer, stack("qkv_bias", _named("bias", parts)))
    attended = heads * (spec.value_dim or dim)
    yield whole("output", "self_attn.o_proj.weight", (hidden, attended))
    if spec.output_bias:
        yield whole("output_bias", "self_attn.o_proj.bias", (hidden,))
    if spec.output_gate is not None:
        yield _output_gate(spec, layer, heads if spec.output_gate.by_head else q_rows)
    if layer.sinks:
        yield whole("sinks", "self_attn.sinks", (heads,))
    if spec.qk_norm and spec.qk_norm_weighted:
        yield _by_halves(spec, layer, _qk_norm(spec, layer))


def _latent(spec: ModelSpec, latent: LatentSpec) -> Iterator[Parameter]:
    """The parameters of latent attention; ``qkv`` gives queries, or their latent, and the row."""
    hidden, heads, rank = spec.hidden_size, spec.num_heads, latent.rank
    rows = heads * latent.query_dim
    projection = ("q_proj", rows) if latent.query_rank is None else ("q_a_proj", latent.query_rank)
    parts = [projection, ("kv_a_proj_with_mqa", latent.row_dim)]
    yield _turned(spec, latent, stack("qkv", _named("weight", parts), hidden))
    if spec.qkv_bias:
        yield _turned(spec, latent, stack("qkv_bias", _named("bias", parts)))
    if latent.query_rank is not None:
        yield whole("query_norm", "self_attn.q_a_layernorm.weight", (latent.query_rank,))
        up = whole("query_up", "self_attn.q_b_proj.weight", (rows, latent.query_rank))
        yield _turned(spec, latent, up)
    yield whole("latent_norm", "self_attn.kv_a_layernorm.weight", (rank,))
    yield from latent_up(spec, latent)
    yield whole("output", "self_attn.o_proj.weight", (hidden, heads * latent.value_dim))
    if spec.output_bias:
        yield whole("output_bias", "self_attn.o_proj.bias", (hidden,))
    if spec.output_gate is not None:
        yield whole("output_gate", "self_attn.gate_proj.weight", (heads, hidden))


def _named(kind: str, parts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(f"self_attn.{name}.{kind}", rows) for name, rows in parts]


def _turned(spec: ModelSpec, latent: LatentSpec, parameter: Parameter) -> Parameter:
    """Have what is rotated, at the end of a query's head and of the row, in the order of halves."""
    if not spec.layout.rotated_by_pairs:
        return parameter
    sizes = {"kv_a_proj_with_mqa": latent.row_dim, "q_a_proj": None}

    def turned(piece: Piece) -> Piece:
        size = sizes.get(piece.tensor.split(".")[1], latent.query_dim)
        if size is None:
            return piece
        start = size - latent.rotated_dim
        return replace(piece, pairs=(size, latent.rotated_dim), pairs_start=start)

    return replace(parameter, pieces=tuple(map(turned, parameter.pieces)))


def _by_halves(spec: ModelSpec, layer: LayerSpec, parameter: Parameter) -> Parameter:
    """Have the rows of Q and K in the order in which halves of a head are rotated together."""
    if not spec.layout.rotated_by_pairs:
        return parameter
    pairs = (layer.head_dim, spec.ropes[layer.rope].rotary_dim)
    axis = parameter.name == "qk_norm" and spec.layout.head_norms
    pieces = tuple(
        replace(piece, pairs=pairs, axis=int(axis))
        if re.search(r"\.[qk]_(proj|norm)\.", piece.tensor)
        else piece
        for piece in parameter.pieces
    )
    return replace(parameter, pieces=pieces)


def _output_gate(spec: ModelSpec, layer: LayerSpec, rows: int) -> Parameter:
    shape = (rows, spec.hidden_size)
    if not spec.layout.gate_in_q:
        return whole("output_gate", "self_attn.gate_proj.weight", shape)
    return Parameter("output_gate", shape, tuple(_of_q(spec, layer, layer.head_dim)))


def _beside_gates(spec: ModelSpec, layer: LayerSpec, qkv: Parameter) -> Parameter:
    """Have of the tensor of Q the rows of queries only."""
    return replace(qkv, pieces=(*_of_q(spec, layer, 0), *qkv.pieces[1:]))


def _of_q(spec: ModelSpec, layer: LayerSpec, first: int) -> Iterator[Piece]:
    """Yield the rows of queries or of gates, which begin at ``first`` of those of each head."""
    dim = layer.head_dim
    heads = spec.heads(layer)
    shape = (2 * heads * dim, spec.hidden_size)
    for head in range(heads):
        start = 2 * head * dim + first
        part = (slice(start, start + dim),)
        index = (slice(head * dim, (head + 1) * dim),)
        yield Piece("self_attn.q_proj.weight", shape, index, part)


def _qk_norm(spec: ModelSpec, layer: LayerSpec) -> Parameter:
    """Return one norm weight per head, so that Q and K are normalised by one call.

    Where one norm spans all heads of Q and another one those of K, one behind the other.
    """
    if spec.qk_norm_whole:
        counts = (spec.heads(layer), layer.num_kv_heads)
        sizes = [heads * layer.head_dim for heads in counts]
        names = [f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")]
        return stack("qk_norm", list(zip(names, sizes, strict=True)))
    heads, dim = spec.heads(layer), layer.head_dim

    def shape(count: int) -> tuple[int, ...]:
        return (count, dim) if spec.layout.head_norms else (dim,)

    pieces = [Piece("self_attn.q_norm.weight", shape(heads), (slice(0, heads),))]
    if layer.kv_source is None:
        stop = heads + layer.num_kv_heads
        of_keys = shape(layer.num_kv_heads)
        pieces.append(Piece("self_attn.k_norm.weight", of_keys, (slice(heads, stop),)))
        heads = stop
    return Parameter("qk_norm", (heads, layer.head_dim), tuple(pieces))


def _norms(spec: ModelSpec, layer: LayerSpec) -> Iterator[Parameter]:
    names = {}
    if spec.pre_norms:
        before = "pre_feedforward" if spec.post_norms else "post_attention"
        names = {"input_norm": "input_layernorm", "mlp_norm": f"{before}_layernorm"}
    if spec.post_norms:
        names["post_attention_norm"] = "post_attention_layernorm"
        names["post_mlp_norm"] = "post_feedforward_layernorm"
    for name, tensor in names.items():
        if "mlp" in name and not layer.has_feed_forward:
            continue
        if name == "input_norm" and layer.plain_input:
            continue
        yield whole(name, f"{tensor}.weight", (spec.hidden_size,))
        if spec.encoder is not None and spec.encoder.norm_bias:
            yield whole(f"{name}_bias", f"{tensor}.bias", (spec.hidden_size,))


def _mlp(spec: ModelSpec, layer: LayerSpec) -> Iterator[Parameter]:
    if not has_mlp(spec, layer):
        return
    hidden, size = spec.hidden_size, layer.intermediate_size
    parts = [("gate_proj", size), ("up_proj", size)]
    if spec.layout.fused_gate_up:
        parts = [("gate_up_proj", 2 * size)]
    shared = layer.moe and spec.moe is not None and spec.moe.shared
    home = "mlp.shared_experts" if shared else "mlp"
    if spec.activation in UNGATED:
        yield whole("up", f"{home}.up_proj.weight", (size, hidden))
        parts = parts[1:]
    else:
        yield stack("gate_up", [(f"{home}.{name}.weight", rows) for name, rows in parts], hidden)
    yield whole("down", f"{home}.down_proj.weight", (hidden, size))
    if spec.mlp_bias:
        yield stack("gate_up_bias", [(f"{home}.{name}.bias", rows) for name, rows in parts])
        yield whole("down_bias", f"{home}.down_proj.bias", (hidden,))
    if spec.activation == "xielu":
        yield Parameter("activation", (len(XIELU),), tuple(_xielu(home)))


def _xielu(home: str) -> Iterator[Piece]:
    for place, (name, shape) in enumerate(XIELU.items()):
        yield Piece(f"{home}.act_fn.{name}", shape, (slice(place, place + 1),))


def _experts(spec: ModelSpec, layer: LayerSpec, stacked: bool) -> Iterator[Parameter]:
    if not layer.moe or spec.moe is None:
        return
    hidden, count, size = spec.hidden_size, spec.moe.num_experts, spec.moe.intermediate_size
    gate_up, down = (count, 2 * size, hidden), (count, hidden, size)
    home = "experts" if spec.moe.beside_mlp else "mlp.experts"
    if spec.activation in UNGATED:
        yield from _ungated_experts(home, (count, size, hidden), stacked)
    elif stacked or spec.layout.stacked_experts:
        order = _alternating(spec, gate_up)
        flipped = spec.layout.transposed_experts
        pieces = [Piece(f"{home}.gate_up_proj", gate_up, axis=1, pairs=order, transposed=flipped)]
        if spec.layout.split_experts:
            shape, all_of = (count, size, hidden), slice(0, count)
            pieces = [
                Piece(f"{home}.{name}", shape, (all_of, slice(place * size, (place + 1) * size)))
                for place, name in enumerate(("gate_proj", "up_proj"))
            ]
        yield Parameter("expert_gate_up", gate_up, tuple(pieces))
        piece = Piece(f"{home}.down_proj", down, transposed=flipped)
        yield Parameter("expert_down", down, (piece,))
    else:
        yield Parameter("expert_gate_up", gate_up, tuple(_expert_gate_up(home, spec)))
        single = [Piece(f"{home}.{e}.down_proj.weight", down[1:], (e,)) for e in range(count)]
        yield Parameter("expert_down", down, tuple(single))
    if spec.moe.expert_bias:
        order = _alternating(spec, gate_up)
        pieces = [Piece(f"{home}.gate_up_proj_bias", gate_up[:2], axis=1, pairs=order)]
        if spec.layout.split_expert_bias:
            sides = {"gate_proj_bias": slice(0, size), "up_proj_bias": slice(size, 2 * size)}
            pieces = [
                Piece(f"{home}.{name}", (count, size), (slice(0, count), to))
                for name, to in sides.items()
            ]
        yield Parameter("expert_gate_up_bias", gate_up[:2], tuple(pieces))
        yield whole("expert_down_bias", f"{home}.down_proj_bias", down[:2])
    if not spec.moe.beside_mlp:
        yield from _router(spec, spec.moe)
        return
    yield whole("router", "router.proj.weight", (count, hidden))
    yield whole("router_scale", "router.scale", (hidden,))
    yield whole("expert_scale", "router.per_expert_scale", (count,))
    yield whole("dense_post_norm", "post_feedforward_layernorm_1.weight", (hidden,))
    yield whole("expert_norm", "pre_feedforward_layernorm_2.weight", (hidden,))
    yield whole("expert_post_norm", "post_feedforward_layernorm_2.weight", (hidden,))


def _ungated_experts(home: str, shape: Shape, stacked: bool) -> Iterator[Parameter]:
    count, size, hidden = shape
    for name, rows, columns in (("up", size, hidden), ("down", hidden, size)):
        tensor, whole = f"{home}.{{}}{name}_proj", (count, rows, columns)
        pieces = [Piece(tensor.format(""), whole)]
        if not stacked:
            single = [tensor.format(f"{e}.") + ".weight" for e in range(count)]
            pieces = [Piece(one, whole[1:], (e,)) for e, one in enumerate(single)]
        yield Parameter(f"expert_{name}", whole, tuple(pieces))


def _alternating(spec: ModelSpec, shape: Shape) -> tuple[int, int] | None:
    """Return ``Piece.pairs`` of gates that alternate with what they multiply, one head of all."""
    return (shape[1], shape[1]) if spec.layout.interleaved_experts else None


def _router(spec: ModelSpec, moe: MoeSpec) -> Iterator[Parameter]:
    """Yield the router, whose last output is the gate of the shared experts where they have one."""
    rows = [("mlp.gate.weight", moe.num_experts)]
    if moe.shared_gate:
        rows.append(("mlp.shared_expert_gate.weight", 1))
    yield stack("router", rows, spec.hidden_size)
    if moe.router_bias:
        yield whole("router_bias", "mlp.gate.bias", (moe.num_experts,))
    if moe.correction_bias:
        shape = (1, moe.num_experts) if spec.layout.correction_row else (moe.num_experts,)
        piece = Piece("mlp.gate.e_score_correction_bias", shape)
        yield Parameter("correction_bias", (moe.num_experts,), (piece,))


def _expert_gate_up(home: str, spec: ModelSpec) -> Iterator[Piece]:
    assert spec.moe is not None
    size, shape = spec.moe.intermediate_size, (spec.moe.intermediate_size, spec.hidden_size)
    for expert in range(spec.moe.num_experts):
        yield Piece(f"{home}.{expert}.gate_proj.weight", shape, (expert, slice(0, size)))
        yield Piece(f"{home}.{expert}.up_proj.weight", shape, (expert, slice(size, 2 * size)))


def _per_layer_input(spec: ModelSpec) -> Iterator[Parameter]:
    size, hidden = spec.per_layer_input_size, spec.hidden_size
    if size:
        yield whole("input_gate", "per_layer_input_gate.weight", (size, hidden))
        yield whole("input_projection", "per_layer_projection.weight", (hidden, size))
        yield whole("post_input_norm", "post_per_layer_input_norm.weight", (hidden,))
    if spec.layer_scalars:
        yield whole("layer_scalar", "layer_scalar", (1,))
