"""Model specs as pure data, without torch, so that the scheduler can size the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from weft.core.errors import InvariantError
from weft.kernels.conv import ConvShape
from weft.kernels.delta import DeltaShape
from weft.kernels.mamba2 import Mamba2Shape
from weft.kernels.parts import limited
from weft.kernels.routing import Routing
from weft.models.encoder_spec import DenseSpec, EncoderSpec
from weft.models.quant_config import StoredWeights
from weft.models.vision import VisionSpec


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding: the inverse frequencies and what scales them.

    ``kind`` names the formula: ``default`` (Su et al. 2021), ``linear``, ``llama3``, ``yarn`` (Peng
    et al. 2023), ``longrope`` (Ding et al. 2024), ``proportional`` (Gemma 4), or ``none``, which
    rotates by nothing (NoPE, Kazemnejad et al. 2023).
    """

    kind: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that the formula is built for
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range outward
    dim_factors: tuple[float, ...] = ()  # longrope: one divisor per frequency
    rotated_angles: int = 0  # proportional: frequencies that are not zero
    query_scales: tuple[float, ...] = ()  # of queries by position, the last one from there on
    query_step: int = 0  # positions of each of these


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: sizes, how the router chooses and weighs, and what else there is.

    Shared experts, which every token goes to, are one dense MLP beside the routed ones: that of the
    layer, whose ``LayerSpec.intermediate_size`` is then the width of all shared ones together.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool  # the shares of the chosen experts sum to one
    beside_mlp: bool = False  # Gemma 4: experts run beside the dense MLP, each with its own norms
    scoring: str = "softmax"  # or sigmoid
    correction_bias: bool = False  # e_score_correction_bias: added to what chooses, not to shares
    n_group: int = 1  # groups of experts, of which ``topk_group`` are chosen from
    topk_group: int = 1
    group_best: int = 2  # experts whose weights, added up, rank a group
    routed_scaling_factor: float = 1.0  # multiplies shares
    shared: bool = False  # there are shared experts
    shared_gate: bool = False  # what they give is multiplied by the sigmoid of a product
    router_bias: bool = False
    expert_bias: bool = False  # both products of each expert have a bias

    @property
    def routing(self) -> Routing:
        """How experts are chosen and weighed."""
        return Routing(
            self.top_k,
            self.normalise,
            self.scoring,
            self.n_group,
            self.topk_group,
            self.group_best,
            self.routed_scaling_factor,
        )

    @property
    def has_mlp(self) -> bool:
        """Whether layers with experts have a dense MLP as well."""
        return self.beside_mlp or self.shared


@dataclass(frozen=True)
class GateSpec:
    """A gate of attention's output: a projection of the layer's input, before the output's own.

    Attributes:
        kind: ``sigmoid`` or ``softplus`` (Qiu et al. 2025, Gated Attention for Large Language
            Models).
        by_head: it has one number a head, in place of one for each number of the output.
    """

    kind: str = "sigmoid"
    by_head: bool = False


# All say what a state consists of: ``matrix``, ``kept_inputs`` and ``state_bytes``.
StateShape: TypeAlias = DeltaShape | ConvShape | Mamba2Shape


