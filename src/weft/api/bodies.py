"""Request bodies as the API descriptions of OpenAI and vLLM define them, with weft's extensions.

What they have but weft does not honour is declared too, with a rule that says whether it is ignored
or refused (see `weft.api.rules`). Such fields, and variables of templates, are left as JSON: to
decode a long value holds up every other thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct, defstruct

from weft.api.decoding import MAX_CONTAINERS, MAX_STRINGS
from weft.api.rules import NULL, Ignored, Refused
from weft.core.settings import Setting
from weft.core.types import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
)

MAX_N = 128
MAX_BAD_WORDS = MAX_BAD_SEQUENCES // 2  # each with a space before it and without
MAX_BAD_WORD_CHARS = 256
MAX_NAME_CHARS = 1024
MAX_MESSAGES = 16384  # also of parts of a message and of its tool calls
MAX_TOOLS = 1024  # a client may offer many that are not shown to the model
MAX_IDS = 2**20  # of one list; far beyond any context
MAX_DOCUMENTS = 256
HOTTEST = 2  # temperature, as OpenAI's API bounds it
IMAGE = "[An image or a file stands here, which this model cannot read.]"

FIXED_LIMITS: Mapping[str, int] = {
    "n": MAX_N,
    "completion_logprobs": MAX_LOGPROBS,
    "top_logprobs": MAX_LOGPROBS,
    "stop_strings": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "messages": MAX_MESSAGES,
    "lists_and_objects": MAX_CONTAINERS,
    "strings": MAX_STRINGS,
}

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Meta(ge=0)]
Logprobs = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Ids = Annotated[list[int], Meta(max_length=MAX_IDS)]
Prompts = Annotated[list[str | int | Ids], Meta(max_length=MAX_IDS)]
Variables = Annotated[dict[str, Raw], Meta(max_length=32)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Parts = Annotated[list[Raw], Meta(max_length=MAX_MESSAGES)]  # each is decoded by its ``type``

CACHE_HINT = Ignored("equal prefixes are found without hints")
CALLER = Ignored("the model itself calls tools", ({"type": "direct"},))
KEPT_ELSEWHERE = Ignored("a client's own bookkeeping")
WHITESPACE = Ignored("use json_whitespace")
ROUTING = Ignored("there is one model replica, so nothing to route")


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # extension: usage in every chunk
    include_obfuscation: Annotated[
        Raw, Ignored("chunks are not padded against observers of their length", (False,))
    ] = NULL

    OPEN: ClassVar[bool] = True


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation; which fields go with which role is checked later.

    Attributes:
        reasoning, reasoning_content: two names of the same.
    """

    role: str
    content: str | Objects | None = None
    name: Name | None = None
    tool_calls: Objects | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Annotated[Raw, Refused("weft reads text only")] = NULL
    function_call: Annotated[Raw, Refused("use tool_calls, which replaced it")] = NULL
    annotations: Annotated[Raw, Ignored("the text does not need them", ([],))] = NULL

    OPEN: ClassVar[bool] = True


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema that the output is to satisfy; it always does, ``strict`` or not."""

    name: FunctionName
    schema: Raw = NULL
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The ``response_format`` of a body.

    Attributes:
        schema: of a ``json_object``, as llama.cpp has it.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: Raw = NULL


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of ``KINDS``, as vLLM names them.

    Attributes:
        disable_any_whitespace: JSON is compact, whatever ``json_whitespace`` says.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("json", "json_object", "regex", "choice", "grammar")

    json: Raw = NULL
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    # Not honoured.
    disable_additional_properties: Annotated[
        Raw, Ignored("objects that name their keys are closed anyway", (False,))
    ] = NULL
    disable_fallback: Annotated[Raw, Ignored("there is nothing to fall back to", (False, True))] = (
        NULL
    )
    whitespace_pattern: Annotated[Raw, WHITESPACE] = NULL


class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None

    OPEN: ClassVar[bool] = True


class GrammarText(Struct, forbid_unknown_fields=True, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The format of the text that a custom tool takes."""

    type: Literal["text", "grammar"]
    grammar: GrammarText | None = None


