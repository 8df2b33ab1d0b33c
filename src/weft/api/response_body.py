"""``/v1/responses``: turns a checked body into the job of an equivalent chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct, defstruct

from weft.api.bodies import (
    CACHE_HINT,
    KEPT_ELSEWHERE,
    MAX_TOOLS,
    SAME_NAME,
    Name,
    Parts,
    StreamOptions,
)
from weft.api.decoding import decode_body
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id
from weft.api.response_items import Item, messages_of
from weft.api.response_tools import ResponseTools
from weft.api.rules import NULL, Ignored, Notes, Refused
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
    ".custom.format.grammar": ".format",
}

# Fields that a chat has by the same name; the chat checks them.
CHECKED_BY_CHAT = (
    *SAME_NAME,
    "top_p",
    "parallel_tool_calls",
    "service_tier",
    "cache_salt",
    "chat_template_kwargs",
    "include_stop_str_in_output",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "timeout",
    "json_whitespace",
    "priority",
    "thinking_token_budget",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
)

if TYPE_CHECKING:
    ChatFields = Struct  # code reads them by ``CHECKED_BY_CHAT``
else:
    _FIELDS = [(name, Raw, NULL) for name in CHECKED_BY_CHAT]
    ChatFields = defstruct("ChatFields", _FIELDS, kw_only=True)


class Format(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: Raw = NULL
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: Format | None = None
    verbosity: Annotated[
        Raw, Ignored("no template reads it; say it in the instructions", ("medium",))
    ] = NULL

    OPEN: ClassVar[bool] = True


SUMMARY = Ignored("reasoning is shown as it is", ("auto",))


class ReasoningConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: Annotated[Raw, SUMMARY] = NULL
    generate_summary: Annotated[Raw, SUMMARY] = NULL
    mode: Annotated[Raw, Ignored("there is one mode", ("standard",))] = NULL
    context: Annotated[Raw, Ignored("the conversation is used as it is", ("auto",))] = NULL

    OPEN: ClassVar[bool] = True


class ResponseToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)] | None = None


class ResponseBody(ChatFields, forbid_unknown_fields=True, kw_only=True):
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
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: str | ResponseToolChoice | None = None
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: Raw = NULL
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    user: Name | None = None
    # Not honoured.
    access_programs: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    background_options: Annotated[Raw, Ignored("background responses begin at once")] = NULL
    client_metadata: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    image: Annotated[Raw, Ignored("weft generates no images")] = NULL
    session_id: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    context_management: Annotated[
        Raw, Ignored("weft never shortens a conversation by itself", ([],))
    ] = NULL
    max_tool_calls: Annotated[Raw, Ignored("it bounds calls that a provider runs")] = NULL
    prompt_cache_options: Annotated[Raw, CACHE_HINT] = NULL
    prompt_cache_retention: Annotated[Raw, CACHE_HINT] = NULL
    conversation: Annotated[Raw, Refused("use previous_response_id")] = NULL
    moderation: Annotated[Raw, Refused("weft does not moderate")] = NULL
    prompt: Annotated[Raw, Refused("prompts are not stored here; send the input")] = NULL


def response_job(
    body: ResponseBody, items: Seq[Item], builder: Builder, notes: Notes | None = None
) -> Job:
    """Check a body and return what it asks for.

    Args:
        items: the conversation: what came before, and the body's own input.
        notes: take what is ignored.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    notes = Notes() if notes is None else notes
    messages = _instructed(messages_of(items), body.instructions)
    tools = ResponseTools(notes)
    tools.read(body.tools or (), "tools")
    tools.load(items)
    names = {**NAMES, **tools.names()}
    given = ((name, getattr(body, name)) for name in CHECKED_BY_CHAT)
    fields = {name: value for name, value in given if value is not NULL}
    fields |= {
        "model": check_model(body.model, builder.card),
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "response_format": _response_format(body.text),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        **_tool_fields(body, tools),
    }
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}

    def job_of(chosen: Seq[Mapping[str, Any]]) -> Job:
        return job_of_chat({**fields, "messages": chosen}, builder, names, notes)

    def fits(chosen: Seq[Mapping[str, Any]]) -> bool:
        """Whether messages leave room for the output, and for some if no limit is set."""
        try:
            found = job_of_chat({**fields, "messages": chosen}, builder, names, Notes())
        except PromptTooLongError:
            return False
        return found.requests[0].sampling.max_tokens == body.max_output_tokens

    job = job_of(messages if body.truncation != "auto" else _truncated(fits, messages))
    return replace(job, endpoint="response", id=new_id("resp", "_"), shown_calls=tools.shown)


def _instructed(messages: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages under instructions; many templates take one system message only, the first."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in SYSTEM:
        first = {**messages[0], "content": f"{instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _truncated(
    fits: Callable[[Seq[Mapping[str, Any]]], bool], messages: Seq[Mapping[str, Any]]
) -> Seq[Mapping[str, Any]]:
    """The longest end of a conversation that fits, with all of its instructions."""
    turns = [i for i, message in enumerate(messages) if message["role"] not in SYSTEM]
    if len(turns) < 2 or fits(messages):
        return messages
    low, high = 1, len(turns) - 1  # how many to leave out; the last one always stays
    while low < high:
        middle = (low + high) // 2
        if fits(_without(messages, turns[:middle])):
            high = middle
        else:
            low = middle + 1
    return _without(messages, turns[:low])


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


def _tool_fields(body: ResponseBody, tools: ResponseTools) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools.functions:
        fields["tools"] = tools.functions
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        fields["tool_choice"] = _choice(choice, tools)
    elif choice is not None and (tools.functions or choice not in ("auto", "none")):
        fields["tool_choice"] = choice
    return fields


def _choice(choice: ResponseToolChoice, tools: ResponseTools) -> dict[str, Any]:
    if choice.type in ("function", "custom") and choice.name is not None:
        name = tools.function(choice.name, choice.namespace)
        return {"type": choice.type, choice.type: {"name": name}}
    if choice.type == "allowed_tools":
        allowed = [_allowed(raw, index, tools) for index, raw in enumerate(choice.tools or ())]
        mode = choice.mode or "auto"
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    raise UnsupportedParameterError("tool_choice.type", " Choose a tool by its name.")


class _Named(Struct):
    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


def _allowed(raw: Raw, index: int, tools: ResponseTools) -> dict[str, Any]:
    tool = decode_body(_Named, raw, f"tool_choice.tools[{index}]")
    return {"type": tool.type, tool.type: {"name": tools.function(tool.name, tool.namespace)}}
