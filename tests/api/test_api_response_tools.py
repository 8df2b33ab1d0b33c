"""Tools of responses that are no plain functions: namespaces, a client's search, tools to come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from test_api_responses import USER, answer_of, body_of, events_in, messages, stream_of, updates_of

from weft.api import Builder, Job, Notes
from weft.api.response_answers import ResponseCollector, ResponseWriter
from weft.api.response_events import replay
from weft.api.response_items import messages_of, read_items
from weft.api.response_tools import ResponseTools
from weft.core.errors import WeftError

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "text"}}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files of a disk.",
    "tools": [READ, PATCH],
}
WEB = {"type": "web_search"}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
SEARCHED = {
    "type": "tool_search_call",
    "call_id": "s1",
    "execution": "client",
    "arguments": {"query": "files"},
}
FOUND = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [FILES]}


@pytest.fixture(scope="module")
def builder(tokenizer: Any, builder: Any) -> Builder:
    """The packaged model's builder with room for the descriptions of tools."""
    return Builder(tokenizer, builder.chat_template, replace(builder.card, max_model_len=4096))


def called(name: str, arguments: str) -> str:
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def prompt_of(builder: Any, **fields: Any) -> str:
    job, _ = answer_of(builder, ResponseCollector, **fields)
    return str(builder.tokenizer.decode(job.requests[0].prompt))


def test_tools_of_a_namespace_are_functions_with_its_name(builder):
    shown = prompt_of(builder, tools=[WEB, FILES])
    assert '"name": "mcp__files__read"' in shown
    assert '"name": "mcp__files__patch"' in shown
    assert shown.count("Files of a disk.") == 1
    assert "Files of a disk.\\n\\nReads." in shown
    spaced = prompt_of(builder, tools=[{**FILES, "name": "mcp__files__"}])
    assert '"name": "mcp__files__read"' in spaced


@pytest.mark.parametrize(
    ("text", "item"),
    [
        (
            called("mcp__files__read", '{"path": "a"}'),
            {"type": "function_call", "name": "read", "arguments": '{"path": "a"}'},
        ),
        (
            called("mcp__files__patch", '{"input": "+a"}'),
            {"type": "custom_tool_call", "name": "patch", "input": "+a"},
        ),
    ],
)
def test_a_call_of_such_a_tool_names_both(builder, text, item):
    job, writer = answer_of(builder, ResponseWriter, tools=[FILES], stream=True)
    events = stream_of(writer, updates_of(job, builder, text))
    response = events[-1]["response"]
    [shown] = response["output"]
    assert {**item, "namespace": "mcp__files"}.items() <= shown.items()
    added = next(e for e in events if e["type"] == "response.output_item.added")
    assert (added["item"]["name"], added["item"]["namespace"]) == (item["name"], "mcp__files")
    assert json.loads(json.dumps(response["tools"])) == [FILES]
    result = {"type": f"{item['type']}_output", "call_id": shown["call_id"], "output": "ok"}
    given = read_items(body_of(input=[USER, shown, result]).input)
    assert given[1]["namespace"] == "mcp__files"
    [call] = messages_of(given)[1]["tool_calls"]
    assert call["function"]["name"] == f"mcp__files__{item['name']}"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "read"},
        {"type": "function", "name": "read", "namespace": "mcp__files"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read"}],
        },
    ],
)
def test_a_choice_names_a_tool_with_its_namespace_or_without(builder, choice):
    job, _ = answer_of(builder, ResponseCollector, tools=[FILES], tool_choice=choice)
    grammar = job.requests[0].sampling.grammar
    assert "mcp__files__read" in grammar
    assert "mcp__files__patch" not in grammar


