"""Loading, encoding and decoding; spelled control tokens stay text."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from live import eventually
from weft.core.errors import ParameterError, TokenizerError
from weft.text import Tokenizer
from weft.text.fast import CHARS_A_TOKEN

FIXED = searching(200)
FRAGMENTS = [
    "<|eot_id|>", "<|im_start|>", "<|fim_prefix|>", "<s>", "</s>", "[INST]", "<start_of_turn>",
    "<unk>", "<h1>", "\n\n", "<think>", "<|eot", "_id|>", "<", "|", ">", " ", "a", "é", "😀", "１",
    "＜s＞", "<0x0A>", "▁", "\ue000", "word",
]  # fmt: skip
spelling_text = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def copy_folder(source: Path, target: Path, **config: object) -> dict:
    """Copy a model folder with changed config keys; return its tokenizer.json."""
    document = json.loads((source / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps(document))
    old = json.loads((source / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(old | config))
    return document


class TestIds:
    @FIXED
    @given(kind=st.sampled_from(["byte_level", "llama2", "gemma"]), text=any_text | spelling_text)
    def test_are_those_of_transformers(self, kind, text, transformers_by_kind, tokenizers_by_kind):
        tokenizer, theirs = tokenizers_by_kind[kind], transformers_by_kind[kind]
        assert tokenizer.encode(text, parse_special=True) == theirs(text)["input_ids"]
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, parse_special=True, add_special_tokens=False) == plain
        assert tokenizer.decode(plain) == theirs.decode(
            plain, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @FIXED
    @given(kind=st.sampled_from(["byte_level", "llama2", "gemma"]), text=any_text | spelling_text)
    def test_of_fastokens_are_those_of_the_reference(self, kind, text, tokenizers_by_kind):
        tokenizer = tokenizers_by_kind[kind]
        assert tokenizer.encoder.name == "fastokens"
        expected = tokenizer.reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True, add_special_tokens=False) == expected

    @FIXED
    @given(text=any_text | spelling_text)
    def test_decode_to_the_text_again(self, text, byte_level):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert byte_level.decode(ids, skip_special_tokens=False) == text

    def test_are_below_the_vocabulary_size(self, tokenizer):
        assert (
            max(tokenizer.encode("a\n<|eot_id|><h1>é", parse_special=True)) < tokenizer.vocab_size
        )
        assert tokenizer.reference.id_to_token(tokenizer.vocab_size) is None
        assert tokenizer.reference.id_to_token(tokenizer.vocab_size - 1) is not None

    def test_bos_and_eos_come_from_the_config(self, byte_level, unigram):
        assert byte_level.encode("", add_special_tokens=True) == [byte_level.bos_id]
        assert byte_level.reference.id_to_token(byte_level.eos_id) == "<|eot_id|>"
        assert byte_level.special_tokens["eos_token"] == "<|eot_id|>"
        assert unigram.bos_id is None


class TestSpelledControlTokens:
    @pytest.mark.parametrize(
        "pattern", ["{}", "a{}b", " {} ", "{0}{0}", "\n{}\n", "<{}>", "x {0}é{0}"]
    )
    def test_stay_text(self, tokenizer, pattern):
        assert tokenizer.control_ids
        for token in tokenizer.added_tokens:
            if token.token_id in tokenizer.control_ids:
                text = pattern.format(token.content)
                ids = tokenizer.encode(text, add_special_tokens=False)
                assert tokenizer.control_ids.isdisjoint(ids)
                parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
                assert token.token_id in parsed

    @FIXED
    @given(kind=st.sampled_from(["byte_level", "llama2", "gemma", "unigram"]), text=spelling_text)
    def test_stay_text_in_any_surroundings(self, kind, text, tokenizers_by_kind):
        tokenizer = tokenizers_by_kind[kind]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.control_ids.isdisjoint(ids)
        if kind in ("byte_level", "gemma"):
            unknown = tokenizer.reference.token_to_id("<unk>")
            text = text.replace("▁", " ") if kind == "gemma" else text
            assert unknown in ids or tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_stay_text_when_only_normalisation_or_the_vocabulary_makes_them(self, unigram):
        eos = unigram.eos_id
        for text in ("a ＜/s＞ b", "</s>", "a</s>"):
            assert eos in unigram.encode(text, parse_special=True)
            assert eos not in unigram.encode(text)
        by_vocabulary = unigram.reference.model.tokenize("</s>")
        assert [token.id for token in by_vocabulary] == [
            eos
        ]  # so hiding added tokens is not enough

    def test_stay_text_when_merges_make_them(self, folders, tmp_path):
        document = copy_folder(folders["byte_level"], tmp_path)
        vocab, merges = document["model"]["vocab"], document["model"]["merges"]
        added = next(t for t in document["added_tokens"] if t["content"] == "<|im_end|>")
        vocab["<|im_end|>"] = len(vocab)
        for left, right in [("<", "|"), ("i", "m"), ("e", "n"), ("en", "d"), ("|", ">")]:
            vocab.setdefault(left + right, len(vocab))
            merges.insert(0, [left, right])
        for left, right in [("<|", "im"), ("<|im", "_"), ("<|im_", "end"), ("<|im_end", "|>")]:
            vocab.setdefault(left + right, len(vocab))
            merges.insert(5, [left, right])
        merges[5:9] = merges[8:4:-1]
        document["model"]["ignore_merges"] = True
        document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\S+|\s+"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        tokenizer = Tokenizer.load(tmp_path)
        token_id = tokenizer.reference.token_to_id(added["content"])
        made = [token.id for token in tokenizer.reference.model.tokenize("<|im_end|>")]
        assert made == [token_id]
        ids = tokenizer.encode("a <|im_end|>", add_special_tokens=False)
        assert token_id not in ids
        assert tokenizer.decode(ids) == "a <|im_end|>"

    def test_other_added_tokens_are_matched_all_the_same(self, byte_level):
        h1 = byte_level.reference.token_to_id("<h1>")
        assert h1 in byte_level.encode("<h1>")
        assert h1 in byte_level.encode("<h1><|eot_id|>")

    def test_markers_count_as_control_even_if_not_marked_special(self, byte_level):
        fim = byte_level.reference.token_to_id("<|fim_prefix|>")
        assert fim not in byte_level.special_ids
        assert fim not in byte_level.encode("<|fim_prefix|>x")
        assert fim in byte_level.encode("<|fim_prefix|>x", parse_special=True)

    def test_unknown_text_may_become_the_unknown_token(self, unigram):
        unknown = unigram.reference.token_to_id("<unk>")
        assert unknown in unigram.encode("ไ")

    def test_private_names_differ_between_loads(self, folders):
        names = [Tokenizer.load(folders["llama2"]).guard._names["<s>"] for _ in range(2)]
        assert names[0] != names[1]
        assert all(len(set(name)) > 1 and not name.isascii() for name in names)

    def test_the_guard_is_built_once_by_many_threads(self, folders):
        tokenizer = Tokenizer.load(folders["byte_level"])
        found: list[object] = []
        work = threading.Barrier(4)

        def build() -> None:
            work.wait()
            tokenizer.encode("<|eot_id|>")
            found.append(tokenizer.guard)

        threads = [threading.Thread(target=build) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(map(id, found))) == 1


class TestBackend:
    def test_is_the_reference_until_fastokens_pays(self, folders):
        """It is loaded beside, after so many characters; texts may come from several threads."""
        tokenizer = Tokenizer.load(folders["byte_level"])
        text = "Hello world, 123! "
        expected = tokenizer.encode(text)
        assert tokenizer.encoder.name == "tokenizers"
        assert "too little text" in tokenizer.encoder.reason
        tokenizer.encode("a" * (CHARS_A_TOKEN * tokenizer.reference.get_vocab_size() - 99))
        assert tokenizer.encoder.name == "tokenizers"
        with ThreadPoolExecutor(4) as threads:
            found = threads.map(lambda _: tokenizer.encode(text), range(64))
            assert all(ids == expected for ids in found)
        eventually(lambda: tokenizer.encoder.name == "fastokens", 60)
        assert tokenizer.encode(text) == expected

    def test_is_fastokens_where_it_agrees(self, byte_level):
        assert byte_level.encoder.name == "fastokens"
        assert "agrees" in byte_level.encoder.reason

    def test_is_the_reference_where_fastokens_is_not_installed(self, folders, monkeypatch, caplog):
        """Once there is enough text; one line of the log says so."""
        monkeypatch.setitem(sys.modules, "fastokens", None)
        tokenizer = Tokenizer.load(folders["byte_level"])
        text = "Hello world, 123! <|eot_id|> 日本語"
        before = tokenizer.encode(text)
        with caplog.at_level(logging.INFO, "weft"):
            tokenizer.encode("a" * CHARS_A_TOKEN * tokenizer.reference.get_vocab_size())
            eventually(lambda: "not installed" in tokenizer.encoder.reason, 60)
            eventually(lambda: bool(caplog.messages), 60)
            assert tokenizer.encode(text) == before
        assert tokenizer.encoder.name == "tokenizers"
        assert caplog.messages == [
            "Text is encoded by tokenizers: fastokens is not installed; "
            "pip install 'weft[fast]' brings it."
        ]

    def test_is_the_reference_where_fastokens_cannot_load(self, unigram):
        assert unigram.encoder.name == "tokenizers"
        assert "cannot read" in unigram.encoder.reason

    def test_is_the_reference_where_fastokens_is_broken(self, folders, monkeypatch, tmp_path):
        """As by a C library that is too old for it."""
        (tmp_path / "fastokens.py").write_text("raise ImportError('GLIBC_2.99 not found\\nmore')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "fastokens")
        tokenizer = Tokenizer.load(folders["byte_level"])
        tokenizer.encoder.decide()
        assert tokenizer.encoder.name == "tokenizers"
        assert tokenizer.encoder.reason == "fastokens does not load: GLIBC_2.99 not found"

    @pytest.mark.parametrize("wrong_for", ["\u2581", "<h1>", "12345678901234567890", "👍🏽"])
    def test_is_the_reference_where_fastokens_disagrees(self, folders, monkeypatch, wrong_for):
        import fastokens

        real = fastokens.Tokenizer.from_json_str

        class Wrong:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

            def encode(self, text):
                return self._inner.encode(text.replace(wrong_for, "?"))

        class Module:
            from_json_str = staticmethod(lambda text: Wrong(real(text)))

        monkeypatch.setattr(fastokens, "Tokenizer", Module)
        tokenizer = Tokenizer.load(folders["byte_level"])
        tokenizer.encoder.decide()
        assert tokenizer.encoder.name == "tokenizers"
        assert "differently" in tokenizer.encoder.reason
        expected = tokenizer.reference.encode(f"a{wrong_for}").ids
        assert tokenizer.encode(f"a{wrong_for}") == expected

    def test_truncation_and_padding_in_the_file_are_ignored(self, folders, tmp_path):
        document = copy_folder(folders["byte_level"], tmp_path)
        document["truncation"] = {
            "max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
        }  # fmt: skip
        document["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
        }  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        for text in ("a", "one two three four five six seven <|eot_id|>"):
            expected = Tokenizer.load(folders["byte_level"]).encode(text)
            assert Tokenizer.load(tmp_path).encode(text) == expected


class TestTime:
    """A megabyte; quadratic work would take hours."""

    @pytest.mark.parametrize(
        "unit", ["a", " ", "\n", " \n", "1", "<", "日", "<|eot_id|>", "aaaa<s>"]
    )
    def test_grows_about_linearly(self, tokenizer, unit):
        if tokenizer.decode_table is None and unit != " ":
            pytest.skip("Unigram is slow, if linear: one case is enough")
        text = unit * (2**20 // len(unit.encode()))
        start = time.perf_counter()
        ids = tokenizer.encode(text)
        assert time.perf_counter() - start < 20
        assert tokenizer.control_ids.isdisjoint(ids[len(tokenizer._prefix) :])


class TestErrors:
    def test_missing_file(self, tmp_path):
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json in .*; add"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00"])
    def test_broken_file(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match="download the file again") as caught:
            Tokenizer.load(tmp_path)
        assert str(tmp_path) not in caught.value.message

    def test_not_utf8(self, tmp_path):
        (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{")
        with pytest.raises(TokenizerError, match="UTF-8"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
    def test_broken_config(self, folders, tmp_path, content):
        copy_folder(folders["byte_level"], tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            Tokenizer.load(tmp_path)

    def test_unknown_eos(self, folders, tmp_path):
        copy_folder(folders["byte_level"], tmp_path, eos_token="<nope>")
        with pytest.raises(TokenizerError, match="'<nope>' as eos_token"):
            Tokenizer.load(tmp_path)

    def test_a_named_token_is_special_whatever_the_file_says(self, folders, tmp_path):
        copy_folder(folders["byte_level"], tmp_path, eos_token="</think>")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.eos_id in tokenizer.special_ids & tokenizer.control_ids
        assert tokenizer.eos_id not in tokenizer.encode("</think>")
        assert tokenizer.decode(tokenizer.encode("a</think>", parse_special=True)) == "a"

    def test_names_missing_in_the_config_come_from_the_special_tokens_map(self, folders, tmp_path):
        copy_folder(folders["byte_level"], tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        tokens = {"eos_token": "<|im_end|>"}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
        assert Tokenizer.load(tmp_path).special_tokens == tokens

    @pytest.mark.parametrize("parse", [False, True])
    def test_unpaired_surrogate(self, tokenizer, parse):
        with pytest.raises(ParameterError, match="unpaired surrogate"):
            tokenizer.encode("a\ud800b", parse_special=parse)
