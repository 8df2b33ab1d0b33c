"""Ollama's ``/api/chat`` and ``/api/generate``: turns a checked body into a job.

Both stand for chats, except for a raw prompt, which is a completion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw, Struct

from weft.api.bodies import HOTTEST, MAX_MESSAGES, MAX_TOOLS, Name
from weft.api.chat import SWITCH, reads_effort
from weft.api.decoding import decode_body
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import Builder, Job
from weft.api.ollama_calls import CallQueue
from weft.api.rules import NULL, Ignored, Notes, Refused, is_neutral
from weft.api.sampling import check_model
from weft.api.translate import job_of_chat, job_of_completion
from weft.core.errors import ParameterError
from weft.core.types import MAX_STOP_STRINGS, MAX_TEMPERATURE

# Fields of the chat or completion body -> fields of these.
NAMES = {
    "continue_final_message": "messages",
    "frequency_penalty": "options.frequency_penalty",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "min_p": "options.min_p",
    "presence_penalty": "options.presence_penalty",
    "repetition_penalty": "options.repeat_penalty",
    "seed": "options.seed",
    "stop": "options.stop",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "response_format": "format",
    ".json_schema.schema": "",
    ".function.": ".function.",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
    "thinking_token_budget": "think",
}
LEVELS = ("low", "medium", "high", "max")

_NOTHING = re.compile(r"[+-]?0*(\.0*)?(ns|us|µs|ms|s|m|h)?")  # a duration of none
_WHOLE = re.compile(rb"(-?\d+)\.0+")  # a whole number written as a float


STAYS_LOADED = Ignored("the model stays loaded", (-1,))
SET_AT_START = Ignored("it is set when the server starts")


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of Ollama: sampling, and running the model.

    Clients send whatever their version of Ollama knows, so that unknown options are ignored.
    """

    OPEN: ClassVar[bool] = True

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, lt=2**31)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Not honoured.
    embedding_only: Annotated[Raw, Refused("the model also generates", (False,))] = NULL
    mirostat: Annotated[Raw, Refused("weft has no mirostat sampling", (0,))] = NULL
    penalize_newline: Annotated[Raw, Refused("penalties count every token", (True,))] = NULL
    tfs_z: Annotated[Raw, Refused("use min_p", (1, 1.0))] = NULL
    typical_p: Annotated[Raw, Refused("use min_p", (1, 1.0))] = NULL
    vocab_only: Annotated[Raw, Refused("weft always loads the weights", (False,))] = NULL
    f16_kv: Annotated[Raw, SET_AT_START] = NULL
    logits_all: Annotated[Raw, Ignored("log probabilities are there without it")] = NULL
    low_vram: Annotated[Raw, SET_AT_START] = NULL
    main_gpu: Annotated[Raw, SET_AT_START] = NULL
    mirostat_eta: Annotated[Raw, Ignored("it belongs to mirostat")] = NULL
    mirostat_tau: Annotated[Raw, Ignored("it belongs to mirostat")] = NULL
    num_batch: Annotated[Raw, SET_AT_START] = NULL
    num_ctx: Annotated[Raw, SET_AT_START] = NULL
    num_gpu: Annotated[Raw, SET_AT_START] = NULL
    num_keep: Annotated[Raw, Ignored("weft does not shift the context")] = NULL
    num_thread: Annotated[Raw, SET_AT_START] = NULL
    numa: Annotated[Raw, SET_AT_START] = NULL
    use_mlock: Annotated[Raw, SET_AT_START] = NULL
    use_mmap: Annotated[Raw, SET_AT_START] = NULL


Pictured = Annotated[list[str], Meta(max_length=MAX_MESSAGES)]  # images in base64


class CallFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    arguments: Raw = NULL
    index: Raw = NULL

    OPEN: ClassVar[bool] = True


class Call(Struct, forbid_unknown_fields=True, kw_only=True):
    function: CallFunction
    id: Name | None = None
    type: str | None = None

    OPEN: ClassVar[bool] = True


class OllamaMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_MESSAGES)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Pictured | None = None

    OPEN: ClassVar[bool] = True


class OllamaTool(Struct, forbid_unknown_fields=True, kw_only=True):
    function: Raw
    type: str | None = None

    OPEN: ClassVar[bool] = True


class OllamaBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share; unknown ones are ignored, as Ollama does."""

    OPEN: ClassVar[bool] = True

    model: Name
    format: Raw = NULL
    logprobs: bool | None = None
    options: Raw = NULL
    stream: bool | None = None
    think: bool | str | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    # Not honoured.
    keep_alive: Annotated[Raw, STAYS_LOADED] = NULL
    shift: Annotated[Raw, Ignored("weft does not shift the context", (False,))] = NULL
    template: Annotated[Raw, Refused("the model's own template is used", ("",))] = NULL
    truncate: Annotated[Raw, Ignored("a conversation that is too long is an error", (False,))] = (
        NULL
    )


class OllamaChatBody(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/chat``."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/generate``."""

    prompt: str | None = None
    raw: bool | None = None
    system: str | None = None
    # Not honoured.
    context: Annotated[Raw, Refused("send the conversation to /api/chat", ([],))] = NULL
    height: Annotated[Raw, Refused("weft generates no images", (0,))] = NULL
    images: Pictured | None = None
    steps: Annotated[Raw, Refused("weft generates no images", (0,))] = NULL
    suffix: Annotated[Raw, Refused("weft has no fill-in-the-middle", ("",))] = NULL
    width: Annotated[Raw, Refused("weft generates no images", (0,))] = NULL


def ollama_chat_job(
    body: OllamaChatBody, builder: Builder, notes: Notes | None = None
) -> Job | None:
    """Check a body and return what it asks for; None if that is only to load the model.

    Args:
        notes: take what is ignored.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    notes = Notes() if notes is None else notes
    check_model(body.model, builder.card)
    options = read_options(body.options, notes)
    if not body.messages:
        return None
    messages = _messages(body.messages)
    fields = {"messages": messages, "tools": _tools(body.tools), **_continued(messages[-1])}
    return _chat(body, options, fields, builder, NAMES, notes)


def ollama_generate_job(
    body: OllamaGenerateBody, builder: Builder, notes: Notes | None = None
) -> Job | None:
    """As `ollama_chat_job`, for one prompt."""
    notes = Notes() if notes is None else notes
    check_model(body.model, builder.card)
    options = read_options(body.options, notes)
    if not body.prompt:
        return None
    if body.raw:
        return _completion(body, options, body.prompt, builder, notes)
    messages = [{"role": "user", "content": _content(body.prompt, body.images)}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    names = {**NAMES, "messages": "prompt"}
    return _chat(body, options, {"messages": messages}, builder, names, notes)


def unloads(body: OllamaBody) -> bool:
    """Whether a body without a prompt asks for the model to be unloaded."""
    try:
        given = msgspec.json.decode(body.keep_alive)
    except msgspec.DecodeError:
        return False
    return bool(_NOTHING.fullmatch(given)) if isinstance(given, str) else given == 0


def read_options(given: Raw, notes: Notes) -> Options:
    """The ``options`` of a body. Raises ParameterError, which names the wrong one."""
    if is_neutral(bytes(given)):
        return Options()
    return decode_body(Options, _with_integers(given), "options", notes)


def _with_integers(given: Raw) -> Raw:
    """The options with 128 for 128.0: some clients have no integers. What is no object stays."""
    try:
        options = msgspec.json.decode(given, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return given
    wholes = {name: match for name, raw in options.items() if (match := _WHOLE.fullmatch(raw))}
    if not wholes:
        return given
    return Raw(msgspec.json.encode(options | {n: Raw(match[1]) for n, match in wholes.items()}))


def _chat(
    body: OllamaBody,
    options: Options,
    fields: Mapping[str, Any],
    builder: Builder,
    names: Mapping[str, str],
    notes: Notes,
) -> Job:
    chat = {
        **fields,
        **_shared_fields(body, options),
        **_think_fields(body, builder),
        "max_completion_tokens": _bound(options),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }
    job = job_of_chat(chat, builder, names, notes)
    return _checked(job, options, builder, notes)


def _completion(
    body: OllamaGenerateBody, options: Options, prompt: str, builder: Builder, notes: Notes
) -> Job:
    """The job of a prompt that has gone through a template already."""
    if body.system:
        raise UnsupportedParameterError("system", " A raw prompt goes through no template.")
    bos = builder.tokenizer.special_tokens.get("bos_token")
    fields = {
        **_shared_fields(body, options),
        "prompt": prompt,
        "parse_special": True,
        "add_special_tokens": not (bos and prompt.startswith(bos)),
        "max_tokens": _bound(options),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    job = job_of_completion(fields, builder, NAMES, notes)
    if options.num_predict is None:
        job = _sampled(job, max_tokens=builder.card.sampling_defaults.get("max_tokens"))
    return _checked(job, options, builder, notes)


def _shared_fields(body: OllamaBody, options: Options) -> dict[str, Any]:
    unpenalised = options.repeat_last_n == 0
    return {
        "model": body.model,
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        "temperature": None if _hot(options) else options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": 1.0 if unpenalised else options.repeat_penalty,
        "presence_penalty": None if unpenalised else options.presence_penalty,
        "frequency_penalty": None if unpenalised else options.frequency_penalty,
    }


def _bound(options: Options) -> int | None:
    """The limit on output tokens; 0 and below are none."""
    wanted = options.num_predict
    return wanted if wanted is not None and wanted > 0 else None


def _checked(job: Job, options: Options, builder: Builder, notes: Notes) -> Job:
    """The job, after what only its sampling shows."""
    _check_window(options, builder.card.max_model_len, notes)
    if _hot(options):
        job = _sampled(job, temperature=_temperature(options, notes))
    unbounded = options.num_predict is not None and options.num_predict <= 0
    return _sampled(job, max_tokens=None) if unbounded else job


def _sampled(job: Job, **changes: Any) -> Job:
    """The job with other parameters of sampling; without ``max_tokens`` the context is the end."""
    [request] = job.requests
    sampling = replace(request.sampling, **changes)
    return replace(job, requests=(replace(request, sampling=sampling),))


def _hot(options: Options) -> bool:
    """Whether the temperature is beyond what a chat takes; Ollama has no bound."""
    return options.temperature is not None and options.temperature > HOTTEST


def _temperature(options: Options, notes: Notes) -> float:
    """The temperature of hot options, lowered to what the engine takes."""
    assert options.temperature is not None
    if options.temperature > MAX_TEMPERATURE:
        notes.ignore("options.temperature")
    return min(options.temperature, MAX_TEMPERATURE)


def _check_window(options: Options, context: int, notes: Notes) -> None:
    """Note an ignored window: penalties count all tokens."""
    window = options.repeat_last_n
    if window is not None and 0 < window < context:
        notes.ignore("options.repeat_last_n", _no_window)


def _no_window(name: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        name, " Penalties count all tokens here; give -1, or leave it out."
    )


def _response_format(given: Raw) -> dict[str, Any] | None:
    text = bytes(given).strip()
    if text in (b"null", b'""'):
        return None
    if text == b'"json"':
        return {"type": "json_object"}
    if not text.startswith(b"{"):
        raise ParameterError("format must be 'json' or a JSON Schema.", param="format")
    schema = {"name": "format", "schema": given, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _think_fields(body: OllamaBody, builder: Builder) -> dict[str, Any]:
    """Template variables for reasoning: whether to think, and how much."""
    think = body.think
    if isinstance(think, str) and think not in LEVELS:
        raise ParameterError(
            f"think must be true, false or one of {', '.join(LEVELS)}, not '{think[:100]}'.",
            param="think",
        )
    if think is None:
        return {}
    if builder.dialect.reasoning is None:
        if not think:
            return {}
        raise UnsupportedParameterError("think", " This model does not support thinking.")
    if think is True:
        template = builder.chat_template
        reads = template is not None and SWITCH in template.variables
        return {"chat_template_kwargs": {SWITCH: True}} if reads else {}
    if think is False:
        reads = reads_effort(builder.chat_template)
        told = {"reasoning_effort": "none"} if reads else {"thinking_token_budget": 0}
        return {**told, "include_reasoning": False}
    return {"reasoning_effort": think}


def _continued(last: Mapping[str, Any]) -> dict[str, Any]:
    """Continue the assistant's text if the conversation ends with it."""
    open_text = last["role"] == "assistant" and "tool_calls" not in last
    return {"continue_final_message": True} if open_text and last["content"].strip() else {}