@dataclass(frozen=True)
class StateSpec:
    """What takes attention's place in a recurrent layer, with its sizes.

    Attributes:
        kind: ``delta``: the gated delta rule behind a short convolution (Yang et al. 2024);
            that of Kimi Linear (2025) where each channel decays by itself. ``conv``: a gated short
            convolution alone (LFM2 2025). ``mamba2``: Mamba-2 (Dao and Gu 2024). The op that
            computes it has this name in the op table.
        time_limits: the least and the largest time step, of Mamba-2.
        gate_rank: of decays by channel: inner size of the two products that give them, and of
            those that give the gates of the output; None: each is one product.
        floor: of decays by channel: see ``DeltaParts.floor``.
    """

    kind: str
    shape: StateShape
    time_limits: tuple[float, float] = (0.0, float("inf"))
    gate_rank: int | None = None
    floor: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the layer's part of a state."""
        return self.shape.state_bytes


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: all heads of a token share one cached row.

    The row has the rotated part of the key and a latent, which are a key of all query heads in the
    absorbed form (DeepSeek-V2 2024, section 2.1 and appendix C); its latent is the value.
    """

    query_rank: int | None  # of the projection of queries; None: it is one matrix
    rank: int  # numbers of the latent
    rotated_dim: int  # numbers of a head that are rotated
    plain_dim: int  # numbers of a query's head that are not
    value_dim: int  # numbers of a head's output
    norm_eps: float = 1e-6  # of the latents' norms, which is not the layers'

    @property
    def query_dim(self) -> int:
        """Numbers of a query's head as it is projected."""
        return self.plain_dim + self.rotated_dim

    @property
    def row_dim(self) -> int:
        """Numbers of a cached row, which are those of an absorbed query's head."""
        return self.rotated_dim + self.rank


@dataclass(frozen=True)
class LayerSpec:
    """The parameters in which layers may differ."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # 0: it has no MLP
    num_heads: int | None = None  # query heads, where they are not the model's
    window: int | None = None  # a query at p sees (p - window, p]; None: everything before it
    rope: int = 0  # index into ModelSpec.ropes
    moe: bool = False
    mlp_limit: float | None = None  # of the activation, also of shared experts; None: it has none
    expert_limit: float | None = None  # the same of routed experts
    kv_source: int | None = None  # the earlier layer whose KV this one reads instead of its own
    value_is_key: bool = False  # V is the K projection before its norm and rotation
    sinks: bool = False  # each query head has a score without a value (Xiao et al. 2023)
    state: StateSpec | None = None  # in place of attention, whose sizes are then without meaning
    plain_input: bool = False  # attention reads the residual without a norm
    stored: tuple[int, int] | None = None  # numbers on disk where its MLP is a layer of its own

    @property
    def has_feed_forward(self) -> bool:
        """Whether an MLP or experts follow what mixes tokens."""
        return self.moe or self.intermediate_size > 0


@dataclass(frozen=True)
class StateGroup:
    """The recurrent layers of a model, of all of which a slot holds the state.

    Attributes:
        layers: their numbers, in the order of a store.
        slot_bytes: of all of them.
    """

    layers: tuple[int, ...]
    slot_bytes: int


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV blocks have the same shape and lifetime, in cache order."""

    name: str
    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_in_key: bool = False  # keys and values are the same arrays

    @property
    def arrays(self) -> int:
        """Arrays of a layer's cache."""
        return 1 if self.value_in_key else 2

    def bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Return the KV bytes of one token over all layers; each row of a head may have a scale."""
        row = self.head_dim * element_bytes + scale_bytes
        return self.arrays * len(self.layers) * self.num_kv_heads * row


@dataclass(frozen=True)
class AttentionParams:
    """Arguments of one layer's ``paged_attention``, and its place in the cache."""

    group: int  # index into ModelSpec.kv_groups
    index: int  # position of the layer's cache within the group
    scale: float
    window: int | None
    softcap: float | None
    value_dim: int | None = None  # of latent attention
    causal: bool = True


