"""A tool loop with langchain-openai: a forced call, its result, an answer; whole and streamed.

Runs in an environment of its own, without weft; prints one line of JSON.
"""

import json
import os

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def count_letters(word: str) -> int:
    """Count the letters of a word."""
    return len(word)


def main() -> None:
    model = ChatOpenAI(
        model="builtin", base_url=f"{os.environ['WEFT_URL']}/v1", temperature=0, max_tokens=120
    )
    asked = HumanMessage("How many letters has the word list?")
    forced = model.bind_tools([count_letters], tool_choice="count_letters")
    call = forced.invoke([asked])
    assert isinstance(call, AIMessage)
    assert [made["name"] for made in call.tool_calls] == ["count_letters"], call
    assert not call.invalid_tool_calls, call
    assert isinstance(call.tool_calls[0]["args"]["word"], str), call
    result = count_letters.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = model.bind_tools([count_letters], tool_choice="none").invoke([asked, call, result])
    assert answer.content, answer
    assert not answer.tool_calls
    whole = None
    for chunk in forced.stream([asked]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["args"] == call.tool_calls[0]["args"], (whole, call)
    structured = model.with_structured_output(
        {
            "title": "Answer",
            "description": "An answer.",
            "type": "object",
            "properties": {"letters": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["letters"],
            "additionalProperties": False,
        },
        method="json_schema",
        strict=True,
    ).invoke([asked])
    assert 0 <= structured["letters"] <= 99, structured
    print(json.dumps({"call": call.tool_calls[0]["args"], "structured": structured}))


main()
