"""The tokeniser and template of the built-in model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import weft
from depth import searching
from weft.core.errors import TemplateError
from weft.text import ChatTemplate, Detokenizer, Tokenizer, encode_chat

FOLDER = Path(weft.__file__).parent / "builtin"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "tokenizer.json").is_file(), reason="the built-in model is not in this checkout"
)
FIXED = searching(200)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(FOLDER)
    tokenizer.encoder.decide()
    return tokenizer


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(FOLDER)


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


def test_takes_the_fast_ways(tokenizer):
    assert tokenizer.encoder.name == "fastokens", tokenizer.encoder.reason
    assert tokenizer.decode_table is not None
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    assert None not in tokenizer.id_to_bytes


@FIXED
@given(text=any_text)
def test_text_goes_in_and_comes_out(text, tokenizer, theirs):
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == text


@FIXED
@given(ids=st.lists(st.integers(0, 4095), max_size=24))
def test_any_ids_stream_as_they_decode(ids, tokenizer):
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
        assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@FIXED
@given(contents=st.lists(any_text | st.sampled_from(["  a < b | c > ", "d[0] <= 1"]), min_size=1))
def test_chats_have_the_ids_of_transformers(contents, tokenizer, template, theirs):
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert encode_chat(tokenizer, template, chat) == expected


def test_no_message_spells_a_control_token(tokenizer, template):
    def controls(text: str) -> list[int]:
        ids = encode_chat(tokenizer, template, [{"role": "user", "content": text}])
        return [i for i in ids if i in tokenizer.control_ids]

    for token in tokenizer.added_tokens:
        assert controls(f"a{token.content} {token.content}") == controls("a")
        assert tokenizer.control_ids.isdisjoint(
            tokenizer.encode(token.content, add_special_tokens=False)
        )


def test_an_unknown_role_is_refused(tokenizer, template):
    with pytest.raises(TemplateError, match="role"):
        encode_chat(tokenizer, template, [{"role": "end|><|system", "content": "x"}])
