"""``/v1/completions``: turns a checked body into a job."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from weft.api.bodies import CompletionBody
from weft.api.jobs import Builder, Job, new_id, now
from weft.api.rules import Notes
from weft.api.sampling import (
    build_sampling,
    check_max_tokens,
    check_model,
    first_seed,
    fit_context,
    include_usage,
    prompt_logprobs_asked,
    seeded,
    truncated,
    usage_in_chunks,
    with_most_logprobs,
)
from weft.api.structured import find_constraint
from weft.core.errors import ParameterError
from weft.core.types import Request

DEFAULT_MAX_TOKENS = 16

Prompt = str | Seq[int]


def completion_job(body: CompletionBody, builder: Builder, notes: Notes | None = None) -> Job:
    """Check a body and return what it asks for.

    Args:
        notes: take what is ignored.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    card = builder.card
    notes = Notes() if notes is None else notes
    body = with_most_logprobs(body, notes)
    model = check_model(body.model, card)
    card.pooling.check_generates(model)
    check_max_tokens(body.max_tokens, "max_tokens", 0)
    _, tier = builder.classes.choose(body.service_tier, body.priority)
    prompts = prompts_of(body.prompt, "prompt")
    builder.check_count(len(prompts), body.n or 1)
    builder.check_size(sum(_size(prompt) for prompt in prompts), "prompt")
    constraint = find_constraint(body)
    ids = [_encode(prompt, body, builder) for prompt in prompts]
    limits = [
        fit_context(len(prompt), body.max_tokens, card, "prompt", notes=notes) for prompt in ids
    ]
    return Job(
        "completion",
        new_id("cmpl"),
        now(),
        model,
        card.system_fingerprint,
        _requests(body, builder, ids, limits, constraint and constraint.grammar),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=include_usage(body),
        usage_in_chunks=usage_in_chunks(body),
        service_tier=tier,
        echoed=_echoed(prompts, ids, body, builder) if body.echo else None,
        logprobs=body.logprobs is not None or body.logprob_token_ids is not None,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        no_output=body.max_tokens == 0,
        constrained_by=constraint and constraint.param,
        timeout_s=body.timeout,
    )


def _requests(
    body: CompletionBody,
    builder: Builder,
    prompts: Seq[tuple[int, ...]],
    limits: Seq[int | None],
    grammar: str | None,
) -> tuple[Request, ...]:
    """One sequence for each choice of each prompt; choice i of every prompt has seed + i.

    Args:
        limits: on the output tokens of each prompt's choices.
    """
    card, n = builder.card, body.n or 1
    numbers = builder.numbers(len(prompts) * n)
    seeds = [first_seed(body, card, number) for number in numbers[::n]]
    params = build_sampling(
        body,
        card,
        builder.tokenizer,
        max_tokens=_limit(limits[0]),
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        seed=seeds[0],
        grammar=grammar,
    )
    rank, _ = builder.classes.choose(body.service_tier, body.priority)
    own = [replace(params, max_tokens=_limit(limit)) for limit in limits]
    salt = (body.cache_salt or "").encode()
    return tuple(
        Request(
            number,
            prompts[i // n],
            seeded(own[i // n], seeds[i // n], i % n),
            card.eos_token_ids,
            rank,
            salt,
        )
        for i, number in enumerate(numbers)
    )


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """Alternatives of each prompt token that the echo or the answer beside it shows."""
    wanted = [prompt_logprobs_asked(body)]
    if body.echo:
        wanted.append(0 if body.logprobs is None and body.logprob_token_ids else body.logprobs)
    return max((count for count in wanted if count is not None), default=None)


def _limit(max_tokens: int | None) -> int:
    """Output tokens of a sequence, which computes one even if none is to be shown."""
    return DEFAULT_MAX_TOKENS if max_tokens is None else max(max_tokens, 1)


def prompts_of(given: str | list[str | int | list[int]] | None, param: str) -> list[Prompt]:
    """The prompts in any of the four forms of a body; None is an empty document.

    Raises:
        ParameterError: there are none, or they are of several kinds.
    """
    if given is None or isinstance(given, str):
        return [given or ""]
    if not given:
        raise ParameterError(f"The list of {param} is empty.", param=param)
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise ParameterError(
            f"{param} must be a text, a list of texts, a list of token ids, or a list of lists of "
            "token ids, not a mixture.",
            param=param,
        )
    if kinds == {int}:
        return [cast(list[int], given)]
    return cast(list[Prompt], given)


def _size(prompt: Prompt) -> int:
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)


def _encode(prompt: Prompt, body: CompletionBody, builder: Builder) -> tuple[int, ...]:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        ids = builder.tokenizer.encode(
            prompt, add_special_tokens=special, parse_special=bool(body.parse_special)
        )
    else:
        check_ids(prompt, builder.card.vocab_size, "prompt")
        ids = list(prompt)
    if not ids:
        raise ParameterError("The prompt is empty; give at least one token.", param="prompt")
    return tuple(truncated(ids, body, builder.card, body.max_tokens))


def check_ids(ids: Seq[int], vocab_size: int, param: str) -> None:
    """Raise ParameterError if a token id is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ParameterError(
            f"{param} has the token id {wrong}; ids go from 0 to {vocab_size - 1}.", param=param
        )


def _echoed(
    prompts: Seq[Prompt], ids: Seq[tuple[int, ...]], body: CompletionBody, builder: Builder
) -> tuple[str, ...]:
    whole = body.truncate_prompt_tokens is None
    return tuple(
        prompt if whole and isinstance(prompt, str) else builder.tokenizer.decode(tokens)
        for prompt, tokens in zip(prompts, ids, strict=True)
    )
