"""Anthropic's ``/v1/messages``: turns a checked body into the job of an equivalent chat."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct

from weft.api.bodies import IMAGE, Parts
from weft.api.chat import reads_effort
from weft.api.decoding import decode_body, kind_of
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id
from weft.api.message_body import (
    Content,
    Document,
    DocumentSource,
    MessageBody,
    MessageTool,
    MessageToolChoice,
    Other,
    OutputConfig,
    OutputFormat,
    PromptBody,
    SearchResult,
    Text,
    Thinking,
    ToolReference,
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
    fields = {
        **chat_fields(body, notes),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "stream": body.stream,
    }
    job = _job(body, fields, builder, notes)
    return replace(job, endpoint="message", id=new_id("msg", "_"))


def _job(body: PromptBody, fields: dict[str, Any], builder: Builder, notes: Notes) -> Job:
    """The job of the chat; a model that marks its thinking is asked not to think if so wished."""
    names = NAMES
    config = body.thinking
    if config is not None and config.type == "disabled" and builder.dialect.reasoning is not None:
        if reads_effort(builder.chat_template):
            fields["reasoning_effort"] = "none"
        else:
            fields["thinking_token_budget"] = 0
        names = {**NAMES, "reasoning_effort": "thinking", "thinking_token_budget": "thinking"}
    return job_of_chat(fields, builder, names, notes)


def count_tokens(body: PromptBody, builder: Builder, notes: Notes | None = None) -> int:
    """Tokens of the prompt that a message would be answered from. Raises as `message_job`."""
    notes = Notes() if notes is None else notes
    return _job(body, chat_fields(body, notes), builder, notes).prompt_tokens


def chat_fields(body: PromptBody, notes: Notes | None = None) -> dict[str, Any]:
    """Fields of the chat body that has the same prompt.

    Raises:
        ParameterError: a block is malformed, unknown, not supported, or answers no call.
    """
    notes = Notes() if notes is None else notes
    blocks = _Blocks(notes)
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": blocks.text(body.system, "system")})
    called: frozenset[str] = frozenset()
    for index, turn in enumerate(body.messages):
        path = f"messages[{index}].content"
        if turn.role == "assistant":
            message, called = _assistant(turn.content, path, blocks)
            messages.append(message)
        elif turn.role == "system":
            messages.append({"role": "system", "content": blocks.text(turn.content, path)})
        else:
            messages += _user(turn.content, path, called, blocks)
    config = body.output_config or OutputConfig()
    form = config.format or body.output_format
    fields = {
        "model": body.model,
        "messages": messages,
        "reasoning_effort": config.effort,
        "response_format": form and _response_format(form),
        **_tool_fields(_found(body.tools or (), body.tool_choice, blocks), body.tool_choice, notes),
        **_continued(messages[-1], len(body.messages) - 1),
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        if body.thinking.budget_tokens is None:
            raise MissingParameterError("thinking.budget_tokens")
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields


def _continued(last: Mapping[str, Any], index: int) -> dict[str, Any]:
    """If a conversation ends with the assistant's text, the model continues it."""
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last or not last["content"].strip():
        raise ParameterError(
            "The last message is the assistant's; it can be continued if it ends with text.",
            param=f"messages[{index}]",
        )
    return {"continue_final_message": True}


