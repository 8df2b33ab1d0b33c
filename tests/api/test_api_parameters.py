"""Parameters that are honoured, ignored and refused, and how the answer names them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Builder, Job, Notes, TokenTexts, chat_job, completion_job, decode_body
from weft.api.bodies import ChatBody, CompletionBody, TokenizeBody
from weft.api.card import ApiLimits
from weft.api.message_body import MessageBody
from weft.api.messages import message_job
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_items import read_items
from weft.api.rules import MAX_NAMED, rules_of
from weft.api.tokens import tokenize
from weft.core.errors import ParameterError, PromptTooLongError, TemplateError, WeftError
from weft.text import ChatTemplate

HELLO = [{"role": "user", "content": "hi"}]


def chat(builder: Builder, notes: Notes, **fields: Any) -> Job:
    body = {"model": "builtin", "messages": HELLO, **fields}
    decoded = decode_body(ChatBody, json.dumps(body).encode(), notes=notes)
    return chat_job(decoded, builder, notes)


def completion(builder: Builder, notes: Notes, **fields: Any) -> Job:
    body = {"model": "builtin", "prompt": "hi", **fields}
    decoded = decode_body(CompletionBody, json.dumps(body).encode(), notes=notes)
    return completion_job(decoded, builder, notes)


def message(builder: Builder, notes: Notes, **fields: Any) -> Job:
    body = {"model": "builtin", "max_tokens": 5, "messages": HELLO, **fields}
    decoded = decode_body(MessageBody, json.dumps(body).encode(), notes=notes)
    return message_job(decoded, builder, notes)


def response(builder: Builder, notes: Notes, **fields: Any) -> Job:
    data = json.dumps({"model": "builtin", "input": "hi", **fields}).encode()
    body = decode_body(ResponseBody, data, notes=notes)
    return response_job(body, read_items(body.input, notes=notes), builder, notes)


def said(*parts: Any, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts), **message}]}


CACHED = {"type": "ephemeral"}
TEXT = {"type": "text", "text": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
LITELLM = {
    "role": "assistant",
    "content": "Hi.",
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": None,
    "id": "x",
}

IGNORED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (chat, {"messages": [*HELLO, LITELLM, *HELLO]}, [
        "messages[].provider_specific_fields", "messages[].id",
    ]),
    (chat, said({**TEXT, "cache_control": CACHED}, cache_control=CACHED), [
        "messages[].cache_control", "messages[].content[].cache_control",
    ]),
    (chat, {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low"}, [
        "prompt_cache_key", "prompt_cache_retention", "verbosity",
    ]),
    (chat, {"metadata": {"a": "b"}, "store": True}, ["metadata", "store"]),
    (chat, {"metadata": "x" * 100_000, "prediction": {"type": "content"}}, [
        "metadata", "prediction",
    ]),
    (chat, {"reasoning_effort": "low"}, ["reasoning_effort"]),
    (chat, {"thinking_token_budget": 9}, ["thinking_token_budget"]),
    (chat, {"max_completion_tokens": 10**6}, ["max_completion_tokens"]),
    (chat, {"tools": [{"type": "web_search", "filters": {}}]}, [
        "tools[].filters", "tools[](web_search)",
    ]),
    (chat, {"stream": True, "stream_options": {"usage": 1, "include_obfuscation": True}}, [
        "stream_options.usage", "stream_options.include_obfuscation",
    ]),
    (chat, {"structured_outputs": {
        "regex": "a", "whitespace_pattern": " ?", "disable_additional_properties": True,
        "disable_fallback": True, "disable_any_whitespace": False,
    }}, [
        "structured_outputs.whitespace_pattern", "structured_outputs.disable_additional_properties",
    ]),
    (chat, {"chat_template_content_format": "openai", "guided_whitespace_pattern": " "}, [
        "chat_template_content_format", "guided_whitespace_pattern",
    ]),
    (completion, {"guided_decoding_backend": "xgrammar"}, ["guided_decoding_backend"]),
    (completion, {"max_tokens": 1000, "cache_prompt": True}, ["cache_prompt", "max_tokens"]),
    (message, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, [
        "context_management",
    ]),
    (message, {"output_config": {"effort": "high"}}, ["output_config.effort"]),
    (message, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, [
        "thinking.budget_tokens",
    ]),
    (message, {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, [
        "tools[].max_uses", "tools[](web_search_20250305)",
    ]),
    (message, {"max_tokens": 32_000}, ["max_tokens"]),
    (message, said({**TEXT, "citations": [{}]}), ["messages[].content[].citations"]),
    (message, {"metadata": {"user_id": "u", "team": "t"}}, ["metadata.team", "metadata"]),
    (chat, {"user": "u", "safety_identifier": "s"}, ["user", "safety_identifier"]),
    (response, {"client_metadata": {"a": "b"}, "text": {"verbosity": "low"}}, [
        "client_metadata", "text.verbosity",
    ]),
    (response, {"reasoning": {"effort": "medium", "summary": "detailed"}}, [
        "reasoning.summary", "reasoning.effort",
    ]),
    (response, {"tools": [{"type": "tool_search"}, {"type": "web_search"}]}, [
        "tools[](tool_search)", "tools[](web_search)",
    ]),
    (response, {"input": [{"role": "user", "content": "hi", "phase": "commentary", "x": 1}]}, [
        "input[].x", "input[].phase",
    ]),
    (response, {"max_output_tokens": 10**6}, ["max_output_tokens"]),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "fields", "names"), IGNORED)
def test_what_is_ignored_is_named_and_refused_where_strict(builder, ask, fields, names):
    notes = Notes()
    assert ask(builder, notes, **fields).requests
    assert sorted(notes.names) == sorted(names)
    assert all(name in notes.header().decode() for name in names)
    with pytest.raises(WeftError) as caught:
        ask(builder, Notes(strict=True), **fields)
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (chat, {"use_beam_search": False, "detokenize": True, "length_penalty": 1.0}),
        (chat, {"spaces_between_special_tokens": True, "add_special_tokens": False}),
        (chat, {"verbosity": "medium", "store": False, "metadata": {}, "modalities": ["text"]}),
        (chat, {"no_such_field": None, "audio": None}),
        (chat, {"messages": [{"role": "user", "content": "hi", "no_such_field": None}]}),
        (chat, {"guided_decoding_backend": "auto", "chat_template_content_format": "auto"}),
        (chat, {"structured_outputs": {"json_object": True, "disable_fallback": True}}),
        (chat, {"top_logprobs": 0}),
        (completion, {"best_of": 1, "suffix": "", "priority": 0}),
        (message, {"speed": "standard", "mcp_servers": [], "betas": []}),
        (message, said({**TEXT, "citations": None})),
        (response, {"context_management": [], "background": False, "max_tool_calls": None}),
    ],
)
def test_values_that_ask_for_nothing_pass_even_where_strict(builder, ask, fields):
    notes = Notes(strict=True)
    ask(builder, notes, **fields)
    assert notes.names == []


def test_a_refused_field_says_why(builder):
    with pytest.raises(ParameterError, match="There is no beam search") as caught:
        chat(builder, Notes(), use_beam_search=True)
    assert (caught.value.param, caught.value.code) == ("use_beam_search", "unsupported_parameter")


def test_an_unknown_field_at_the_top_is_refused(builder):
    for ask in (chat, completion, message, response):
        with pytest.raises(ParameterError) as caught:
            ask(builder, Notes(), temprature=1)
        assert caught.value.code == "unknown_parameter"


def test_a_header_is_bounded_and_plain():
    notes = Notes()
    notes.ignore("a,b\r\nc\u00fc")
    for number in range(100):
        notes.ignore(f"n{number}" + "x" * 1000)
    header = notes.header()
    assert header.startswith(b"a?b??c?, n0x")
    assert header.endswith(b", ...")
    assert len(notes.names) == MAX_NAMED + 1
    assert len(header) <= (MAX_NAMED + 1) * 102
    assert header.isascii()


def test_every_rule_has_a_reason_and_takes_null():
    for kind in (ChatBody, CompletionBody, MessageBody, ResponseBody):
        rules = rules_of(kind)
        assert rules
        for name, rule in rules.items():
            assert rule.reason or name == "background"


# -- limits on output -----------------------------------------------------------------------------


def test_a_limit_beyond_the_context_is_lowered_to_what_is_left(builder):
    limit = builder.card.max_model_len
    for ask, name in ((chat, "max_tokens"), (message, "max_tokens"), (completion, "max_tokens")):
        job = ask(builder, Notes(), **{name: 10 * limit})
        [request] = job.requests
        assert request.sampling.max_tokens == limit - len(request.prompt)
    job = completion(builder, Notes(), prompt=[[5] * 250, [5] * 3], max_tokens=20)
    assert [r.sampling.max_tokens for r in job.requests] == [limit - 250, 20]
    with pytest.raises(PromptTooLongError):
        completion(builder, Notes(), prompt=[5] * limit, max_tokens=1)
    with pytest.raises(PromptTooLongError):
        completion(builder, Notes(strict=True), max_tokens=10 * limit)


def test_prompts_can_be_cut(builder):
    ids = list(range(5, 25))
    cut = completion(builder, Notes(), prompt=ids, truncate_prompt_tokens=4).requests[0].prompt
    assert cut == tuple(ids[-4:])
    fields = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert completion(builder, Notes(), prompt=ids, **fields).requests[0].prompt == tuple(ids[:4])
    long = [5] * 1000
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 6}
    [request] = completion(builder, Notes(), prompt=long, **fields).requests
    assert len(request.prompt) == builder.card.max_model_len - 6
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 10**6}
    [request] = completion(builder, Notes(), prompt=long, **fields).requests
    assert (len(request.prompt), request.sampling.max_tokens) == (builder.card.max_model_len - 1, 1)
    whole = chat(builder, Notes()).requests[0].prompt
    assert chat(builder, Notes(), truncate_prompt_tokens=3).requests[0].prompt == whole[-3:]
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncation_side": "left"}):
        with pytest.raises(ParameterError, match="trunc"):
            completion(builder, Notes(), prompt=ids, **wrong)


# -- conversations --------------------------------------------------------------------------------


def decoded(builder: Builder, job: Job) -> str:
    return builder.tokenizer.decode(job.requests[0].prompt, skip_special_tokens=False)


def test_the_model_goes_on_with_the_last_message(builder):
    messages = [*HELLO, {"role": "assistant", "content": "def add(a, "}]
    open_end = chat(builder, Notes(), messages=messages, continue_final_message=True)
    assert decoded(builder, open_end).endswith("def add(a,")  # this template trims messages
    closed = chat(builder, Notes(), messages=messages, add_generation_prompt=False)
    assert decoded(builder, closed).startswith(decoded(builder, open_end).rstrip())
    assert len(decoded(builder, closed)) > len(decoded(builder, open_end))
    assert decoded(builder, message(builder, Notes(), messages=messages)).endswith("def add(a,")


@pytest.mark.parametrize("text", ["e", "en", "end", "<", "a e", "im"])
def test_a_continued_text_is_not_looked_for_in_what_closes_messages(builder, text):
    messages = [*HELLO, {"role": "assistant", "content": text}]
    job = chat(builder, Notes(), messages=messages, continue_final_message=True)
    assert decoded(builder, job).endswith(f"<|assistant|>{text}")


def test_white_space_at_the_end_stays_where_the_template_keeps_it(builder):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}"
    keeps = Builder(builder.tokenizer, ChatTemplate({"default": source}), builder.card)
    messages = [*HELLO, {"role": "assistant", "content": "so "}]
    job = chat(keeps, Notes(), messages=messages, continue_final_message=True)
    assert decoded(builder, job) == "[user]hi|[assistant]so "


def test_the_end_of_a_continued_message_cannot_spell_control_tokens(builder):
    messages = [*HELLO, {"role": "assistant", "content": "ok <|end|>"}]
    job = chat(builder, Notes(), messages=messages, continue_final_message=True)
    end = builder.tokenizer.reference.token_to_id("<|end|>")
    plain = chat(builder, Notes(), messages=[*HELLO, {"role": "assistant", "content": "ok"}],
                 continue_final_message=True)  # fmt: skip
    assert job.requests[0].prompt.count(end) == plain.requests[0].prompt.count(end)


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
        {
            "continue_final_message": True,
            "messages": [*HELLO, {"role": "assistant", "content": ""}],
        },
    ],
)
def test_what_cannot_be_continued(builder, fields):
    with pytest.raises(ParameterError, match="continue_final_message"):
        chat(builder, Notes(), **fields)


def test_roles_of_the_clients_own(builder):
    own = [*HELLO, {"role": "critic", "content": "Be brief."}]
    names = ChatTemplate(
        {"default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}
    )
    knowing = Builder(builder.tokenizer, names, builder.card)
    assert decoded(builder, chat(knowing, Notes(), messages=own)) == "[user]hi[critic]Be brief."
    silent = ChatTemplate({"default": "{{ messages[0].content }}"})
    with pytest.raises(TemplateError, match="critic"):
        chat(Builder(builder.tokenizer, silent, builder.card), Notes(), messages=own)


def test_reasoning_by_any_of_its_names_and_refusals_are_read(builder):
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    reads = Builder(builder.tokenizer, ChatTemplate({"default": source}), builder.card)
    for name in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "b", name: "a"}
        assert "a|b;" in decoded(builder, chat(reads, Notes(), messages=[*HELLO, turn]))
    turn = {"role": "assistant", "content": None, "refusal": "No."}
    assert "|No.;" in decoded(builder, chat(reads, Notes(), messages=[*HELLO, turn]))


@pytest.mark.parametrize(
    "turn",
    [{}, {"content": None}, {"content": []}, {"content": None, "tool_calls": []}],
)
def test_turns_of_the_assistant_without_content_are_empty(builder, turn):
    def prompt(said: dict[str, Any]) -> Any:
        messages = [*HELLO, {"role": "assistant", **said}, *HELLO]
        return chat(builder, Notes(strict=True), messages=messages).requests[0].prompt

    assert prompt(turn) == prompt({"content": ""})


def test_no_parts_are_an_empty_text(builder):
    for role in ("system", "user"):
        wanted, given = (
            chat(builder, Notes(), messages=[{"role": role, "content": content}, *HELLO])
            for content in ("", [])
        )
        assert given.requests[0].prompt == wanted.requests[0].prompt


def test_documents_need_a_template_that_shows_them(builder):
    documents = [{"title": "T", "text": "x"}]
    with pytest.raises(ParameterError) as caught:
        chat(builder, Notes(), documents=documents)
    assert caught.value.param == "documents"
    shows = ChatTemplate({"default": "{{ documents[0].title }}: {{ messages[0].content }}"})
    job = chat(Builder(builder.tokenizer, shows, builder.card), Notes(), documents=documents)
    assert decoded(builder, job) == "T: hi"


def test_templates_of_requests_need_leave(builder):
    text = "{{ messages[0].content }}!"
    with pytest.raises(ParameterError, match="--request-chat-template") as caught:
        chat(builder, Notes(), chat_template=text)
    assert caught.value.param == "chat_template"
    limits = ApiLimits(request_templates=True)
    free = Builder(builder.tokenizer, builder.chat_template, builder.card, limits)
    assert decoded(builder, chat(free, Notes(), chat_template=text)) == "hi!"
    with pytest.raises(TemplateError) as refused:
        chat(free, Notes(), chat_template="{% for %}")
    assert refused.value.param == "chat_template"


def test_tokenize_takes_what_makes_a_chats_prompt(builder):
    def ids(**fields: Any) -> list[int]:
        data = json.dumps({"messages": HELLO, **fields}).encode()
        texts = TokenTexts(builder.tokenizer)
        found: list[int] = tokenize(decode_body(TokenizeBody, data), builder, texts)["tokens"]
        return found

    assert ids() == list(chat(builder, Notes()).requests[0].prompt)
    assert len(ids(add_generation_prompt=False)) < len(ids())
    tool = {"type": "function", "function": {"name": "look"}}
    assert ids(tools=[tool]) == list(chat(builder, Notes(), tools=[tool]).requests[0].prompt)


def test_responses_take_the_extensions_of_chats(builder):
    fields = {"allowed_token_ids": [5, 6], "bad_words": ["a"], "logprob_token_ids": [7]}
    job = response(builder, Notes(), **fields, top_logprobs=2)
    sampling = job.requests[0].sampling
    assert sampling.allowed_token_ids == (5, 6)
    assert sampling.bad_token_sequences
    assert sampling.logprob_token_ids == (7,)


def test_a_schema_beside_json_object_is_followed(builder):
    schema = {"type": "object", "properties": {"a": {"const": 5}}}
    wanted = {"type": "json_object", "schema": schema}
    job = chat(builder, Notes(), response_format=wanted)
    assert '"const"' in (job.requests[0].sampling.grammar or "").replace("\\", "")
    assert job.constrained_by == "response_format.schema"


# -- classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priority", "name"), [(-1, "priority"), (0, "interactive"), (7, "flex")])
def test_priorities_choose_classes(builder, priority, name):
    shown = name if priority else None
    for ask in (chat, completion, response):
        job = ask(builder, Notes(), priority=priority)
        assert (job.requests[0].service_class, job.service_tier) == (name, shown)
        with pytest.raises(ParameterError):
            ask(builder, Notes(), priority=priority or 1, service_tier="flex")


# -- what stands in results of tools, and tools that are texts ------------------------------------


def test_results_of_tools_keep_their_text_beside_images(builder):
    content = [
        {"type": "text", "text": "a tree"},
        {"type": "image", "source": {"type": "base64", "data": "x"}},
        {"type": "tool_reference", "tool_name": "climb"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    messages = [*HELLO, {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [result]}]  # fmt: skip
    notes = Notes()
    text = decoded(builder, message(builder, notes, messages=messages))
    assert "a tree" in text
    assert "An image or a file stands here" in text
    assert "climb" in text
    assert notes.names == ["messages[].content[].content[]"]
    output = [{"type": "input_text", "text": "a tree"}, {"type": "input_image", "image_url": "x"}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": output}]
    assert "a tree" in decoded(builder, response(builder, notes, input=items))


def test_deferred_tools_wait_until_a_result_refers_to_them(builder):
    search = {"name": "search", "input_schema": {"type": "object"}}
    fetch = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}
    asked = {"tools": [search, fetch], "messages": HELLO}
    assert "fetch" not in decoded(builder, message(builder, Notes(), **asked))
    call = {**CALL, "name": "search"}
    found = {"type": "tool_reference", "tool_name": "fetch"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    messages = [*HELLO, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]}]  # fmt: skip
    text = decoded(builder, message(builder, Notes(), tools=[search, fetch], messages=messages))
    assert text.count("fetch") == 2
    theirs = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    text = decoded(builder, message(builder, Notes(), tools=[theirs, fetch]))
    assert "fetch" in text
    named = {"type": "tool", "name": "fetch"}
    assert "fetch" in decoded(builder, message(builder, Notes(), **asked, tool_choice=named))


def test_documents_of_plain_text_are_read(builder):
    source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    part = {"type": "document", "title": "Notes", "source": source}
    text = decoded(builder, message(builder, Notes(), **said(part, TEXT)))
    assert "Notes\nAll of it.\nhi" in text
    with pytest.raises(ParameterError) as caught:
        message(builder, Notes(), **said({"type": "document", "source": {"type": "url"}}))
    assert caught.value.param == "messages[0].content[0].source.type"


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Applies a patch."}}


def test_custom_tools_are_offered_as_functions_with_a_string(builder):
    job = chat(builder, Notes(), tools=[PATCH])
    assert job.custom_tools == {"patch"}
    assert '"input"' in decoded(builder, job)
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}
    held = {"type": "custom", "custom": {**PATCH["custom"], "format": grammar}}
    assert "[ab]" in (chat(builder, Notes(), tools=[held]).requests[0].sampling.grammar or "")
    flat = {"type": "custom", "name": "patch", "format": {"type": "grammar", **grammar["grammar"]}}
    job = response(builder, Notes(), tools=[flat])
    assert job.custom_tools == {"patch"}
    assert "[ab]" in (job.requests[0].sampling.grammar or "")
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert chat(builder, Notes(), tools=[PATCH], tool_choice=choice).reading is not None


def test_earlier_calls_of_custom_tools_are_read(builder):
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "done"}]  # fmt: skip
    text = decoded(builder, chat(builder, Notes(), messages=messages, tools=[PATCH]))
    assert "*** Begin" in text
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    assert "*** Begin" in decoded(builder, response(builder, Notes(), input=items))