class Custom(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes a text instead of arguments."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None

    OPEN: ClassVar[bool] = True


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool; of the types that have a model call something, ``function`` and ``custom``."""

    type: str
    function: Function | None = None
    custom: Custom | None = None

    OPEN: ClassVar[bool] = True


class FunctionRef(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName


class ToolRef(Struct, forbid_unknown_fields=True, kw_only=True):
    """Names a tool, under the key of its type."""

    type: Literal["function", "custom"]
    function: FunctionRef | None = None
    custom: FunctionRef | None = None


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolRef], Meta(max_length=MAX_TOOLS)]


class ToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    function: FunctionRef | None = None
    custom: FunctionRef | None = None
    allowed_tools: AllowedTools | None = None


# Numbers of ``SamplingParams`` that bodies spell in ways of their own; the others are fields of
# bodies by the same names, with the bounds that are declared there.
APART = frozenset({"include_stop", "logprobs", "max_tokens", "prompt_logprobs", "seed", "top_p"})
SAME_NAME = tuple(name for name in NUMBERS if name not in APART)


def _number(declared: Setting) -> Any:
    """The type of a number or switch in a body."""
    if declared.kind == "bool":
        return bool | None
    low, high = declared.low, declared.high
    bounds = Meta(gt=low, le=high) if declared.above else Meta(ge=low, le=high)
    return Annotated[int if declared.kind == "int" else float, bounds] | None


if TYPE_CHECKING:
    SamplingFields = Struct  # code reads them by ``SAME_NAME``
else:
    _NUMBERS = [(name, _number(NUMBERS[name]), None) for name in SAME_NAME]
    SamplingFields = defstruct("SamplingFields", _NUMBERS, kw_only=True)


class GenerationBody(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions share.

    A field of ``SamplingFields`` that stands here again has other bounds in OpenAI's API.
    """

    model: Name
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    response_format: ResponseFormat | None = None  # an extension of completions
    seed: int | None = None
    service_tier: str | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=HOTTEST)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[Name | None, KEPT_ELSEWHERE] = None
    # Extensions: weft's, and vLLM's by their names.
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    cache_salt: Name | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: Raw = NULL
    guided_regex: str | None = None
    include_stop_str_in_output: bool | None = None
    json_whitespace: Literal["compact", "flexible"] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROBS)] | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    priority: int | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Not honoured.
    metadata: Annotated[Raw, Ignored("kept by OpenAI beside stored completions", ({},))] = NULL
    store: Annotated[Raw, Ignored("completions are not stored; responses are", (False,))] = NULL
    prompt_cache_key: Annotated[Raw, CACHE_HINT] = NULL
    prompt_cache_options: Annotated[Raw, CACHE_HINT] = NULL
    prompt_cache_retention: Annotated[Raw, CACHE_HINT] = NULL
    cache_prompt: Annotated[Raw, CACHE_HINT] = NULL
    id_slot: Annotated[Raw, CACHE_HINT] = NULL
    request_id: Annotated[Raw, Ignored("the header X-Request-Id is honoured")] = NULL
    session_id: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    client_metadata: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    litellm_metadata: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    provider: Annotated[Raw, ROUTING] = NULL
    models: Annotated[Raw, ROUTING] = NULL
    route: Annotated[Raw, ROUTING] = NULL
    usage: Annotated[Raw, Ignored("answers have usage; streams by stream_options")] = NULL
    stream_interval: Annotated[Raw, Ignored("tokens are sent as they come", (1,))] = NULL
    keep_alive: Annotated[Raw, Ignored("the model stays loaded")] = NULL
    guided_decoding_backend: Annotated[Raw, Ignored("there is one", ("auto",))] = NULL
    guided_whitespace_pattern: Annotated[Raw, WHITESPACE] = NULL
    use_beam_search: Annotated[Raw, Refused("there is no beam search", (False,))] = NULL
    best_of: Annotated[Raw, Refused("ask for n choices and choose among them", (1,))] = NULL
    length_penalty: Annotated[Raw, Refused("it belongs to beam search", (1.0, 1))] = NULL
    early_stopping: Annotated[Raw, Refused("it belongs to beam search", (False,))] = NULL
    detokenize: Annotated[Raw, Refused("return_token_ids adds the ids to the text", (True,))] = NULL
    spaces_between_special_tokens: Annotated[
        Raw, Refused("text is what the tokens spell", (True,))
    ] = NULL
    repetition_detection: Annotated[Raw, Refused("use penalties, or stop")] = NULL
    watermarking: Annotated[Raw, Refused("weft adds no watermark", (False,))] = NULL
    logits_processors: Annotated[Raw, Refused("weft runs no code of requests", ([],))] = NULL
    kv_transfer_params: Annotated[Raw, Refused("KV is not moved between servers")] = NULL
    ec_transfer_params: Annotated[Raw, Refused("KV is not moved between servers")] = NULL
    vllm_xargs: Annotated[Raw, Refused("weft has no such extensions", ({},))] = NULL


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | Prompts | None
    echo: bool | None = None
    parse_special: bool | None = None
    logprobs: Logprobs | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Annotated[Raw, Refused("send text or token ids", ([],))] = NULL
    suffix: Annotated[Raw, Refused("weft has no fill-in-the-middle", ("",))] = NULL


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    safety_identifier: Annotated[Name | None, KEPT_ELSEWHERE] = None
    top_logprobs: Logprobs | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    tool_choice: str | ToolChoice | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Variables | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: Annotated[list[Raw], Meta(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: str | None = None
    # Not honoured.
    verbosity: Annotated[Raw, Ignored("no template reads it; say it in a message", ("medium",))] = (
        NULL
    )
    chat_template_content_format: Annotated[
        Raw, Ignored("templates get contents as text", ("auto",))
    ] = NULL
    mm_processor_kwargs: Annotated[Raw, Ignored("weft processes text only", ({},))] = NULL
    media_io_kwargs: Annotated[Raw, Ignored("weft processes text only", ({},))] = NULL
    prediction: Annotated[Raw, Ignored("a hint for speed; prompts are looked up anyway")] = NULL
    add_special_tokens: Annotated[Raw, Refused("the chat template writes them", (False,))] = NULL
    audio: Annotated[Raw, Refused("weft generates no audio")] = NULL
    modalities: Annotated[Raw, Refused("answers are text", (["text"],))] = NULL
    function_call: Annotated[Raw, Refused("use tool_choice, which replaced it", ("none",))] = NULL
    functions: Annotated[Raw, Refused("use tools, which replaced it", ([],))] = NULL
    moderation: Annotated[Raw, Refused("weft does not moderate")] = NULL
    web_search_options: Annotated[Raw, Refused("weft does not search")] = NULL


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /tokenize``: either a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    documents: Annotated[list[Raw], Meta(max_length=MAX_DOCUMENTS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    skip_special_tokens: bool = False
