"""LlamaIndex over both APIs: forced tools, an agent, a structured answer, streams."""

from typing import Any

import checks
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, LLMMetadata
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Fruit(BaseModel, extra="forbid"):  # or a model without sense goes on with other keys
    fruit: checks.FRUIT


TOOL = FunctionTool.from_defaults(checks.colour_of, fn_schema=Fruit)


class ServedByWeft(Anthropic):
    """The Anthropic client with a model name that is not Anthropic's."""

    @property
    def metadata(self) -> Any:
        return LLMMetadata(
            context_window=131072, is_chat_model=True, is_function_calling_model=True,
            model_name=self.model, num_output=self.max_tokens,
        )  # fmt: skip


MODELS = (
    OpenAILike(
        model=checks.MODEL, api_base=f"{checks.URL}/v1", api_key="none", is_chat_model=True,
        is_function_calling_model=True, max_tokens=checks.MAX_TOKENS, max_retries=0,
        context_window=131072,
    ),
    ServedByWeft(
        model=checks.MODEL, base_url=checks.URL, api_key="none", max_tokens=checks.MAX_TOKENS,
        max_retries=0,
    ),
)  # fmt: skip


class Answer(BaseModel, extra="forbid"):
    """How many letters a word has."""

    letters: int = Field(ge=0, le=99)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def first(model: Any) -> None:
    checks.expect("It is mauve.", model.chat([user(checks.say("It is mauve."))]).message.content)


def tools(model: Any) -> None:
    asked = checks.call("colour_of", fruit="plum")
    called = model.chat_with_tools([TOOL], user_msg=asked, tool_required=True)
    [call] = model.get_tool_calls_from_response(called)
    assert call.tool_name == "colour_of", call
    if checks.KNOWN:  # with Anthropic's API it neither closes schemas nor forces this call
        checks.expect(checks.COLOUR, checks.wait_for(agent(model, asked)))
        letters = checks.call("Answer", letters=4)
        answer = model.structured_predict(Answer, PromptTemplate("{asked}"), asked=letters)
        assert answer.letters == 4


async def agent(model: Any, asked: str) -> str:
    return str(await FunctionAgent(tools=[TOOL], llm=model).run(asked))


def stream(model: Any) -> None:
    chunks = list(model.stream_chat([user(checks.say(checks.WORDS))]))
    checks.expect_pieces([chunk.delta for chunk in chunks if chunk.delta])


def second(model: Any) -> None:
    asked = user(checks.say("It is mauve."))
    history = [asked, model.chat([asked]).message, user(checks.RECALL)]
    checks.expect("I said: It is mauve.", model.chat(history).message.content)


def cancel(model: Any) -> None:
    async def go() -> None:
        await checks.leave(model.astream_chat([user(checks.WAIT)]))

    checks.wait_for(go())


checks.run_each(MODELS, first, tools, stream, second, cancel)
