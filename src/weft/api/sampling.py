"""Builds sampling parameters from the fields that both generation endpoints share."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec

from weft.api.bodies import SAME_NAME, ChatBody, CompletionBody
from weft.api.card import ModelCard
from weft.api.errors import UnknownModelError
from weft.api.rules import Notes
from weft.core.errors import ParameterError, PromptTooLongError
from weft.core.types import MAX_LOGPROBS, MAX_SEED, NEUTRAL, SamplingParams
from weft.text import Tokenizer

LATEST = ":latest"
GivenBody = TypeVar("GivenBody", CompletionBody, ChatBody)

SMALLEST_TOP_P = 1e-6  # stands for 0, which keeps the likeliest token only

_COUNTS = ("logprobs", "top_logprobs", "prompt_logprobs")  # of alternatives


def check_model(name: str | None, card: ModelCard) -> str:
    """Return the name to answer with. Raises UnknownModelError if it is not served.

    A name may bear the tag ``:latest``, which Ollama's clients add, on whatever route they use it.
    """
    if name is None:
        return card.served_names[0]
    if name not in card.served_names and name.removesuffix(LATEST) not in card.served_names:
        served = ", ".join(f"'{known}'" for known in card.served_names)
        raise UnknownModelError(
            f"The model '{name[:200]}' was not found; this server has {served}.",
            param="model",
        )
    return name


def build_sampling(
    body: CompletionBody | ChatBody, card: ModelCard, tokenizer: Tokenizer, **chosen: Any
) -> SamplingParams:
    """Return the resolved parameters of a request.

    Args:
        tokenizer: makes tokens of bad words.
        chosen: fields that the endpoints fill differently; None leaves one open.

    Raises:
        ParameterError: a value is out of bounds, or outside the vocabulary.
    """
    values: dict[str, Any] = {
        name: value
        for name in (*SAME_NAME, "logit_bias")
        if (value := getattr(body, name)) is not None
    }
    if body.top_p is not None:
        values["top_p"] = max(body.top_p, SMALLEST_TOP_P)
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.include_stop_str_in_output:
        values["include_stop"] = True
    for name in ("allowed_token_ids", "logprob_token_ids"):
        values[name] = tuple(getattr(body, name) or ())
    values["bad_token_sequences"] = _bad_sequences(body.bad_words or (), tokenizer)
    values |= {name: value for name, value in chosen.items() if value is not None}
    params = SamplingParams(**{**_defaults(card), **values})
    params.check_vocabulary(card.vocab_size)
    return params


def _bad_sequences(words: Seq[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words: at the start of a text, and after a space."""
    texts = [f"{before}{word.lstrip()}" for word in words for before in ("", " ")]
    found = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(ids for ids in found if ids))


def with_most_logprobs(body: GivenBody, notes: Notes) -> GivenBody:
    """The body with the most alternatives for -1, which asks for the whole vocabulary in vLLM.

    Each parameter that is lowered so is noted as ignored.

    Raises:
        ParameterError: the request is strict.
    """

    def too_many(name: str) -> ParameterError:
        return ParameterError(
            f"{name} may be {MAX_LOGPROBS} at most; -1 asks for the whole vocabulary.", param=name
        )

    names = [name for name in _COUNTS if getattr(body, name, None) == -1]
    for name in names:
        notes.ignore(name, too_many)
    return msgspec.structs.replace(body, **dict.fromkeys(names, MAX_LOGPROBS)) if names else body


def prompt_logprobs_asked(body: CompletionBody | ChatBody) -> int | None:
    """Alternatives of each prompt token. Raises ParameterError in a stream, which has none."""
    if body.prompt_logprobs is not None and body.stream:
        raise ParameterError(
            "prompt_logprobs are not streamed; ask for them without stream.",
            param="prompt_logprobs",
        )
    return body.prompt_logprobs


def _defaults(card: ModelCard) -> dict[str, Any]:
    """Defaults of unset fields: the model's own values before the neutral ones."""
    given = card.sampling_defaults
    names = (*NEUTRAL, "max_tokens")
    return {**NEUTRAL, **{name: given[name] for name in names if given.get(name) is not None}}


def first_seed(body: CompletionBody | ChatBody, card: ModelCard, number: int) -> int:
    """The seed of choice 0: the given one, or a random or repeatable one for ``number``."""
    if body.seed is not None:
        if not -MAX_SEED - 1 <= body.seed <= MAX_SEED:
            raise ParameterError("seed must fit in 64 bits.", param="seed")
        return body.seed % (MAX_SEED + 1)
    if card.base_seed is not None:
        return (card.base_seed + number) % (MAX_SEED + 1)
    return secrets.randbelow(MAX_SEED + 1)


