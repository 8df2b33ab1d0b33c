"""Instructor over both APIs: typed answers by forced tools and by schemas, with a retry."""

import asyncio
from typing import Any

import anthropic
import checks
import instructor
import openai
from pydantic import BaseModel, Field


class Answer(BaseModel, extra="forbid"):  # or a model without sense goes on with other keys
    """How many letters a word has."""

    letters: int = Field(ge=0, le=99)


ASK: dict[str, Any] = {
    "model": checks.MODEL,
    "max_tokens": 100,
    "response_model": Answer,
    "max_retries": 0,
}
OPENAI = openai.OpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=checks.URL, api_key="none", max_retries=0)
BY_TOOL = (
    instructor.from_openai(OPENAI, mode=instructor.Mode.TOOLS),
    instructor.from_anthropic(ANTHROPIC, mode=instructor.Mode.ANTHROPIC_TOOLS),
)
BY_SCHEMA = (instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA),)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def expect(letters: int, answer: Answer) -> None:
    assert not checks.KNOWN or answer.letters == letters, answer


def first() -> None:
    for client in BY_SCHEMA:
        expect(4, client.create(messages=[user(checks.say('{"letters": 4}'))], **ASK))


def tools() -> None:
    """The first call breaks the bounds, so that the error goes back as the tool's result."""
    lines = [checks.call("Answer", letters=letters) for letters in (500, 8)]
    for client in BY_TOOL:
        more = ASK | {"max_retries": 1}
        expect(8, client.create(messages=[user("\n".join(lines))], **more))


def stream() -> None:
    asked = user(checks.call("PartialAnswer", letters=4))
    for client in BY_TOOL:
        seen = list(client.create_partial(messages=[asked], **ASK))
        expect(4, seen[-1])


def second() -> None:
    history = [user(checks.say("It is mauve.")), {"role": "assistant", "content": "Mauve."}]
    asked = user(checks.call("Answer", letters=5))
    for client in BY_TOOL:
        expect(5, client.create(messages=[*history, asked], **ASK))


def cancel() -> None:
    async def go() -> None:
        client = openai.AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key="none", max_retries=0)
        more = ASK | {"max_tokens": checks.LONG}
        answer = instructor.from_openai(client).create(messages=[user(checks.WAIT)], **more)
        asking = asyncio.create_task(answer)
        await asyncio.to_thread(checks.wait_until_busy, asking.done)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(checks.wait_until_idle)

    checks.wait_for(go())


checks.run(first=first, tools=tools, stream=stream, second=second, cancel=cancel)
