"""Small real tokenisers of the kinds that models use, trained here, and model folders of them."""

from __future__ import annotations

import argparse
import json
import random
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from weft.text import Tokenizer as WeftTokenizer

sys.path.insert(0, str(Path(__file__).parent))

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>", "<h1>"]
SPM_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]


def corpus() -> list[str]:
    """Code, and a few lines in other scripts."""
    code = [Path(module.__file__).read_text() for module in (argparse, typing, random)]
    return [
        *code,
        "日本語のテキスト 안녕하세요 😀👩‍👩‍👧 é ü ñ Привет мир aaaaaaaa        \n\n\n\n",
    ] * 5


def _byte_level() -> Tokenizer:
    """In the manner of Llama 3, with the added tokens of ChatML models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(LLAMA3_SPECIAL)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in QWEN_PLAIN])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return tokenizer


def _sentencepiece(prefix: bool) -> Tokenizer:
    """BPE with byte fallback: in the manner of Llama 2 with ``prefix``, of Gemma without."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), replace] if prefix else [replace]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1300,
        special_tokens=[*SPM_SPECIAL, *fallback],
        limit_alphabet=100,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    document = json.loads(tokenizer.to_str())
    document["pre_tokenizer"] = None
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] in SPM_SPECIAL
    ]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    if not prefix:
        plain = ["\n\n", "\n\n\n", "▁▁", "<h1>", "</h1>"]
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


def _unigram() -> Tokenizer:
    """Unigram with a Metaspace decoder, whose vocabulary contains its control tokens."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus()[-1], corpus()[0][:30_000]], trainer)
    return tokenizer


CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"},
    },
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<s>", "eos_token": "<end_of_turn>", "unk_token": "<unk>"},
    "unigram": {"eos_token": "</s>", "unk_token": "<unk>"},
}
KINDS = list(CONFIGS)
_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "llama2": lambda: _sentencepiece(prefix=True),
    "gemma": lambda: _sentencepiece(prefix=False),
    "unigram": _unigram,
}

WriteFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A model folder for each kind of tokeniser."""
    found = {}
    for kind, make in _MAKERS.items():
        folder = tmp_path_factory.mktemp(kind)
        make().save(str(folder / "tokenizer.json"))
        config = CONFIGS[kind] | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found[kind] = folder
    return found


@pytest.fixture(scope="session")
def tokenizers_by_kind(folders: Mapping[str, Path]) -> Mapping[str, WeftTokenizer]:
    found = {kind: WeftTokenizer.load(folder) for kind, folder in folders.items()}
    for tokenizer in found.values():
        tokenizer.encoder.decide()
    return found


@pytest.fixture(scope="session")
def transformers_by_kind(folders: Mapping[str, Path]) -> Mapping[str, PreTrainedTokenizerFast]:
    return {
        kind: PreTrainedTokenizerFast.from_pretrained(folder) for kind, folder in folders.items()
    }


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tokenizers_by_kind: Mapping[str, WeftTokenizer]
) -> WeftTokenizer:
    """Each kind in turn."""
    return tokenizers_by_kind[request.param]


@pytest.fixture(scope="session")
def byte_level(tokenizers_by_kind: Mapping[str, WeftTokenizer]) -> WeftTokenizer:
    return tokenizers_by_kind["byte_level"]


@pytest.fixture(scope="session")
def llama2(tokenizers_by_kind: Mapping[str, WeftTokenizer]) -> WeftTokenizer:
    return tokenizers_by_kind["llama2"]


@pytest.fixture(scope="session")
def gemma(tokenizers_by_kind: Mapping[str, WeftTokenizer]) -> WeftTokenizer:
    return tokenizers_by_kind["gemma"]


@pytest.fixture(scope="session")
def unigram(tokenizers_by_kind: Mapping[str, WeftTokenizer]) -> WeftTokenizer:
    return tokenizers_by_kind["unigram"]
