"""Anthropic's ``/v1/messages``: turns a checked body into the job of an equivalent chat."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec

from weft.api.chat import SWITCH, reads_effort
from weft.api.errors import MissingParameterError
from weft.api.jobs import Builder, Job, new_id
from weft.api.message_blocks import ASSISTANT_BLOCKS, PROVIDERS_BLOCKS, USER_BLOCKS, Blocks, Placed
from weft.api.message_body import (
    Content,
    ImageBlock,
    ImageSource,
    MessageBody,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    OutputFormat,
    PromptBody,
    Thinking,
    ToolResult,
    ToolUse,
)
from weft.api.rules import MAX_SHOWN_CHARS, NULL, Notes
from weft.api.translate import job_of_chat
from weft.core.errors import ParameterError

# Fields of the chat body -> fields of this one.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs": "thinking",
    ".parameters": ".input_schema",
}


def message_job(body: MessageBody, builder: Builder, notes: Notes | None = None) -> Job:
    """Check a body and return what it asks for.

    Args:
        notes: take what is ignored.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    notes = Notes() if notes is None else notes
    names: dict[str, str] = {}
    fields = {
        **chat_fields(body, notes, names),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stream": body.stream,
    }
    job = _job(body, fields, builder, names, notes)
    return replace(job, endpoint="message", id=new_id("msg", "_"))


def _job(
    body: PromptBody,
    fields: dict[str, Any],
    builder: Builder,
    places: Mapping[str, str],
    notes: Notes,
) -> Job:
    """The job of the chat; a model that marks its thinking is asked to think or not, as wished."""
    names = {**NAMES, **places}
    config, template = body.thinking, builder.chat_template
    if config is None or builder.dialect.reasoning is None:
        return job_of_chat(fields, builder, names, notes)
    if config.type == "disabled":
        if reads_effort(template):
            fields["reasoning_effort"] = "none"
        else:
            fields["thinking_token_budget"] = 0
        names |= {"reasoning_effort": "thinking", "thinking_token_budget": "thinking"}
    elif config.type == "enabled" and template is not None and SWITCH in template.variables:
        fields["chat_template_kwargs"] = {SWITCH: True}  # some templates think only if told to
    return job_of_chat(fields, builder, names, notes)


def count_tokens(body: PromptBody, builder: Builder, notes: Notes | None = None) -> int:
    """Tokens of the prompt that a message would be answered from. Raises as `message_job`."""
    notes = Notes() if notes is None else notes
    names: dict[str, str] = {}
    return _job(body, chat_fields(body, notes, names), builder, names, notes).prompt_tokens


