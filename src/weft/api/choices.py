"""Assembles the updates of the engine into the text, tokens and ends of a job's choices."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.api.errors import CancelledError
from weft.api.jobs import Job
from weft.core.errors import WeftError
from weft.core.plan import Update
from weft.core.types import FinishReason, Request, TokenLogprob
from weft.text import TextStream, Tokenizer
from weft.text.assistant import Content, Event, Reasoning, ToolArguments, ToolCall
from weft.text.customcalls import CustomCalls
from weft.text.forms import MARK


@dataclass(slots=True)
class ChoiceDelta:
    """The new part of one choice.

    Attributes:
        first: whether nothing of the choice was shown before; its prompt goes before the text.
        text: as the model wrote it.
        events: the same as content, reasoning and calls.
        finish_reason: ``stop`` or ``length`` with the last delta.
    """

    choice: Choice
    text: str
    events: list[Event]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    first: bool = False
    finish_reason: str | None = None

    @property
    def index(self) -> int:
        return self.choice.index


class Choice:
    """One choice: its detokeniser, and what is known of its prompt.

    Attributes:
        called: whether it has called a tool.
        prompt_logprobs: one entry a prompt token, None for the first; only where asked for.
        num_tokens: output tokens that belong to the answer.
        ended: whether the engine has ended the sequence.
        halted: whether a stop string has ended the text, so that the engine need not go on.
        started: whether something of it has been shown.
    """

    __slots__ = (
        "_custom",
        "_hidden",
        "_parser",
        "_stream",
        "_with_reasoning",
        "cached_tokens",
        "called",
        "ended",
        "halted",
        "index",
        "num_tokens",
        "prompt_logprobs",
        "request",
        "started",
    )

    def __init__(self, index: int, request: Request, job: Job, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.index = index
        self.request = request
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.cached_tokens = 0
        self.num_tokens = 0
        self.ended = False
        self.halted = False
        self._hidden = job.no_output
        self.started = False
        self.called = False
        reading = job.reading
        self._parser = reading.parser() if reading is not None else None
        self._custom = CustomCalls(job.custom_tools) if job.custom_tools else None
        self._with_reasoning = reading is None or reading.with_reasoning
        self._stream = TextStream(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            markers=reading.markers if reading is not None else None,
            after=request.prompt if job.endpoint == "completion" else (),
        )

    def push(self, updates: Seq[Update]) -> ChoiceDelta | None:
        """Apply updates; return what they add, None if they add nothing.

        Raises:
            WeftError: the engine ended the sequence with an error.
        """
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: str | None = None
        for update in updates:
            if update.token is not None:
                tokens.append(update.token)
                if update.logprob is not None:
                    logprobs.append(update.logprob)
            if update.prompt_logprobs is not None:
                self.prompt_logprobs.extend(update.prompt_logprobs.entries)
            if update.finish is not None:
                finish = self._end(update)
        return self._delta(tokens, logprobs, finish)

    def push_plain(self, updates: Seq[Update]) -> str | None:
        """Apply updates that are only tokens; return the new text.

        Returns None, and does nothing, if there is more to them, or to the text, or if the text has
        not started or has ended: then ``push`` has to be called.
        """
        if not self.started or self.halted or self._hidden or self._parser is not None:
            return None
        for update in updates:
            if update.token is None or update.finish is not None:
                return None
        text, self.halted = self._stream.push([update.token for update in updates])  # type: ignore[misc]
        self.num_tokens = self._stream.token_count
        return text

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stream.stopped_by

    def _end(self, update: Update) -> str:
        self.ended = True
        self.cached_tokens = update.cached_tokens
        if self.halted or update.finish is FinishReason.STOP:
            return "stop"
        if update.finish is FinishReason.LENGTH:
            return "length"
        raise ended_badly(update)

    def _delta(
        self, tokens: list[int], logprobs: list[TokenLogprob], finish: str | None
    ) -> ChoiceDelta | None:
        if self._hidden:
            tokens, logprobs = [], []
            finish = finish and "length"
        text = ""
        if tokens and not self.halted:
            text, self.halted = self._stream.push(tokens)
            kept = self._stream.token_count - self.num_tokens
            self.num_tokens += kept
            if kept < len(tokens):
                del tokens[kept:], logprobs[kept:]
        elif tokens:
            tokens, logprobs = [], []
        if finish is not None and not self._hidden:
            text += self._stream.flush()
            finish = "stop" if self._stream.stopped_by is not None else finish
        if not (text or tokens or finish):
            return None
        first, self.started = not self.started, True
        events = self._events(text, finish)
        return ChoiceDelta(self, text.replace(MARK, ""), events, tokens, logprobs, first, finish)

    def _events(self, text: str, finish: str | None) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text)
        if finish is not None:
            events += self._parser.flush(cut=finish == "length")
        events = [_unmarked(event) for event in events]
        if self._custom is not None:
            events = self._custom.push(events, end=finish is not None)
        if not self._with_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        self.called = self.called or any(isinstance(event, ToolCall) for event in events)
        return events


def _unmarked(event: Event) -> Event:
    """An event without what tells markers from text that spells them."""
    if isinstance(event, ToolCall) or MARK not in event.text:
        return event
    return replace(event, text=event.text.replace(MARK, ""))


def ended_badly(update: Update) -> WeftError:
    """The error of a sequence that was cancelled or has failed."""
    return update.error or CancelledError("The request was cancelled before it was complete.")


class Assembly:
    """All choices of a job.

    Attributes:
        open: choices that the engine has not ended.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.choices = [
            Choice(index, request, job, tokenizer) for index, request in enumerate(job.requests)
        ]
        self.open = len(self.choices)
        self._by_id = {choice.request.id: choice for choice in self.choices}
        self._only = self.choices[0] if len(self.choices) == 1 else None

    def push(self, updates: Seq[Update]) -> tuple[list[ChoiceDelta], list[int]]:
        """Take updates in; return what is new, and the ids whose text a stop string has ended.

        The engine should end those with the reason ``stop``; each is named once.

        Raises:
            WeftError: a sequence failed; the answer cannot be completed.
        """
        deltas: list[ChoiceDelta] = []
        halted: list[int] = []
        for choice, own in self._split(updates):
            if choice.ended:
                continue
            was_halted = choice.halted
            delta = choice.push(own)
            self.open -= choice.ended
            if delta is not None:
                deltas.append(delta)
            if choice.halted and not was_halted and not choice.ended:
                halted.append(choice.request.id)
        return deltas, halted

    def open_ids(self) -> list[int]:
        """Ids of the sequences that the engine has not ended."""
        return [choice.request.id for choice in self.choices if not choice.ended]

    def _split(self, updates: Seq[Update]) -> list[tuple[Choice, Seq[Update]]]:
        if self._only is not None:
            return [(self._only, updates)]
        split: dict[int, list[Update]] = {}
        for update in updates:
            split.setdefault(update.sequence_id, []).append(update)
        return [(self._by_id[number], own) for number, own in split.items()]

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that lay in the prefix cache before, over all prompts."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.job.n])


@dataclass(slots=True)
class Answer:
    """All deltas of one choice, put together."""

    choice: Choice
    texts: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def content(self) -> str | None:
        """The content of the turn; None if it only calls tools."""
        texts = [event.text for event in self.events if isinstance(event, Content)]
        return "".join(texts) if texts or not self.choice.called else None

    def reasoning(self) -> str | None:
        """The reasoning of the turn, None if it has none."""
        texts = [event.text for event in self.events if isinstance(event, Reasoning)]
        return "".join(texts) or None

    def calls(self) -> list[tuple[ToolCall, str]]:
        """The calls of the turn with their arguments."""
        arguments: dict[int, list[str]] = {}
        for event in self.events:
            if isinstance(event, ToolArguments):
                arguments.setdefault(event.index, []).append(event.text)
        calls = [event for event in self.events if isinstance(event, ToolCall)]
        return [(call, "".join(arguments.get(call.index, ()))) for call in calls]

    def add(self, delta: ChoiceDelta) -> None:
        """Append what is new."""
        self.texts.append(delta.text)
        self.events += delta.events
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
