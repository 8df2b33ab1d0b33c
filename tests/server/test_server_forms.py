"""Forced calls in every form, by a real engine: their arguments satisfy the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest
from serving import serving

from typed import unknown_fields
from weft.core.config import EngineConfig
from weft.engine.build import build_engine
from weft.engine.local import EngineThread
from weft.text.forms import CALL_FORMS

LIMIT = 1024  # tokens of the context
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
CHAT: dict[str, Any] = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "Hm?"}],
    "tools": TOOLS,
    "seed": 5,
    "temperature": 0.8,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def inbox():
    """The packaged model with a context that takes markers of many tokens each."""
    built = build_engine(
        EngineConfig(max_model_len=LIMIT, max_num_seqs=4, threads=1, dtype="float32")
    )
    thread = EngineThread(built.scheduler, built.executor, built.grammars)
    yield thread.inbox
    thread.close()


@pytest.fixture(params=CALL_FORMS)
def served(request, inbox, text):
    """A client of a server whose model calls in this form."""
    tokenizer, template, card = text
    with (
        serving(
            inbox,
            (tokenizer, template, replace(card, max_model_len=LIMIT)),
            tool_parser=request.param,
        ) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def options(text, request):
    """Of a chat with a forced call: in harmony without reasoning, whose end ends this model."""
    if request.node.callspec.params["served"] != "harmony":
        return CHAT
    pieces = enumerate(text[0].id_to_bytes)
    return {**CHAT, "logit_bias": {str(i): -100 for i, p in pieces if p and p.startswith(b"a")}}


def test_a_forced_call_in_every_form(served, options):
    whole = served.chat.completions.create(**options, tool_choice="required")
    [call] = whole.choices[0].message.tool_calls
    assert (whole.choices[0].finish_reason, call.function.name) == ("tool_calls", "look")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert whole.choices[0].message.content is None
    named = {"type": "function", "function": {"name": "look"}}
    chunks = list(served.chat.completions.create(**options, tool_choice=named, stream=True))
    assert all(unknown_fields(chunk) == [] for chunk in chunks)
    deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "look"
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments


@pytest.mark.parametrize("served", ["qwen3-coder", "gemma4", "harmony"], indirect=True)
def test_a_forced_call_of_a_response_in_forms_that_are_not_json(served, options):
    tool = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}
    asked: dict[str, Any] = {"model": "builtin", "input": "Hm?", "tools": [tool]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    asked |= {"extra_body": {"seed": 7, "logit_bias": options.get("logit_bias")}}
    response = served.responses.create(**asked)
    [item] = response.output
    jsonschema.validate(json.loads(item.arguments), PARAMETERS)
    with served.responses.stream(**asked) as stream:
        events = list(stream)
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == item.arguments