def chat_fields(
    body: PromptBody, notes: Notes | None = None, names: dict[str, str] | None = None
) -> dict[str, Any]:
    """Fields of the chat body that has the same prompt.

    Args:
        notes: take what is ignored.
        names: take the places of tools in the chat, and in this body.

    Raises:
        ParameterError: a block is malformed, unknown, not supported, or answers no call.
    """
    notes = Notes() if notes is None else notes
    blocks = Blocks(notes)
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": blocks.text(body.system, "system")})
    called: frozenset[str] = frozenset()
    users = [index for index, turn in enumerate(body.messages) if turn.role == "user"]
    cleared = users[-1] if users else -1
    for index, turn in enumerate(body.messages):
        path, content = f"messages[{index}].content", turn.content
        if content is None:
            if turn.role != "system" or turn.output_config is NULL:
                raise MissingParameterError(path)
            continue
        if turn.role == "assistant":
            message, called = _assistant(content, path, blocks)
            messages.append(message)
        elif turn.role == "system":
            text = blocks.changed(content, path)
            if index > cleared or turn.clear_at != "next_user_message":
                messages += [{"role": "system", "content": text}] if text else []
        else:
            messages += _user(content, path, called, blocks)
    config = body.output_config or OutputConfig()
    form = config.format or body.output_format
    placed = _found(body.tools or (), body.tool_choice, blocks)
    fields = {
        "model": body.model,
        "messages": messages,
        "reasoning_effort": config.effort,
        "response_format": form and _response_format(form),
        **_tool_fields(placed, body.tool_choice, {} if names is None else names, notes),
        **_continued(messages, len(body.messages) - 1),
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        if body.thinking.budget_tokens is None:
            raise MissingParameterError("thinking.budget_tokens")
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields


def _continued(messages: Seq[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """If a conversation ends with the assistant's text, the model continues it."""
    if not messages:
        raise ParameterError("No message has a text.", param="messages")
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last or not last["content"].strip():
        raise ParameterError(
            "The last message is the assistant's; it can be continued if it ends with text.",
            param=f"messages[{index}]",
        )
    return {"continue_final_message": True}


def _user(
    content: Content, path: str, called: frozenset[str], blocks: Blocks
) -> list[dict[str, Any]]:
    """Tool results first, each in its own message, then the text."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block, where in blocks.read(content, path, USER_BLOCKS):
        if isinstance(block, ImageBlock):
            parts.append(_image(block.source, where))
            continue
        if not isinstance(block, ToolResult):
            parts.append({"type": "text", "text": blocks.shown(block, where)})
            continue
        if block.tool_use_id not in called:
            raise ParameterError(
                f"'{where}' is the result of '{block.tool_use_id[:100]}', but the assistant's "
                "message before has no tool_use block with that id.",
                param=f"{where}.tool_use_id",
            )
        text = blocks.result(block.content or "", f"{where}.content")
        results.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": f"Error: {text}" if block.is_error else text,
            }
        )
    if parts or not results:
        seen = any(part["type"] == "image_url" for part in parts)
        shown = parts if seen else "\n".join(part["text"] for part in parts)
        results.append({"role": "user", "content": shown})
    return results


def _image(source: ImageSource, path: str) -> dict[str, Any]:
    """The part of a chat that has the image of a source."""
    name = "data" if source.type == "base64" else "url"
    given = getattr(source, name)
    if given is None:
        raise MissingParameterError(f"{path}.source.{name}")
    if source.type == "base64":
        given = f"data:{source.media_type or 'image/png'};base64,{given}"
    return {"type": "image_url", "image_url": {"url": given}}


def _assistant(
    content: Content, path: str, blocks: Blocks
) -> tuple[dict[str, Any], frozenset[str]]:
    """The message of an earlier turn, and the ids of its calls."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}, frozenset()
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks.read(content, path, ASSISTANT_BLOCKS, ignored=PROVIDERS_BLOCKS):
        if isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            arguments = msgspec.json.encode(block.input).decode()
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts.append(blocks.shown(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message, frozenset(call["id"] for call in calls)


def _found(
    tools: Seq[MessageTool], choice: MessageToolChoice | None, blocks: Blocks
) -> list[Placed]:
    """The tools that the template shows to the model.

    A deferred tool is left out until the result of a client's search refers to it. With a search
    tool of Anthropic's, which weft does not run, all are included. What a message defines takes the
    place of the body's tool of the name.
    """
    placed = [(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    placed = [one for one in placed if one[0].name not in blocks.defined]
    placed += blocks.defined.values()
    placed = [one for one in placed if one[0].name not in blocks.removed]
    if any((tool.type or "").startswith("tool_search") for tool in tools):
        return placed
    known = {*blocks.referenced, choice.name if choice is not None else None}
    return [one for one in placed if not one[0].defer_loading or one[0].name in known]


def _tool_fields(
    tools: Seq[Placed], choice: MessageToolChoice | None, names: dict[str, str], notes: Notes
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    found = [(_tool(tool, path, notes), path) for tool, path in tools]
    if offered := [tool for tool, _ in found if tool is not None]:
        fields["tools"] = offered
        paths = (path for tool, path in found if tool is not None)
        names |= {f"tools[{index}]": path for index, path in enumerate(paths)}
    if choice is None:
        return fields
    if choice.type == "tool":
        if choice.name is None:
            raise MissingParameterError("tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif offered or choice.type == "any":
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if offered and choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: MessageTool, path: str, notes: Notes) -> dict[str, Any] | None:
    """A client's tool as a function; None for one whose schema only Anthropic knows."""
    if tool.type not in (None, "custom"):
        notes.ignore(f"{path}({tool.type[:MAX_SHOWN_CHARS]})")
        return None
    if tool.name is None:
        raise MissingParameterError(f"{path}.name")
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
