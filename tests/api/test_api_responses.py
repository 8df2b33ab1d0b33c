"""Responses: items to chats, events in their order, objects against OpenAI's own schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Notes, TokenTexts, decode_body
from weft.api.response_answers import ResponseCollector, ResponseWriter
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_items import messages_of, read_items
from weft.core.errors import EngineDeadError, WeftError
from weft.core.plan import Update
from weft.core.types import FinishReason, TokenLogprob

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a tree"}
USER = {"role": "user", "content": "hi"}


def body_of(**fields: Any) -> ResponseBody:
    return decode_body(ResponseBody, json.dumps({"input": "hi", **fields}).encode())


def answer_of(builder: Any, kind: Any, **fields: Any) -> Any:
    body = body_of(**fields)
    job = response_job(body, read_items(body.input), builder)
    return job, kind(job, body, builder.tokenizer, TokenTexts(builder.tokenizer))


def updates_of(job: Any, builder: Any, text: str, finish: str = "stop") -> list[Update]:
    """One update a token, each with a log probability, and the end."""
    number = job.requests[0].id
    updates = [
        Update(number, token, TokenLogprob(token, -0.5, 1, ((token, -0.5), (9, -3.0))))
        for token in builder.tokenizer.encode(text, add_special_tokens=False)
    ]
    end = Update(number, None, cached_tokens=2, finish=FinishReason(finish))
    return [*updates, end]


def events_in(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        number, name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert number == f"id: {events[-1]['sequence_number']}"
        assert name == f"event: {events[-1]['type']}"
    return events


def stream_of(writer: Any, updates: list[Update]) -> list[dict[str, Any]]:
    data = b"".join(writer.push([update])[0] for update in updates)
    return events_in(data + writer.last())


# -- items ----------------------------------------------------------------------------------------


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    body = body_of(input=list(items))
    return messages_of(read_items(body.input))


def test_a_text_is_a_message_of_the_user():
    [item] = read_items(body_of().input)
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert messages_of([item]) == [{"role": "user", "content": "hi"}]


def test_what_the_assistant_does_without_pause_is_one_message():
    thought = {"type": "reasoning", "summary": [], "content": [text_of("reasoning_text", "hm")]}
    said = {"role": "assistant", "content": [{**text_of("output_text", "I look."), "logprobs": []}]}
    first, turn, result, last = messages(USER, thought, said, CALL, RESULT, said)
    assert turn["reasoning_content"] == "hm"
    assert turn["content"] == "I look."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["look"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "a tree"}
    assert (first["role"], last) == ("user", {"role": "assistant", "content": "I look."})


THEIRS = (
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
    {"type": "file_search_call", "id": "fs_1", "queries": [], "results": None},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": []},
    {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
    {"type": "computer_call", "call_id": "x1", "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "x1", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_list_tools", "id": "m1", "server_label": "s", "tools": []},
    {"type": "mcp_call", "id": "m2", "name": "look", "arguments": "{}", "output": "a bird"},
    {"type": "mcp_approval_request", "id": "m3", "name": "look", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m3", "approve": True},
    {"type": "local_shell_call", "call_id": "x2", "action": {"type": "exec"}},
    {"type": "local_shell_call_output", "id": "x2", "output": "bin"},
    {"type": "shell_call", "call_id": "x3", "action": {"commands": []}},
    {"type": "shell_call_output", "call_id": "x3", "output": []},
    {"type": "tool_search_call", "call_id": None, "arguments": {}},
    {"type": "tool_search_output", "call_id": None, "tools": []},
    {"type": "compaction", "encrypted_content": "x"},
)


@pytest.mark.parametrize("item", THEIRS, ids=lambda item: str(item["type"]))
def test_items_of_a_provider_s_tools_are_left_out_and_named(item):
    notes = Notes()
    given = body_of(input=[USER, item, CALL, RESULT]).input
    assert [kept["type"] for kept in read_items(given, notes=notes)] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert notes.names == [f"input[]({item['type']})"]
    with pytest.raises(WeftError, match=str(item["type"])):
        read_items(given, notes=Notes(strict=True))


def test_the_result_of_a_call_that_is_left_out_goes_with_it():
    call = {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec"}}
    notes = Notes()
    items = read_items(body_of(input=[USER, call, RESULT]).input, notes=notes)
    assert messages_of(items) == [{"role": "user", "content": "hi"}]
    assert notes.names == ["input[](local_shell_call)", "input[](function_call_output)"]


def test_results_may_be_given_as_output_text():
    parts = [text_of("output_text", "a tree"), text_of("input_text", "b")]
    assert messages(USER, CALL, {**RESULT, "output": parts})[-1]["content"] == "a tree\nb"


def test_a_reference_to_an_item_says_what_to_send():
    with pytest.raises(WeftError, match="Send the item itself") as caught:
        read_items(body_of(input=[{"type": "item_reference", "id": "msg_1"}]).input)
    assert caught.value.param == "input[0].type"


def text_of(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_items_are_kept_as_the_description_has_them(valid):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [text_of("summary_text", "hm")]}
    parts = [text_of("input_text", "a"), text_of("input_text", "b")]
    given = [
        {"role": "developer", "content": parts, "type": "message"},
        thought,
        {"role": "assistant", "content": "so"},
        CALL,
        {**RESULT, "output": parts},
    ]
    items = read_items(body_of(input=given).input)
    page = {"object": "list", "data": items, "has_more": False, "first_id": "a", "last_id": "b"}
    valid("ResponseItemList", page)
    assert len({item["id"] for item in items}) == len(items)
    assert read_items(body_of(input=items).input) == items
    assert messages_of(items)[0] == {"role": "developer", "content": "a\nb"}
    assert messages_of(items)[-1]["content"] == "a\nb"


# -- answers --------------------------------------------------------------------------------------


def test_a_whole_response(builder, valid):
    fields = {"metadata": {"a": "b"}, "instructions": "Be kind.", "user": "me", "top_p": 0.5}
    job, answer = answer_of(builder, ResponseCollector, **fields)
    answer.push(updates_of(job, builder, "naïve 🙂"))
    assert answer.done
    whole = json.loads(answer.body())
    valid("Response", whole)
    [item] = whole["output"]
    assert item["content"][0]["text"] == "naïve 🙂"
    assert (whole["status"], item["status"]) == ("completed", "completed")
    assert whole["completed_at"] >= whole["created_at"]
    assert (whole["metadata"], whole["user"], whole["top_p"]) == ({"a": "b"}, "me", 0.5)
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert whole["usage"]["input_tokens"] == len(job.requests[0].prompt)
    assert "Be kind." in builder.tokenizer.decode(job.requests[0].prompt)


def test_an_answer_that_was_cut_short_is_incomplete(builder, valid):
    job, answer = answer_of(builder, ResponseWriter, max_output_tokens=5)
    events = stream_of(answer, updates_of(job, builder, "a b c", "length"))
    assert events[-1]["type"] == "response.incomplete"
    valid("ResponseIncompleteEvent", events[-1])
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == events[-2]["item"]["status"] == "incomplete"
    assert response["completed_at"] is None


EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.completed": "ResponseCompletedEvent",
}


def test_the_events_of_a_text(builder, valid):
    fields = {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    job, writer = answer_of(builder, ResponseWriter, **fields)
    events = stream_of(writer, updates_of(job, builder, "one two"))
    for event in events:
        valid(EVENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in deltas) == "one two"
    [part] = events[-1]["response"]["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "one two"
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * len(part["logprobs"])
    assert sum(len(event["logprobs"]) for event in deltas) == len(part["logprobs"])
    assert events[-2]["item"] == events[-1]["response"]["output"][0]


def test_an_error_is_a_failed_response(builder, valid):
    job, writer = answer_of(builder, ResponseWriter, stream=True)
    writer.push(updates_of(job, builder, "one")[:-1])
    [event] = events_in(writer.failed(EngineDeadError("The engine has gone.")))
    valid("ResponseFailedEvent", event)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "The engine has gone."}


def test_instructions_and_a_first_system_message_are_one(builder):
    given = [{"role": "developer", "content": "Rhyme."}, USER]
    job, _ = answer_of(builder, ResponseCollector, input=given, instructions="Be kind.")
    prompt = builder.tokenizer.decode(job.requests[0].prompt, skip_special_tokens=False)
    assert "Be kind.\n\nRhyme." in prompt
    assert prompt.count("<|system|>") == 1


def test_extensions_of_chats_are_extensions_here(builder):
    fields = {"top_k": 3, "seed": 5, "stop": ["x"], "stop_token_ids": [9], "timeout": 2.5}
    fields |= {"structured_outputs": {"regex": "[ab]+"}, "cache_salt": "s"}
    job, _ = answer_of(builder, ResponseCollector, **fields)
    [request] = job.requests
    sampling = request.sampling
    assert (sampling.top_k, sampling.seed, sampling.stop) == (3, 5, ("x",))
    assert sampling.stop_token_ids == (9,)
    assert sampling.grammar
    assert (job.timeout_s, request.cache_salt) == (2.5, b"s")


# -- bodies ---------------------------------------------------------------------------------------


def test_truncation_leaves_the_oldest_out(builder):
    old = [{"role": "user", "content": f"number {i} " + "word " * 12} for i in range(30)]
    fields = {"input": [*old, USER], "instructions": "Be kind."}
    with pytest.raises(WeftError, match="context"):
        answer_of(builder, ResponseCollector, **fields)
    job, _ = answer_of(
        builder, ResponseCollector, **fields, truncation="auto", max_output_tokens=20
    )
    prompt = builder.tokenizer.decode(job.requests[0].prompt)
    assert "Be kind." in prompt
    assert "number 29" in prompt
    assert "number 0 " not in prompt
    assert 180 < len(job.requests[0].prompt) <= builder.card.max_model_len - 20
    with pytest.raises(WeftError, match="context"):
        answer_of(builder, ResponseCollector, input="word " * 500, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "invalid_parameter"),
        ({"input": []}, "input", "invalid_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "invalid_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", None),
        ({"input": [{"type": "poem", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "invalid_parameter"),
        ({"input": [{**USER, "content": [{"text": "a"}]}]}, "input[0].content[0].type", None),
        (
            {"input": [{**USER, "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
            "missing_required_parameter",
        ),
        ({"input": [RESULT]}, "input", "invalid_parameter"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "invalid_parameter"),
        ({"input": "word " * 500}, "input", "context_length_exceeded"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"background": 1}, "background", "invalid_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_parameter"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"include": ["secrets"]}, "include[0]", "invalid_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_parameter"),
        ({"temperature": 3}, "temperature", "invalid_parameter"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_parameter"),
        ({"metadata": {"a": 1}}, None, "invalid_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ],
)
def test_wrong_bodies_are_named(builder, fields, param, code):
    with pytest.raises(WeftError) as caught:
        answer_of(builder, ResponseCollector, **fields)
    assert param is None or caught.value.param == param
    assert code is None or caught.value.code == code
    assert "max_completion_tokens" not in caught.value.message
