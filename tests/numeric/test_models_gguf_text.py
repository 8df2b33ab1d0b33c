"""GGUF files alone: tokeniser, template and sampling defaults are those that went into them."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import add_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as cuts
from tokenizers.processors import TemplateProcessing

from weft.core.errors import TokenizerError
from weft.models.generation import read_generation_defaults
from weft.models.gguf_header import read_header
from weft.models.gguf_pre import PRE_TOKENIZERS
from weft.models.gguf_text import documents, text_folder
from weft.text import ChatTemplate, encode_chat
from weft.text import Tokenizer as WeftTokenizer

TEXTS = [
    "Hello, world! I'm HERE, they'LL see 1234567 things.",
    "  two  spaces\n\n\nand lines\t\ttabs \n ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ok?",
    "日本語のテキスト 안녕하세요 😀👩‍👩‍👧 é ü ñ Привет мир",
    "e\u0301 \ufb01 \u2126 naïve camelCaseXMLHttp",
    "",
    " ",
    "a<|im_end|>b <think>c</think><|im_start|>",
    "!!!???...---***///\\\\\\ ½ ² x=3.14 && y",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def split(pattern: str) -> cuts.PreTokenizer:
    level = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
    return cuts.Sequence([cuts.Split(Regex(pattern), "isolated"), level])


CUTS = {
    "llama-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(QWEN2),
    "smollm": lambda: cuts.Sequence(
        [cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: cuts.ByteLevel(add_prefix_space=False),
}


def corpus() -> list[str]:
    code = [Path(module.__file__).read_text() for module in (argparse, random)]
    return [*code, *TEXTS * 5]


def byte_level(pre: str) -> Tokenizer:
    """A tokeniser as models on the hub have it: trained here, control and plain added tokens."""
    made = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    made.pre_tokenizer, made.decoder = CUTS[pre](), decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = cuts.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus(), trainer)
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>")])
    if pre == "llama-bpe":
        first = made.token_to_id(CONTROL[0])
        made.post_processor = TemplateProcessing(f"{CONTROL[0]} $A", None, [(CONTROL[0], first)])
    return made


def sentencepiece() -> tuple[Tokenizer, dict[str, float]]:
    """In the manner of Llama 2, and the score of each token."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps)
    undone = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undone, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    made.train_from_iterator([text.replace("é", "") for text in corpus()[:2]], trainer)
    document = json.loads(made.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < 3]
    scores = dict.fromkeys(document["model"]["vocab"], 0.0)
    for rank, (left, right) in enumerate(document["model"]["merges"]):
        scores.setdefault(left + right, 0.0)
        scores[left + right] = scores[left + right] or -float(rank + 1)
    made = Tokenizer.from_str(json.dumps(document))
    made.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return made, scores


