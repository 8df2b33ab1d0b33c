"""Bodies of requests, as OpenAI's API description has them, and weft's extensions.

What the description has but weft does not support is declared too, so that it is refused by its
own name; a value that asks for nothing (null, or the default) is let through. Such fields, and
variables of templates, are left as JSON: to decode a long value holds up every other thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from weft.api.errors import (
    InvalidJSONError,
    MissingParameterError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from weft.core.errors import ParameterError
from weft.core.types import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SPECULATION,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_N = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_NAME_CHARS = 1024
MAX_MESSAGES = 16384  # also of parts of a message and of its tool calls
MAX_TOOLS = 128
MAX_IDS = 2**20  # of one list; far beyond any context
MAX_NEUTRAL_BYTES = 64  # of a value that asks for nothing
MAX_SHOWN_CHARS = 100  # of a name that a client made up

MAX_CONTAINERS = 2**16  # lists and objects of a body; each costs 0.7 us to decode
MAX_STRINGS = 2**18  # strings of a body
UNCOUNTED_BYTES = 128 * 2**10  # bodies up to here cannot hold enough to matter

FIXED_LIMITS: Mapping[str, int] = {
    "n": MAX_N,
    "completion_logprobs": MAX_COMPLETION_LOGPROBS,
    "top_logprobs": MAX_LOGPROBS,
    "stop_strings": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "messages": MAX_MESSAGES,
    "lists_and_objects": MAX_CONTAINERS,
    "strings": MAX_STRINGS,
}

NULL = Raw(b"null")
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0)]
Ids = Annotated[list[int], Meta(max_length=MAX_IDS)]
Prompts = Annotated[list[str | int | Ids], Meta(max_length=MAX_IDS)]
Variables = Annotated[dict[str, Raw], Meta(max_length=32)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Parts = Annotated[list[Raw], Meta(max_length=MAX_MESSAGES)]  # each is decoded by its ``type``


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # extension: usage in every chunk
    include_obfuscation: Raw = NULL


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation; which fields go with which role is checked later."""

    role: str
    content: str | Objects | None = None
    name: Name | None = None
    tool_calls: Objects | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    refusal: Raw = NULL
    audio: Raw = NULL
    function_call: Raw = NULL
    annotations: Raw = NULL


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema that the output is to satisfy; it always does, ``strict`` or not."""

    name: FunctionName
    schema: Raw = NULL
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of these, as vLLM names them."""

    json: Raw = NULL
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    function: Function | None = None
    custom: Raw = NULL


class FunctionRef(Struct, forbid_unknown_fields=True, kw_only=True):
    name: FunctionName


class ToolRef(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionRef


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolRef], Meta(max_length=MAX_TOOLS)]


class ToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    function: FunctionRef | None = None
    allowed_tools: AllowedTools | None = None
    custom: Raw = NULL


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions share."""

    model: Name
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    presence_penalty: Penalty | None = None
    response_format: ResponseFormat | None = None  # an extension of completions
    seed: int | None = None
    service_tier: str | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Name | None = None
    # Extensions.
    cache_salt: Name | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: Raw = NULL
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Annotated[int, Meta(ge=0, le=MAX_SPECULATION)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | Prompts | None
    echo: bool | None = None
    parse_special: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    best_of: Raw = NULL
    suffix: Raw = NULL


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    safety_identifier: Name | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    tool_choice: str | ToolChoice | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Variables | None = None
    include_reasoning: bool | None = None
    audio: Raw = NULL
    function_call: Raw = NULL
    functions: Raw = NULL
    metadata: Raw = NULL
    modalities: Raw = NULL
    moderation: Raw = NULL
    prediction: Raw = NULL
    prompt_cache_key: Raw = NULL
    prompt_cache_options: Raw = NULL
    prompt_cache_retention: Raw = NULL
    store: Raw = NULL
    verbosity: Raw = NULL
    web_search_options: Raw = NULL


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /tokenize``: either a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: Variables | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    skip_special_tokens: bool = False


# Values besides null that ask for nothing, for fields that are otherwise refused.
_NEUTRAL: dict[type[Struct], dict[str, tuple[Any, ...]]] = {
    StreamOptions: {"include_obfuscation": (False,)},
    Message: {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)},
    CompletionBody: {"best_of": (1,), "suffix": ("",)},
    ChatBody: {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    },
}

Body = TypeVar("Body", bound=Struct)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `([^`]*)`")


@cache
def _decoder(body: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


def decode_body(body: type[Body], data: bytes | Raw, at: str = "") -> Body:
    """Decode and check the body of a request, or the part of one that stands ``at`` a path.

    Raises:
        ParameterError: the body is not JSON, or a field is malformed, out of bounds, unknown or
            not supported; the error names it.
    """
    if isinstance(data, bytes):  # a part has been counted with the whole
        refuse_many_parts(data)
    try:
        str(data, "utf-8")  # the decoder does not look into what is left as JSON
        decoded: Body = _decoder(body).decode(data)
    except msgspec.ValidationError as error:
        raise _explained(body, str(error), at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = "" if isinstance(error, RecursionError) else f" ({str(error)[:200]})"
        raise InvalidJSONError(f"The body of the request is not valid JSON{detail}.") from None
    refuse_unsupported(decoded, at and f"{at}.")
    return decoded


def encode_json(value: Any) -> bytes:
    """JSON of a value from a body. Raises ParameterError if it is nested too deeply."""
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise ParameterError("The body of the request is nested too deeply.") from None


class _Kind(Struct):
    type: str | None = None


def kind_of(raw: Raw, path: str, default: str | None = None) -> str:
    """The ``type`` of an object. Raises MissingParameterError if it and a default are missing."""
    kind = decode_body(_Kind, raw, path).type
    kind = default if kind is None else kind
    if kind is None:
        raise MissingParameterError(f"{path}.type")
    return kind


def refuse_many_parts(data: bytes) -> None:
    """Raise ParameterError for JSON that would take long to decode, before it is decoded.

    The decoder checks the length of a list only when it has it, and holds up every thread until
    then: a megabyte of empty lists takes 200 ms. To count first takes a few.
    """
    if len(data) <= UNCOUNTED_BYTES or not _many(data):
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_STRINGS or _many(b"".join(plain.split(b'"')[::2])):
        raise ParameterError(
            f"The body of the request has too many parts; it may have {MAX_CONTAINERS} lists and "
            f"objects and {MAX_STRINGS} strings."
        )


def _many(data: bytes) -> bool:
    """Whether there may be too many parts; brackets within strings count, too."""
    containers = data.count(b"[") + data.count(b"{")
    return containers > MAX_CONTAINERS or data.count(b'"') > 2 * MAX_STRINGS


def refuse_unsupported(body: Struct, path: str = "") -> None:
    """Raise UnsupportedParameterError for a field that asks for something weft does not have."""
    table = _NEUTRAL.get(type(body)) or getattr(body, "REFUSED", {})
    for name, neutral in table.items():
        value = getattr(body, name)
        if value is not NULL and not _is_neutral(bytes(value), neutral):
            raise UnsupportedParameterError(path + name)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            refuse_unsupported(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for index, item in enumerate(value):
                refuse_unsupported(item, f"{path}{name}[{index}].")


def _is_neutral(data: bytes, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. A long one is not even decoded: that would take long."""
    if len(data) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(_same(value, one) for one in neutral)


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and bool(value == neutral)


def _explained(body: type[Struct], text: str, at: str) -> ParameterError:
    """Turn the library's sentence into a typed error that names the parameter."""
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    known = _known(body, path)
    path = f"{at}.{path}".rstrip(".").replace(".[", "[") if at else path
    path = path[:MAX_SHOWN_CHARS]
    field = _FIELD.search(what)
    if field is not None:
        name = field[1][:MAX_SHOWN_CHARS]
        name = f"{path}.{name}" if path else name
        if "missing required" in what:
            return MissingParameterError(name)
        return UnknownParameterError(name, known)
    if not path:
        return ParameterError(f"The body of the request is wrong: {_plain(what)}.")
    return ParameterError(f"'{path}' is wrong: {_plain(what)}.", param=path)


def _known(body: type[Struct], path: str) -> tuple[str, ...]:
    if path.startswith("messages["):
        return Message.__struct_fields__
    if path == "stream_options":
        return StreamOptions.__struct_fields__
    return body.__struct_fields__


def _plain(text: str) -> str:
    """``Expected `int | null`, got `str``` -> ``expected int or null, got str``; shortened."""
    text = text if len(text) <= 3 * MAX_SHOWN_CHARS else f"{text[: 3 * MAX_SHOWN_CHARS]}..."
    return (text[:1].lower() + text[1:]).replace("`", "").replace(" | ", " or ")