def seeded(params: SamplingParams, seed: int, choice: int) -> SamplingParams:
    """The parameters of one choice: choice ``i`` of a request draws with seed + i."""
    own = (seed + choice) % (MAX_SEED + 1)
    return params if params.seed == own else replace(params, seed=own)


def include_usage(body: CompletionBody | ChatBody) -> bool:
    """Whether a stream ends with a chunk of usage. Raises ParameterError if there is no stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ParameterError(
            "stream_options may only be given when stream is true.", param="stream_options"
        )
    return bool(body.stream_options.include_usage)


def usage_in_chunks(body: CompletionBody | ChatBody) -> bool:
    """Whether every chunk of a stream has the usage so far."""
    return include_usage(body) and bool(
        body.stream_options and body.stream_options.continuous_usage_stats
    )


def check_max_tokens(value: int | None, name: str, low: int) -> None:
    """Raise ParameterError for a limit on output tokens that makes no sense."""
    if value is not None and not low <= value < 2**31:
        raise ParameterError(f"{name} must be from {low} to {2**31 - 1}, not {value}.", param=name)


def fit_context(
    prompt_tokens: int,
    max_tokens: int | None,
    card: ModelCard,
    param: str,
    limit_name: str = "max_tokens",
    notes: Notes | None = None,
) -> int | None:
    """Return the limit on output tokens, lowered to what the context has beside the prompt.

    Clients ask for a fixed number whatever the prompt is; the end of the context then ends the
    answer, with the reason ``length``, and the limit is noted as ignored.

    Raises:
        PromptTooLongError: the prompt alone does not fit, or the request is strict.
    """
    limit = card.max_model_len
    if prompt_tokens >= limit:
        raise PromptTooLongError(
            f"This model's context is {limit} tokens for prompt and output, but the prompt alone "
            f"has {prompt_tokens}; shorten it.",
            param=param,
        )
    room = limit - prompt_tokens
    if max_tokens is None or max_tokens <= room:
        return max_tokens

    def too_long(_: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"This model's context is {limit} tokens, but the prompt has {prompt_tokens} and "
            f"{max_tokens} more are asked for; lower the limit on output tokens or shorten the "
            "prompt.",
            param=param,
        )

    if notes is not None:
        notes.ignore(limit_name, too_long)
    return room


class Truncating(Protocol):
    """A body that may ask for a part of its prompt only."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> str | None: ...


def truncated(
    ids: Seq[int],
    body: Truncating,
    card: ModelCard,
    max_tokens: int | None,
    marks: Seq[int] = (),
) -> Seq[int]:
    """The part of a prompt that ``truncate_prompt_tokens`` leaves, by default its end.

    As in vLLM, -1 leaves as much as fits beside the output that is asked for.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        if body.truncation_side is not None:
            raise ParameterError(
                "truncation_side needs truncate_prompt_tokens.", param="truncation_side"
            )
        return ids
    if keep == -1:
        room = card.max_model_len - max(max_tokens or 1, 1)
        keep = room if room > 0 else card.max_model_len - 1  # such a limit is lowered anyway
    if keep == 0:
        raise ParameterError(
            "truncate_prompt_tokens leaves nothing of the prompt.", param="truncate_prompt_tokens"
        )
    return cut_between(ids, keep, marks, right=body.truncation_side == "right")


def cut_between(ids: Seq[int], keep: int, marks: Seq[int], *, right: bool) -> Seq[int]:
    """At most ``keep`` ids of a text, with the marks that the tokeniser puts around it.

    Args:
        marks: what the tokeniser makes of no text; vectors are often those of such a token.
        right: the end of the text is left out, else its beginning.

    Raises:
        ParameterError: only marks would be left.
    """
    if len(ids) <= keep:
        return ids
    first = last = 0
    while first < len(marks) and ids[first] == marks[first]:
        first += 1
    while last < len(marks) - first and ids[-1 - last] == marks[-1 - last]:
        last += 1
    if keep <= first + last:
        raise ParameterError(
            f"truncate_prompt_tokens leaves nothing of a text beside the {first + last} tokens "
            "that stand around each.",
            param="truncate_prompt_tokens",
        )
    end = len(ids) - last
    left = keep - first - last
    text = ids[first : first + left] if right else ids[end - left : end]
    return [*ids[:first], *text, *ids[end:]]
