"""Ollama's ``/api/chat`` and ``/api/generate``: a checked body to the job that it stands for.

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

from weft.api.bodies import MAX_MESSAGES, MAX_TOOLS, NULL, Name, decode_body
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import Builder, Job
from weft.api.ollama_calls import CallQueue
from weft.api.sampling import check_model
from weft.api.translate import job_of_chat, job_of_completion
from weft.core.errors import ParameterError
from weft.core.types import MAX_STOP_STRINGS, SamplingParams

# Fields of the chat or completion body -> fields of these.
NAMES = {
    "frequency_penalty": "options.frequency_penalty",
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
}
SWITCH = "enable_thinking"  # the variable of templates
LEVELS = ("low", "medium", "high", "max")

_NOTHING = re.compile(r"[+-]?0*(\.0*)?(ns|us|µs|ms|s|m|h)?")  # a duration of none


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """How to sample, and what only tells Ollama how to run a model: that is left as JSON."""

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
    # What would change the answer.
    embedding_only: Raw = NULL
    mirostat: Raw = NULL
    penalize_newline: Raw = NULL
    tfs_z: Raw = NULL
    typical_p: Raw = NULL
    vocab_only: Raw = NULL
    # What does not.
    f16_kv: Raw = NULL
    logits_all: Raw = NULL
    low_vram: Raw = NULL
    main_gpu: Raw = NULL
    mirostat_eta: Raw = NULL
    mirostat_tau: Raw = NULL
    num_batch: Raw = NULL
    num_ctx: Raw = NULL
    num_gpu: Raw = NULL
    num_keep: Raw = NULL
    num_thread: Raw = NULL
    numa: Raw = NULL
    use_mlock: Raw = NULL
    use_mmap: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        "embedding_only": (False,),
        "mirostat": (0,),
        "penalize_newline": (True,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "vocab_only": (False,),
    }


class CallFunction(Struct, kw_only=True):
    name: Name
    arguments: Raw = NULL


class Call(Struct, kw_only=True):
    function: CallFunction
    id: Name | None = None


class Message(Struct, kw_only=True):
    """One message of a conversation; what else clients keep in it is passed over."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_MESSAGES)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"images": ([],)}


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    function: Raw
    type: str | None = None
    items: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {"items": ()}


class OllamaBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints share."""

    model: Name
    format: Raw = NULL
    keep_alive: Raw = NULL
    logprobs: bool | None = None
    options: Raw = NULL
    shift: bool | None = None
    stream: bool | None = None
    template: Raw = NULL
    think: bool | str | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    truncate: bool | None = None

    REFUSED: ClassVar[Mapping[str, Any]] = {"template": ("",)}


class OllamaChatBody(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/chat``."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/generate``."""

    prompt: str | None = None
    raw: bool | None = None
    system: str | None = None
    context: Raw = NULL
    height: Raw = NULL
    images: Raw = NULL
    steps: Raw = NULL
    suffix: Raw = NULL
    width: Raw = NULL

    REFUSED: ClassVar[Mapping[str, Any]] = {
        **OllamaBody.REFUSED,
        "context": ([],),
        "height": (0,),
        "images": ([],),
        "steps": (0,),
        "suffix": ("",),
        "width": (0,),
    }