def _user(
    content: Content, path: str, called: frozenset[str], blocks: _Blocks
) -> list[dict[str, Any]]:
    """Tool results first, each in its own message, then the text."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for block, where in blocks.read(content, path, USER_BLOCKS):
        if not isinstance(block, ToolResult):
            texts.append(blocks.shown(block, where))
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
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(
    content: Content, path: str, blocks: _Blocks
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


Kinds = Mapping[str, type[Struct]]

TEXT_BLOCKS: Kinds = {"text": Text}
USER_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "tool_result": ToolResult,
    "document": Document,
    "search_result": SearchResult,
}
RESULT_BLOCKS: Kinds = {
    **TEXT_BLOCKS,
    "image": Other,
    "document": Document,
    "search_result": SearchResult,
    "tool_reference": ToolReference,
}
ASSISTANT_BLOCKS: Kinds = {**TEXT_BLOCKS, "thinking": Thinking, "tool_use": ToolUse}
# Of tools that Anthropic runs, and reasoning that only Anthropic can read.
PROVIDERS_BLOCKS = ("redacted_thinking", "server_tool_use", "_tool_result", "container_upload")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Reads the blocks of contents; ``notes`` take what is ignored in them.

    Attributes:
        referenced: names of tools that results of tools refer to.
    """

    notes: Notes
    referenced: set[str] = field(default_factory=set)

    def text(self, content: Content, path: str) -> str:
        """The text of what may have blocks of text only."""
        if isinstance(content, str):
            return content
        return "\n".join(block.text for block, _ in self.read(content, path, TEXT_BLOCKS))

    def result(self, content: Content, path: str) -> str:
        """The text of a tool's result; an image has a text in its place."""
        if isinstance(content, str):
            return content
        found = self.read(content, path, RESULT_BLOCKS)
        return "\n".join(self.shown(block, where) for block, where in found)

    def read(
        self, content: Parts, path: str, kinds: Kinds, ignored: Seq[str] = ()
    ) -> list[tuple[Any, str]]:
        """The decoded blocks of a content, each with its path.

        Raises:
            UnsupportedParameterError: a block is of a type that is neither known nor ignored.
        """
        found = []
        for index, raw in enumerate(content):
            where = f"{path}[{index}]"
            kind = kind_of(raw, where)
            if kind in kinds:
                found.append((decode_body(kinds[kind], raw, where, self.notes), where))
            elif kind.endswith(tuple(ignored)):
                self.notes.ignore(f"{where}({kind})")
            else:
                raise UnsupportedParameterError(
                    f"{where}.type",
                    f" A block of type {kind[:100]!r} is not supported here; send "
                    f"{', '.join(kinds)}.",
                )
        return found

    def shown(self, block: Struct, path: str) -> str:
        """The text that the model sees for a block."""
        if isinstance(block, Text):
            return block.text
        if isinstance(block, ToolReference):
            self.referenced.add(block.tool_name)
            return f"[The tool {block.tool_name} can be called.]"
        if isinstance(block, SearchResult):
            text = self.text(block.content, f"{path}.content")
            return f"{block.title} ({block.source})\n{text}"
        if isinstance(block, Document):
            heads = [line for line in (block.title, block.context) if line]
            return "\n".join([*heads, self._source(block.source, f"{path}.source")])
        self.notes.ignore(path)
        return IMAGE

    def _source(self, source: DocumentSource, path: str) -> str:
        if source.type == "text" and source.data is not None:
            return source.data
        if source.type == "content" and source.content is not None:
            return self.text(source.content, f"{path}.content")
        raise UnsupportedParameterError(
            f"{path}.type", " Only documents of plain text can be read; send the text."
        )


Placed = tuple[MessageTool, str]  # and where the request has it


def _found(
    tools: Seq[MessageTool], choice: MessageToolChoice | None, blocks: _Blocks
) -> list[Placed]:
    """The tools that the template shows to the model.

    A deferred tool is left out until the result of a client's search refers to it. With a search
    tool of Anthropic's, which weft does not run, all are included.
    """
    placed = [(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if any((tool.type or "").startswith("tool_search") for tool in tools):
        return placed
    known = {*blocks.referenced, choice.name if choice is not None else None}
    return [one for one in placed if not one[0].defer_loading or one[0].name in known]


def _tool_fields(
    tools: Seq[Placed], choice: MessageToolChoice | None, notes: Notes
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    found = [_tool(tool, path, notes) for tool, path in tools]
    if offered := [tool for tool in found if tool is not None]:
        fields["tools"] = offered
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
