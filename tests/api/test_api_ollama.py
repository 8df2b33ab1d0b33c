"""Ollama's bodies: options, calls without ids, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.api import Builder, Notes, decode_body
from weft.api.ollama import (
    OllamaChatBody,
    OllamaGenerateBody,
    ollama_chat_job,
    ollama_generate_job,
)
from weft.core.errors import WeftError
from weft.text import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
PENALTIES = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5}
TWO_CALLS = [
    {"function": {"name": "look", "arguments": {"at": "a"}}},
    {"function": {"name": "listen", "arguments": {"to": "b"}}},
]


def chat(builder: Builder, notes: Notes | None = None, **fields: Any) -> Any:
    body = {"model": "builtin", "messages": HI, **fields}
    return ollama_chat_job(decode_body(OllamaChatBody, json.dumps(body).encode()), builder, notes)


def generate(builder: Builder, **fields: Any) -> Any:
    body = {"model": "builtin", "prompt": "hi", **fields}
    return ollama_generate_job(decode_body(OllamaGenerateBody, json.dumps(body).encode()), builder)


def sampling_of(job: Any) -> Any:
    return job.requests[0].sampling


def prompt_of(job: Any, builder: Builder) -> str:
    return builder.tokenizer.decode(job.requests[0].prompt, skip_special_tokens=False)


def test_options_that_tell_ollama_how_to_run_a_model_change_nothing(builder):
    inert = {
        **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"), 1),
        **dict.fromkeys(("low_vram", "f16_kv", "use_mmap", "use_mlock", "numa"), True),
        **{"num_ctx": 10**6, "logits_all": True, "mirostat_eta": 0.3, "mirostat_tau": 3},
        **{"mirostat": 0, "tfs_z": 1, "typical_p": 1.0, "penalize_newline": True},
        **{"vocab_only": False, "embedding_only": False, "seed": 1},
    }
    plain, told = chat(builder, options={"seed": 1}), chat(builder, options=inert)
    assert sampling_of(told) == sampling_of(plain)
    assert told.requests[0].prompt == plain.requests[0].prompt


def test_what_nobody_said_is_the_model_s(builder):
    for given in ({}, {"options": None}, {"options": {"temperature": None, "seed": -1}}):
        sampling = sampling_of(chat(builder, **given))
        assert sampling.temperature == builder.card.sampling_defaults["temperature"]
    assert chat(builder).stream
    assert not chat(builder, stream=False).stream


def test_penalties(builder):
    asked = sampling_of(chat(builder, options=PENALTIES))
    assert (asked.repetition_penalty, asked.presence_penalty) == (1.5, 1)
    assert asked.frequency_penalty == 0.5
    for window in (-1, builder.card.max_model_len):
        job = chat(builder, options={**PENALTIES, "repeat_last_n": window, "seed": 1})
        assert sampling_of(job).repetition_penalty == 1.5
    off = sampling_of(chat(builder, options={**PENALTIES, "repeat_last_n": 0}))
    assert (off.repetition_penalty, off.presence_penalty, off.frequency_penalty) == (1, 0, 0)
    notes = Notes()
    windowed = sampling_of(chat(builder, notes, options={**PENALTIES, "repeat_last_n": 64}))
    assert windowed.repetition_penalty == 1.5
    assert notes.names == ["options.repeat_last_n"]
    with pytest.raises(WeftError, match="count all tokens") as caught:
        chat(builder, Notes(strict=True), options={**PENALTIES, "repeat_last_n": 64})
    assert caught.value.param == "options.repeat_last_n"


def test_unknown_options_are_ignored_and_named(builder):
    notes = Notes()
    options = {"temprature": 1, "num_gqa": 8, "draft": {"n": 2}, "top_k": 3, "rope": None}
    assert sampling_of(chat(builder, notes, options=options)).top_k == 3
    assert notes.names == ["options.temprature", "options.num_gqa", "options.draft"]
    with pytest.raises(WeftError) as caught:
        chat(builder, Notes(strict=True), options={"temprature": 1})
    assert caught.value.param == "options.temprature"


@pytest.mark.parametrize("kind", [OllamaChatBody, OllamaGenerateBody])
def test_unknown_keys_of_bodies_are_ignored_and_named(kind):
    notes, data = Notes(), json.dumps({"model": "builtin", "mirostat": 1, "chat_id": "c"}).encode()
    assert decode_body(kind, data, notes=notes).model == "builtin"
    assert notes.names == ["mirostat", "chat_id"]
    with pytest.raises(WeftError) as caught:
        decode_body(kind, data, notes=Notes(strict=True))
    assert caught.value.param == "mirostat"


def test_no_alternatives_without_log_probabilities_is_the_default(builder):
    for more in ({}, {"logprobs": False}):
        assert not chat(builder, top_logprobs=0, **more).logprobs


def test_whole_floats_are_integers(builder):
    options = {"num_predict": 128.0, "top_k": 40.0, "seed": 7.0, "repeat_last_n": -1.0}
    sampling = sampling_of(chat(builder, options={**options, "temperature": 1.0, "mirostat": 0.0}))
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (128, 40, 7)
    for ask in (chat, generate):
        assert sampling_of(ask(builder, options={"num_predict": 9.0})).max_tokens == 9
    with pytest.raises(WeftError) as caught:
        chat(builder, options={"num_predict": 1.5})
    assert caught.value.param == "options.num_predict"


def test_temperatures_go_as_high_as_the_engine_takes_them(builder):
    for ask in (chat, generate):
        assert sampling_of(ask(builder, options={"temperature": 3.5})).temperature == 3.5
    notes = Notes()
    asked = chat(builder, notes, options={"temperature": 1e6})
    assert sampling_of(asked).temperature == 100
    assert notes.names == ["options.temperature"]


def test_results_find_the_calls_that_they_answer(builder):
    def prompt(*results: dict[str, Any], calls: Any = TWO_CALLS) -> str:
        asked = {"role": "Assistant", "content": "", "tool_calls": calls, "provider_field": {}}
        messages = [*HI, asked, *({"role": "tool", **result} for result in results)]
        return prompt_of(chat(builder, messages=messages), builder)

    in_order = prompt({"content": "tree"}, {"content": "bird"})
    assert in_order.index('"look"') < in_order.index("tree") < in_order.index("bird")
    named = [{"tool_name": "listen", "content": "bird"}, {"tool_name": "look", "content": "tree"}]
    assert "bird" in prompt(*named)
    numbered = [{**call, "id": f"id-{i}"} for i, call in enumerate(TWO_CALLS)]
    assert "bird" in prompt({"tool_call_id": "id-1", "content": "bird"}, calls=numbered)
    assert "bird" in prompt({"tool_name": "unknown", "content": "bird"})
    with pytest.raises(WeftError, match="no call before it waits") as caught:
        prompt(*[{"content": "x"}] * 3)
    assert caught.value.param == "messages[4]"


def test_empty_fields_of_clients_ask_for_nothing(builder):
    message = {"role": "user", "content": "hi", "images": [], "tool_calls": None, "thinking": None}
    job = chat(
        builder,
        messages=[message],
        tools=[],
        template="",
        format="",
        keep_alive=-1,
        truncate=True,
        shift=True,
        think=False,
    )
    assert job.requests[0].prompt == chat(builder).requests[0].prompt
    nothing = {"suffix": "", "context": [], "images": None, "width": 0, "height": 0, "steps": 0}
    assert generate(builder, **nothing, template="", system="", raw=False)


def test_a_conversation_that_ends_with_the_assistant_s_text_is_continued(builder):
    begun = [*HI, {"role": "assistant", "content": "Once upon"}]
    assert prompt_of(chat(builder, messages=begun), builder).endswith("<|assistant|>Once upon")
    empty = [*HI, {"role": "assistant", "content": ""}]
    assert prompt_of(chat(builder, messages=empty), builder).endswith("<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"seed": 2**64}}, "options.seed"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.7}}, "options.typical_p"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"format": "xml"}, "format"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"think": "hard"}, "think"),
        ({"think": True}, "think"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_refused_is_named(builder, fields, param):
    with pytest.raises(WeftError) as caught:
        chat(builder, **fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "prompt"),
        ({"raw": True, "system": "Be kind."}, "system"),
        ({"raw": True, "template": "x"}, "template"),
        ({"prompt": "a " * 4096}, "prompt"),
        ({"prompt": "a " * 4096, "raw": True}, "prompt"),
        ({"steps": 4}, "steps"),
    ],
)
def test_what_is_refused_of_a_prompt_is_named(builder, fields, param):
    with pytest.raises(WeftError) as caught:
        generate(builder, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("reads", "think", "shown"),
    [
        ("enable_thinking", True, "True"),
        ("enable_thinking", "low", "True"),
        ("enable_thinking", False, "False"),
        ("reasoning_effort", "low", "low"),
        ("reasoning_effort", False, "none"),
        ("reasoning_effort", True, ""),
        ("other", "low", ""),
        ("other", False, ""),
    ],
)
def test_thinking_is_told_as_the_template_can_be_told(tokenizer, builder, reads, think, shown):
    template = ChatTemplate({"default": "hi{{ " + reads + " }}{# <think></think> #}"})
    own = Builder(tokenizer, template, builder.card)
    job = chat(own, think=think)
    assert prompt_of(job, own) == f"hi{shown}"
    assert job.reading.with_reasoning is (think is not False)
