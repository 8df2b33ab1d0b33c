"""Turns in every form of calls through chat completions, responses and messages, streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai.types.chat as chat
import pytest
from test_api_turns import answer_message, answer_response, updates_of

from weft.api import Builder, ChatBody, ChunkWriter, TokenTexts, chat_job, decode_body
from weft.core.errors import WeftError
from weft.text import ChatTemplate
from weft.text.callwriting import write_calls
from weft.text.detect import choose_dialect
from weft.text.dialect import Dialect
from weft.text.forms import CALL_FORMS

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "days": {"type": "integer"}}}
CALLS = [("look", {"at": 'Par"is\n', "days": 3}), ("look", {"at": "Oslo"})]


def speaking(builder: Any, name: str) -> Builder:
    """The packaged model's builder, as if its turns were in this form."""
    dialect = Dialect.named(name, "harmony" if name == "harmony" else "think")
    return Builder(builder.tokenizer, builder.chat_template, builder.card, dialect=dialect)


def turn_of(name: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """A turn with reasoning, text where the form has some, and calls."""
    form, calls = CALL_FORMS[name], CALLS
    if name == "harmony":
        calls = CALLS[:1]
        said = "".join(
            f"<|channel|>{channel}<|message|>{text}<|end|><|start|>assistant"
            for channel, text in (("analysis", "Hm."), ("commentary", "I look."))
        )
        return said + write_calls(form, calls), calls
    said = "" if form.unmarked else "I look.\n"
    return f"<think>\nHm.\n</think>\n\n{said}{write_calls(form, calls)}", calls


def chunks_of(builder: Builder, turn: str, cut: int) -> list[dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    said = [{"role": "user", "content": "hi"}]
    body = {"model": "builtin", "messages": said, "tools": [tool], "stream": True}
    job = chat_job(decode_body(ChatBody, json.dumps(body).encode()), builder)
    writer = ChunkWriter(job, builder.tokenizer, TokenTexts(builder.tokenizer))
    data = b"".join(writer.push(u)[0] for u in updates_of(job, builder, turn, cut, "stop"))
    lines = (data + writer.last()).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]


@pytest.mark.parametrize("cut", [1, 1000])
@pytest.mark.parametrize("name", CALL_FORMS)
def test_deltas_of_a_chat(builder, name, cut):
    turn, calls = turn_of(name)
    chunks = chunks_of(speaking(builder, name), turn, cut)
    deltas = [chat.ChatCompletionChunk.model_validate(c).choices[0].delta for c in chunks]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    assert (reasoning, content) == ("Hm.", "" if CALL_FORMS[name].unmarked else "I look.")
    made: dict[int, list[Any]] = {}
    for call in [call for delta in deltas for call in delta.tool_calls or ()]:
        if call.index not in made:
            assert call.index == len(made)
            assert call.id
            made[call.index] = [call.function.name, ""]
        made[call.index][1] += call.function.arguments or ""
    assert [(called, json.loads(text)) for called, text in made.values()] == calls
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", CALL_FORMS)
def test_items_of_a_response_and_blocks_of_a_message(builder, name):
    turn, calls = turn_of(name)
    own = speaking(builder, name)
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    whole, events = answer_response(own, turn, tools=tools)
    items = [item for item in whole["output"] if item["type"] == "function_call"]
    assert [(i["name"], json.loads(i["arguments"])) for i in items] == calls
    written = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(written) == "".join(item["arguments"] for item in items)
    assert whole["output"][0]["content"][0]["text"] == "Hm."
    message, _ = answer_message(own, turn, tools=[{"name": "look", "input_schema": SCHEMA}])
    blocks = [block for block in message["content"] if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in blocks] == calls


def test_turns_of_harmony_without_tools_show_no_markup(builder):
    dialect = Dialect.named("harmony", None)
    own = Builder(builder.tokenizer, builder.chat_template, builder.card, dialect=dialect)
    body = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}
    job = chat_job(decode_body(ChatBody, json.dumps(body).encode()), own)
    parser = job.reading.parser()
    events = parser.push("<|channel|>final<|message|>Hi.") + parser.flush()
    assert [event.text for event in events] == ["Hi."]
    grammar = {**body, "guided_json": {"const": 7}}
    job = chat_job(decode_body(ChatBody, json.dumps(grammar).encode()), own)
    assert "final" in job.requests[0].sampling.grammar


def test_efforts_and_arguments_are_as_the_template_takes_them(builder):
    """As gpt-oss's levels, and DeepSeek's templates, which put arguments together as text."""
    source = (
        "Effort {{ reasoning_effort }}. {% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<do>' + c.function.name + '<with>' "
        "+ c.function.arguments + '</do>' }}{% endfor %}{% endfor %}{{ tools }}"
    )
    template = ChatTemplate({"default": source})
    found = choose_dialect(template)
    assert found.text_arguments
    assert found.tools.body == "json"
    harmony = Dialect.named("harmony", "harmony")
    own = Builder(
        builder.tokenizer, template, builder.card, dialect=replace(harmony, text_arguments=True)
    )
    call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": '{"at":"x"}'}}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
    ]
    body = {"model": "builtin", "messages": said, "reasoning_effort": "minimal"}
    job = chat_job(decode_body(ChatBody, json.dumps(body).encode()), own)
    prompt = builder.tokenizer.decode(list(job.requests[0].prompt), skip_special_tokens=False)
    assert 'Effort low. hi<do>look<with>{"at": "x"}</do>warm' in prompt


def test_a_schema_that_a_form_cannot_follow_names_the_parameter(builder):
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "date"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    said = [{"role": "user", "content": "hi"}]
    body = {"model": "builtin", "messages": said, "tools": [tool], "tool_choice": "required"}
    with pytest.raises(
        WeftError, match="'format' cannot be followed in this model's form"
    ) as error:
        chat_job(decode_body(ChatBody, json.dumps(body).encode()), speaking(builder, "glm"))
    assert (error.value.http_status, error.value.param) == (400, "tools")
    assert "function 'look'" in error.value.message
    chat_job(decode_body(ChatBody, json.dumps(body).encode()), speaking(builder, "hermes"))
