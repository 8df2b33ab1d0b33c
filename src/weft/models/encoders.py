"""BERT, RoBERTa and XLM-RoBERTa: ``config.json`` -> ``ModelSpec``. They give vectors of texts."""

from __future__ import annotations

from weft.models.config_reader import ConfigReader
from weft.models.family import Family, read_common, read_sizes
from weft.models.spec import CheckpointLayout, EncoderSpec, ModelSpec, RopeSpec

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
# Of training, of other heads, and of what old versions of transformers did.
_UNUSED = """
attention_probs_dropout_prob classifier_activation directionality gradient_checkpointing
output_past pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
pooler_type
"""
# What other heads have, and what is made of sizes.
_IGNORED = (
    r"(.*\.)?(pooler|cls|lm_head|classifier)\..*",
    r"(.*\.)?embeddings\.(position_ids|token_type_ids)",
)


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
    # The token that engines choose behind each text, and pass over, needs no position.
    context = rows - first_position + 1
    fields |= {"max_position_embeddings": context, "tied_embeddings": True}
    return ModelSpec(
        layers=(sizes.layer(),) * sizes.layers,
        ropes=(RopeSpec("none", 1.0, 2),),
        attention_scale=sizes.head_dim**-0.5,
        encoder=EncoderSpec(rows, first_position, config.positive("type_vocab_size", 2)),
        head="none",
        pooled="mean",
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


def roberta(config: ConfigReader, limit: int | None) -> ModelSpec:
    """RoBERTa: BERT whose positions begin behind that of padding."""
    config.assume(layer_norm_eps=1e-12)
    padding = config.count("pad_token_id", 1)
    return bert(config, limit, padding + 1)


ENCODERS = (
    Family("bert", "BertModel", "bert", bert, aliases=("BertForMaskedLM",)),
    Family("roberta", "RobertaModel", "roberta", roberta, aliases=("RobertaForMaskedLM",)),
    Family(
        "xlm_roberta",
        "XLMRobertaModel",
        "xlm-roberta",
        roberta,
        aliases=("XLMRobertaForMaskedLM",),
    ),
)
