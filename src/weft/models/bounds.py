"""Upper bounds for the sizes in a checkpoint, beyond any real model and checked before use.

A config is a few bytes that may ask for any number of layers. Each bound is several times what the
largest known model has, so that a file beyond it is damaged or hostile.
"""

from __future__ import annotations

MOST_INTEGER = 2**31 - 1  # of keys that are not listed below; ids of tokens, too
MOST_NUMBER = 1e30
MOST_LISTED = 2**16  # entries of a list
MOST_LAYER_EXPERTS = 2**16  # experts of all layers together
MOST_HEADER_BYTES = 16 * 2**20  # of a safetensors file
MOST_INDEX_BYTES = 64 * 2**20  # of model.safetensors.index.json
MOST_PACKED_HEADER_BYTES = 64 * 2**20  # of a file of packed weights, which lists each expert

_LAYERS, _WIDTH, _HEADS, _HEAD_DIM = 1024, 2**20, 1024, 4096
_VOCABULARY, _CONTEXT, _EXPERTS = 2**22, 2**27, 4096
_SHARED = 64
MOST: dict[str, int] = {
    # config.json
    "global_head_dim": _HEAD_DIM,
    "head_dim": _HEAD_DIM,
    "hidden_size": _WIDTH,
    "hidden_size_per_layer_input": _WIDTH,
    "intermediate_size": _WIDTH,
    "linear_head_dim": _HEAD_DIM,
    "linear_num_heads": _HEADS,
    "max_position_embeddings": _CONTEXT,
    "moe_intermediate_size": _WIDTH,
    "moe_k": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "moe_num_shared_experts": _SHARED,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": _SHARED,
    "num_nextn_predict_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "num_global_key_value_heads": _HEADS,
    "num_heads": _HEADS,
    "v_head_dim": _HEAD_DIM,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _HEADS,
    "num_local_experts": _EXPERTS,
    "num_shared_experts": _SHARED,
    "original_max_position_embeddings": _CONTEXT,
    "shared_expert_intermediate_size": _WIDTH,
    "shared_intermediate_size": _WIDTH,
    "top_k_experts": _EXPERTS,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    # metadata of GGUF files
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": _HEAD_DIM,
    "block_count": _LAYERS,
    "context_length": _CONTEXT,
    "embedding_length": _WIDTH,
    "feed_forward_length": _WIDTH,
}
