"""How a chat asks for answers: model, service class and sampling, and what an answer has so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.chat.client import AnswerPiece, ChatClient, ChatRefusedError
from weft.chat.conversation import Message, to_send
from weft.core.errors import ParameterError, suggest
from weft.core.settings import Setting, settings_of
from weft.core.types import SamplingParams

MORE = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
UNSET, ON, OFF = "unset", "on", "off"
USAGE = "usage"


def sampling_settings() -> dict[str, Setting]:
    """The sampling settings of a chat, which bodies of requests have by the same names."""
    declared = settings_of(SamplingParams)
    return {name: one for name, one in declared.items() if one.everyday or name in MORE}


@dataclass(slots=True)
class AskSettings:
    """What requests ask for beside their messages.

    Attributes:
        service_class: None: the one that the server gives to the key.
        sampling: settings by name; without one the model's own default counts.
        usage: whether a line with counts and times follows each answer.
    """

    model: str
    service_class: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    usage: bool = True

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The body of a request."""
        tier = {} if self.service_class is None else {"service_tier": self.service_class}
        return {"model": self.model, "messages": to_send(messages), **tier, **self.sampling}

    def set(self, name: str, word: str) -> None:
        """Change a setting. Raises ParameterError if there is none, or its value is wrong."""
        name = name.lstrip("-").replace("-", "_")
        if name == USAGE:
            if word not in (ON, OFF):
                raise ParameterError(f"usage must be {ON} or {OFF}, not '{word}'.")
            self.usage = word == ON
            return
        declared = sampling_settings()
        if name not in declared:
            known = [USAGE, *declared]
            raise ParameterError(
                f"There is no setting '{name}'.{suggest(name, known)} /set shows all."
            )
        if word == UNSET:
            self.sampling.pop(name, None)
            return
        value = declared[name].check(declared[name].parse(word))
        self.sampling[name] = value

    def settings(self) -> dict[str, str]:
        """Every setting with its value as a word."""
        shown = {USAGE: ON if self.usage else OFF}
        for name in sampling_settings():
            value = self.sampling.get(name)
            words = value if not isinstance(value, tuple) else ", ".join(map(repr, value))
            shown[name] = UNSET if value is None else str(words)
        return shown


class ShowsAnswer(Protocol):
    """Takes the parts of an answer as they come."""

    def reason(self, piece: str) -> None: ...

    def write(self, piece: str) -> None: ...


@dataclass(slots=True)
class StreamedAnswer:
    """An answer as far as it has come."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    tokens: int | None = None
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def read(self, client: ChatClient, body: dict[str, Any], view: ShowsAnswer) -> None:
        """Read a stream to its end. Raises ChatRefusedError if it has none."""
        async with contextlib.aclosing(client.stream(body)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._take(piece)
                if piece.reasoning:
                    view.reason(piece.reasoning)
                if piece.text:
                    view.write(piece.text)
        if self.finish is None:
            raise ChatRefusedError(f"{client.name} has closed the stream before the answer's end.")

    def _take(self, piece: AnswerPiece) -> None:
        if self.first is None and (piece.text or piece.reasoning or piece.calls):
            self.first = time.monotonic()
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.finish = piece.finish or self.finish
        self.tokens = self.tokens if piece.tokens is None else piece.tokens
        for part in piece.calls:
            self._take_call(part)

    def _take_call(self, part: Any) -> None:
        """Put the parts of a tool call together."""
        try:
            function = part.get("function") or {}
            call = self._calls.setdefault(
                int(part.get("index") or 0),
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = str(part.get("id") or call["id"])
            for name in ("name", "arguments"):
                call["function"][name] += str(function.get(name) or "")
        except (TypeError, ValueError, AttributeError):
            raise ChatRefusedError("The server sends tool calls that are none.") from None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls of the answer."""
        return [self._calls[index] for index in sorted(self._calls)]

    def usage(self, service_class: str | None) -> str:
        """Counts and times in a line."""
        end = time.monotonic()
        first = self.started if self.first is None else self.first
        words = [] if self.tokens is None else [f"{self.tokens} tokens"]
        words.append(f"first after {first - self.started:.2f} s")
        if self.tokens is not None:  # over all of the time: tokens come in groups
            words.append(f"{self.tokens / max(end - self.started, 1e-9):.0f} tokens/s")
        if service_class is not None:
            words.append(f"class {service_class}")
        return f"[{', '.join(words)}]"


def call_words(call: dict[str, Any]) -> str:
    """A tool call as one writes it."""
    return f"tool call: {call['function']['name']}({call['function']['arguments']})"


Say = Callable[[str], None]
