"""Encodes and decodes requests and errors for the ring.

Only the sampling parameters that the engine uses are sent; ``STAY`` (stop strings and others of
text) stay with the request plane.
"""

from __future__ import annotations

from typing import Any

from weft.core import errors
from weft.core.errors import WeftError
from weft.core.plan import PromptLogprobs, Update
from weft.core.types import Request, SamplingParams, TokenLogprob
from weft.ring import _native
from weft.ring.layout import FINISH_OF, SET

STAY = frozenset({"stop", "include_stop", "skip_special_tokens"})
FLAGS = frozenset({"ignore_eos", "embed"})
OPTIONAL = tuple(name for name in SET if name not in FLAGS)
PLAIN = ("presence_penalty", "frequency_penalty", "min_tokens")

Scored = tuple[int, float, int, tuple[tuple[int, float], ...]]


def pack_sampling(request: Request) -> _native.SamplingRecord:
    """The fixed-size part of the parameters; what has no fixed size travels in its section."""
    params = request.sampling
    record = _native.SamplingRecord()
    given = 0
    for name in OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            setattr(record, name, value)
            given |= SET[name]
    for name in PLAIN:
        setattr(record, name, getattr(params, name))
    given |= SET["ignore_eos"] if params.ignore_eos else 0
    record.set = given | (SET["embed"] if request.embed else 0)
    return record


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
    record: _native.SamplingRecord,
    logit_bias: list[tuple[int, float]],
    stop_ids: list[int],
    grammar: bytes,
    token_lists: list[int],
) -> SamplingParams:
    """Raises ParameterError if a value is out of bounds, as in a corrupted slot."""
    lists = unpack_token_lists(token_lists)
    scored = lists.get("logprob_token_ids")
    if scored and (not record.set & SET["logprobs"] or record.logprobs != len(scored)):
        raise errors.ParameterError("logprobs is not the number of logprob_token_ids.")
    values: dict[str, Any] = {name: getattr(record, name) for name in PLAIN}
    values |= {name: getattr(record, name) for name in OPTIONAL if record.set & SET[name]}
    return SamplingParams(
        **values,
        **lists,
        logit_bias=dict(logit_bias),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(record.set & SET["ignore_eos"]),
        grammar=_text(grammar, "grammar") or None,
    )


def unpack_request(claim: tuple[Any, ...], vocab_size: int | None) -> Request:
    """The request of a claimed slot. Raises ParameterError for anything that cannot be right."""
    sequence_id, prompt, record, bias, stop_ids, eos_ids, service_class, salt = claim[:8]
    output, crashes, memory_kills, grammar, token_lists = claim[8:]
    if vocab_size is not None and max(output, default=0) >= vocab_size:
        raise errors.InvariantError("A token that a dead engine has given out cannot be right.")
    if vocab_size is not None and max(prompt) >= vocab_size:
        raise errors.ParameterError(
            f"The prompt has token id {max(prompt)}, but the vocabulary has {vocab_size}.",
            param="prompt",
        )
    sampling = unpack_sampling(record, bias, stop_ids, grammar, token_lists)
    if vocab_size is not None:
        sampling.check_vocabulary(vocab_size)
    return Request(
        sequence_id,
        prompt,
        sampling,
        tuple(eos_ids),
        _text(service_class, "service_class"),
        salt,
        embed=bool(record.set & SET["embed"]),
        output=output,
        crashes=crashes,
        memory_kills=memory_kills,
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


def unpack_news(news: tuple[Any, ...]) -> list[Update]:
    """Decode the result of ``poll`` for one request, in the engine's order."""
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
                scheduled_ns=scheduled,
                prefilled_ns=prefilled,
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
