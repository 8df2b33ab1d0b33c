"""Tokenisers that would take all time or memory: refused, or bounded, before anything is run."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from weft.core.errors import ParameterError, TokenizerError
from weft.text import Tokenizer
from weft.text.control import AddedToken, Scanner
from weft.text.growth import growth
from weft.text.tokenizer import MAX_NORMALISED_CHARS, MAX_VOCAB_SIZE


def replace(sought: str, given: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: sought}, "content": given}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


PREPEND = {"type": "Prepend", "prepend": "▁"}
MODELS = {
    "none": (None, 1),
    "Llama 2": (sequence(PREPEND, replace(" ", "▁")), 2),
    "Gemma": (replace(" ", "▁"), 1),
    "BERT": ({"type": "BertNormalizer", "clean_text": True}, 1),
    "T5": (sequence(replace(" {2,}", "▁", "Regex")), 2),
    "ALBERT": (sequence(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}), 1),
    "many that do not meet": (sequence(*(replace(c, f"<{i}>") for i, c in enumerate("abcdef"))), 3),
}
HOSTILE = {
    "a thousand, four times": sequence(*[replace("x", "x" * 1000)] * 4),
    "by turns": sequence(*[replace("x", "yy"), replace("y", "xx")] * 10),
    "regular expressions": sequence(*[replace("x", "xx", "Regex")] * 10),
    "between all characters": replace("", "x" * 1000),
    "nested sequences": sequence(
        sequence(replace("x", "y" * 30)), sequence(replace("y", "z" * 30))
    ),
    "across another step": sequence(
        replace("x", "Y" * 30), {"type": "Lowercase"}, replace("y", "z" * 30)
    ),
    "put before each stretch": {"type": "Prepend", "prepend": "x" * 1000},
}


@pytest.mark.parametrize("name", MODELS)
def test_growth_of_what_models_have(name):
    section, factor = MODELS[name]
    assert growth(section) == factor


def test_the_growth_is_a_bound():
    draw = random.Random(5)
    for _ in range(300):
        steps = [
            normalizers.Replace(
                "".join(draw.choices("abc", k=draw.randint(1, 2))),
                "".join(draw.choices("abcd", k=draw.randint(0, 3))),
            )
            for _ in range(draw.randint(1, 4))
        ]
        section = json.loads(normalizers.Sequence(steps).__getstate__())
        for text in ("a", "ab", "abcabc", "aabbcc" * 5):
            normalised = normalizers.Sequence(steps).normalize_str(text)
            assert len(normalised) <= growth(section) * len(text)


def changed(folder: Path, tmp_path: Path, **sections: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    document = json.loads((folder / "tokenizer.json").read_text()) | sections
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return tmp_path


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("section", ["normalizer", "decoder"])
def test_hostile_steps_are_refused_before_they_run(folders, tmp_path, name, section):
    steps = json.loads(json.dumps(HOSTILE[name]).replace("normalizers", f"{section}s"))
    folder = changed(folders["byte_level"], tmp_path, **{section: steps})
    with pytest.raises(TokenizerError, match=f"The {section} of tokenizer.json may make a text"):
        Tokenizer.load(folder)


def test_a_text_is_bounded_where_it_may_grow(folders, tmp_path):
    steps = sequence(replace("x", "y" * 16))
    tokenizer = Tokenizer.load(changed(folders["byte_level"], tmp_path, normalizer=steps))
    assert tokenizer.decode(tokenizer.encode("x")) == "y" * 16
    with pytest.raises(ParameterError, match="16 times as long; it takes 262144 characters"):
        tokenizer.encode("x" * (MAX_NORMALISED_CHARS // 16 + 1))


def test_ids_beyond_any_vocabulary_are_refused(folders, tmp_path):
    document = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    document["model"]["vocab"]["beyond"] = MAX_VOCAB_SIZE
    folder = changed(folders["byte_level"], tmp_path, model=document["model"])
    with pytest.raises(TokenizerError, match=f"has the id {MAX_VOCAB_SIZE}; ids up to"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_beyond_any_size_are_not_read(folders, tmp_path, name):
    folder = changed(folders["byte_level"], tmp_path)
    with (folder / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(TokenizerError, match="is longer than"):
        Tokenizer.load(folder)


def with_many_added(folder: Path, tmp_path: Path, count: int) -> Path:
    document = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max(token["id"] for token in document["added_tokens"])
    more = [
        {"id": first + n, "content": f"<|s_{n}|>", "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for n in range(count)
    ]
    return changed(folder, tmp_path, added_tokens=document["added_tokens"] + more)


def test_very_many_added_tokens(folders, tmp_path):
    began = time.process_time()
    tokenizer = Tokenizer.load(with_many_added(folders["byte_level"], tmp_path, 40_000))
    text = "a<|s_39999|><|s_4|>b<|s_40000|>"
    parsed = tokenizer.encode(text, parse_special=True)
    assert [tokenizer.reference.id_to_token(i) for i in parsed if i in tokenizer.control_ids] == [
        "<|begin_of_text|>",
        "<|s_39999|>",
        "<|s_4|>",
    ]
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(text)[1:])
    assert time.process_time() - began < 20  # a second and a half on a free core


def test_too_many_added_tokens_are_refused(folders, tmp_path):
    folder = with_many_added(folders["byte_level"], tmp_path, 300_000)
    with pytest.raises(TokenizerError, match="added tokens; 262144 are supported"):
        Tokenizer.load(folder)


def test_the_scanner_finds_the_longest_of_the_leftmost():
    draw = random.Random(3)
    for _ in range(200):
        words = {"".join(draw.choices("ab<|", k=draw.randint(1, 6))) for _ in range(8)}
        scanner = Scanner(AddedToken(n, word, True) for n, word in enumerate(sorted(words)))
        text = "".join(draw.choices("ab<|", k=60))
        pieces = list(scanner.split(text))
        assert "".join(piece.text for piece in pieces) == text
        assert [p.text for p in pieces if p.token] == spelled(text, words)


def spelled(text: str, words: set[str]) -> list[str]:
    found, at = [], 0
    while at < len(text):
        word = max((w for w in words if text.startswith(w, at)), key=len, default="")
        found += [word] if word else []
        at += len(word) or 1
    return found
