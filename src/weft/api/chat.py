"""``/v1/chat/completions``: a checked body to a job, and messages to what templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from weft.api.bodies import ChatBody, Message, encode_json
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id, now
from weft.api.sampling import (
    build_sampling,
    check_context,
    check_max_tokens,
    check_model,
    first_seed,
    include_usage,
    seeded,
    service_class,
    usage_in_chunks,
)
from weft.api.structured import find_constraint
from weft.api.tools import Tools, constrain_turn, read_tools
from weft.core.errors import ParameterError, TemplateError
from weft.core.types import Request
from weft.text import encode_chat
from weft.text.dialect import Reading

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_VARIABLES_BYTES = 16 * 2**10


def chat_job(body: ChatBody, builder: Builder) -> Job:
    """Check a body and return what it asks for.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    card = builder.card
    model = check_model(body.model, card)
    max_tokens = _max_tokens(body)
    n = body.n or 1
    builder.check_count(1, n)
    tools = read_tools(body, builder)
    wanted = find_constraint(body)
    prompt = tuple(_prompt(body, tools, builder))
    check_context(len(prompt), max_tokens, card, "messages")
    reading = _reading(body, tools, prompt, builder)
    constraint = constrain_turn(tools, wanted, reading, builder)
    numbers = builder.numbers(n)
    seed = first_seed(body, card, numbers[0])
    params = build_sampling(
        body,
        card,
        max_tokens=max_tokens,
        logprobs=_logprobs(body),
        seed=seed,
        grammar=constraint and constraint.grammar,
    )
    rank, tier = service_class(body.service_tier)
    salt = (body.cache_salt or "").encode()
    return Job(
        "chat",
        new_id("chatcmpl"),
        now(),
        model,
        card.system_fingerprint,
        tuple(
            Request(number, prompt, seeded(params, seed, i), card.eos_token_ids, rank, salt)
            for i, number in enumerate(numbers)
        ),
        n=n,
        stream=bool(body.stream),
        include_usage=include_usage(body),
        usage_in_chunks=usage_in_chunks(body),
        service_tier=tier,
        logprobs=bool(body.logprobs),
        return_token_ids=bool(body.return_token_ids),
        timeout_s=body.timeout,
        reading=reading if reading.reads else None,
        constrained_by=constraint and constraint.param,
    )


def _prompt(body: ChatBody, tools: Tools | None, builder: Builder) -> list[int]:
    variables = read_variables(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None:
        variables = {**_effort(effort, builder), **variables}
    shown = None if tools is None else tools.shown()
    return encode_messages(body.messages, builder, variables, tools=shown)


def _effort(effort: str, builder: Builder) -> dict[str, Any]:
    """What tells the template how much to think."""
    known = frozenset() if builder.chat_template is None else builder.chat_template.variables
    if effort not in EFFORTS:
        raise ParameterError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, not '{effort[:100]}'.",
            param="reasoning_effort",
        )
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if "enable_thinking" in known:
        return {"enable_thinking": effort != "none"}
    raise UnsupportedParameterError(
        "reasoning_effort", " The chat template of this model does not ask for it."
    )


def _reading(body: ChatBody, tools: Tools | None, prompt: Seq[int], builder: Builder) -> Reading:
    dialect = builder.dialect
    names = None if tools is None else frozenset(function.name for function in tools.functions)
    return Reading(
        dialect,
        names,
        opened=dialect.opens_reasoning(prompt, builder.tokenizer),
        markers=dialect.marker_ids(builder.tokenizer, calls=names is not None),
        with_reasoning=body.include_reasoning is not False,
        forced=tools is not None and tools.forced,
    )


