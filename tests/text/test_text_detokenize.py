"""Incremental detokenisation: equal to the full decode for any ids and any cutting."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from depth import searching
from weft.text import Detokenizer, TextStream, Tokenizer

FIXED = searching(300)
some_ids = st.lists(st.integers(0, 10**6), max_size=24)
some_cuts = st.lists(st.integers(0, 24), max_size=6)
some_text = st.text(max_size=20) | st.sampled_from(["👩‍👩‍👧 日本", "  two", "a\n\nb", "\n", "é<s>"])


def pushed(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]


class TestEqualsTheFullDecode:
    @FIXED
    @given(kind=st.sampled_from(["byte_level", "llama2", "gemma"]), data=st.data())
    def test_for_random_ids(self, kind, data, tokenizers_by_kind):
        tokenizer = tokenizers_by_kind[kind]
        ids = [i % (tokenizer.vocab_size + 3) for i in data.draw(some_ids)]
        self.check(tokenizer, ids, data.draw(some_cuts), data.draw(st.booleans()))

    @FIXED
    @given(kind=st.sampled_from(["llama2", "gemma"]), data=st.data())
    def test_for_runs_of_byte_tokens(self, kind, data, tokenizers_by_kind):
        tokenizer = tokenizers_by_kind[kind]
        assert tokenizer.decode_table is not None
        byte_ids = sorted(tokenizer.decode_table.byte_ids)
        assert len(byte_ids) == 256
        whole = data.draw(st.text(max_size=4)).encode()
        ids = [byte_ids[b] for b in whole] + data.draw(
            st.lists(st.sampled_from([*byte_ids, 1, 2, 270, 280, 300]), max_size=8)
        )
        self.check(tokenizer, ids, data.draw(some_cuts), data.draw(st.booleans()))

    @FIXED
    @given(kind=st.sampled_from(["byte_level", "llama2", "gemma", "unigram"]), data=st.data())
    def test_for_encoded_text(self, kind, data, tokenizers_by_kind):
        tokenizer = tokenizers_by_kind[kind]
        ids = tokenizer.encode(data.draw(some_text), parse_special=data.draw(st.booleans()))
        self.check(tokenizer, ids, data.draw(some_cuts), data.draw(st.booleans()))

    @staticmethod
    def check(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        pieces = pushed(detokenizer, ids, cuts)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) + detokenizer.flush() == whole


@pytest.mark.parametrize("text", ["a 😀 b", "👩‍👩‍👧", "日本語", "naïve"])
def test_no_piece_holds_half_a_character(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in tokenizer.encode(text)]
    joined = "".join(pieces) + detokenizer.flush()
    assert joined == tokenizer.decode(tokenizer.encode(text))
    if tokenizer.decode_table is not None:
        assert joined == text
        assert "\ufffd" not in joined


def test_text_streams_and_is_not_saved_up_for_the_end(tokenizer):
    text = "def parse(self, args): return the arguments of the parser"
    detokenizer = Detokenizer(tokenizer)
    early = "".join(detokenizer.push([i]) for i in tokenizer.encode(text)[:-1])
    assert len(early) >= len(text) * 0.6


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end(byte_level):
    ids = byte_level.encode("é😀", add_special_tokens=False)
    detokenizer = Detokenizer(byte_level)
    cut_ids = ids[:-1]
    assert detokenizer.push(cut_ids) == "é"
    assert detokenizer.flush() == "\ufffd"
    assert byte_level.decode(cut_ids) == "é\ufffd"


def test_only_the_first_space_of_a_llama2_text_is_stripped(llama2):
    ids = llama2.encode("  two words", add_special_tokens=False)
    detokenizer = Detokenizer(llama2)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == "  two words"


def test_special_tokens_are_skipped_or_kept(byte_level):
    ids = byte_level.encode("a<|eot_id|>b", parse_special=True)
    assert Detokenizer(byte_level).push(ids) == "ab"
    kept = Detokenizer(byte_level, skip_special_tokens=False).push(ids)
    assert kept == "<|begin_of_text|>a<|eot_id|>b"


def test_id_to_bytes_joins_to_the_text(byte_level, gemma):
    for tokenizer in (byte_level, gemma):
        text = "x  é😀 日\n\n<h1>"
        table = tokenizer.id_to_bytes
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(table[i] for i in ids) == text.encode()
        assert len(table) == tokenizer.vocab_size


@pytest.mark.parametrize("added", ["<a b>", "é b", "né", "\u00a0x", "\u00ad", "日", "Ġx", "\x85"])
def test_added_tokens_of_any_characters_decode_as_in_the_library(folders, tmp_path, added):
    reference = Reference.from_file(str(folders["byte_level"] / "tokenizer.json"))
    reference.add_tokens([AddedToken(added, normalized=False)])
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode(f"x{added}{added[0]} y")
    assert reference.token_to_id(added) in ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.flush() == reference.decode(ids)


def test_an_unusual_decoder_has_no_table_and_uses_the_library_stream(unigram):
    assert unigram.decode_table is None
    assert unigram.id_to_bytes is None


def test_a_strip_decoder_of_another_shape_is_not_mistaken(folders, tmp_path):
    document = json.loads((folders["llama2"] / "tokenizer.json").read_text())
    document["decoder"]["decoders"][3]["stop"] = 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert Tokenizer.load(tmp_path).decode_table is None


class TestTextStream:
    @FIXED
    @given(
        kind=st.sampled_from(["byte_level", "llama2", "gemma"]),
        text=st.text(alphabet="ab \né😀", max_size=16),
        stops=st.lists(st.text(alphabet="ab \né😀", min_size=1, max_size=3), max_size=3),
        cuts=some_cuts,
        include=st.booleans(),
    )
    @example(kind="llama2", text="a\nb", stops=["\n"], cuts=[], include=False)
    @example(kind="byte_level", text="a😀b", stops=["😀"], cuts=[3], include=True)
    def test_stops_at_the_token_that_completes_the_stop(
        self, kind, text, stops, cuts, include, tokenizers_by_kind
    ):
        tokenizer = tokenizers_by_kind[kind]
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, stops, include_stop=include)
        edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
        deltas = [stream.push(ids[a:b]) for a, b in pairwise(edges)]
        got = "".join(delta for delta, _ in deltas) + stream.flush()
        expected, count, stop = self.naive(tokenizer, ids, stops, include)
        assert (got, stream.token_count, stream.stopped_by) == (expected, count, stop)
        assert deltas[-1][1] == (stop is not None)

    @staticmethod
    def naive(tokenizer, ids, stops, include):
        """Decode every prefix anew; stop at the first that contains a stop string."""
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count])
            hits = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
            if hits:
                end, start, stop = min(hits)
                return text[: end if include else start], count, stop
        return tokenizer.decode(ids), len(ids), None

    def test_ids_after_the_stop_are_not_counted(self, byte_level):
        ids = byte_level.encode("one END two", add_special_tokens=False)
        stream = TextStream(byte_level, ["END"])
        assert stream.push(ids) == ("one ", True)
        assert stream.token_count < len(ids)
        assert "END" in byte_level.decode(ids[: stream.token_count])
        assert "END" not in byte_level.decode(ids[: stream.token_count - 1])
        assert stream.push([5, 6]) == ("", True)
        assert stream.flush() == ""

    def test_without_stops_everything_passes(self, byte_level):
        ids = byte_level.encode("one END two", add_special_tokens=False)
        stream = TextStream(byte_level)
        assert stream.push(ids) == ("one END two", False)
        assert (stream.token_count, stream.stopped_by) == (len(ids), None)


def test_a_continuation_keeps_the_space_that_starts_it(llama2, unigram):
    """Llama-2-like decoders strip the space at the start of a text, not of its continuation."""
    for tokenizer in (llama2, unigram):
        whole = tokenizer.encode("the first line and the second", add_special_tokens=False)
        for cut in range(1, len(whole)):
            continued = Detokenizer(tokenizer, after=whole[:cut])
            text = "".join(continued.push([i]) for i in whole[cut:]) + continued.flush()
            assert tokenizer.decode(whole[:cut]) + text == tokenizer.decode(whole)
        fresh = Detokenizer(tokenizer)
        assert fresh.push(whole) + fresh.flush() == tokenizer.decode(whole)


def test_some_special_tokens_can_be_shown_while_others_are_hidden(tokenizer):
    shown, hidden = sorted(tokenizer.special_ids - {tokenizer.bos_id})[:2]
    words = tokenizer.encode("a word", add_special_tokens=False)
    ids = [hidden, *words, shown, hidden, *words, shown]
    expected = tokenizer.decode([i for i in ids if i != hidden], skip_special_tokens=False)
    for cut in range(len(ids)):
        detokenizer = Detokenizer(tokenizer, shown=frozenset({shown}))
        pieces = [detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:]), detokenizer.flush()]
        assert "".join(pieces) == expected
