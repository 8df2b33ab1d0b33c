"""Anthropic's ``/v1/messages``: a checked body to the job of the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from weft.api.bodies import MAX_MESSAGES, MAX_TOOLS, NULL, Name, Parts, decode_body, kind_of
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id
from weft.api.translate import job_of_chat
from weft.core.errors import ParameterError
from weft.core.types import MAX_STOP_STRINGS

Content = str | Parts

# Fields of the chat body -> fields of this one.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
    ".parameters": ".input_schema",
}


class Block(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every block may have; caching of prefixes needs no hints here."""

    type: str
    cache_control: Raw = NULL


class Text(Block, forbid_unknown_fields=True, kw_only=True):
    text: str
    citations: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"citations": ([],)}


class ToolUse(Block, forbid_unknown_fields=True, kw_only=True):
    id: Name
    name: Name
    input: dict[str, Raw]
    caller: Raw = NULL
    toolset_name: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"caller": ({"type": "direct"},), "toolset_name": ()}


class ToolResult(Block, forbid_unknown_fields=True, kw_only=True):
    tool_use_id: Name
    content: Content = ""
    is_error: bool | None = None
    toolset_name: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"toolset_name": ()}


class Thinking(Block, forbid_unknown_fields=True, kw_only=True):
    thinking: str
    signature: str = ""


class Turn(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    input_schema: Raw = NULL
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Raw = NULL
    eager_input_streaming: Raw = NULL
    input_examples: Raw = NULL
    allowed_callers: Raw = NULL
    defer_loading: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }


class ToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ThinkingConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Raw = NULL
    display: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"display": ("summarized",)}


class Metadata(Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: Name | None = None


class PromptBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What makes the prompt: the body of ``POST /v1/messages/count_tokens``."""

    model: Name
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Raw = NULL
    speed: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"speed": ("standard",)}


class MessageBody(PromptBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Raw = NULL
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Raw = NULL
    context_management: Raw = NULL
    diagnostics: Raw = NULL
    inference_geo: Raw = NULL
    mcp_servers: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        **PromptBody.REFUSED,
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
    }


def message_job(body: MessageBody, builder: Builder) -> Job:
    """Check a body and return what it asks for.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    fields = {
        **chat_fields(body),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stream": body.stream,
    }
    job = _job(body, fields, builder)
    return replace(job, endpoint="message", id=new_id("msg", "_"))


def _job(body: PromptBody, fields: dict[str, Any], builder: Builder) -> Job:
    """The job of the chat; a model that marks its thinking is asked not to think if so wished."""
    names = NAMES
    config = body.thinking
    if config is not None and config.type == "disabled" and builder.dialect.reasoning is not None:
        fields["reasoning_effort"] = "none"
        names = {**NAMES, "reasoning_effort": "thinking"}
    return job_of_chat(fields, builder, names)


def count_tokens(body: PromptBody, builder: Builder) -> int:
    """Tokens of the prompt that a message would be answered from. Raises as `message_job`."""
    return _job(body, chat_fields(body), builder).prompt_tokens


def chat_fields(body: PromptBody) -> dict[str, Any]:
    """Fields of the chat body that has the same prompt.

    Raises:
        ParameterError: a block is malformed, unknown, not supported, or answers no call.
    """
    if body.messages[-1].role == "assistant":
        raise UnsupportedParameterError(
            "messages", " The last message must not be the assistant's: its text is not continued."
        )
    _check_thinking(body.thinking)
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    called: frozenset[str] = frozenset()
    for index, turn in enumerate(body.messages):
        path = f"messages[{index}].content"
        if turn.role == "assistant":
            message, called = _assistant(turn.content, path)
            messages.append(message)
        elif turn.role == "system":
            messages.append({"role": "system", "content": _text(turn.content, path)})
        else:
            messages += _user(turn.content, path, called)
    config = body.output_config or OutputConfig()
    return {
        "model": body.model,
        "messages": messages,
        "reasoning_effort": config.effort,
        "response_format": config.format and _response_format(config.format),
        **_tool_fields(body.tools, body.tool_choice),
    }


def _check_thinking(config: ThinkingConfig | None) -> None:
    if config is not None and config.type == "enabled":
        raise UnsupportedParameterError(
            "thinking.budget_tokens", ' Use "thinking": {"type": "adaptive"}, which has no budget.'
        )


def _user(content: Content, path: str, called: frozenset[str]) -> list[dict[str, Any]]:
    """Results of tools first, each a message of its own, then the text."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for block, where in _blocks(content, path, (Text, ToolResult)):
        if isinstance(block, Text):
            texts.append(block.text)
            continue
        if block.tool_use_id not in called:
            raise ParameterError(
                f"'{where}' is the result of '{block.tool_use_id[:100]}', but the assistant's "
                "message before has no tool_use block with that id.",
                param=f"{where}.tool_use_id",
            )
        text = _text(block.content, f"{where}.content")
        results.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": f"Error: {text}" if block.is_error else text,
            }
        )
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(content: Content, path: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The message of an earlier turn, and the ids of its calls."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}, frozenset()
    texts, thoughts, calls = [], [], []
    for block, _ in _blocks(content, path, (Text, Thinking, ToolUse)):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        else:
            arguments = msgspec.json.encode(block.input).decode()
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message, frozenset(call["id"] for call in calls)


def _text(content: Content, path: str) -> str:
    """The text of what may have blocks of text only."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block, _ in _blocks(content, path, (Text,)))


_TYPES: Mapping[type[Block], str] = {
    Text: "text",
    Thinking: "thinking",
    ToolResult: "tool_result",
    ToolUse: "tool_use",
}


def _blocks(content: Parts, path: str, allowed: Seq[type[Block]]) -> list[tuple[Any, str]]:
    """The decoded blocks of a content, each with its path."""
    kinds = {_TYPES[kind]: kind for kind in allowed}
    found = []
    for index, raw in enumerate(content):
        where = f"{path}[{index}]"
        kind = kind_of(raw, where)
        if kind not in kinds:
            raise UnsupportedParameterError(
                f"{where}.type",
                f" A block of type {kind[:100]!r} cannot stand here; send {', '.join(kinds)}.",
            )
        found.append((decode_body(kinds[kind], raw, where), where))
    return found


def _tool_fields(tools: Seq[Tool] | None, choice: ToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice is None:
        return fields
    if choice.type == "tool":
        if choice.name is None:
            raise MissingParameterError("tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif tools or choice.type == "any":
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if tools and choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameterError(
            f"{path}.type", f" There is no tool of type {tool.type[:100]!r}; describe your own."
        )
    if tool.input_schema is NULL:
        raise MissingParameterError(f"{path}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _response_format(given: OutputFormat) -> dict[str, Any]:
    schema = {"name": "output", "schema": given.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
