"""``/v1/responses``: a checked body to the job of the chat that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from weft.api.bodies import MAX_TOOLS, NULL, Name, Parts, decode_body, kind_of
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id
from weft.api.response_items import Item, messages_of
from weft.api.sampling import check_model
from weft.api.translate import job_of_chat
from weft.core.errors import PromptTooLongError
from weft.core.types import MAX_LOGPROBS

SYSTEM = ("system", "developer")
LOGPROBS = "message.output_text.logprobs"

# All that OpenAI's API can be asked to include. Most of it belongs to tools that are not there, so
# that there is nothing to include; reasoning is always sent in clear.
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]

# Fields of the chat body -> fields of this one.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

# Fields that a chat has by the same name; the chat checks them.
SAME = (
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    "service_tier",
    "user",
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "speculation",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "timeout",
    "top_k",
)


class Format(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: Raw = NULL
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Format | None = None
    verbosity: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"verbosity": ("medium",)}


class ReasoningConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: Raw = NULL
    generate_summary: Raw = NULL
    mode: Raw = NULL
    context: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
        "context": ("auto",),
    }


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Name
    parameters: Raw = NULL
    strict: bool | None = None
    description: str | None = None
    output_schema: Raw = NULL
    defer_loading: Raw = NULL
    allowed_callers: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        "output_schema": (),
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
    }


class ToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"include_obfuscation": (False,)}


class ResponseBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/responses``."""

    model: Name | None = None
    input: str | Parts
    include: Annotated[list[Include], Meta(max_length=16)] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    previous_response_id: Name | None = None
    prompt_cache_key: Name | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: str | ToolChoice | None = None
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # The chat checks these; all from cache_salt on are extensions.
    parallel_tool_calls: Raw = NULL
    service_tier: Raw = NULL
    temperature: Raw = NULL
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    top_p: Raw = NULL
    user: Name | None = None
    cache_salt: Raw = NULL
    chat_template_kwargs: Raw = NULL
    frequency_penalty: Raw = NULL
    ignore_eos: Raw = NULL
    include_stop_str_in_output: Raw = NULL
    logit_bias: Raw = NULL
    min_p: Raw = NULL
    min_tokens: Raw = NULL
    presence_penalty: Raw = NULL
    repetition_penalty: Raw = NULL
    seed: Raw = NULL
    skip_special_tokens: Raw = NULL
    speculation: Raw = NULL
    stop: Raw = NULL
    stop_token_ids: Raw = NULL
    structured_outputs: Raw = NULL
    timeout: Raw = NULL
    top_k: Raw = NULL
    # Not supported.
    background: Raw = NULL
    context_management: Raw = NULL
    conversation: Raw = NULL
    max_tool_calls: Raw = NULL
    moderation: Raw = NULL
    prompt: Raw = NULL
    prompt_cache_options: Raw = NULL
    prompt_cache_retention: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
    }


def response_job(body: ResponseBody, items: Seq[Item], builder: Builder) -> Job:
    """Check a body and return what it asks for.

    Args:
        items: the conversation: what came before, and the body's own input.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    messages = _instructed(messages_of(items), body.instructions)
    fields = {name: value for name in SAME if (value := getattr(body, name)) is not NULL}
    fields |= {
        "model": check_model(body.model, builder.card),
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "response_format": _response_format(body.text),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        **_tool_fields(body),
    }
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        fields["logprobs"] = True
    else:
        fields.pop("top_logprobs")

    def job_of(chosen: Seq[Mapping[str, Any]]) -> Job:
        return job_of_chat({**fields, "messages": chosen}, builder, NAMES)

    job = job_of(messages) if body.truncation != "auto" else _truncated(job_of, messages)
    return replace(job, endpoint="response", id=new_id("resp", "_"))


def _instructed(messages: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages under instructions; many templates take one system message only, the first."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in SYSTEM:
        first = {**messages[0], "content": f"{instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _truncated(
    job_of: Callable[[Seq[Mapping[str, Any]]], Job], messages: Seq[Mapping[str, Any]]
) -> Job:
    """The job of the longest end of a conversation that fits, with all of its instructions."""
    turns = [i for i, message in enumerate(messages) if message["role"] not in SYSTEM]
    try:
        return job_of(messages)
    except PromptTooLongError:
        if len(turns) < 2:
            raise
    low, high = 1, len(turns) - 1  # how many to leave out; the last one always stays
    while low < high:
        middle = (low + high) // 2
        try:
            job_of(_without(messages, turns[:middle]))
            high = middle
        except PromptTooLongError:
            low = middle + 1
    return job_of(_without(messages, turns[:low]))


def _without(messages: Seq[Mapping[str, Any]], dropped: Seq[int]) -> list[Mapping[str, Any]]:
    """The messages without some, and without results whose calls are gone with them."""
    gone = set(dropped)
    kept = [message for i, message in enumerate(messages) if i not in gone]
    called = {call["id"] for message in kept for call in message.get("tool_calls", ())}
    return [m for m in kept if m["role"] != "tool" or m["tool_call_id"] in called]


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema is NULL or given.name is None:
        raise MissingParameterError(f"text.format.{'schema' if given.name else 'name'}")
    schema: dict[str, Any] = {"name": given.name, "schema": given.schema}
    if given.strict is not None:
        schema["strict"] = given.strict
    if given.description is not None:
        schema["description"] = given.description
    return {"type": "json_schema", "json_schema": schema}


def read_tools(body: ResponseBody) -> list[FunctionTool]:
    """The tools of a body. Raises a ParameterError for those that are no functions."""
    tools = []
    for index, raw in enumerate(body.tools or ()):
        path = f"tools[{index}]"
        kind = kind_of(raw, path)
        if kind != "function":
            raise UnsupportedParameterError(
                f"{path}.type", f" There are no tools of type {kind[:100]!r}; describe functions."
            )
        tools.append(decode_body(FunctionTool, raw, path))
    return tools


def _tool_fields(body: ResponseBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    tools = read_tools(body)
    if tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        fields["tool_choice"] = _choice(choice)
    elif choice is not None and (tools or choice not in ("auto", "none")):
        fields["tool_choice"] = choice
    return fields


def _function(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "parameters", "strict", "description")
    given = {name: getattr(tool, name) for name in names}
    return {name: value for name, value in given.items() if value is not None and value is not NULL}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "function" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        tools = [_allowed(raw, index) for index, raw in enumerate(choice.tools or ())]
        allowed = {"mode": choice.mode or "auto", "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise UnsupportedParameterError("tool_choice.type", " Choose a function by its name.")


class _Named(Struct):
    type: Literal["function"]
    name: Name


def _allowed(raw: Raw, index: int) -> dict[str, Any]:
    tool = decode_body(_Named, raw, f"tool_choice.tools[{index}]")
    return {"type": "function", "function": {"name": tool.name}}
