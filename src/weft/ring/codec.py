"""Encodes and decodes requests and errors for the ring.

Of the sampling parameters those cross that the engine uses; ``STAY`` (stop strings and what else
concerns text) stays with the request plane. Numbers and switches cross as one block of bytes, laid
out by ``NUMBERS``; the native part reads no more of it than its head.
"""

from __future__ import annotations

import math
import struct
from hashlib import sha256
from operator import attrgetter
from typing import Any

from weft.core import errors
from weft.core.errors import WeftError
from weft.core.images import unpack_images
from weft.core.plan import PromptLogprobs, Update
from weft.core.types import NUMBERS, Request, SamplingParams, TokenLogprob
from weft.ring.layout import FINISH_OF, SET

STAY = frozenset({"stop", "include_stop", "skip_special_tokens"})
HEAD = frozenset({"logprobs", "prompt_logprobs"})  # the native part reads these, too
PACKED = tuple(name for name in NUMBERS if name not in STAY and name not in HEAD)
_CODES = {"float": "d", "int": "q", "bool": "?7x"}
_NONE = {"float": math.nan, "int": -(2**63)}  # what no parameter can be stands for None

# A SamplingHead of ring.hpp, then the numbers.
_RECORD = struct.Struct("<4I" + "".join(_CODES[NUMBERS[name].kind] for name in PACKED))
_NONES = tuple(_NONE.get(NUMBERS[name].kind) for name in PACKED)
_packed_of = attrgetter(*PACKED)

# Tells rings of builds apart that have other parameters: they refuse each other.
SAMPLING = int.from_bytes(sha256(f"{PACKED} {_RECORD.format}".encode()).digest()[:8], "little")

Scored = tuple[int, float, int, tuple[tuple[int, float], ...]]


def pack_sampling(request: Request) -> bytes:
    """The parameters that are numbers; what has no fixed size travels in its section."""
    params = request.sampling
    scored, prompt_scored = params.logprobs, params.prompt_logprobs
    given = SET["embed"] if request.embed else 0
    given |= 0 if scored is None else SET["logprobs"]
    given |= 0 if prompt_scored is None else SET["prompt_logprobs"]
    numbers = zip(_packed_of(params), _NONES, strict=True)
    values = [none if value is None else value for value, none in numbers]
    return _RECORD.pack(given, scored or 0, prompt_scored or 0, 0, *values)


def unpack_numbers(packed: bytes) -> tuple[dict[str, Any], bool]:
    """The parameters that were packed, without those that are None; whether to embed.

    Raises:
        InvariantError: there are more or fewer bytes than the parameters have.
    """
    if len(packed) != _RECORD.size:
        raise errors.InvariantError("The sampling parameters of a request are cut off.")
    given, scored, prompt_scored, _, *numbers = _RECORD.unpack(packed)
    values: dict[str, Any] = {
        name: value
        for name, value in zip(PACKED, numbers, strict=True)
        if value == value and value != _NONE["int"]  # NaN differs from itself
    }
    if given & SET["logprobs"]:
        values["logprobs"] = scored
    if given & SET["prompt_logprobs"]:
        values["prompt_logprobs"] = prompt_scored
    return values, bool(given & SET["embed"])


def pack_token_lists(params: SamplingParams) -> list[int]:
    """The ids that are allowed, that are scored, and each bad sequence, with their lengths."""
    lists = (params.allowed_token_ids, params.logprob_token_ids, *params.bad_token_sequences)
    return [word for ids in lists for word in (len(ids), *ids)] if any(lists) else []


def unpack_token_lists(words: list[int]) -> dict[str, Any]:
    """The parameters that were packed. Raises ParameterError for what cannot be right."""
    lists: list[tuple[int, ...]] = []
    at = 0
    while at < len(words):
        end = at + 1 + words[at]
        lists.append(tuple(words[at + 1 : end]))
        at = end
    if at != len(words) or len(lists) == 1:
        raise errors.ParameterError("The lists of token ids are cut off.", param="bad_words")
    if not lists:
        return {}
    allowed, scored, *bad = lists
    return {
        "allowed_token_ids": allowed,
        "logprob_token_ids": scored,
        "bad_token_sequences": tuple(bad),
    }


