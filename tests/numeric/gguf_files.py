"""Writes tokenisers into GGUF files as llama.cpp's converter does."""

from __future__ import annotations

import json
from typing import Any

import gguf
from tokenizers import Tokenizer

TYPES = gguf.TokenType


def add_tokenizer(
    writer: gguf.GGUFWriter, made: Tokenizer, model: str, pre: str, **more: Any
) -> None:
    """Add the metadata of a tokeniser.

    Args:
        model, pre: how llama.cpp calls its kind and its cut.
        more: ``scores`` of SentencePiece; ``ids`` of named tokens; ``template``; ``sampling``.
    """
    document = json.loads(made.to_str())
    added = {token["id"]: token for token in document["added_tokens"]}
    size = made.get_vocab_size()
    tokens = [made.id_to_token(i) for i in range(size)]
    kinds = [TYPES.NORMAL] * size
    for i, token in added.items():
        kinds[i] = TYPES.CONTROL if token["special"] else TYPES.USER_DEFINED
    writer.add_tokenizer_model(model)
    if model == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
        tokens += ["[PAD0]", "[PAD1]"]
        kinds += [TYPES.UNUSED] * 2
    else:
        kinds[0] = TYPES.UNKNOWN
        for i, token in enumerate(tokens):
            if token.startswith("<0x"):
                kinds[i] = TYPES.BYTE
        writer.add_token_scores([more["scores"][token] for token in tokens])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in more.get("ids", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    if "template" in more:
        writer.add_chat_template(more["template"])
    for key, value in more.get("sampling", {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{key}", value)