def encode_messages(
    messages: Seq[Message],
    builder: Builder,
    variables: Mapping[str, Any],
    *,
    tools: Seq[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of a conversation.

    Args:
        variables: of the template.
        tools: functions as the template shows them.

    Raises:
        ParameterError: a message is malformed, has content that is not text, or answers no call.
        TemplateError: the model has no chat template, or its template refused the conversation.
    """
    template = builder.chat_template
    if template is None:
        raise TemplateError(
            "This model has no chat template; use /v1/completions, or start the server with "
            "--chat-template FILE.",
            param="messages",
        )
    knows_developer = any("developer" in source for source in template.sources.values())
    plain = [_message(message, i, knows_developer) for i, message in enumerate(messages)]
    _check_results(plain)
    num_bytes = sum(map(_num_bytes, messages, plain))
    builder.check_size(num_bytes + (len(encode_json(tools)) if tools else 0), "messages")
    template.check_variables(variables)
    return encode_chat(
        builder.tokenizer,
        template,
        plain,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        **variables,
    )


def _check_results(messages: Seq[Mapping[str, Any]]) -> None:
    """Every result of a tool must answer a call that an earlier message has."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            path, number = f"messages[{index}].tool_call_id", message["tool_call_id"][:100]
            raise ParameterError(
                f"'{path}' is '{number}', but no message before it has a call with that id.",
                param=path,
            )


def _num_bytes(message: Message, plain: Mapping[str, Any]) -> int:
    """Bytes of everything in a message that a template may show."""
    texts = sum(len(value.encode()) for value in plain.values() if isinstance(value, str))
    return texts + (len(encode_json(message.tool_calls)) if message.tool_calls else 0)


def read_variables(given: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Values for the template; they are decoded only if they are short."""
    param = "chat_template_kwargs"
    if (
        sum(len(name.encode()) + len(bytes(raw)) for name, raw in given.items())
        > MAX_VARIABLES_BYTES
    ):
        message = f"{param} may have {MAX_VARIABLES_BYTES} bytes at most."
        raise ParameterError(message, param=param)
    try:
        return {name: msgspec.json.decode(raw) for name, raw in given.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ParameterError(f"{param} has a value that cannot be read.", param=param) from None


def _max_tokens(body: ChatBody) -> int | None:
    check_max_tokens(body.max_tokens, "max_tokens", 1)
    check_max_tokens(body.max_completion_tokens, "max_completion_tokens", 1)
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ParameterError(
            "max_tokens is the old name of max_completion_tokens; give one of them.",
            param="max_tokens",
        )
    return new if new is not None else old


def _logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise ParameterError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _message(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    """One message as templates take it; a system message by its new name gets the old one."""
    path = f"messages[{index}]"
    role = message.role
    if role not in ROLES:
        raise ParameterError(
            f"The role of a message must be one of {', '.join(ROLES)}, not '{role[:100]}'.",
            param=f"{path}.role",
        )
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != owner:
            raise ParameterError(
                f"Only messages with the role '{owner}' have {name}.", param=f"{path}.{name}"
            )
    if role == "tool" and message.tool_call_id is None:
        raise MissingParameterError(f"{path}.tool_call_id")
    content = _content(message.content, path)
    if content is None and not message.tool_calls:
        raise MissingParameterError(f"{path}.content")
    if role == "developer" and not knows_developer:
        role = "system"
    plain: dict[str, Any] = {
        "role": role,
        "content": content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return {name: value for name, value in plain.items() if value is not None}


def _content(content: str | list[dict[str, Any]] | None, path: str) -> str | None:
    """The text of a message; several parts are joined by line ends."""
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise ParameterError("The list of content parts is empty.", param=f"{path}.content")
    return "\n".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _part(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind is None:
        raise MissingParameterError(f"{path}.type")
    if kind != "text":
        raise UnsupportedParameterError(
            f"{path}.type", f" Content of type {str(kind)[:100]!r} cannot be read; send text."
        )
    for name in part:
        if name not in ("type", "text"):
            raise UnsupportedParameterError(f"{path}.{str(name)[:100]}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ParameterError(f"'{path}.text' must be a string.", param=f"{path}.text")
    return text


def _tool_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A call of an earlier turn; templates want its arguments as an object, not as JSON text."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise UnsupportedParameterError(f"{path}.type", " Only function calls can be read.")
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, (str, dict)):
        raise ParameterError(
            f"'{path}.function' needs a name and arguments, both strings.", param=f"{path}.function"
        )
    plain = {"type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _arguments(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        loaded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return loaded if isinstance(loaded, dict) else arguments
