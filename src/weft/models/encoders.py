"""BERT, RoBERTa, XLM-RoBERTa and ModernBERT: ``config.json`` -> ``ModelSpec``.

They give vectors of texts, or scores of pairs of texts. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from weft.models.config_reader import ConfigReader
from weft.models.encoder_spec import DenseSpec, EncoderSpec
from weft.models.family import FULL, SLIDING, Family, read_common, read_layer_types, read_sizes
from weft.models.pooling import as_encoder
from weft.models.rope_config import read_layer_ropes
from weft.models.spec import CheckpointLayout, ModelSpec, RopeSpec

_NAMES = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_feedforward_layernorm": "output.LayerNorm",
}
_MODERN_NAMES = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "self_attn.qkv_proj": "attn.Wqkv",
    "self_attn.o_proj": "attn.Wo",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "mlp.Wi",
    "mlp.down_proj": "mlp.Wo",
    "norm": "final_norm",
}
# Of training, of other heads, and of what old versions of transformers did.
_UNUSED = """
attention_probs_dropout_prob classifier_activation directionality gradient_checkpointing
output_past pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
pooler_type
"""
_MODERN_UNUSED = """
classifier_activation classifier_bias classifier_pooling cls_token_id decoder_bias
deterministic_flash_attn embedding_dropout gradient_checkpointing initializer_cutoff_factor
layer_norm_eps mlp_dropout position_embedding_type reference_compile repad_logits_with_grad
sparse_pred_ignore_index sparse_prediction
"""
# What other heads have, and what is made of sizes.
_IGNORED = (
    r"(.*\.)?(pooler|cls|lm_head|classifier)\..*",
    r"(.*\.)?embeddings\.(position_ids|token_type_ids)",
)
_MODERN_IGNORED = (r"(head|decoder|classifier)\..*",)


def bert(config: ConfigReader, limit: int | None, first_position: int = 0) -> ModelSpec:
    """BERT: attention in both directions, learned positions, norms of residual sums.

    Args:
        first_position: row of the table of positions that the first token has.
    """
    config.choice("position_embedding_type", "absolute", ("absolute",))
    config.ignore(*_UNUSED.split())
    config.assume(rms_norm_eps=config.number("layer_norm_eps", 1e-12))
    sizes = read_sizes(config, limit)
    rows = sizes.max_position
    if rows <= first_position:
        config.refuse("max_position_embeddings", rows, f"more than {first_position} are needed")
    fields = read_common(config, sizes, known={"gelu": "gelu"})
    fields["max_position_embeddings"] = rows - first_position
    types = config.positive("type_vocab_size", 2)
    spec = ModelSpec(
        layers=(sizes.layer(),) * sizes.layers,
        ropes=(RopeSpec("none", 1.0, 2),),
        attention_scale=sizes.head_dim**-0.5,
        norm_centred=True,
        pre_norms=False,
        post_norms=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layout=CheckpointLayout(
            prefixes=("bert.", "roberta.", ""),
            layers="encoder.layer",
            renamed=_NAMES,
            ignored=_IGNORED,
        ),
        **fields,
    )
    encoder = EncoderSpec(
        rows, first_position, token_types=types, embedding_norm=True, norm_bias=True
    )
    return as_encoder(spec, encoder)


def roberta(config: ConfigReader, limit: int | None) -> ModelSpec:
    """RoBERTa: BERT whose positions begin behind that of padding."""
    config.assume(layer_norm_eps=1e-12)
    padding = config.count("pad_token_id", 1)
    return bert(config, limit, padding + 1)


def modernbert(config: ConfigReader, limit: int | None) -> ModelSpec:
    """ModernBERT: most layers attend to near tokens, two rotary bases, norms before (Warner 2024).

    A query of a local layer sees half of ``local_attention`` tokens in each direction.
    """
    config.assume(max_position_embeddings=8192, hidden_activation="gelu")
    config.assume(rms_norm_eps=config.number("norm_eps", 1e-5))
    config.ignore(*_MODERN_UNUSED.split())
    if config.flag("norm_bias", False):
        config.refuse("norm_bias", True, "norms without biases are")
    sizes = read_sizes(config, limit)
    every = config.positive("global_attn_every_n_layers", 3)
    default = [SLIDING if number % every else FULL for number in range(sizes.layers)]
    kinds = read_layer_types(config, sizes, default)
    window = config.positive("local_attention", 128) // 2 + 1
    bases = {
        FULL: config.number("global_rope_theta", 160_000.0),
        SLIDING: config.number("local_rope_theta", 10_000.0),
    }
    ropes = read_layer_ropes(
        config, {kind: sizes.rope_context(theta=base) for kind, base in bases.items()}
    )
    bias = config.flag("attention_bias", False)
    spec = ModelSpec(
        layers=tuple(
            sizes.layer(
                window=window if kind == SLIDING else None,
                rope=int(kind == SLIDING),
                plain_input=number == 0,
            )
            for number, kind in enumerate(kinds)
        ),
        ropes=(ropes[FULL], ropes[SLIDING]),
        attention_scale=sizes.head_dim**-0.5,
        norm_centred=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        layout=CheckpointLayout(
            fused_qkv=True, fused_gate_up=True, renamed=_MODERN_NAMES, ignored=_MODERN_IGNORED
        ),
        **read_common(config, sizes, activation="hidden_activation", known={"gelu": "geglu"}),
    )
    return as_encoder(spec, EncoderSpec(embedding_norm=True))


def _classifier(spec: ModelSpec, pooled: str, *dense: DenseSpec) -> ModelSpec:
    """An encoder that scores pairs of texts: what its pooled state goes through to one label."""
    return replace(spec, head="score", pooled=pooled, dense=dense, unit_states=False)


def bert_classifier(config: ConfigReader, limit: int | None) -> ModelSpec:
    """A cross encoder: BERT's pooler and one label, of the first token. Its pairs have types."""
    spec = bert(config, limit)
    size, encoder = spec.hidden_size, spec.encoder
    assert encoder is not None
    spec = replace(spec, encoder=replace(encoder, typed_pairs=encoder.token_types > 1))
    pooler = DenseSpec("pooler.dense", size, size, activation="tanh")
    return _classifier(spec, "first", pooler, DenseSpec("classifier", size, 1))


