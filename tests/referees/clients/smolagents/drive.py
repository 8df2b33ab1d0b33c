"""smolagents: agents that call tools, by calls and by code, whole and streamed."""

from typing import Any

import checks
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def colour_of(fruit: str) -> str:
    """Return the colour of a fruit.

    Args:
        fruit: Its name.
    """
    return checks.colour_of(fruit)


def model(max_tokens: int = checks.MAX_TOKENS) -> OpenAIServerModel:
    return OpenAIServerModel(
        checks.MODEL, api_base=f"{checks.URL}/v1", api_key="none", max_tokens=max_tokens
    )


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def first() -> None:
    answer = model().generate([message(checks.say("It is mauve."))])
    checks.expect("It is mauve.", answer.content)
    assert answer.token_usage.input_tokens > 0


def tools() -> None:
    lines = [checks.call("colour_of", fruit="plum"), checks.call("final_answer", answer="$result")]
    answer = ToolCallingAgent(
        [colour_of], model(400), max_steps=3, verbosity_level=0, stream_outputs=checks.KNOWN
    ).run("\n".join(lines))
    checks.expect(checks.COLOUR, str(answer))
    code = "Thought: code.\n<code>\nfinal_answer(colour_of('plum'))\n</code>"
    answer = CodeAgent([colour_of], model(400), max_steps=2, verbosity_level=0).run(
        checks.say(code)
    )
    checks.expect(checks.COLOUR, str(answer))


def stream() -> None:
    chunks = model().generate_stream([message(checks.say(checks.WORDS))])
    checks.expect_pieces([chunk.content for chunk in chunks if chunk.content])


def second() -> None:
    agent = ToolCallingAgent([], model(), max_steps=1, verbosity_level=0)
    agent.run(checks.call("final_answer", answer="It is mauve."))
    if checks.KNOWN:
        again = agent.run(checks.call("final_answer", answer="It is red."), reset=False)
        checks.expect("It is red.", str(again))


def cancel() -> None:
    asked = model(checks.LONG)
    chunks = asked.generate_stream([message(checks.WAIT)])
    for _ in range(3):
        if next(chunks, None) is None:
            assert not checks.KNOWN, "the stream ended by itself"
    asked.client.close()
    checks.wait_until_idle()


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
