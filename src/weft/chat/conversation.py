"""The conversation: whole turns only, as messages to send and as a file."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError
from weft.core.json_files import check_depth, read_text

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SENT = ("role", "content", "tool_calls", "tool_call_id", "name")  # other keys are chat's own
MOST_BYTES = 64 * 2**20  # of a file
PRIVATE = 0o600
NOT_RUN = "This client runs no tools."


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Messages from one of the user's up to the next: what was asked, and the whole answer."""

    messages: tuple[Message, ...]

    @property
    def asked(self) -> str | None:
        """The text of the user's last message; None where it is more than text."""
        own = [message for message in self.messages if message["role"] == "user"]
        content = own[-1]["content"] if own else None
        return content if isinstance(content, str) else None

    @property
    def question(self) -> tuple[Message, ...]:
        """The messages up to the user's last one."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: last + 1]

    @property
    def reasoning(self) -> str:
        """The reasoning of the last answer that has any."""
        told = (message.get("reasoning_content") for message in reversed(self.messages))
        return next(filter(None, told), "")


@dataclass(slots=True)
class Conversation:
    """A system message and whole turns.

    Attributes:
        saved: whether a file has all of it.
    """

    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)
    saved: bool = True

    def messages(self, before: int | None = None) -> list[Message]:
        """The messages of the first turns, of all by default, as a file keeps them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *(m for turn in self.turns[:before] for m in turn.messages)]

    def put(self, turn: ChatTurn, at: int) -> None:
        """Make a turn the last one, after the first ``at`` ones."""
        self.turns[at:] = [turn]
        self.saved = False

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self.saved = True


def to_send(messages: Iterable[Message]) -> list[Message]:
    """The messages without what concerns chat alone."""
    return [{key: m[key] for key in SENT if key in m} for m in messages]


def answered(
    question: Iterable[Message],
    text: str,
    *,
    reasoning: str = "",
    calls: Iterable[Mapping[str, Any]] = (),
    stopped: bool = False,
) -> ChatTurn:
    """A turn with its answer. Calls of tools are answered, too: with the note that none was run."""
    answer: Message = {"role": "assistant", "content": text}
    if reasoning:
        answer["reasoning_content"] = reasoning
    if stopped:
        answer["stopped"] = True
    results: list[Message] = []
    if calls := list(calls):
        answer["tool_calls"] = calls
        results = [{"role": "tool", "tool_call_id": c["id"], "content": NOT_RUN} for c in calls]
    return ChatTurn((*question, answer, *results))


def save(conversation: Conversation, path: Path) -> None:
    """Write all messages as JSON; the file has all of them, or is as it was.

    A new file is for its owner alone.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(conversation.messages(), ensure_ascii=False, indent=1) + "\n"
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"Cannot write '{path}': {error.strerror}.") from None
    conversation.saved = True


def replace_file(path: Path, text: str) -> None:
    """Give a file another content at once; one that is there keeps its mode, a new one is private.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()  # what a link leads to
    mode = path.stat().st_mode & 0o777 if path.exists() else PRIVATE
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(number)
            os.fchmod(number, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def load(path: Path) -> tuple[Conversation, str]:
    """A conversation of a file, and the text of a message at its end that has no answer.

    Raises:
        ConfigError: the file is not a list of messages.
    """

    def refuse(message: str) -> ConfigError:
        return ConfigError(message.replace("; download the file again", ""))

    if not path.exists():
        raise refuse(f"There is no file '{path}'.")
    try:
        value = json.loads(read_text(path, refuse, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise refuse(f"'{path}' is not JSON ({error}).") from None
    check_depth(value, str(path), refuse)
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list) or not value:
        raise refuse(f"'{path}' has no messages: it must be a JSON list of them.")
    for number, message in enumerate(value, 1):
        if problem := _problem(message):
            raise refuse(f"'{path}': message {number} {problem}.")
    return _conversation(value)


def _problem(message: Any) -> str:
    """What is wrong with a message; empty if nothing is."""
    if not isinstance(message, dict):
        return "is not an object"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"has the role {json.dumps(role)[:40]}, not one of {', '.join(ROLES)}"
    if content is None and role == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, str | list):
        return "has no content"
    if not isinstance(message.get("reasoning_content", ""), str):
        return "has reasoning_content that is not text"
    return ""


def _conversation(messages: list[Message]) -> tuple[Conversation, str]:
    system = None
    if messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        system = messages[0]["content"]
        messages = messages[1:]
    turns: list[list[Message]] = []
    for message in messages:
        after_answer = not turns or turns[-1][-1]["role"] in ("assistant", "tool")
        if (message["role"] == "user" and after_answer) or not turns:
            turns.append([])
        turns[-1].append(message)
    unanswered = ""
    if turns and turns[-1][-1]["role"] not in ("assistant", "tool"):
        content = turns.pop()[-1]["content"]
        unanswered = content if isinstance(content, str) else ""
    return Conversation(system, [ChatTurn(tuple(turn)) for turn in turns]), unanswered
