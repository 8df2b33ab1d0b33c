"""``/v1/chat/completions``: turns a checked body into a job."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from weft.api.bodies import ChatBody
from weft.api.conversation import encode_messages, read_variables, rendering
from weft.api.jobs import Builder, Job, new_id, now
from weft.api.pictures import Pictures
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
from weft.api.tools import Tools, constrain_turn, read_tools
from weft.core.errors import ParameterError
from weft.core.types import Request, SamplingParams
from weft.text import ChatTemplate
from weft.text.dialect import Reading

SWITCH = "enable_thinking"  # the variable of templates
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_job(body: ChatBody, builder: Builder, notes: Notes | None = None) -> Job:
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
    max_tokens, limit_name = _max_tokens(body)
    n = body.n or 1
    builder.check_count(1, n)
    tools = read_tools(body, builder, notes)
    wanted = find_constraint(body)
    pictures = Pictures(builder)
    ids = _prompt(body, tools, builder, notes, pictures)
    images, prompt = pictures.place(ids), tuple(truncated(ids, body, card, max_tokens))
    if images and len(prompt) != len(ids):
        raise ParameterError(
            "A prompt with images cannot be truncated.", param="truncate_prompt_tokens"
        )
    max_tokens = fit_context(len(prompt), max_tokens, card, "messages", limit_name, notes)
    reading = _reading(body, tools, prompt, builder)
    room = card.max_model_len - len(prompt) if max_tokens is None else max_tokens
    budget = _thinking_budget(body, builder, room, notes)
    white = body.json_whitespace or "compact"
    constraint = constrain_turn(tools, wanted, reading, builder, budget, white)
    numbers = builder.numbers(n)
    seed = first_seed(body, card, numbers[0])
    params = build_sampling(
        body,
        card,
        builder.tokenizer,
        max_tokens=max_tokens,
        logprobs=_logprobs(body),
        prompt_logprobs=prompt_logprobs_asked(body),
        seed=seed,
        grammar=constraint and constraint.grammar,
    )
    rank, tier = builder.classes.choose(body.service_tier, body.priority)
    salt = (body.cache_salt or "").encode()
    return Job(
        "chat",
        new_id("chatcmpl"),
        now(),
        model,
        card.system_fingerprint,
        tuple(
            Request(
                number,
                prompt,
                _choice(params, seed, i),
                card.eos_token_ids,
                rank,
                salt,
                images=images,
            )
            for i, number in enumerate(numbers)
        ),
        n=n,
        stream=bool(body.stream),
        include_usage=include_usage(body),
        usage_in_chunks=usage_in_chunks(body),
        service_tier=tier,
        echoed=_echoed(body),
        custom_tools=frozenset() if tools is None else tools.custom,
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        timeout_s=body.timeout,
        reading=reading if reading.reads else None,
        constrained_by=constraint and constraint.param,
    )


def _prompt(
    body: ChatBody, tools: Tools | None, builder: Builder, notes: Notes, pictures: Pictures
) -> list[int]:
    variables = read_variables(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None:
        variables = {**_effort(effort, builder, notes), **variables}
    shown = None if tools is None else tools.shown()
    how = rendering(body, variables, shown)
    return encode_messages(body.messages, builder, how, notes, pictures)


def _effort(effort: str, builder: Builder, notes: Notes) -> dict[str, Any]:
    """The reasoning effort as template variables; empty if the request sets none."""
    if effort not in EFFORTS:
        raise ParameterError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, not '{effort[:100]}'.",
            param="reasoning_effort",
        )
    if not reads_effort(builder.chat_template):
        notes.ignore("reasoning_effort")
        return {}
    assert builder.chat_template is not None
    if "reasoning_effort" in builder.chat_template.variables:
        return {"reasoning_effort": builder.dialect.effort(effort)}
    return {SWITCH: effort != "none"}


def _thinking_budget(body: ChatBody, builder: Builder, room: int, notes: Notes) -> int | None:
    """Tokens of reasoning at most; None where nothing else is possible, or without a bound.

    Args:
        room: tokens of output at most. A budget that is no less needs no grammar.
    """
    budget = body.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if builder.dialect.reasoning is None:
        notes.ignore("thinking_token_budget")
        return None
    return budget if budget < room else None


def reads_effort(template: ChatTemplate | None) -> bool:
    """Whether a template reads an effort, or at least turns thinking on and off."""
    known = frozenset() if template is None else template.variables
    return not known.isdisjoint(("reasoning_effort", SWITCH))


def _echoed(body: ChatBody) -> tuple[str, ...] | None:
    """With ``echo`` the answer starts with the last message, if that is the assistant's too."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return None
    content = last.content
    if isinstance(content, list):  # of text parts: the prompt has been made of them
        content = "\n".join(str(part.get("text", "")) for part in content)
    return (content or "",)


def _reading(body: ChatBody, tools: Tools | None, prompt: Seq[int], builder: Builder) -> Reading:
    dialect = builder.dialect
    schemas = None if tools is None else tools.schemas()
    return Reading(
        dialect,
        schemas,
        opened=dialect.opens_reasoning(prompt, builder.tokenizer),
        markers=dialect.marker_ids(builder.tokenizer, calls=schemas is not None),
        with_reasoning=body.include_reasoning is not False,
        forced=tools is not None and tools.forced,
    )


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The limit on output tokens, and which of its two names gave it."""
    check_max_tokens(body.max_tokens, "max_tokens", 1)
    check_max_tokens(body.max_completion_tokens, "max_completion_tokens", 1)
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ParameterError(
            "max_tokens is the old name of max_completion_tokens; give one of them.",
            param="max_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _choice(params: SamplingParams, seed: int, choice: int) -> SamplingParams:
    """The parameters of one choice; all have one prompt, which the first choice scores."""
    own = seeded(params, seed, choice)
    return replace(own, prompt_logprobs=None) if choice and own.prompt_logprobs is not None else own


def _logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ParameterError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None