@dataclass(frozen=True)
class CheckpointLayout:
    """A family's tensor names on disk.

    ``prefixes`` are tried in order: the one under which the embedding exists is used. Tensors that
    match an ``ignored`` regular expression (full match) are left unread. ``renamed`` maps names of
    ``layout`` to those on disk: of whole tensors or of modules, of a layer or of the model; ``*``
    is the number of an expert.
    """

    prefixes: tuple[str, ...] = ("model.", "")
    layers: str = "layers"  # what is before a layer's number
    fused_qkv: bool = False  # stored as qkv_proj, as in Phi-3
    gate_in_q: bool = False  # q_proj has the rows of each head's gate behind those of its query
    # Inputs of recurrent layers are stored by key head, as Qwen3-Next has them; so are their gates.
    fused_state: bool = False
    fused_state_gates: bool = False
    split_latent: bool = False  # kv_b_proj is stored as two tensors by head, k_b_proj and v_b_proj
    fused_gate_up: bool = False  # stored as gate_up_proj
    stacked_experts: bool = False  # those of a layer are always one tensor
    split_experts: bool = False  # and gates and what they multiply two of them
    transposed_experts: bool = False  # of these tensors floats are stored as [E, inputs, outputs]
    interleaved_experts: bool = False  # and their gates alternate with what they multiply
    split_expert_bias: bool = False  # biases of gates and of what they multiply are two tensors
    correction_row: bool = False  # a correction bias is stored as [1, E]
    rotated_by_pairs: bool = False  # of rows of Q and K neighbours are rotated together
    decay_column: bool = False  # A_log of decays by channel is stored as [1, 1, Hv, 1]
    head_norms: bool = False  # norms of Q and K have a weight for each head
    renamed: Mapping[str, str] = field(default_factory=dict)
    other_mlp: str = ""  # what dense MLPs are called where they are not ``mlp``
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


GroupKey: TypeAlias = tuple[int | None, int, int]  # window, KV heads, head_dim


@dataclass(frozen=True)
class PipelineStage:
    """Which of a model's layers, one after the other, a stage of a pipeline computes.

    Attributes:
        number: of this stage, below ``count``.
        first: the number of its first layer in the whole model.
        total: layers of the whole model.
        groups: all KV groups of the whole model, with their names; of some of them this stage may
            have no layer.
    """

    number: int = 0
    count: int = 1
    first: int = 0
    total: int = 0
    groups: tuple[tuple[str, GroupKey], ...] = ()

    @property
    def embeds(self) -> bool:
        """Whether it begins with the embedding of tokens."""
        return self.number == 0

    @property
    def ends(self) -> bool:
        """Whether it ends with the final norm and the output head."""
        return self.number == self.count - 1