def ollama_chat_job(body: OllamaChatBody, builder: Builder) -> Job | None:
    """Check a body and return what it asks for; None if that is only to load the model.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    check_model(body.model, builder.card)
    if not body.messages:
        return None
    fields = {"messages": _messages(body.messages), "tools": _tools(body.tools)}
    return _chat(body, fields, builder, NAMES)


def ollama_generate_job(body: OllamaGenerateBody, builder: Builder) -> Job | None:
    """As `ollama_chat_job`, for one prompt."""
    check_model(body.model, builder.card)
    if not body.prompt:
        return None
    if body.raw:
        return _completion(body, body.prompt, builder)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return _chat(body, {"messages": messages}, builder, {**NAMES, "messages": "prompt"})


def unloads(body: OllamaBody) -> bool:
    """Whether a body without a prompt asks for the model to be unloaded."""
    if body.keep_alive is NULL:
        return False
    try:
        given = msgspec.json.decode(body.keep_alive)
    except msgspec.DecodeError:
        return False
    return given == 0 if not isinstance(given, str) else bool(_NOTHING.fullmatch(given))


def _chat(
    body: OllamaBody, fields: Mapping[str, Any], builder: Builder, names: Mapping[str, str]
) -> Job:
    options = read_options(body.options)
    chat = {
        **fields,
        **_shared_fields(body, options),
        **_think_fields(body, builder),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }
    return _bounded(job_of_chat(chat, builder, names), options, builder)


def _completion(body: OllamaGenerateBody, prompt: str, builder: Builder) -> Job:
    """The job of a prompt that has gone through a template already."""
    if body.system:
        raise UnsupportedParameterError("system", " A raw prompt goes through no template.")
    options = read_options(body.options)
    bos = builder.tokenizer.special_tokens.get("bos_token")
    fields = {
        **_shared_fields(body, options),
        "prompt": prompt,
        "parse_special": True,
        "add_special_tokens": not (bos and prompt.startswith(bos)),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return _bounded(job_of_completion(fields, builder, NAMES), options, builder)


def read_options(given: Raw) -> Options:
    """The ``options`` of a body. Raises ParameterError, which names the wrong one."""
    return Options() if _is_null(given) else decode_body(Options, given, "options")


def _shared_fields(body: OllamaBody, options: Options) -> dict[str, Any]:
    unpenalised = options.repeat_last_n == 0
    return {
        "model": body.model,
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": 1.0 if unpenalised else options.repeat_penalty,
        "presence_penalty": None if unpenalised else options.presence_penalty,
        "frequency_penalty": None if unpenalised else options.frequency_penalty,
    }


def _bounded(job: Job, options: Options, builder: Builder) -> Job:
    """The job with as many output tokens as the options and the context leave it."""
    card = builder.card
    _check_window(options, job.requests[0].sampling, card.max_model_len)
    wanted = options.num_predict
    if wanted is None:
        wanted = card.sampling_defaults.get("max_tokens")
    requests = []
    for request in job.requests:
        room = card.max_model_len - len(request.prompt)
        most = room if wanted is None or wanted <= 0 else min(wanted, room)
        requests.append(replace(request, sampling=replace(request.sampling, max_tokens=most)))
    return replace(job, requests=tuple(requests))


def _check_window(options: Options, sampling: SamplingParams, context: int) -> None:
    """Refuse penalties that leave tokens out; without penalties a window says nothing."""
    window = options.repeat_last_n
    if window is None or window <= 0 or window >= context:
        return
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    if sampling.repetition_penalty != 1 or any(penalties):
        raise UnsupportedParameterError(
            "options.repeat_last_n", " Penalties count all tokens here; give -1, or leave it out."
        )


def _is_null(raw: Raw) -> bool:
    return raw is NULL or bytes(raw).strip() == b"null"


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
    """What tells the template whether and how much to think."""
    think = body.think
    if isinstance(think, str) and think not in LEVELS:
        raise ParameterError(
            f"think must be true, false or one of {', '.join(LEVELS)}, not '{think[:100]}'.",
            param="think",
        )
    if think is None:
        return {}
    template = builder.chat_template
    known = template.variables if template is not None else frozenset()
    if builder.dialect.reasoning is None:
        if not think:
            return {}
        raise UnsupportedParameterError("think", " This model does not support thinking.")
    if think is True:
        return {"chat_template_kwargs": {"enable_thinking": True}} if SWITCH in known else {}
    effort = think or "none"
    tells = not known.isdisjoint((SWITCH, "reasoning_effort"))
    return {
        "reasoning_effort": effort if tells else None,
        "include_reasoning": None if think else False,
    }


def _messages(messages: Seq[Message]) -> list[dict[str, Any]]:
    """Messages of a chat; calls and their results get the ids that tie them together."""
    calls = CallQueue()
    shown = []
    for index, message in enumerate(messages):
        plain: dict[str, Any] = {
            "role": message.role.lower(),
            "content": message.content or "",
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


def _call(call: Call, number: str) -> dict[str, Any]:
    arguments = {} if _is_null(call.function.arguments) else call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def _tools(tools: Seq[Tool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [{"type": tool.type or "function", "function": tool.function} for tool in tools]
