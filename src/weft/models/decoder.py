"""One decoder for every family: the spec defines its layers, the executor passes in attention."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from weft.core.errors import InvariantError
from weft.kernels.arrays import (
    Array,
    as_float32,
    concatenate,
    contiguous,
    dtype_name,
    empty,
    from_numpy,
    is_numpy,
    scaled,
    times,
    to_numpy,
    where,
)
from weft.kernels.collectives import ByRows
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.interface import FusedStack, OpTable, RecurrentStack, Weight
from weft.kernels.parts import LayerInputs, StackParts
from weft.models.encoder_parts import dense_layers, token_types
from weft.models.encoder_spec import EncoderSpec
from weft.models.fused import fuse
from weft.models.latent import expand_latent, project_latent
from weft.models.layers import (
    Angles,
    LayerWeights,
    add_per_layer_input,
    biased_norm,
    bind_state,
    feed_forward,
    gated,
    inverse_frequencies,
    pre_norm,
    project_qkv,
    project_state,
    without_padding,
)
from weft.models.shard import Shard, shard_range
from weft.models.spec import AttentionParams, LayerSpec, ModelSpec

Caches = Seq[Seq[Array]]
Placed = tuple[Array, Array]  # places [N] among the tokens, and what stands there [N, C]


class Attend(Protocol):
    """Writes K and V of one layer and attends.

    Given q [T, H, D], k and v [T, Hkv, D] (None where the layer reads another layer's KV), it
    returns the attention output [T, H, D]. Of a recurrent layer it is given what ``mix`` takes, and
    None, and returns what that does.
    """

    def __call__(self, layer: int, q: Array, k: Array | None, v: Array | None) -> Array: ...


class Decoder:
    """A loaded model.

    ``forward`` is the one forward pass; other executors weave the same parts in another order:
    ``embed``, then for each layer ``pre``, attention and ``post``, then ``finish`` and ``logits``.
    Arrays are numpy's or torch's, as the ops of the table take and return them.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Any], ops: OpTable) -> None:
        """Take the parameters, as ``ops`` packed them, by the names of ``layout.parameters``.

        Of a model that is cut, ``spec`` and weights are those of a rank, see ``shard.shard_spec``,
        and of one that is split those of a stage, see ``stages.stage_spec``.
        """
        self.spec = spec
        self.ops = ops
        self.embedding = weights.get("embed")  # [V, C], of the first stage
        self.final_norm: Array = weights.get("norm")  # [C], of the last stage
        self.lm_head = weights.get("embed" if spec.tied_embeddings else "lm_head")  # [V, C]
        self.score: Array | None = weights.get("score")  # [1, C], of a classifier's last stage
        self.layers = tuple(_layer_weights(number, weights) for number in range(spec.num_layers))
        if spec.qk_norm and not spec.qk_norm_weighted:
            self.layers = tuple(
                replace(layer, qk_norm=self._plain_qk_norm(kind))
                for kind, layer in zip(spec.layers, self.layers, strict=True)
            )
        self.embed_positions = weights.get("embed_positions")  # [P, C], of encoders; so are those
        self.embed_types: Array = weights.get("embed_types")  # [K, C]
        self.embed_norm: Array | None = weights.get("embed_norm")  # [C]
        self.embed_norm_bias: Array | None = weights.get("embed_norm_bias")  # [C]
        self.dense = dense_layers(spec, weights)
        self.per_layer_embedding = weights.get("per_layer_embed")  # [V', L * P]
        self.per_layer_projection = weights.get("per_layer_projection")  # [L * P, C]
        self.per_layer_norm = weights.get("per_layer_norm")  # [P]
        self._mixers = tuple(
            bind_state(spec, layer, layer_weights, ops)
            for layer, layer_weights in zip(spec.layers, self.layers, strict=True)
        )
        self._fused = tuple(
            fuse(spec, layer, layer_weights, ops, mixer)
            for layer, layer_weights, mixer in zip(
                spec.layers, self.layers, self._mixers, strict=True
            )
        )
        self._sinks = tuple(
            None if layer.sinks is None else as_float32(layer.sinks) for layer in self.layers
        )
        self._frequencies = tuple(
            from_numpy(self._norm, inverse_frequencies(rope)) for rope in spec.ropes
        )
        self._query_scales = tuple(  # [N] each
            from_numpy(self._norm, np.array(rope.query_scales, np.float32))
            if rope.query_scales
            else None
            for rope in spec.ropes
        )

    @property
    def device(self) -> str:
        """The device of the weights, such as ``cpu`` or ``cuda:0``."""
        return "cpu" if self.on_numpy else str(self._norm.device)

    @property
    def on_numpy(self) -> bool:
        """Whether arrays are numpy's."""
        return is_numpy(self._norm)

    @property
    def dtype(self) -> str:
        """The name of the dtype of weights and hidden states."""
        return dtype_name(self._norm.dtype)

    @property
    def _norm(self) -> Array:
        """A norm [C], which every stage has."""
        first = self.layers[0]
        norms = first.input_norm, first.mlp_norm, first.post_attention_norm
        return next(norm for norm in norms if norm is not None)

    def _plain_qk_norm(self, kind: LayerSpec) -> Array:
        """Weights [H + Hkv, D] that change nothing, for norms of Q and K without any."""
        heads = self.spec.heads(kind) + (0 if kind.kv_source is not None else kind.num_kv_heads)
        weight = empty(self._norm, (heads, kind.head_dim))
        weight[:] = 0.0 if self.spec.norm_plus_one else 1.0
        return weight

    @property
    def _final_plus_one(self) -> bool:
        return self.spec.norm_plus_one and not self.spec.plain_final_norm

    def attention_params(self, layer: int) -> AttentionParams:
        """Return how this layer calls ``paged_attention`` and which group holds its cache."""
        return self.spec.attention(layer)

    def sinks(self, layer: int) -> Array | None:
        """Return the sinks [H] float32 of this layer's query heads, None if it has none."""
        return self._sinks[layer]

    def sink_numbers(self, layer: int) -> tuple[float, ...]:
        """Return the sinks of this layer as numbers, for those who attend elsewhere."""
        found = self._sinks[layer]
        return () if found is None else tuple(to_numpy(found).tolist())

    def forward(
        self, input_ids: Array, positions: Array, attend: Attend, placed: Placed | None = None
    ) -> Array:
        """Run every layer over T tokens.

        Of a model that is split into stages: the layers of this one, from what the stage before has
        sent, and send the result to the next one.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, the place of each token in its own sequence.
            placed: what tokens that stand for images have in place of their embeddings.

        Returns:
            The normalised hidden states [T, C]; before the last stage they are not normalised.
        """
        residual, layer_inputs = self._begin(input_ids, positions)  # [T, C], [L, T, P] or None
        if placed is not None:
            at, rows = placed
            residual[at] = rows
        angles = self.angles(positions)
        for number in range(self.spec.num_layers):
            out = attend(number, *self.pre(number, residual, angles))
            inputs = None if layer_inputs is None else layer_inputs[number]
            residual = self.post(number, out, residual, inputs)
        if self.spec.stage.ends:
            return self.finish(residual)
        self._hand_on(residual, layer_inputs)
        return residual

    def _begin(self, input_ids: Array, positions: Array) -> tuple[Array, Array | None]:
        """The residual [T, C] and per-layer inputs [L, T, P] that the layers begin with."""
        spec = self.spec
        if spec.stage.embeds:
            residual = self.embed(input_ids, positions)
            return residual, self.layer_inputs(input_ids, residual)
        tokens, hidden, size = len(input_ids), spec.hidden_size, spec.per_layer_input_size
        layers = spec.total_layers - spec.stage.first
        width = hidden + layers * size
        rows = self.ops.link.receive(empty(input_ids, (tokens, width), self.dtype))
        if not size:
            return rows, None
        inputs = rows[:, hidden:].reshape(tokens, layers, size).swapaxes(0, 1)
        return contiguous(rows[:, :hidden]), inputs

    def _hand_on(self, residual: Array, layer_inputs: Array | None) -> None:
        """Send the next stage the residual [T, C], and with it the inputs of later layers."""
        if layer_inputs is not None:
            later = layer_inputs[self.spec.num_layers :].swapaxes(0, 1)  # [T, L', P]
            residual = concatenate((residual, later.reshape(len(residual), -1)), 1)
        self.ops.link.send(contiguous(residual))

    def bind(
        self, keys: Caches, values: Caches, states: Mapping[int, LayerStates] | None = None
    ) -> FusedStack | None:
        """Bind the model to an executor's caches, by KV group and layer of the group.

        Args:
            states: by the number of a recurrent layer; a model with any is a ``RecurrentStack``.

        The result's ``run`` is ``forward`` with nothing but paged attention between the layers, and
        gives the very same bits on a CPU. None if there is a layer that does not run as two fused
        calls, which on a CPU are recurrent ones of some kinds, or a recurrent one without states,
        or several processes compute the model.
        """
        if self.ops.fused is None or None in self._fused or self.ops.processes > 1:
            return None
        spec, states = self.spec, states or {}
        if spec.states is not None and not states:
            return None
        inputs = None
        if self.per_layer_embedding is not None:
            assert self.per_layer_norm is not None
            table, projection = self.per_layer_embedding, self.per_layer_projection
            inputs = LayerInputs(table, projection, self.per_layer_norm)
        parts = StackParts(
            self.embedding,
            spec.embedding_scale,
            self._norm if spec.norms_sums else self.final_norm,
            spec.norm_eps,
            self._final_plus_one,
            inputs,
            spec.norm_centred,
            spec.embedding_norm,
            self.embed if spec.encoder is not None else None,
            not spec.norms_sums,
        )
        stack = self.ops.fused.stack(parts)
        ropes = zip(spec.ropes, self._frequencies, self._query_scales, strict=True)
        for rope, frequencies, scales in ropes:
            stack.add_rope(frequencies, rope.attention_factor, scales, rope.query_step)
        for number, (kind, layer) in enumerate(zip(spec.layers, self._fused, strict=True)):
            assert layer is not None
            if kind.state is not None:
                cast("RecurrentStack", stack).add_recurrent(layer, states[number])
                continue
            at = spec.attention(number)
            caches = (keys[at.group][at.index], values[at.group][at.index])
            stack.add_layer(
                layer,
                (kind.rope, at.group),
                caches,
                scale=at.scale,
                window=at.window,
                softcap=at.softcap,
                sinks=self.sinks(number),
                causal=at.causal,
            )
        return stack

    def logits(self, hidden: Array) -> Array:
        """Return float32 logits [S, V] of normalised hidden states [S, C]."""
        logits, ranks = self.ops.logits(hidden, self.lm_head), self.ops.ranks
        if ranks.size > 1:
            vocabulary = self.spec.vocab_size
            most = len(shard_range(vocabulary, Shard(0, ranks.size)))
            missing = empty(logits, (len(logits), most - logits.shape[1]))
            missing[:] = 0.0
            # Samplers take dense rows, which a cut makes of a vocabulary that does not divide.
            logits = contiguous(ranks.gather(concatenate((logits, missing), 1))[:, :vocabulary])
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    def embed(self, input_ids: Array, positions: Array | None = None) -> Array:
        """Return the token embeddings [T, C], scaled where the family scales them.

        Args:
            positions: [T] int64, which encoders need.
        """
        embedded = self._look_up(input_ids, self.embedding, self.spec.vocab_size)
        if self.spec.encoder is not None:
            embedded = self._beside_tokens(self.spec.encoder, embedded, input_ids, positions)
        embedded = scaled(embedded, self.spec.embedding_scale)
        if self.spec.embedding_norm:
            embedded = self.ops.rms_norm(embedded, None, self.spec.norm_eps, False)
        return embedded

    def _beside_tokens(
        self, encoder: EncoderSpec, embedded: Array, ids: Array, positions: Array | None
    ) -> Array:
        """Return embeddings [T, C] with what an encoder adds to them, normalised if it does."""
        if encoder.token_types:
            types = self.embed_types[:1]
            if encoder.typed_pairs:
                types = self.ops.embedding(token_types(ids, positions), self.embed_types)
            embedded = embedded + types
        if encoder.positions:
            assert positions is not None
            places = self.ops.embedding(positions + encoder.first_position, self.embed_positions)
            embedded = embedded + places
        if not encoder.embedding_norm:
            return embedded
        return biased_norm(self.spec, embedded, self.embed_norm, self.embed_norm_bias, self.ops)

    def _look_up(self, ids: Array, table: Weight, size: int) -> Array:
        """Return the rows of ids [T] of a table of so many rows, each of which some rank has."""
        ranks = self.ops.ranks
        if ranks.size == 1:
            return self.ops.embedding(ids, table)
        here = shard_range(size, Shard(ranks.rank, ranks.size))
        missing = (ids < here.start) | (ids >= here.stop)
        rows = self.ops.embedding(where(missing, 0, ids - here.start), table)
        rows[missing] = 0.0
        return ranks.sum(rows)

    def layer_inputs(self, input_ids: Array, embedded: Array) -> Array | None:
        """Return the per-layer inputs [L, T, P] of the tokens, None for a model without them.

        Of the layers of all stages, as only the first one has what they are made of.
        """
        if self.per_layer_embedding is None or self.per_layer_projection is None:
            return None
        spec = self.spec
        shape = (len(input_ids), spec.total_layers, spec.per_layer_input_size)
        tokens = self._look_up(input_ids, self.per_layer_embedding, spec.per_layer_vocab_size)
        tokens = tokens.reshape(shape)  # [T, L, P]
        tokens = scaled(tokens, spec.per_layer_input_size**0.5)
        context = self.ops.linear(embedded, self.per_layer_projection, None).reshape(shape)
        context = times(context, spec.hidden_size**-0.5)
        context = self.ops.rms_norm(context, self.per_layer_norm, spec.norm_eps, spec.norm_plus_one)
        return times(context + tokens, 2.0**-0.5).swapaxes(0, 1)

    def angles(self, positions: Array) -> tuple[Angles, ...]:
        """Return the angles of the positions [T], for each rope of the spec."""
        return tuple(map(partial(self._angles, positions), range(len(self.spec.ropes))))

    def _angles(self, positions: Array, number: int) -> Angles:
        """Cos and sin [T, R] float32, or [T, 2R] with those of queries that are scaled."""
        rope, scales = self.spec.ropes[number], self._query_scales[number]
        angles = self.ops.angles(positions, self._frequencies[number], rope.attention_factor)
        if scales is None:
            return angles
        steps = (positions // rope.query_step).clip(max=len(scales) - 1)
        cos, sin = (concatenate((part, part * scales[steps][:, None]), 1) for part in angles)
        return cos, sin

    def pre(
        self, layer: int, residual: Array, angles: tuple[Angles, ...]
    ) -> tuple[Array, Array | None, Array | None]:
        """Norm, QKV, QK norm and rotation: q [T, H, D], k and v [T, Hkv, D] or None.

        Of a recurrent layer what ``mix`` takes, and None.
        """
        spec, weights, kind = self.spec, self.layers[layer], self.spec.layers[layer]
        if kind.state is not None:
            return (*project_state(spec, kind.state, weights, residual, self.ops), None)
        fused = self._fused[layer]
        if fused is not None:
            qkv = fused.pre(residual, *angles[kind.rope])  # [T, H + 2 Hkv, D]
            if kind.kv_source is not None:
                return qkv, None, None
            heads = spec.heads(kind)
            keys = heads + kind.num_kv_heads
            return qkv[:, :heads], qkv[:, heads:keys], qkv[:, keys:]
        x = pre_norm(spec, residual, weights.input_norm, self.ops)
        if spec.latent is not None:
            return project_latent(spec, weights, x, angles[kind.rope], self.ops)
        return project_qkv(spec, kind, weights, x, angles[kind.rope], self.ops)

    def mix(
        self, layer: int, x: Array, gates: Array | None, states: LayerStates, batch: StateBatch
    ) -> Array:
        """Take the tokens of a recurrent layer through its states: [T, N], or by head.

        Args:
            x, gates: what ``pre`` gave.
            states: those of the layer, by slot.
        """
        mixer = self._mixers[layer]
        if mixer is None:
            raise InvariantError(f"layer {layer} attends and has no states")
        return mixer(x, gates, states, batch)

    def post(
        self, layer: int, attended: Array, residual: Array, inputs: Array | None = None
    ) -> Array:
        """Output projection, MLP and both residual sums: the new residual [T, C].

        Args:
            attended: [T, H, D].
            inputs: [T, P], the layer's own inputs of a model with per-layer inputs.
        """
        fused = self._fused[layer]
        if fused is not None and self.ops.ranks.size == 1:
            return fused.post(attended, residual, inputs)
        spec, ops, weights = self.spec, self.ops, self.layers[layer]
        if ops.ranks.splits(residual):
            ops = replace(ops, ranks=ByRows(ops.ranks))
        if spec.latent is not None and spec.layers[layer].state is None:
            attended = expand_latent(spec, weights, attended, ops)
        attended = without_padding(spec, attended)
        attended = gated(spec, weights, attended, residual, ops)
        y = ops.linear(attended.reshape(len(attended), -1), weights.output, weights.output_bias)
        y = ops.ranks.sum(y)  # [T, C], or a rank's rows of that
        if spec.norms_sums:
            first = weights.post_attention_norm, weights.post_attention_norm_bias
            residual = biased_norm(spec, residual + y, *first, ops)
            y = feed_forward(spec, spec.layers[layer], weights, residual, ops)
            last = weights.post_mlp_norm, weights.post_mlp_norm_bias
            return biased_norm(spec, residual + y, *last, ops)
        if weights.post_attention_norm is not None:
            y = _post_norm(spec, y, weights.post_attention_norm, ops)
        before = ops.ranks.own(residual)
        residual = before + _added(spec, y)
        if not spec.layers[layer].has_feed_forward:
            return ops.ranks.enter(residual)
        read = before if spec.parallel_block else residual
        y = feed_forward(spec, spec.layers[layer], weights, read, ops)
        if weights.post_mlp_norm is not None:
            y = _post_norm(spec, y, weights.post_mlp_norm, ops)
        residual = ops.ranks.enter(residual + _added(spec, y))
        if inputs is not None:
            residual = add_per_layer_input(spec, weights, residual, inputs, ops)
        return residual if weights.layer_scalar is None else residual * weights.layer_scalar

    def finish(self, residual: Array) -> Array:
        """Return the final norm of the residual [T, C], where its layers do not end with it."""
        spec = self.spec
        if spec.norms_sums:
            return residual
        plus_one, centred = self._final_plus_one, spec.norm_centred
        return self.ops.rms_norm(residual, self.final_norm, spec.norm_eps, plus_one, centred)


def _post_norm(spec: ModelSpec, y: Array, weight: Array, ops: OpTable) -> Array:
    """Return the norm after attention or an MLP of y [T, C]."""
    eps = spec.norm_eps if spec.post_norm_eps is None else spec.post_norm_eps
    return ops.rms_norm(y, weight, eps, spec.norm_plus_one)


def _added(spec: ModelSpec, y: Array) -> Array:
    """Return what attention or an MLP adds to the residual [T, C]."""
    return y if spec.residual_scale == 1.0 else times(y, spec.residual_scale)


def _layer_weights(number: int, weights: Mapping[str, Any]) -> LayerWeights:
    prefix = f"layers.{number}."
    names = [field.name for field in fields(LayerWeights)]
    return LayerWeights(**{n: weights[prefix + n] for n in names if prefix + n in weights})