def write(path: Path, made: Tokenizer, model: str, pre: str, **more: Any) -> None:
    """Write a file that has nothing but a tokeniser."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, made, model, pre, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(found: WeftTokenizer, made: Tokenizer) -> None:
    for text in TEXTS:
        expected = made.encode(text).ids
        assert found.encode(text, parse_special=True) == expected, text
        assert found.decode(expected) == made.decode(expected), text
    table = found.id_to_bytes
    assert table is not None
    assert len(table) == found.vocab_size


@pytest.mark.parametrize("pre", CUTS)
def test_byte_level_ids_are_those_of_the_original(tmp_path, pre) -> None:
    made, path = byte_level(pre), tmp_path / "model.gguf"
    write(path, made, "gpt2", pre, ids={"bos": 0, "eos": 2})
    found = WeftTokenizer.load(text_folder(path))
    same(found, made)
    assert found.special_ids == {0, 1, 2}
    assert found.vocab_size == made.get_vocab_size()
    assert found.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def test_sentencepiece_ids_are_those_of_the_original(tmp_path) -> None:
    made, scores = sentencepiece()
    path = tmp_path / "model.gguf"
    write(path, made, "llama", "", scores=scores)
    found = WeftTokenizer.load(text_folder(path))
    same(found, made)
    assert (found.bos_id, found.eos_id) == (1, 2)


@pytest.mark.parametrize("flag", [True, False])
def test_a_file_says_whether_texts_begin_with_bos(tmp_path, flag) -> None:
    made, path = byte_level("qwen2"), tmp_path / "model.gguf"
    write(path, made, "gpt2", "qwen2", ids={"bos": 0, "eos": 2})
    fields = read_header(path, lists=True).fields | {"tokenizer.ggml.add_bos_token": flag}
    document = documents(fields, path.name)["tokenizer.json"]
    ids = Tokenizer.from_str(json.dumps(document)).encode("Hello").ids
    assert (ids[0] == 0) is flag


def test_template_ends_and_sampling_come_from_the_metadata(tmp_path) -> None:
    made, path = byte_level("qwen2"), tmp_path / "model.gguf"
    more = {"temp": 0.7, "top_k": 20, "top_p": 0.95}
    write(path, made, "gpt2", "qwen2", ids={"bos": 0, "eos": 0}, template=TEMPLATE, sampling=more)
    folder = text_folder(path)
    defaults = read_generation_defaults(folder)
    assert defaults.eos_token_ids == (0, 2)  # <|im_end|> ends a turn by its spelling
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    assert {key: defaults.sampling[key] for key in expected} == expected
    tokenizer, template = WeftTokenizer.load(folder), ChatTemplate.load(folder)
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": "hi <|im_end|>"}])
    assert ids[:2] == [0, 1]
    assert ids.count(2) == 1  # what a message spells is text


def test_several_templates_keep_their_names(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    template = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(path, byte_level("gpt-2"), "gpt2", "gpt-2", template=template)
    assert ChatTemplate.load(text_folder(path)).sources == {"default": "a", "tool_use": "b"}


def test_texts_are_made_once_and_again_when_the_file_changes(tmp_path, cache) -> None:
    path = tmp_path / "model.gguf"
    write(path, byte_level("gpt-2"), "gpt2", "gpt-2")
    first = text_folder(path)
    assert first.is_relative_to(cache)
    before = (first / "tokenizer.json").stat().st_mtime_ns
    assert text_folder(path) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == before
    write(path, byte_level("qwen2"), "gpt2", "qwen2")
    assert text_folder(path) != first


def test_a_tokenizer_beside_the_file_counts_first(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    write(path, byte_level("gpt-2"), "gpt2", "gpt-2")
    (tmp_path / "tokenizer.json").write_text(byte_level("qwen2").to_str())
    assert text_folder(path) == tmp_path
    assert text_folder(tmp_path) == tmp_path


def test_other_tokenisers_are_refused_with_the_remedy(tmp_path) -> None:
    made, path = byte_level("gpt-2"), tmp_path / "model.gguf"
    write(path, made, "gpt2", "gpt-2")
    fields = dict(read_header(path, lists=True).fields)
    cases = [
        ({"tokenizer.ggml.pre": "viking"}, "'viking'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.merges": ["ab"]}, "malformed merge 'ab'"),
        ({"tokenizer.ggml.merges": [3]}, "another form"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "fewer scores"),
    ]
    for changes, words in cases:
        with pytest.raises(TokenizerError, match=f"{words}.*tokenizer.json beside the file"):
            documents(fields | changes, path.name)


def test_every_cut_is_one_that_the_library_takes() -> None:
    for row in PRE_TOKENIZERS.values():
        made = Tokenizer(models.BPE())
        document = json.loads(made.to_str()) | {"pre_tokenizer": row.document()}
        cut = Tokenizer.from_str(json.dumps(document)).pre_tokenizer
        for text in TEXTS:
            pieces = cut.pre_tokenize_str(text)
            assert [span for _, span in pieces] == sorted(span for _, span in pieces)
            assert sum(end - start for _, (start, end) in pieces) == len(text)