def roberta_classifier(config: ConfigReader, limit: int | None) -> ModelSpec:
    """A cross encoder: two products of RoBERTa's first token."""
    spec = roberta(config, limit)
    size = spec.hidden_size
    first = DenseSpec("classifier.dense", size, size, activation="tanh")
    return _classifier(spec, "first", first, DenseSpec("classifier.out_proj", size, 1))


def modernbert_classifier(config: ConfigReader, limit: int | None) -> ModelSpec:
    """A cross encoder: ModernBERT's prediction head and one label, of the first token or of all."""
    spec = modernbert(config, limit)
    size = spec.hidden_size
    first = DenseSpec(
        "head.dense",
        size,
        size,
        bias=config.flag("classifier_bias", False),
        activation=config.choice("classifier_activation", "gelu", ("gelu",)),
        norm="head.norm",
    )
    pooling = {"cls": "first", "mean": "mean"}
    pooled = pooling[config.choice("classifier_pooling", "cls", pooling)]
    return _classifier(spec, pooled, first, DenseSpec("classifier", size, 1))


ENCODERS = (
    Family(
        "bert",
        "BertModel",
        "bert",
        bert,
        aliases=("BertForMaskedLM",),
        classifier=bert_classifier,
    ),
    Family(
        "roberta",
        "RobertaModel",
        "roberta",
        roberta,
        aliases=("RobertaForMaskedLM",),
        classifier=roberta_classifier,
    ),
    Family(
        "xlm_roberta",
        "XLMRobertaModel",
        "xlm-roberta",
        roberta,
        aliases=("XLMRobertaForMaskedLM",),
        classifier=roberta_classifier,
    ),
    Family(
        "modernbert",
        "ModernBertModel",
        "modernbert",
        modernbert,
        aliases=("ModernBertForMaskedLM",),
        classifier=modernbert_classifier,
    ),
)
