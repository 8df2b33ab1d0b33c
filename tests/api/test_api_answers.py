"""Updates to answers: objects and chunks, against OpenAI's own schemas where those are at hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import (
    ChatBody,
    ChunkWriter,
    Collector,
    CompletionBody,
    DetokenizeBody,
    Job,
    TokenizeBody,
    TokenTexts,
    chat_job,
    completion_job,
    decode_body,
    describe_error,
    detokenize,
    model_entries,
    tokenize,
)
from weft.core.errors import InvariantError, OutOfMemoryError, WeftError
from weft.core.plan import PromptLogprobs, Update
from weft.core.types import FinishReason, TokenLogprob

HELLO = [{"role": "user", "content": "hi"}]
TEXT = "naïve 🙂 end"


def job_of(builder, endpoint: str, **fields: Any) -> Job:
    if endpoint == "chat":
        body = {"model": "builtin", "messages": HELLO, **fields}
        return chat_job(decode_body(ChatBody, json.dumps(body).encode()), builder)
    body = {"model": "builtin", "prompt": "def f(", **fields}
    return completion_job(decode_body(CompletionBody, json.dumps(body).encode()), builder)


def updates_of(sequence_id: int, ids: list[int], finish: str = "stop") -> list[Update]:
    """One update a token, each with a log probability; the last one ends the sequence."""
    updates = []
    for i, token in enumerate(ids):
        entry = TokenLogprob(token, -0.5 - i, 1, ((token, -0.5 - i), (5, -3.0)))
        end = FinishReason(finish) if i == len(ids) - 1 else None
        updates.append(Update(sequence_id, token, entry, cached_tokens=2, finish=end))
    return updates


def ids_of(builder, text: str) -> list[int]:
    return builder.tokenizer.encode(text, add_special_tokens=False)


def collect(builder, job: Job, *batches: list[Update]) -> dict[str, Any]:
    collector = Collector(job, builder.tokenizer, TokenTexts(builder.tokenizer))
    for batch in batches:
        collector.push(batch)
    assert collector.done
    return json.loads(collector.body())


def stream(builder, job: Job, *batches: list[Update]) -> list[dict[str, Any]]:
    writer = ChunkWriter(job, builder.tokenizer, TokenTexts(builder.tokenizer))
    data = b"".join(writer.push(batch)[0] for batch in batches) + writer.last()
    assert writer.done
    return [json.loads(line) for line in data.splitlines()]


def test_a_whole_chat(builder, valid):
    job = job_of(builder, "chat", logprobs=True, top_logprobs=2, service_tier="auto")
    ids = ids_of(builder, TEXT)
    whole = collect(builder, job, updates_of(job.requests[0].id, ids))
    valid("CreateChatCompletionResponse", whole)
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(ids)
    assert bytes(b for e in choice["logprobs"]["content"] for b in e["bytes"]).decode() == TEXT
    assert whole["service_tier"] == "default"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert whole["usage"]["completion_tokens"] == len(ids)


def test_required_keys_are_there_without_logprobs(builder, valid):
    job = job_of(builder, "chat", n=2)
    batches = [updates_of(r.id, [5, 7], "length") for r in job.requests]
    whole = collect(builder, job, *batches)
    valid("CreateChatCompletionResponse", whole)
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    assert all(c["logprobs"] is None and c["finish_reason"] == "length" for c in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == len(job.requests[0].prompt)
    assert whole["usage"]["completion_tokens"] == 4


def test_a_whole_completion(builder, valid):
    job = job_of(builder, "completion", logprobs=1)
    whole = collect(builder, job, updates_of(job.requests[0].id, ids_of(builder, TEXT)))
    valid("CreateCompletionResponse", whole)
    [choice] = whole["choices"]
    assert choice["text"] == TEXT
    scores = choice["logprobs"]
    assert len({len(scores[key]) for key in scores}) == 1
    assert scores["text_offset"][0] == 0
    assert scores["text_offset"] == sorted(scores["text_offset"])
    assert all(scores["tokens"][i] in top for i, top in enumerate(scores["top_logprobs"]))


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_scores_of_the_prompt_come_as_vllm_has_them(builder, endpoint):
    job = job_of(builder, endpoint, prompt_logprobs=1, n=2, return_tokens_as_token_ids=True)
    batches = [updates_of(request.id, [9]) for request in job.requests]
    prompt = job.requests[0].prompt
    for request, batch in zip(job.requests, batches, strict=True):
        if request.sampling.prompt_logprobs is not None:
            entries = tuple(TokenLogprob(t, -2.0, 3, ((5, -0.5), (6, -1))) for t in prompt[1:])
            batch.insert(0, Update(request.id, None, prompt_logprobs=PromptLogprobs(1, entries)))
    whole = collect(builder, job, *batches)
    places = [whole] if endpoint == "chat" else whole["choices"]
    for place in places:
        nothing, *told = place["prompt_logprobs"]
        assert nothing is None
        assert [list(entry) for entry in told] == [
            list(dict.fromkeys([str(t), "5"])) for t in prompt[1:]
        ]
        own, other = told[0].values()
        spelled = builder.tokenizer.decode([prompt[1]], skip_special_tokens=False)
        assert own == {"logprob": -2.0, "rank": 3, "decoded_token": spelled}
        assert (other["logprob"], other["rank"]) == (-0.5, 1)
    plain = job_of(builder, endpoint)
    told = collect(builder, plain, updates_of(plain.requests[0].id, [9]))
    assert "prompt_logprobs" not in json.dumps(told)


@pytest.mark.parametrize("how", [collect, stream])
def test_tokens_as_their_ids(builder, how):
    job = job_of(builder, "chat", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    told = json.dumps(how(builder, job, updates_of(job.requests[0].id, [9, 10])))
    assert '"token": "token_id:9"' in told
    assert '"token": "token_id:5"' in told
    job = job_of(builder, "completion", logprobs=2, return_tokens_as_token_ids=True)
    told = json.dumps(how(builder, job, updates_of(job.requests[0].id, [9, 10])))
    assert '"tokens": ["token_id:9", "token_id:10"]' in told
    assert '"token_id:5": -3.0' in told


def test_an_echo_has_as_many_alternatives_as_it_asked_for(builder):
    job = job_of(builder, "completion", echo=True, logprobs=1, prompt_logprobs=2)
    request = job.requests[0]
    entries = tuple(TokenLogprob(t, -2.0, 3, ((5, -0.5), (6, -1))) for t in request.prompt[1:])
    updates = [Update(request.id, None, prompt_logprobs=PromptLogprobs(1, entries))]
    [choice] = collect(builder, job, updates, updates_of(request.id, [9]))["choices"]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3] * len(entries)
    tops = choice["logprobs"]["top_logprobs"][1 : len(request.prompt)]
    assert [len(top) for top in tops] == [2] * len(entries)


def test_echo_with_logprobs(builder):
    job = job_of(builder, "completion", prompt=["ab cd", "x"], echo=True, logprobs=0, n=2)
    batches = []
    for request in job.requests:
        assert request.sampling.prompt_logprobs == 0
        entries = tuple(TokenLogprob(t, -2.0, 3) for t in request.prompt[1:])
        batches.append([Update(request.id, None, prompt_logprobs=PromptLogprobs(1, entries))])
        batches.append(updates_of(request.id, ids_of(builder, " yz")))
    whole = collect(builder, job, *batches)
    assert [c["text"] for c in whole["choices"]] == ["ab cd yz"] * 2 + ["x yz"] * 2
    for choice, request in zip(whole["choices"], job.requests, strict=True):
        scores = choice["logprobs"]
        assert scores["tokens"][0] == "<|bos|>"
        assert scores["token_logprobs"][0] is None
        assert None not in scores["token_logprobs"][1:]
        first = len(request.prompt)
        assert scores["text_offset"][first] == len(choice["text"]) - 3
        assert "".join(scores["tokens"][1:]) == choice["text"]
    streamed = stream(builder, job, *batches)
    texts = ["", "", "", ""]
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [c["text"] for c in whole["choices"]]


def test_max_tokens_0_only_scores_the_prompt(builder):
    job = job_of(builder, "completion", echo=True, logprobs=0, max_tokens=0)
    [request] = job.requests
    assert request.sampling.max_tokens == 1
    entries = tuple(TokenLogprob(t, -2.0, 3) for t in request.prompt[1:])
    batches = [
        [Update(request.id, None, prompt_logprobs=PromptLogprobs(1, entries))],
        updates_of(request.id, [5], "length"),
    ]
    whole = collect(builder, job, *batches)
    assert whole["choices"][0]["text"] == "def f("
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(request.prompt)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    assert stream(builder, job, *batches)[0]["choices"][0]["text"] == "def f("


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 100])
def test_chat_chunks(builder, valid, logprobs, cut):
    job = job_of(
        builder,
        "chat",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=logprobs,
        service_tier="flex",
    )
    ids = ids_of(builder, TEXT)
    by_choice = [updates_of(r.id, ids) for r in job.requests]
    batches = [
        [u for updates in by_choice for u in updates[i : i + cut]] for i in range(0, len(ids), cut)
    ]
    chunks = stream(builder, job, *batches)
    for chunk in chunks:
        valid("CreateChatCompletionStreamResponse", chunk)
    assert {(c["id"], c["created"], c["service_tier"]) for c in chunks} == {
        (job.id, job.created, "flex")
    }
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(c["delta"].get("content", "") for c in own) == TEXT
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        scores = [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]]
        assert len(scores) == (len(ids) if logprobs else 0)
        assert not any("\ufffd" in c["delta"].get("content", "") for c in own)
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * len(ids)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_every_chunk_can_have_the_usage_so_far(builder, endpoint):
    options = {"include_usage": True, "continuous_usage_stats": True}
    job = job_of(builder, endpoint, stream=True, stream_options=options)
    ids = ids_of(builder, TEXT)
    updates = updates_of(job.requests[0].id, ids)
    chunks = stream(builder, job, *([u] for u in updates))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[0] == (0 if endpoint == "chat" else 1)  # the role comes before any token
    assert counts[-1] == len(ids)
    assert len(set(counts)) >= len(ids) // 2


def test_tokens_that_are_ready_at_once_make_one_chunk(builder):
    job = job_of(builder, "completion", stream=True)
    ids = ids_of(builder, "a b c d")
    chunks = stream(builder, job, updates_of(job.requests[0].id, ids))
    assert [c["choices"][0]["text"] for c in chunks] == ["a b c d", ""]
    assert "usage" not in chunks[0]


def test_stop_strings_span_tokens_and_halt_the_engine(builder):
    job = job_of(builder, "completion", stop=["b c"], stream=True, return_token_ids=True)
    [request] = job.requests
    ids = [t for part in ("a", " b", " c", " d", " e") for t in ids_of(builder, part)]
    writer = ChunkWriter(job, builder.tokenizer, TokenTexts(builder.tokenizer))
    updates = updates_of(request.id, ids, "cancelled")
    shown, halted = b"", []
    for update in updates[:-1]:
        data, ended = writer.push([update._replace(finish=None)])
        shown += data
        halted += ended
    assert halted == [request.id]
    shown += writer.push([updates[-1]])[0]
    chunks = [json.loads(line)["choices"][0] for line in shown.splitlines()]
    assert "".join(c["text"] for c in chunks) == "a "
    assert [t for c in chunks for t in c.get("token_ids", [])] == ids[:3]
    assert chunks[0]["prompt_token_ids"] == list(request.prompt)
    assert chunks[-1]["finish_reason"] == "stop"
    assert writer.assembly.completion_tokens == 3


def test_half_a_character_is_never_shown(builder):
    job = job_of(builder, "chat", stream=True)
    smiley = "🙂".encode()
    table = {piece: i for i, piece in enumerate(builder.tokenizer.id_to_bytes)}
    ids = [table[smiley[i : i + 1]] for i in range(4)]
    batches = [[update] for update in updates_of(job.requests[0].id, [*ids, *ids[:2]], "length")]
    texts = [c["choices"][0]["delta"].get("content", "") for c in stream(builder, job, *batches)]
    assert "".join(texts) == "🙂\ufffd"


def test_spellings_of_bytes(builder):
    table = {piece: i for i, piece in enumerate(builder.tokenizer.id_to_bytes)}
    texts = TokenTexts(builder.tokenizer)
    assert texts.of(table[b"\xe2"]) == ("bytes:\\xe2", [0xE2])
    assert texts.of(0) == ("<|bos|>", list(b"<|bos|>"))


def test_token_ids_on_request(builder):
    job = job_of(builder, "chat", return_token_ids=True)
    whole = collect(builder, job, updates_of(job.requests[0].id, [9, 10]))
    assert whole["prompt_token_ids"] == list(job.requests[0].prompt)
    assert whole["choices"][0]["token_ids"] == [9, 10]


@pytest.mark.parametrize(
    ("update", "status", "code"),
    [
        ({"finish": FinishReason.CANCELLED}, 503, "request_cancelled"),
        ({"finish": FinishReason.ERROR, "error": OutOfMemoryError("full")}, 503, "out_of_memory"),
    ],
)
def test_other_ends_are_errors(builder, valid, update, status, code):
    job = job_of(builder, "chat", n=2)
    collector = Collector(job, builder.tokenizer, TokenTexts(builder.tokenizer))
    with pytest.raises(WeftError) as caught:
        collector.push([Update(job.requests[1].id, None, **update)])
    assert describe_error(caught.value)[0] == status
    body = describe_error(caught.value)[1]
    assert body["error"]["code"] == code
    valid("ErrorResponse", body)
    assert [r.id for r in job.requests] == [*collector.assembly.open_ids(), job.requests[1].id]


def test_bugs_show_nothing_of_their_inside(valid):
    for error in (InvariantError("/secret/path"), ValueError("/secret/path")):
        status, body = describe_error(error)
        assert status == 500
        assert "secret" not in json.dumps(body)
        valid("ErrorResponse", body)


def test_models(builder, valid):
    entries = model_entries(builder.card)
    valid("ListModelsResponse", {"object": "list", "data": entries})
    assert [m["id"] for m in entries] == ["builtin", "org/other"]


def test_tokenize_and_back(builder):
    texts = TokenTexts(builder.tokenizer)
    body = TokenizeBody(prompt=TEXT, return_token_strs=True)
    answer = tokenize(body, builder, texts)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == builder.card.max_model_len
    back = DetokenizeBody(tokens=answer["tokens"], skip_special_tokens=True)
    assert detokenize(back, builder) == {"prompt": TEXT}
    chat = decode_body(TokenizeBody, json.dumps({"messages": HELLO}).encode())
    assert tuple(tokenize(chat, builder, texts)["tokens"]) == job_of(
        builder, "chat"
    ).requests[0].prompt  # fmt: skip
    with pytest.raises(WeftError):
        tokenize(TokenizeBody(), builder, texts)
    with pytest.raises(WeftError):
        detokenize(DetokenizeBody(tokens=[4096]), builder)


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
CALLS = (
    'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": "é🙂"}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)


def test_a_chat_that_calls_tools(builder, valid):
    job = job_of(builder, "chat", tools=TOOLS, logprobs=True)
    updates = updates_of(job.requests[0].id, ids_of(builder, CALLS))
    whole = collect(builder, job, updates)
    valid("CreateChatCompletionResponse", whole)
    [choice] = whole["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "add", "arguments": '{"a": "é🙂"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len(choice["logprobs"]["content"]) == len(updates)

    chunks = stream(builder, job, *([update] for update in updates))
    for chunk in chunks:
        valid("CreateChatCompletionStreamResponse", chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert [c["function"].get("name") for c in calls if "id" in c] == ["add", "now"]
    pieces = [c["function"]["arguments"] for c in calls if c["index"] == 0]
    assert "".join(pieces) == '{"a": "é🙂"}'
    assert len(pieces) > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    scores = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(score["content"]) for score in scores) == len(updates)


def test_a_call_that_the_length_cuts_off_is_not_complete(builder):
    job = job_of(builder, "chat", tools=TOOLS)
    ids = ids_of(builder, '<tool_call>{"name": "add", "arguments": {"a": [1, ')
    [choice] = collect(builder, job, updates_of(job.requests[0].id, ids, "length"))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a": [1,')


def test_without_tools_a_call_is_text(builder):
    job = job_of(builder, "chat", tools=TOOLS, tool_choice="none")
    updates = updates_of(job.requests[0].id, ids_of(builder, CALLS))
    message = collect(builder, job, updates)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALLS, "refusal": None}
