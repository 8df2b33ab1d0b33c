"""Answers as the OpenAPI description declares them; tests hold real ones against these.

What answers are made of is written where each is made, without a detour over objects. A field with
the type ``X | UnsetType`` is not in every answer.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class Error(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, kw_only=True):
    """An error in OpenAI's form."""

    error: Error


class MessagesError(Struct, kw_only=True):
    type: str
    message: str


class MessagesErrorAnswer(Struct, kw_only=True):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesError
    request_id: str | None


class OllamaErrorAnswer(Struct, kw_only=True):
    """An error in Ollama's form."""

    error: str


# -- completions and chats ----------------------------------------------------------------------


class CachedTokens(Struct, kw_only=True):
    cached_tokens: int


class CompletionUsage(Struct, kw_only=True):
    """Tokens of a request: of all its prompts, and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Likely(Struct, kw_only=True):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class LikelyFirst(Likely, kw_only=True):
    """A token of the output, and the likeliest ones in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(Struct, kw_only=True):
    content: list[LikelyFirst]
    refusal: None


class TextLogprobs(Struct, kw_only=True):
    """Log probabilities of a completion: a list for each fact, an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CalledFunction(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CalledCustom(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class AnsweredCall(Struct, kw_only=True):
    """A call of a tool; in a chunk the next piece of one, by its ``index``."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class Head(Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET


class ChatCompletion(Head, kw_only=True):
    """The answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Head, kw_only=True):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class TextChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Completion(Head, kw_only=True):
    """The answer to a completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: CompletionUsage


class CompletionChunk(Head, kw_only=True):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


# -- responses ----------------------------------------------------------------------------------


class ReasoningTokens(Struct, kw_only=True):
    reasoning_tokens: int


class ReadTokens(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int | UnsetType = UNSET


class InputUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: ReadTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(Struct, kw_only=True):
    """A response; fields of the request that it repeats are in OpenAI's description."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    output: list[dict[str, Any]]
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: InputUsage | UnsetType = UNSET
    prompt_cache_key: str | UnsetType = UNSET
    safety_identifier: str | UnsetType = UNSET
    user: str | UnsetType = UNSET


class InputTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Struct, kw_only=True):
    """A page of the input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


# -- vectors and scores -------------------------------------------------------------------------


class PromptUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


class EmbeddedInput(Struct, kw_only=True):
    """A vector; as text it is base64 of float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[EmbeddedInput]
    model: str
    usage: PromptUsage


class DocumentText(Struct, kw_only=True):
    text: str


class Ranked(Struct, kw_only=True):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    """Documents by their relevance, the highest first."""

    id: str
    created: int
    model: str
    results: list[Ranked]
    usage: PromptUsage
    meta: dict[str, Any]


class TextScore(Struct, kw_only=True):
    """A text of a request in the form of text-embeddings-inference."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Score(Struct, kw_only=True):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


# -- Anthropic's messages -----------------------------------------------------------------------


class MessageUsage(Struct, kw_only=True):
    """Tokens of a message; those from the prefix cache are no input tokens here."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "priority", "batch"]


class MessageAnswer(Struct, kw_only=True):
    """The answer to ``/v1/messages``: blocks of text, thinking and calls."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Struct, kw_only=True):
    input_tokens: int


class MessageBatchCounts(Struct, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, kw_only=True):
    """A batch of messages; under ``weft`` is what only weft says."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None
    weft: dict[str, Any]


class MessageBatchList(Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageModel(Struct, kw_only=True):
    """A served name for Anthropic's clients; its context is known once it was awake."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class MessageModelList(Struct, kw_only=True):
    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"]
