"""The engine that answers by the script in the prompt, behind the real request plane."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from script import Turn, answer, script_server

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with script_server() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as made:
        yield made


def ask(client, *messages, **more):
    made = [{"role": role, "content": text} for role, text in messages]
    return client.chat.completions.create(model="builtin", messages=made, **more).choices[0]


def test_it_says_calls_and_repeats_the_result(client):
    lines = 'Do this:\nscript> call look {"at": "a"}\nscript> say "$result?"'
    called = ask(client, ("user", lines), tools=[TOOL]).message
    [call] = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "a"})
    messages = [
        {"role": "user", "content": lines},
        called.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a plum"},
    ]
    whole = client.chat.completions.create(model="builtin", messages=messages, tools=[TOOL])
    assert whole.choices[0].message.content == "a plum?"


def test_it_recalls_what_was_said(client):
    history = (("user", "Hi"), ("assistant", "It is mauve."), ("user", "script> recall"))
    assert ask(client, *history).message.content == "I said: It is mauve."


def test_it_keeps_to_max_tokens(client):
    cut = ask(client, ("user", 'script> say "one two three four five six"'), max_tokens=3)
    assert cut.finish_reason == "length"


def test_it_waits_for_whoever_leaves(client):
    with client.chat.completions.create(
        model="builtin", messages=[{"role": "user", "content": "script> wait"}], stream=True
    ) as stream:
        assert sum(1 for _, _ in zip(range(5), stream, strict=False)) == 5


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([Turn("user", "Hi")], "Ready."),
        ([Turn("user", "script> call look {}")], "There is no function look."),
        ([Turn("user", 'script> say "a"'), Turn("assistant", "a")], "Result: a"),
        ([Turn("user", "script> wait")], None),
    ],
)
def test_what_a_prompt_asks_for(turns, expected):
    assert answer(turns) == expected
