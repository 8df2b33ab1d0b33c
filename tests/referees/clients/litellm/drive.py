"""LiteLLM over both APIs: the message objects that it returns go back as they are."""

import json
import os

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}

import checks
import litellm

PROVIDERS = (
    {"model": f"openai/{checks.MODEL}", "api_base": f"{checks.URL}/v1", "api_key": "none"},
    {"model": f"anthropic/{checks.MODEL}", "api_base": checks.URL, "api_key": "none"},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "colour_of",
        "description": "Return the colour of a fruit.",
        "parameters": {
            "type": "object",
            "properties": {"fruit": {"type": "string", "enum": ["apple", "plum"]}},
            "required": ["fruit"],
            "additionalProperties": False,  # or a model without sense goes on with others
        },
    },
}


def ask(provider, messages, **more):
    return litellm.completion(
        **provider, messages=messages, **({"max_tokens": checks.MAX_TOKENS} | more)
    )


def user(text):
    return {"role": "user", "content": text}


def first(provider):
    answer = ask(provider, [user(checks.say("It is mauve."))])
    checks.expect("It is mauve.", answer.choices[0].message.content)
    assert answer.usage.prompt_tokens > 0


def tools(provider):
    messages = [user(checks.call("colour_of", fruit="plum"))]
    more = {"tools": [TOOL], "reasoning_effort": "low", "drop_params": True}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    called = ask(provider, messages, **forced, **more).choices[0].message
    [call] = called.tool_calls
    result = checks.colour_of(**json.loads(call.function.arguments))
    messages += [called, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = ask(provider, messages, **more).choices[0].message
    if checks.KNOWN:
        checks.expect(checks.COLOUR, answer.content)


def stream(provider):
    chunks = list(ask(provider, [user(checks.say(checks.WORDS))], stream=True))
    checks.expect_pieces([text for c in chunks if (text := c.choices[0].delta.content)])


def second(provider):
    messages = [user(checks.say("It is mauve."))]
    messages.append(ask(provider, messages).choices[0].message)
    answer = ask(provider, [*messages, user(checks.RECALL)])
    checks.expect("I said: It is mauve.", answer.choices[0].message.content)


def cancel(provider):
    async def go():
        more = {"messages": [user(checks.WAIT)], "max_tokens": checks.LONG, "stream": True}
        await checks.leave(litellm.acompletion(**provider, **more))

    checks.wait_for(go())


checks.run_each(PROVIDERS, first, tools, stream, second, cancel)
