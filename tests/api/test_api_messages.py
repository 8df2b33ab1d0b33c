"""Anthropic's messages: blocks to the equivalent chat, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Notes, decode_body
from weft.api.message_body import MessageBody, PromptBody
from weft.api.messages import chat_fields, count_tokens, message_job
from weft.core.errors import WeftError

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": [1, "ü"]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a tree"}
CALLED = [*HELLO, {"role": "assistant", "content": [CALL]}]
ANSWERED = [{"role": "user", "content": [RESULT]}]


def body_of(**fields: Any) -> MessageBody:
    body = {"model": "builtin", "max_tokens": 5, "messages": HELLO, **fields}
    return decode_body(MessageBody, json.dumps(body).encode())


def test_texts_come_as_strings_or_blocks():
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    blocks = [{"role": "user", "content": [{"type": "text", "text": "a"}, text]}]
    fields = chat_fields(body_of(system=[text, text], messages=blocks))
    assert fields["messages"] == [
        {"role": "system", "content": "b\nb"},
        {"role": "user", "content": "a\nb"},
    ]


def test_calls_and_their_results():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    text = {"type": "text", "text": "I look."}
    failed = {**RESULT, "is_error": True, "content": [{"type": "text", "text": "fog"}]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thinking, text, CALL]},
        {"role": "user", "content": [{"type": "text", "text": "so?"}, RESULT]},
        {"role": "assistant", "content": [{**CALL, "id": "toolu_2"}]},
        {"role": "user", "content": [{**failed, "tool_use_id": "toolu_2"}]},
    ]
    _, first, result, question, second, error = chat_fields(body_of(messages=messages))["messages"]
    assert (first["content"], first["reasoning_content"]) == ("I look.", "hm")
    [call] = first["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("toolu_1", "look")
    assert json.loads(call["function"]["arguments"]) == CALL["input"]
    assert result == {"role": "tool", "tool_call_id": "toolu_1", "content": "a tree"}
    assert question == {"role": "user", "content": "so?"}
    assert second["content"] == ""
    assert error == {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: fog"}


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": False},
            {"type": "function", "function": {"name": "look"}},
            True,
        ),
    ],
)
def test_tools_and_the_choice_of_one(choice, expected, parallel):
    fields = chat_fields(body_of(tools=[{**TOOL, "strict": True}], tool_choice=choice))
    [tool] = fields["tools"]
    assert tool["type"] == "function"
    assert tool["function"]["strict"] is True
    assert json.loads(bytes(tool["function"]["parameters"])) == {"type": "object"}
    assert fields["tool_choice"] == expected
    assert fields.get("parallel_tool_calls") is parallel


def test_the_job(builder):
    job = message_job(body_of(stop_sequences=["x"], temperature=0.5, stream=True), builder)
    [request] = job.requests
    assert job.endpoint == "message"
    assert job.stream
    assert request.sampling.stop == ("x",)
    assert request.sampling.temperature == 0.5
    assert request.sampling.max_tokens == 5


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", None),
        (said({"text": "a"}), "messages[0].content[0].type", "missing_required_parameter"),
        (said("a"), "messages[0].content[0]", "invalid_parameter"),
        (said({"type": "image", "source": {}}), "messages[0].content[0].source.type", None),
        (said({"type": "text", "text": 5}), "messages[0].content[0].text", "invalid_parameter"),
        (said({"type": "text", "txt": "a"}), None, None),
        (said(RESULT), "messages[0].content[0].tool_use_id", "invalid_parameter"),
        (
            {"messages": [*CALLED, {"role": "assistant", "content": "I"}, *ANSWERED]},
            "messages[3].content[0].tool_use_id",
            "invalid_parameter",
        ),
        ({"messages": [*HELLO, *CALLED[-1:]]}, "messages[1]", "invalid_parameter"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
        (said(CALL), "messages[0].content[0].type", "unsupported_parameter"),
        ({"system": [RESULT]}, "system[0].type", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_parameter"),
        ({"temperature": 1.5}, "temperature", "invalid_parameter"),
        ({"top_p": 2}, "top_p", "invalid_parameter"),
        ({"stop_sequences": [""]}, "stop_sequences", "invalid_parameter"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema", "missing_required_parameter"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"mcp_servers": [{}]}, "mcp_servers", "unsupported_parameter"),
        ({"container": "c"}, "container", "unsupported_parameter"),
        ({"service_tier": "fast"}, "service_tier", "invalid_parameter"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ],
)
def test_wrong_bodies_are_named(builder, fields, param, code):
    with pytest.raises(WeftError) as caught:
        message_job(body_of(**fields), builder)
    assert caught.value.http_status == 400
    if param is not None:
        assert caught.value.param == param
    if code is not None:
        assert caught.value.code == code
    assert "max_completion_tokens " not in caught.value.message


PLAIN = {"type": "text", "text": "a"}


def changed(kind: str, **tool: Any) -> dict[str, Any]:
    return {"type": kind, "tool": tool}


def test_messages_add_and_remove_tools():
    reference = {"type": "tool_reference", "name": "look"}
    changes = [
        PLAIN,
        changed("tool_removal", **reference),
        changed("tool_addition", type="tool_definition", definition={**TOOL, "name": "hear"}),
        changed("tool_addition", type="mcp_tool_reference", server_name="s", name="x"),
    ]
    said = [*HELLO, {"role": "system", "content": changes}]
    notes = Notes()
    fields = chat_fields(body_of(tools=[TOOL], messages=said), notes)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["hear"]
    assert fields["messages"][-1]["content"] == (
        "a\n[The tool look can no longer be called.]\n[The tool hear can be called.]"
    )
    assert notes.names == ["messages[].content[]"]
    said += [*HELLO, {"role": "system", "content": [changed("tool_addition", **reference)]}]
    deferred = {**TOOL, "defer_loading": True}
    fields = chat_fields(body_of(tools=[deferred], messages=said))
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["look", "hear"]


def test_a_tool_that_comes_again_is_the_last_one():
    first, last = ({**TOOL, "description": text} for text in ("First.", "Last."))
    changes = [
        PLAIN,
        changed("tool_addition", type="tool_definition", definition=first),
        changed("tool_removal", type="tool_reference", name="look"),
        changed("tool_addition", type="tool_definition", definition=last),
    ]
    said = [*HELLO, {"role": "system", "content": changes}]
    for tools in ([TOOL], None):
        [tool] = chat_fields(body_of(tools=tools, messages=said))["tools"]
        assert tool["function"]["description"] == "Last."


def test_a_system_message_may_be_for_one_turn():
    hint = {"role": "system", "content": "Be kind.", "clear_at": "next_user_message"}
    last = chat_fields(body_of(messages=[*HELLO, hint]))["messages"]
    assert [message["role"] for message in last] == ["user", "system"]
    gone = chat_fields(body_of(messages=[*HELLO, hint, *HELLO]))["messages"]
    assert [message["role"] for message in gone] == ["user", "user"]
    effort = {"role": "system", "output_config": {"effort": "low"}}
    notes = Notes()
    assert len(chat_fields(body_of(messages=[*HELLO, effort]), notes)["messages"]) == 1


def test_what_stands_for_earlier_messages_is_read():
    parts = [{"type": "compaction", "content": "They met.", "signature": "x"}, PLAIN]
    messages = [{"role": "assistant", "content": parts}, *HELLO]
    fields = chat_fields(body_of(messages=messages))
    assert fields["messages"][0] == {"role": "assistant", "content": "They met.\na"}
    theirs = (
        {"type": "mcp_tool_use", "id": "m"},
        {"type": "fallback"},
        {"type": "mcp_tool_listing"},
    )
    notes = Notes()
    given = [*HELLO, {"role": "assistant", "content": [*theirs, PLAIN]}, *HELLO]
    assert chat_fields(body_of(messages=given), notes)["messages"][1]["content"] == "a"
    assert len(notes.names) == len(theirs)


def test_tools_are_named_where_the_request_has_them(builder):
    web = {"type": "web_search_20250305", "name": "web_search"}
    loose = {**TOOL, "input_schema": {"type": "object", "nullable": True}}
    with pytest.raises(WeftError) as caught:
        message_job(body_of(tools=[web, loose], tool_choice={"type": "any"}), builder)
    assert caught.value.param == "tools[1].input_schema"
    assert "'tools[1].input_schema'" in caught.value.message


def test_counts_take_what_changes_no_prompt(builder):
    fields = {"model": "builtin", "messages": HELLO, "compaction": {"type": "compaction"}}
    plain = decode_body(PromptBody, json.dumps(fields).encode())
    assert count_tokens(plain, builder) > 0
    for refused in ({"compaction": {"type": "x"}}, {"thread": {"type": "create"}}):
        with pytest.raises(WeftError) as caught:
            body_of(**refused)
        assert caught.value.code == "unsupported_parameter"
