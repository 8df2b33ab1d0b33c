"""The line in which the user writes: several lines long, with history, completion and editing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

from weft.chat.conversation import PRIVATE, replace_file

MOST_ENTRIES, MOST_HISTORY_BYTES = 1000, 2**20
QUOTES = '"""'
PROMPT, CONTINUED = "> ", ". "


@contextlib.contextmanager
def line_output() -> Iterator[None]:
    """Have input lines send no escape sequences to a terminal that knows none."""
    if not is_dumb_terminal():
        yield
        return
    with create_app_session(output=PlainTextOutput(sys.stdout)):
        yield


class HistoryFile(History):
    """What was written before, one JSON string a line, for its owner alone.

    A file that has grown too long loses its oldest half. Where it cannot be written, the history
    lasts as long as the chat.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The entries, newest first."""
        try:
            lines = self._path.read_bytes().splitlines()
            if len(lines) > MOST_ENTRIES or sum(map(len, lines)) > MOST_HISTORY_BYTES:
                lines = _newest(lines)
                text = b"\n".join(lines).decode(errors="replace")
                replace_file(self._path, text + "\n")
        except OSError:
            return
        for line in reversed(lines):
            entry = _entry(line)
            if entry is not None:
                yield entry

    def store_string(self, string: str) -> None:
        """Append an entry."""
        line = json.dumps(string) + "\n"
        if len(line) > MOST_HISTORY_BYTES // 4:  # pasted whole: no line of a history
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(self._path, flags, PRIVATE)
            with open(number, "w", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return


def _newest(lines: list[bytes]) -> list[bytes]:
    """The newest entries that fit into half of what a history may be."""
    kept, size = 0, 0
    for line in reversed(lines[-MOST_ENTRIES // 2 :]):
        size += len(line) + 1
        if size > MOST_HISTORY_BYTES // 2:
            break
        kept += 1
    return lines[len(lines) - kept :]


def _entry(line: bytes) -> str | None:
    """An entry of a history; None where the line is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None


class ChatCompleter(Completer):
    """Completes commands, and what follows them.

    Args:
        commands: names with what they are for.
        words: what may follow a command; None for names of files.
    """

    def __init__(
        self, commands: dict[str, str], words: Callable[[str], Iterable[str] | None]
    ) -> None:
        self._commands, self._words = commands, words
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Any]:
        """Yield completions of what is before the cursor."""
        before = document.text_before_cursor
        if not before.startswith("/") or "\n" in before:
            return
        command, space, rest = before.partition(" ")
        if not space:
            for name, text in self._commands.items():
                if name.startswith(command):
                    yield Completion(name, -len(command), display_meta=text)
            return
        words = self._words(command)
        if words is None:
            yield from self._files.get_completions(Document(rest), complete_event)
            return
        last = rest.rpartition(" ")[2]
        for word in words if last == rest else ():
            if word.startswith(last):
                yield Completion(word, -len(last))


class InputLine:
    """Reads what the user writes.

    Attributes:
        cleared: whether Ctrl-C has cleared the line since it was last asked for.
    """

    def __init__(self, history: Path, completer: Completer) -> None:
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=lambda width, *_: CONTINUED.rjust(width),
            history=HistoryFile(history),
            completer=completer,
            complete_while_typing=False,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            key_bindings=_keys(self._on_clear),
        )
        self._reading: asyncio.Task[str | None] | None = None
        self.cleared = False

    def _on_clear(self) -> None:
        self.cleared = True

    async def read(self, default: str = "") -> str | None:
        """What the user writes; None at the end of input, empty after Ctrl-C.

        Args:
            default: what the line has at first.
        """
        self.cleared = False
        self._reading = asyncio.create_task(self._read(default))
        try:
            return await self._reading
        except asyncio.CancelledError:
            if self._reading.cancelled():
                return None
            raise
        finally:
            self._reading = None

    async def _read(self, default: str) -> str | None:
        shown = PROMPT + (default if is_dumb_terminal() else "")  # which shows what is typed alone
        try:
            return await self._session.prompt_async(shown, default=default, handle_sigint=False)
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""

    async def agrees(self, question: str) -> bool:
        """Whether the user answers yes."""
        asking: PromptSession[str] = PromptSession(f"{question} [y/N] ")
        try:
            answer = await asking.prompt_async(handle_sigint=False)
        except (EOFError, KeyboardInterrupt):
            return False
        return answer.strip().lower() in ("y", "yes")

    def end(self) -> None:
        """Let the user write no more."""
        if self._reading is not None:
            self._reading.cancel()

    def interrupt(self) -> None:
        """Do what Ctrl-C does, when it comes as a signal."""
        app = self._session.app
        if app.is_running:
            app.key_processor.send_sigint()


def _keys(on_clear: Callable[[], None]) -> KeyBindings:
    keys = KeyBindings()
    writing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=writing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        at_end = not buffer.document.text_after_cursor.strip()
        if at_end and buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=writing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=writing)
    @keys.add("<sigint>", filter=writing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text:
            buffer.reset()
            on_clear()
        else:
            run_in_terminal(lambda: print("Ctrl-D or /quit ends the chat."))

    return keys


def is_open(text: str) -> bool:
    """Whether a text begins with three quotes that nothing has closed yet."""
    return text.startswith(QUOTES) and (
        len(text) < 2 * len(QUOTES) or not text.rstrip().endswith(QUOTES)
    )


def without_quotes(text: str) -> str:
    """The text within three quotes, or as it is without them."""
    text = text.strip()
    if text.startswith(QUOTES) and not is_open(text):
        return text[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text
