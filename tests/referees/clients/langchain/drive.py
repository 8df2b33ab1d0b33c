"""LangChain over three APIs: an agent with a tool, a structured answer, streams."""

from typing import Any, Literal

import checks
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

LIMITS: dict[str, Any] = {"max_tokens": checks.MAX_TOKENS, "max_retries": 0}
OPENAI: dict[str, Any] = {"base_url": f"{checks.URL}/v1", "api_key": "none", **LIMITS}
MODELS = (
    ChatOpenAI(model=checks.MODEL, reasoning_effort="low", **OPENAI),
    ChatOpenAI(model=checks.MODEL, use_responses_api=True, **OPENAI),
    ChatAnthropic(model=checks.MODEL, base_url=checks.URL, api_key="none", **LIMITS),
)


class Fruit(BaseModel, extra="forbid"):  # or a model without sense goes on with other keys
    fruit: checks.FRUIT


class Answer(BaseModel, extra="forbid"):
    """How many letters a word has."""

    letters: Literal[4, 5]


colour_of = tool(checks.colour_of, args_schema=Fruit)
FORCED: dict[str, Any] = {"tool_choice": "any", "parallel_tool_calls": False}


def first(model: Any) -> None:
    answer = model.invoke(checks.say("It is mauve."))
    checks.expect("It is mauve.", answer.text)
    assert answer.usage_metadata["input_tokens"] > 0


def tools(model: Any) -> None:
    asked = checks.call("colour_of", fruit="plum")
    if checks.KNOWN:
        found = create_agent(model, [colour_of]).invoke({"messages": [HumanMessage(asked)]})
        checks.expect(checks.COLOUR, found["messages"][-1].text)
    bound = model.bind_tools([colour_of], **FORCED)
    called = bound.invoke(asked)
    assert not called.invalid_tool_calls, called
    [call] = called.tool_calls
    again = model.bind_tools([colour_of], **FORCED, strict=True).invoke(asked)
    assert again.tool_calls[0]["args"]["fruit"] in ("apple", "plum")
    answer = model.bind_tools([colour_of]).invoke([HumanMessage(asked), called, run(call)])
    assert isinstance(answer, AIMessage)
    structured = model.with_structured_output(Answer, method="json_schema")
    got = structured.invoke(checks.say('{"letters": 4}'))
    assert not checks.KNOWN or got.letters == 4, got


def run(call: Any) -> Any:
    """The message with a tool's result."""
    return colour_of.invoke(call)


def stream(model: Any) -> None:
    chunks = list(model.stream(checks.say(checks.WORDS)))
    checks.expect_pieces([text for chunk in chunks if (text := chunk.text)])
    whole = None
    asked = checks.call("colour_of", fruit="plum")
    for chunk in model.bind_tools([colour_of], **FORCED).stream(asked):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["fruit"] in ("apple", "plum"), whole


def second(model: Any) -> None:
    asked = HumanMessage(checks.say("It is mauve."))
    answer = model.invoke([asked, model.invoke([asked]), HumanMessage(checks.RECALL)])
    checks.expect("I said: It is mauve.", answer.text)


def cancel(model: Any) -> None:
    checks.wait_for(checks.leave(model.astream(checks.WAIT)))


checks.run_each(MODELS, first, tools, stream, second, cancel)
