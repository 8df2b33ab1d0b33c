"""Whole answers: the objects that requests without ``stream`` get."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from weft.api.card import ModelCard
from weft.api.choices import Answer, Assembly, Choice
from weft.api.jobs import Job
from weft.api.logprobs import (
    CompletionLogprobs,
    TokenNumbers,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from weft.core.plan import Update
from weft.images.reader import can_read_images
from weft.text import Tokenizer
from weft.text.assistant import ToolCall


class Collector:
    """Gathers the updates of a job until its answer is whole."""

    def __init__(self, job: Job, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self.assembly = Assembly(job, tokenizer)
        self._tokenizer = tokenizer
        self._texts = TokenNumbers(tokenizer) if job.tokens_as_ids else texts
        self._plain_texts = texts
        self._answers = [Answer(choice) for choice in self.assembly.choices]

    def push(self, updates: Seq[Update]) -> list[int]:
        """Take updates in; return ids that a stop string has ended. Raises as `Assembly.push`."""
        deltas, halted = self.assembly.push(updates)
        for delta in deltas:
            self._answers[delta.index].add(delta)
        return halted

    @property
    def done(self) -> bool:
        return self.assembly.open == 0

    def body(self) -> bytes:
        """The answer as JSON, once ``done``."""
        job = self.assembly.job
        build = self._chat_choice if job.endpoint == "chat" else self._completion_choice
        whole = {
            **answer_head(job, "chat.completion" if job.endpoint == "chat" else "text_completion"),
            "choices": [build(answer) for answer in self._answers],
            "usage": usage(self.assembly),
        }
        if job.return_token_ids and job.endpoint == "chat":
            whole["prompt_token_ids"] = job.requests[0].prompt
        if job.endpoint == "chat":
            whole |= self._prompt_logprobs(self.assembly.choices[0])
        return orjson.dumps(whole)

    def _chat_choice(self, answer: Answer) -> dict[str, Any]:
        job = self.assembly.job
        choice: dict[str, Any] = {
            "index": answer.choice.index,
            "message": _message(answer, job),
            "logprobs": chat_logprobs(answer.logprobs, self._texts) if job.logprobs else None,
            "finish_reason": finish_reason(answer.choice, answer.finish_reason),
        }
        if job.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _completion_choice(self, answer: Answer) -> dict[str, Any]:
        job = self.assembly.job
        echoed = echoed_text(job, answer.choice.index)
        choice: dict[str, Any] = {
            "index": answer.choice.index,
            "text": (echoed or "") + answer.text,
            "logprobs": self._completion_logprobs(answer, echoed) if job.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if job.return_token_ids:
            choice["prompt_token_ids"] = answer.choice.request.prompt
            choice["token_ids"] = answer.token_ids
        return choice | self._prompt_logprobs(answer.choice)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        most = self.assembly.job.prompt_logprobs
        if most is None:
            return {}
        ids, entries = choice.request.prompt, choice.prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(ids, entries, most, self._plain_texts)}

    def _completion_logprobs(self, answer: Answer, echoed: str | None) -> dict[str, Any]:
        request = answer.choice.request
        skip = request.sampling.skip_special_tokens
        builder = CompletionLogprobs(self._tokenizer, self._texts, skip)
        rows = []
        if echoed is not None:
            most = request.sampling.logprobs or 0
            rows = builder.prompt(request.prompt, answer.choice.prompt_logprobs, echoed, most)
        return builder.build(rows + builder.output(answer.token_ids, answer.logprobs))


def _message(answer: Answer, job: Job) -> dict[str, Any]:
    content, echoed = answer.content(), echoed_text(job, answer.choice.index)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if echoed is None else echoed + (content or ""),
        "refusal": None,
    }
    reasoning, calls = answer.reasoning(), answer.calls()
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call_object(call, arguments, job) for call, arguments in calls]
    return message


def call_object(call: ToolCall, arguments: str, job: Job) -> dict[str, Any]:
    """One call of a tool in a chat's answer; ``arguments`` is the text for a custom one."""
    if call.name in job.custom_tools:
        custom = {"name": call.name, "input": arguments}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def finish_reason(choice: Choice, reason: str) -> str:
    """The finish reason of a chat turn: ``tool_calls`` for a complete one with calls."""
    return "tool_calls" if choice.called and reason == "stop" else reason


def answer_head(job: Job, kind: str) -> dict[str, Any]:
    """The first fields of every answer object."""
    head = {
        "id": job.id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.fingerprint,
    }
    if job.service_tier is not None:
        head["service_tier"] = job.service_tier
    return head


def echoed_text(job: Job, index: int) -> str | None:
    """The prompt that choice ``index`` starts with, None without ``echo``."""
    return None if job.echoed is None else job.echoed[index // job.n]


def usage(assembly: Assembly, completion: int | None = None) -> dict[str, Any]:
    """Tokens counted for a job; of its output all so far, or as many as given."""
    prompt = assembly.job.prompt_tokens
    completion = assembly.completion_tokens if completion is None else completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": assembly.cached_tokens},
    }


def model_object(name: str, card: ModelCard) -> dict[str, Any]:
    """One entry of ``/v1/models``; ``max_model_len`` is an extension that vLLM has, too."""
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "weft",
        "max_model_len": card.max_model_len,
    }
    if card.images is not None and can_read_images():
        entry["input_modalities"] = ["text", "image"]
    return entry


def model_entries(card: ModelCard) -> list[dict[str, Any]]:
    """The entries of ``/v1/models``."""
    return [model_object(name, card) for name in card.served_names]
