"""Reasoning, text and calls as Anthropic's blocks and OpenAI's items, however the turn is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Builder, TokenTexts, decode_body
from weft.api.message_answers import MessageCollector, MessageWriter
from weft.api.message_body import MessageBody
from weft.api.messages import message_job
from weft.api.response_answers import ResponseCollector, ResponseWriter
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_items import read_items
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import FinishReason
from weft.text import ChatTemplate
from weft.text.dialect import Dialect

THOUGHT = "<think>Hm, the tree.</think>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "é"]}}\n</tool_call>'
TURN = f"{THOUGHT}I look.{CALL}{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {}}}


@pytest.fixture(scope="module")
def thinking(builder):
    """The packaged model's builder, as if its turns could think."""
    return Builder(
        builder.tokenizer,
        builder.chat_template,
        builder.card,
        dialect=Dialect.named("hermes", "think"),
    )


def updates_of(job: Any, builder: Any, text: str, cut: int, finish: str) -> list[list[Update]]:
    ids = builder.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    updates = [Update(job.requests[0].id, token) for token in ids]
    updates.append(Update(job.requests[0].id, None, finish=FinishReason(finish)))
    return [updates[i : i + cut] for i in range(0, len(updates), cut)]


def both(collector: Any, writer: Any, batches: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of its stream."""
    data = b""
    for batch in batches:
        collector.push(batch)
        data += writer.push(batch)[0]
    lines = (data + writer.last()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    return json.loads(collector.body()), events


def answer_message(
    builder: Any, turn: str = TURN, cut: int = 1, finish: str = "stop", **more: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and the events of its stream."""
    tools = [{"name": "look", "input_schema": SCHEMA}]
    said = [{"role": "user", "content": "hi"}]
    fields = {"model": "builtin", "max_tokens": 99, "messages": said, "tools": tools, **more}
    job = message_job(decode_body(MessageBody, json.dumps(fields).encode()), builder)
    collector = MessageCollector(job, builder.tokenizer)
    writer = MessageWriter(job, builder.tokenizer)
    return both(collector, writer, updates_of(job, builder, turn, cut, finish))


def answer_response(
    builder: Any, turn: str = TURN, cut: int = 1, finish: str = "stop", **more: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole response, and the events of its stream."""
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    fields = {"model": "builtin", "input": "hi", "tools": tools, **more}
    body = decode_body(ResponseBody, json.dumps(fields).encode())
    job = response_job(body, read_items(body.input), builder)
    texts = TokenTexts(builder.tokenizer)
    collector = ResponseCollector(job, body, builder.tokenizer, texts)
    writer = ResponseWriter(job, body, builder.tokenizer, texts)
    return both(collector, writer, updates_of(job, builder, turn, cut, finish))


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_blocks_of_a_message(thinking, cut):
    whole, events = answer_message(thinking, cut=cut)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = whole["content"]
    assert (thought["thinking"], text["text"]) == ("Hm, the tree.", "I look.")
    assert first["input"] == second["input"] == {"at": [1, "é"]}
    assert first["name"] == "look"
    assert first["id"] != second["id"]
    assert whole["stop_reason"] == "tool_use"
    assert put_together(events) == [
        {**block, "id": None} if "id" in block else block for block in whole["content"]
    ]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that events make; each must be opened, grown and closed in its turn."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            arguments, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1] |= {"input": json.loads(arguments), "id": None}
    assert not is_open
    return blocks


def test_a_call_that_was_cut_short_keeps_its_text(thinking):
    text = '<tool_call>\n{"name": "look", "arguments": {"at": [1'
    whole, _ = answer_message(thinking, text, finish="length")
    [call] = whole["content"]
    assert call["input"] == {"partial_json": '{"at": [1'}
    assert whole["stop_reason"] == "max_tokens"
    whole, _ = answer_response(thinking, text, finish="length")
    [item] = whole["output"]
    assert (item["arguments"], item["status"]) == ('{"at": [1', "incomplete")


EVENTS = {
    "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done"],
    "message": ["content_part.added", "output_text.delta", "output_text.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_items_of_a_response(thinking, valid, cut):
    whole, events = answer_response(thinking, cut=cut)
    valid("Response", whole)
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    thought, said, call, _ = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, the tree."}]
    assert said["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": [1, "é"]})
    details = whole["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["output_tokens"]

    names = []
    for event in events:
        valid("ResponseStreamEvent", event)
        name = event["type"].removeprefix("response.")
        if not names or names[-1] != name or not name.endswith("delta"):
            names.append(name)
    expected = ["created", "in_progress"]
    for kind in kinds:
        closing = [] if kind == "function_call" else ["content_part.done"]
        expected += ["output_item.added", *EVENTS[kind], *closing, "output_item.done"]
    assert names == [*expected, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item.get("content")) for item in items] == [
        (item["type"], item.get("content")) for item in whole["output"]
    ]


def test_a_response_goes_back_as_the_items_of_the_next_request(thinking):
    whole, _ = answer_response(thinking)
    result = {"type": "function_call_output", "output": "a tree"}
    results = [
        {**result, "call_id": item["call_id"]}
        for item in whole["output"]
        if item["type"] == "function_call"
    ]
    asked = {"role": "user", "content": "hi"}
    fields = {"model": "builtin", "input": [asked, *whole["output"], *results]}
    body = decode_body(ResponseBody, json.dumps(fields).encode())
    job = response_job(body, read_items(body.input), thinking)
    prompt = thinking.tokenizer.decode(job.requests[0].prompt, skip_special_tokens=False)
    assert prompt.count("<tool_call>") == prompt.count("<tool_response>") == 2
    assert prompt.index("I look.") < prompt.index("<tool_call>") < prompt.index("a tree")


def test_a_forced_choice_becomes_a_grammar(builder):
    for body, choice in (
        (answer_message, {"type": "any"}),
        (answer_message, {"type": "tool", "name": "look"}),
        (answer_response, "required"),
        (answer_response, {"type": "function", "name": "look"}),
    ):
        whole, _ = body(builder, CALL, tool_choice=choice)
        assert (whole.get("content") or whole["output"])[0]["name"] == "look"
        with pytest.raises(WeftError) as caught:
            body(builder, CALL, tool_choice=choice, tools=[])
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("answer", "fields", "param"),
    [
        (answer_message, {"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        (answer_message, {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        (
            answer_response,
            {"tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named_as_the_endpoint_does(builder, answer, fields, param):
    with pytest.raises(WeftError) as caught:
        answer(builder, **fields)
    assert caught.value.http_status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert "function" not in caught.value.param


def test_thinking_is_turned_off_where_the_template_can(builder):
    thought = "{% if enable_thinking is not false %}<think></think>{% endif %}"
    source = "{{ messages[0]['content'] }}" + thought
    switch = Builder(builder.tokenizer, ChatTemplate({"default": source}), builder.card)
    fields = {"tools": [], "thinking": {"type": "disabled"}}
    on, _ = answer_message(switch, "x", tools=[])
    off, _ = answer_message(switch, "x", **fields)
    assert off["usage"]["input_tokens"] < on["usage"]["input_tokens"]
    answer_message(builder, "x", **fields)  # a model that marks no thinking does none
    always = ChatTemplate({"default": "{{ messages[0]['content'] }}{# </think> #}"})
    body = {"model": "builtin", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    data = json.dumps({**body, **fields}).encode()
    job = message_job(
        decode_body(MessageBody, data), Builder(builder.tokenizer, always, builder.card)
    )
    assert job.constrained_by == "thinking"  # by a budget of no tokens


def test_thinking_is_turned_on_where_the_template_waits_for_it(builder):
    thought = "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    source = "{{ messages[0]['content'] }}" + thought
    switch = Builder(builder.tokenizer, ChatTemplate({"default": source}), builder.card)
    plain, _ = answer_message(switch, "x", tools=[])
    for thinking, more in (
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, False),
    ):
        on, _ = answer_message(switch, "x", tools=[], thinking=thinking)
        assert (on["usage"]["input_tokens"] > plain["usage"]["input_tokens"]) == more
