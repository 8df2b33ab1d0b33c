"""A tool loop with openai-agents, over chat completions and over responses.

Runs in an environment of its own, without weft; prints one line of JSON.
"""

import json
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

CALLS: list[str] = []
SETTINGS = ModelSettings(
    tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
)


class Answer(BaseModel):
    """What the agent must say in the end; a schema, so that a tiny model comes to an end."""

    letters: int = Field(ge=0, le=99)


@function_tool(is_enabled=lambda *_: not CALLS)  # a tiny model would call for ever
def count_letters(word: str) -> int:
    """Count the letters of a word."""
    CALLS.append(word)
    return len(word)


def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['WEFT_URL']}/v1", api_key="none")
    turns = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        CALLS.clear()
        agent = Agent(
            name="counter",
            instructions="Use the tool.",
            model=kind(model="builtin", openai_client=client),
            tools=[count_letters],
            output_type=Answer,
            model_settings=SETTINGS,
        )
        done = Runner.run_sync(agent, "How many letters has the word list?", max_turns=4)
        assert len(CALLS) == 1
        assert isinstance(done.final_output, Answer)
        turns[kind.__name__] = {"calls": list(CALLS), "answers": len(done.raw_responses)}
    print(json.dumps(turns))


main()
