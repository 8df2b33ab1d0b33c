"""Pydantic AI over three APIs: an agent with a tool and a typed result, whole and streamed."""

from typing import Any

import checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{checks.URL}/v1", api_key="none")
MODELS = (
    OpenAIChatModel(checks.MODEL, provider=OPENAI),
    OpenAIResponsesModel(checks.MODEL, provider=OPENAI),
    AnthropicModel(checks.MODEL, provider=AnthropicProvider(base_url=checks.URL, api_key="none")),
)
SETTINGS = ModelSettings(max_tokens=checks.MAX_TOKENS)


class Answer(BaseModel, extra="forbid"):
    """How many letters a word has."""

    letters: int = Field(ge=0, le=99)


def agent(model: Any, **more: Any) -> Agent[None, Any]:
    return Agent(model, model_settings=SETTINGS, **more)


def first(model: Any) -> None:
    done = agent(model).run_sync(checks.say("It is mauve."))
    checks.expect("It is mauve.", done.output)
    assert done.usage.input_tokens > 0


def tools(model: Any) -> None:
    if checks.KNOWN:
        done = agent(model, tools=[checks.colour_of]).run_sync(
            checks.call("colour_of", fruit="plum")
        )
        checks.expect(checks.COLOUR, done.output)
    typed = agent(model, output_type=Answer).run_sync(checks.call("final_result", letters=4))
    assert not checks.KNOWN or typed.output.letters == 4
    history = typed.all_messages()  # with a call and its result
    more = agent(model).run_sync(checks.say("It is mauve."), message_history=history)
    checks.expect("It is mauve.", more.output)


def stream(model: Any) -> None:
    async def go() -> list[str]:
        async with agent(model).run_stream(checks.say(checks.WORDS)) as answer:
            return [text async for text in answer.stream_text(delta=True, debounce_by=None)]

    checks.expect_pieces(checks.wait_for(go()))


def second(model: Any) -> None:
    before = agent(model).run_sync(checks.say("It is mauve."))
    done = agent(model).run_sync(checks.RECALL, message_history=before.all_messages())
    checks.expect("I said: It is mauve.", done.output)


def cancel(model: Any) -> None:
    async def pieces() -> Any:
        async with agent(model).run_stream(checks.WAIT) as answer:
            async for text in answer.stream_text(delta=True, debounce_by=None):
                yield text

    checks.wait_for(checks.leave(pieces()))


checks.run_each(MODELS, first, tools, stream, second, cancel)