def unpack_sampling(
    numbers: dict[str, Any],
    logit_bias: list[tuple[int, float]],
    stop_ids: list[int],
    grammar: bytes,
    token_lists: list[int],
) -> SamplingParams:
    """Raises ParameterError if a value is out of bounds, as in a corrupted slot."""
    lists = unpack_token_lists(token_lists)
    scored = lists.get("logprob_token_ids")
    if scored and numbers.get("logprobs") != len(scored):
        raise errors.ParameterError("logprobs is not the number of logprob_token_ids.")
    return SamplingParams(
        **numbers,
        **lists,
        logit_bias=dict(logit_bias),
        stop_token_ids=tuple(stop_ids),
        grammar=_text(grammar, "grammar") or None,
    )


def unpack_request(claim: tuple[Any, ...], vocab_size: int | None) -> Request:
    """The request of a claimed slot. Raises ParameterError for anything that cannot be right."""
    sequence_id, prompt, packed, bias, stop_ids, eos_ids, service_class, salt = claim[:8]
    output, crashes, memory_kills, grammar, token_lists, images = claim[8:]
    if vocab_size is not None and max(output, default=0) >= vocab_size:
        raise errors.InvariantError("A token that a dead engine has given out cannot be right.")
    if vocab_size is not None and max(prompt) >= vocab_size:
        raise errors.ParameterError(
            f"The prompt has token id {max(prompt)}, but the vocabulary has {vocab_size}.",
            param="prompt",
        )
    numbers, embed = unpack_numbers(packed)
    sampling = unpack_sampling(numbers, bias, stop_ids, grammar, token_lists)
    if vocab_size is not None:
        sampling.check_vocabulary(vocab_size)
    return Request(
        sequence_id,
        prompt,
        sampling,
        tuple(eos_ids),
        _text(service_class, "service_class"),
        salt,
        embed=embed,
        output=output,
        crashes=crashes,
        memory_kills=memory_kills,
        images=unpack_images(images, len(prompt)),
    )


def _text(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise errors.ParameterError(f"'{param}' is not UTF-8.", param=param) from None


def pack_logprob(given: TokenLogprob) -> Scored:
    return given.token, given.logprob, given.rank, given.top


def unpack_logprob(scored: Scored | None) -> TokenLogprob | None:
    return None if scored is None else TokenLogprob(*scored)


def unpack_news(news: tuple[Any, ...], ahead_ns: int = 0) -> list[Update]:
    """Decode the result of ``poll`` for one request, in the engine's order.

    Args:
        ahead_ns: the engine's monotonic clock minus the one here.
    """
    request_id, tokens, scored, prompt, cached, final = news
    updates: list[Update] = []
    if prompt is not None:
        start, entries = prompt
        found = tuple(entry for entry in map(unpack_logprob, entries) if entry is not None)
        updates.append(Update(request_id, None, prompt_logprobs=PromptLogprobs(start, found)))
    if scored is None:
        updates += [Update(request_id, token) for token in tokens]
    else:
        for token, entry in zip(tokens, scored, strict=True):
            given = unpack_logprob(entry)
            updates.append(Update(request_id, token, given, 0 if given is None else cached))
    if final is not None:
        reason, with_token, status, code, param, message, retry, scheduled, prefilled = final
        last = updates.pop() if with_token and tokens else Update(request_id, None)
        error = unpack_error(status, code, param, message, retry) if code else None
        updates.append(
            last._replace(
                cached_tokens=cached,
                finish=FINISH_OF[reason],
                error=error,
                scheduled_ns=scheduled and scheduled - ahead_ns,
                prefilled_ns=prefilled and prefilled - ahead_ns,
            )
        )
    return updates


def unpack_error(
    status: int, code: bytes, param: bytes, message: bytes, retry_after_s: int = 0
) -> WeftError:
    """An error of the type that has this code, else a plain one that looks the same."""
    name = code.decode(errors="replace")
    kind = _ERROR_TYPES.get(name, WeftError)
    error = kind(message.decode(errors="replace"), param=param.decode(errors="replace") or None)
    if error.code != name:
        error.code = name
    if error.http_status != status:
        error.http_status = status
    error.retry_after_s = retry_after_s or None
    return error


def _types_by_code() -> dict[str, type[WeftError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {kind.code: kind for kind in kinds if issubclass(kind, WeftError)}


_ERROR_TYPES = _types_by_code()