def test_a_client_s_search_is_a_function_and_its_call_an_item_of_its_own(builder, valid):
    job, writer = answer_of(builder, ResponseWriter, tools=[SEARCH], stream=True)
    assert '"name": "tool_search"' in builder.tokenizer.decode(job.requests[0].prompt)
    call = called("tool_search", '{"query": "files"}')
    updates = updates_of(job, builder, call)
    data = b"".join(writer.push([update])[0] for update in updates) + writer.last()
    events = events_in(data)
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "files"}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:] == ["output_item.added", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, done = (event["item"] for event in events[2:4])
    assert (added["arguments"], added["status"]) == ({}, "in_progress")
    assert done == item
    valid("Response", events[-1]["response"])
    assert events_in(replay(writer.body(), writer.cuts()))[2:4] == events[2:4]


def test_tools_that_a_search_has_found_can_be_called(builder):
    given = [USER, SEARCHED, FOUND]
    shown = prompt_of(builder, tools=[SEARCH], input=given)
    assert '"name": "mcp__files__read"' in shown
    _, turn, result = messages(*given)
    [call] = turn["tool_calls"]
    assert call["function"] == {"name": "tool_search", "arguments": '{"query": "files"}'}
    text = "These tools can be called now: mcp__files__read, mcp__files__patch."
    assert result == {"role": "tool", "tool_call_id": "s1", "content": text}
    assert messages(USER, SEARCHED, {**FOUND, "tools": []})[-1]["content"] == "No tool was found."
    again = [*given, {**SEARCHED, "call_id": "s2"}, {**FOUND, "call_id": "s2"}]
    assert prompt_of(builder, tools=[SEARCH, READ], input=again).count("mcp__files__read") == 3


def test_a_call_of_a_tool_that_was_there_first_is_shown_as_its_own():
    tools = ResponseTools(Notes())
    given = [{**READ, "name": "mcp__files__read"}]
    tools.read([msgspec.Raw(msgspec.json.encode(tool)) for tool in given], "tools")
    tools.load([FOUND])
    assert len(tools.functions) == 2
    assert tools.shown.keys() == {"mcp__files__patch"}


def test_tools_may_come_amid_a_conversation(builder):
    more = {"type": "additional_tools", "role": "developer", "tools": [READ]}
    shown = prompt_of(builder, input=[USER, more])
    assert '"name": "read"' in shown
    assert messages(USER, more) == [{"role": "user", "content": "hi"}]
    items = read_items(body_of(input=[USER, more, SEARCHED, FOUND]).input)
    assert read_items(body_of(input=items).input) == items


@pytest.mark.parametrize("item", [SEARCHED, FOUND])
def test_a_search_that_a_provider_has_run_is_left_out(item):
    notes = Notes()
    given = body_of(input=[USER, {**item, "execution": "server"}]).input
    assert len(read_items(given, notes=notes)) == 1
    assert notes.names == [f"input[]({item['type']})"]


NAMELESS = {**READ, "name": 1}
LOOSE = {**READ, "parameters": {"type": "object", "nullable": True}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [WEB, {**FILES, "tools": [PATCH, {**READ, "name": 1}]}]},
            "tools[1].tools[1].name",
        ),
        ({"tools": [{**FILES, "tools": [{**READ, "name": "a b"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**FILES, "tools": [WEB]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**FILES, "tools": [FILES]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [WEB, LOOSE], "tool_choice": "required"}, "tools[1].parameters"),
        ({"tools": [WEB, FILES, READ, READ]}, "tools"),
        ({"input": [USER, {**FOUND, "tools": [{"type": "function"}]}]}, "input[1].tools[0].name"),
        ({"input": [USER, {**SEARCHED, "arguments": [1]}]}, "input[1].arguments"),
        ({"input": [USER, FOUND]}, "input"),
    ],
)
def test_wrong_tools_are_named(builder, fields, param):
    with pytest.raises(WeftError) as caught:
        answer_of(builder, ResponseCollector, **fields)
    assert caught.value.param == param


def test_another_process_that_goes_on_with_a_response_shows_its_calls_alike(builder):
    job, _ = answer_of(builder, ResponseCollector, tools=[FILES, SEARCH])
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)
    assert kept.shown_calls == job.shown_calls
    assert kept.shown_calls["mcp__files__read"].namespace == "mcp__files"