def _messages(messages: Seq[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages of a chat; calls and their results get the ids that tie them together."""
    calls = CallQueue()
    shown = []
    for index, message in enumerate(messages):
        plain: dict[str, Any] = {
            "role": message.role.lower(),
            "content": _content(message.content or "", message.images),
            "reasoning_content": message.thinking,
        }
        if message.tool_calls:
            plain["tool_calls"] = [
                _call(call, calls.asked(call.function.name, call.id)) for call in message.tool_calls
            ]
        if plain["role"] == "tool":
            path = f"messages[{index}]"
            plain["tool_call_id"] = calls.answered(message.tool_call_id, message.tool_name, path)
            plain["name"] = message.tool_name
        shown.append(plain)
    return shown


def _content(text: str, images: Seq[str] | None) -> str | list[dict[str, Any]]:
    """A text behind its images, which are in base64."""
    if not images:
        return text
    urls = [{"url": f"data:image/png;base64,{image}"} for image in images]
    pictures = [{"type": "image_url", "image_url": url} for url in urls]
    return [*pictures, {"type": "text", "text": text}]


def _call(call: Call, number: str) -> dict[str, Any]:
    arguments = {} if is_neutral(bytes(call.function.arguments)) else call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def _tools(tools: Seq[OllamaTool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [{"type": tool.type or "function", "function": tool.function} for tool in tools]