ALL_LAYERS = PipelineStage()


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, or of one that is split into stages the layers of one stage."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    max_position_embeddings: int
    attention_scale: float
    family: str = ""  # the name of its row in ``families``
    activation: str = "silu"  # or gelu_tanh, swiglu_oai; relu2, xielu: of MLPs without a gate
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    norm_centred: bool = False  # LayerNorm: norms subtract the mean first
    parallel_block: bool = False  # the MLP reads the residual that attention reads, not its sum
    pre_norms: bool = True  # norms before attention and before the MLP
    post_norms: bool = False  # norms after attention and after the MLP
    post_norm_eps: float | None = None  # of these; None: ``norm_eps``
    plain_final_norm: bool = False  # it multiplies by its weight, whatever ``norm_plus_one``
    embedding_norm: bool = False  # embeddings are normalised without a weight
    qk_norm: bool = False
    qk_norm_weighted: bool = True  # with weights from the checkpoint
    qk_norm_whole: bool = False  # over all heads of Q and over all of K, in place of one a head
    qk_norm_rotated: bool = False  # after the rotation
    value_norm: bool = False  # V is normalised without a weight
    value_dim: int | None = None  # numbers of a head of V that are not 0; None: all
    value_scale: float = 1.0  # multiplies what has been attended, with ``value_dim``
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: GateSpec | None = None
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and the MLP add to the residual
    logit_scale: float = 1.0
    tied_embeddings: bool = False
    head: str = "tokens"  # or "none"; "score": one number of each state, a classifier's
    encoder: EncoderSpec | None = None
    pooled: str = "last"  # which states make a text's vector: of its last token, "first", or "mean"
    dense: tuple[DenseSpec, ...] = ()  # what pooled states go through; of a classifier to its label
    unit_states: bool = True  # vectors of texts have length 1
    sigmoid_scores: bool = True  # of rerankers, unless a request asks for logits
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None  # how all layers attend, in place of K and V of their heads
    per_layer_input_size: int = 0  # Gemma 4: width of each layer's own token embedding
    per_layer_vocab_size: int = 0
    layer_scalars: bool = False  # Gemma 4: each layer's output is multiplied by a stored number
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # the dtype that the checkpoint states, such as "bfloat16"
    layout: CheckpointLayout = field(default_factory=CheckpointLayout)
    stored_weights: StoredWeights | None = None  # how quantised weights lie in the checkpoint
    stage: PipelineStage = ALL_LAYERS
    vision: VisionSpec | None = None  # the tower for images, where weft computes it
    no_vision: str = ""  # why it does not, of a checkpoint with such a tower

    def heads(self, layer: LayerSpec) -> int:
        """Return the query heads of a layer."""
        return self.num_heads if layer.num_heads is None else layer.num_heads

    def mlp_activation(self, layer: LayerSpec) -> str:
        """Return the activation of a layer's MLP, or of its shared experts."""
        return limited(self.activation, layer.mlp_limit)

    def expert_activation(self, layer: LayerSpec) -> str:
        """Return the activation of a layer's routed experts."""
        return limited(self.activation, layer.expert_limit)

    @property
    def norms_sums(self) -> bool:
        """Whether layers normalise the sums of the residual and what is added to it (BERT)."""
        return self.encoder is not None and not self.pre_norms

    @property
    def vector_size(self) -> int:
        """Numbers of a text's vector."""
        return self.dense[-1].outputs if self.dense else self.hidden_size

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def total_layers(self) -> int:
        """The number of layers of the whole model, of which this may be a stage."""
        return self.stage.total or self.num_layers

    @property
    def rows_exchangeable(self) -> bool:
        """Whether rows of one step may join those of another step between two layers.

        Per-layer token inputs are computed at the start of a step for all its layers, so they rule
        it out, and so do positions of encoders. Latent attention has more to do around the cache
        than other processes know.
        """
        return self.per_layer_input_size == 0 and self.latent is None and self.encoder is None

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers that own KV, grouped by window and shape: full groups before sliding ones.

        A stage has all groups of the whole model, also those that it has no layer of.
        """
        members: dict[tuple[int | None, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.kv_source is None and layer.state is None:
                key = (layer.window, layer.num_kv_heads, layer.head_dim)
                members.setdefault(key, []).append(index)
        if self.stage.groups:
            return tuple(
                KVGroup(name, tuple(members.get(shape, ())), *shape, self.latent is not None)
                for name, shape in self.stage.groups
            )
        groups: list[KVGroup] = []
        for (window, kv_heads, head_dim), layers in sorted(
            members.items(), key=lambda item: (item[0][0] is not None, item[1][0])
        ):
            kind = "full" if window is None else "sliding"
            twins = sum(group.name.startswith(kind) for group in groups)
            name = f"{kind}{twins + 1}" if twins else kind
            shape = (window, kv_heads, head_dim)
            groups.append(KVGroup(name, tuple(layers), *shape, self.latent is not None))
        return tuple(groups)

    @cached_property
    def states(self) -> StateGroup | None:
        """The recurrent layers; None for a model of attention alone."""
        kinds = {i: layer.state for i, layer in enumerate(self.layers) if layer.state is not None}
        if not kinds:
            return None
        return StateGroup(tuple(kinds), sum(kind.bytes for kind in kinds.values()))

    @cached_property
    def _attention(self) -> tuple[AttentionParams | None, ...]:
        place = {
            layer: (group_index, index)
            for group_index, group in enumerate(self.kv_groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(
            None
            if layer.state is not None
            else AttentionParams(
                *place[number if layer.kv_source is None else layer.kv_source],
                scale=self.attention_scale,
                window=layer.window,
                softcap=self.attention_softcap,
                value_dim=None if self.latent is None else self.latent.rank,
                causal=self.encoder is None,
            )
            for number, layer in enumerate(self.layers)
        )

    def attention(self, layer: int) -> AttentionParams:
        """Return the attention parameters and the cache place of one layer that attends."""
        found = self._attention[layer]
        if found is None:
            raise InvariantError(f"layer {layer} is recurrent and does not attend")
        return found
