"""Bodies of Anthropic's ``/v1/messages``, and the blocks of their contents."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from weft.api.bodies import CACHE_HINT, CALLER, KEPT_ELSEWHERE, MAX_MESSAGES, MAX_TOOLS, Name, Parts
from weft.api.rules import NULL, Ignored, Refused
from weft.core.types import MAX_STOP_STRINGS

Content = str | Parts


class Block(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that every block may have."""

    type: str
    cache_control: Annotated[Raw, CACHE_HINT] = NULL

    OPEN: ClassVar[bool] = True


class Text(Block, forbid_unknown_fields=True, kw_only=True):
    text: str
    citations: Annotated[Raw, Ignored("the text does not need them", ([],))] = NULL


class ToolUse(Block, forbid_unknown_fields=True, kw_only=True):
    id: Name
    name: Name
    input: dict[str, Raw]
    caller: Annotated[Raw, CALLER] = NULL
    toolset_name: Annotated[Raw, CALLER] = NULL


class ToolResult(Block, forbid_unknown_fields=True, kw_only=True):
    tool_use_id: Name
    content: Content | None = None
    is_error: bool | None = None
    toolset_name: Annotated[Raw, CALLER] = NULL


class Thinking(Block, forbid_unknown_fields=True, kw_only=True):
    thinking: str
    signature: str = ""


class DocumentSource(Struct, forbid_unknown_fields=True, kw_only=True):
    """The source of a document's text."""

    type: str
    media_type: str | None = None
    data: str | None = None
    content: str | Parts | None = None
    url: str | None = None

    OPEN: ClassVar[bool] = True


class ImageSource(Struct, forbid_unknown_fields=True, kw_only=True):
    """An image in base64, or where it lies."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    OPEN: ClassVar[bool] = True


class ImageBlock(Block, forbid_unknown_fields=True, kw_only=True):
    source: ImageSource


class Document(Block, forbid_unknown_fields=True, kw_only=True):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Annotated[Raw, Ignored("answers have no citations", ({"enabled": False}, {}))] = NULL


class SearchResult(Block, forbid_unknown_fields=True, kw_only=True):
    source: str
    title: str
    content: Parts
    citations: Annotated[Raw, Ignored("answers have no citations", ({"enabled": False}, {}))] = NULL


class ToolReference(Block, forbid_unknown_fields=True, kw_only=True):
    tool_name: str


class Compaction(Block, forbid_unknown_fields=True, kw_only=True):
    """What stands in the place of earlier messages; nothing where the shortening failed."""

    content: str | None = None
    encrypted_content: Annotated[Raw, Ignored("the content is read in clear")] = NULL
    signature: Annotated[Raw, Ignored("the content is read in clear")] = NULL
    tool_changes: Annotated[Raw, Ignored("the tools are those of the body", ([],))] = NULL


class Other(Struct, kw_only=True):
    """A block that is known by its type only."""

    type: str


class MessageTurn(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of the conversation.

    Attributes:
        content: only a system message with an ``output_config`` does without.
        clear_at: a system message that is shown only until the user's next message.
    """

    role: Literal["user", "assistant", "system"]
    content: Content | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Annotated[Raw, Ignored("that of the body holds", ({},))] = NULL

    OPEN: ClassVar[bool] = True


class MessageTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool; one without a type, or of the type ``custom``, is described by its schema."""

    name: Name | None = None
    input_schema: Raw = NULL
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Annotated[Raw, CACHE_HINT] = NULL
    eager_input_streaming: Annotated[
        Raw, Ignored("arguments are streamed as they come", (True, False))
    ] = NULL
    input_examples: Annotated[Raw, Ignored("the schema says what is valid", ([],))] = NULL
    allowed_callers: Annotated[Raw, Ignored("the model calls tools itself", (["direct"],))] = NULL
    defer_loading: bool | None = None

    OPEN: ClassVar[bool] = True


class ChangedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tool of a `ToolChange`: by name, or by its definition."""

    type: str
    name: Name | None = None
    server_name: Name | None = None
    definition: MessageTool | None = None

    OPEN: ClassVar[bool] = True


class ToolChange(Block, forbid_unknown_fields=True, kw_only=True):
    """From here on a tool can be called, or no longer (``tool_addition``, ``tool_removal``)."""

    tool: ChangedTool


class MessageToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Raw, Ignored("max_tokens bounds the answer")] = NULL

    OPEN: ClassVar[bool] = True


class ThinkingConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Annotated[Raw, Ignored("reasoning is shown as it is", ("summarized",))] = NULL

    OPEN: ClassVar[bool] = True


class Metadata(Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: Name | None = None

    OPEN: ClassVar[bool] = True


class PromptBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that make the prompt: the body of ``POST /v1/messages/count_tokens``."""

    model: Name
    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    betas: Annotated[Raw, Ignored("what is there needs no header", ([],))] = NULL
    billing_policy: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    cache_control: Annotated[Raw, CACHE_HINT] = NULL
    compaction: Annotated[Raw, Ignored("it does not change the prompt")] = NULL
    context_management: Annotated[
        Raw, Ignored("nothing is cleared from the conversation", ({}, {"edits": []}))
    ] = NULL
    speed: Annotated[Raw, Ignored("there is one speed", ("standard",))] = NULL
    mcp_servers: Annotated[Raw, Refused("the client calls tools", ([],))] = NULL


class MessageBody(PromptBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Raw = NULL
    metadata: Annotated[Metadata | None, KEPT_ELSEWHERE] = None
    service_tier: Literal["auto", "standard_only"] | None = None
    compaction: Annotated[Raw, Refused("ask for a summary in a message")] = NULL
    container: Annotated[Raw, Refused("weft runs no code")] = NULL
    diagnostics: Annotated[Raw, Ignored("weft keeps nothing to compare with")] = NULL
    fallback_credit_token: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    fallbacks: Annotated[Raw, Ignored("there is one model", ([],))] = NULL
    inference_geo: Annotated[Raw, Ignored("the server's location is fixed")] = NULL
    thread: Annotated[Raw, Refused("send the whole conversation")] = NULL
