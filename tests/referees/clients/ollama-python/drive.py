"""Ollama's client for Python: chats, prompts, tools, a schema, vectors, and the model's records."""

from typing import Any

import checks
import ollama

CLIENT = ollama.Client(host=checks.URL, timeout=120)
OPTIONS = {"num_predict": checks.MAX_TOKENS, "num_ctx": 4096, "temperature": 0.7}
SCHEMA = {"type": "object", "properties": {"fruit": {"enum": ["apple", "plum"]}}}


def colour_of(fruit: checks.FRUIT) -> str:
    """Return the colour of a fruit.

    Args:
        fruit: its name
    """
    return checks.colour_of(fruit)


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*messages: Any, **more: Any) -> Any:
    return CLIENT.chat(checks.MODEL, messages, options=OPTIONS, **more)


def first() -> None:
    answer = chat(asked(checks.say("It is mauve.")))
    checks.expect("It is mauve.", answer.message.content)
    assert answer.done
    assert answer.prompt_eval_count > 0
    prompted = CLIENT.generate(checks.MODEL, checks.say("It is mauve."), options=OPTIONS)
    checks.expect("It is mauve.", prompted.response)
    names = [model.model for model in CLIENT.list().models]
    assert any(name.startswith(checks.MODEL) for name in names), names
    assert "completion" in CLIENT.show(checks.MODEL).capabilities
    assert CLIENT.ps().models
    if not checks.KNOWN:
        [vector] = CLIENT.embed(checks.MODEL, "a plum").embeddings
        assert len(vector) > 1


def tools() -> None:
    question = asked(checks.call("colour_of", fruit="plum"))
    answer = chat(question, tools=[colour_of])
    if checks.KNOWN:
        [call] = answer.message.tool_calls
        result = colour_of(**call.function.arguments)
        told = {"role": "tool", "tool_name": call.function.name, "content": result}
        again = chat(question, answer.message, told, tools=[colour_of])
        checks.expect(checks.COLOUR, again.message.content)
    shaped = chat(asked(checks.say('{"fruit": "plum"}')), format=SCHEMA).message.content
    checks.expect("plum", shaped)


def stream() -> None:
    parts = list(chat(asked(checks.say(checks.WORDS)), stream=True))
    checks.expect_pieces([part.message.content for part in parts if part.message.content])
    assert parts[-1].done
    assert parts[-1].eval_count > 0


def second() -> None:
    question = asked(checks.say("It is mauve."))
    answer = chat(question, chat(question).message, asked(checks.RECALL))
    checks.expect("I said: It is mauve.", answer.message.content)


def cancel() -> None:
    client = ollama.AsyncClient(host=checks.URL)
    options = {"num_predict": checks.LONG}
    waiting = client.chat(checks.MODEL, [asked(checks.WAIT)], stream=True, options=options)
    checks.wait_for(checks.leave(waiting))


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
