"""The output of a chat on a terminal: answers as Markdown while they stream, and lines about them.

Blocks of an answer that are complete are printed for good. Only the last one, which still grows, is
drawn again and again, and no more of it than the terminal is high: so nothing that is drawn twice
gets into the terminal's history.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from weft.core.inert import inert

DRAW_S = 0.05  # from a piece to the screen; pieces that come meanwhile go with it
DRAWN_SHARE = 4  # drawing takes a quarter of the time at most
REASONING_ROWS = 8
SPARE_ROWS = 2  # of the terminal, beside what is drawn again and again
DIM = "dim"
# Without HTML: what looks like it is text of the answer.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
# Colours that the terminal chooses, which fit a light background and a dark one.
_THEME = Theme({"markdown.code": "bold cyan", "markdown.code_block": "cyan"})
_CODE_THEME = "ansi_dark"


def terminal() -> Console:
    """The terminal that standard output is."""
    return Console(theme=_THEME, highlight=False, emoji=False, markup=False)


def markdown(text: str) -> Markdown:
    """Text that is rendered as Markdown; the ends of its lines stay, and targets of links show."""
    shown = Markdown(text, code_theme=_CODE_THEME, hyperlinks=False)
    shown.parsed = _MARKDOWN.parse(text)
    for token in shown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return shown


def whole_blocks(text: str) -> int:
    """How many characters at the beginning are blocks of Markdown that nothing can change any more.

    Another block begins after them, in a line that has ended.
    """
    lines = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _MARKDOWN.parse(lines) if token.level == 0 and token.map]
    if not starts:
        return 0
    return sum(map(len, lines.splitlines(keepends=True)[: starts[-1]]))


class Tail:
    """The last rows of something."""

    def __init__(self, content: RenderableType, rows: int) -> None:
        self._content, self._rows = content, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for number, line in enumerate(lines[-self._rows :]):
            if number:
                yield Segment.line()
            yield from line


class AnswerView(Protocol):
    """Shows an answer as it comes."""

    def reason(self, piece: str) -> None:
        """Show more of the reasoning."""

    def write(self, piece: str) -> None:
        """Show more of the answer."""

    def end(self) -> None:
        """Print what is not printed yet. May be called twice."""


class LiveView:
    """Shows an answer on a terminal whose rows can be drawn again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning, self._text = "", ""  # the latter as far as it is not printed yet
        self._printed = False
        self._reasoned = Elapsed()
        self._due: asyncio.TimerHandle | None = None
        self._drawing_s = 0.0
        self._live = Live(
            Text("...", DIM), console=console, transient=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop",
        )  # fmt: skip
        self._live.start(refresh=True)

    def reason(self, piece: str) -> None:
        self._reasoned.go()
        self._reasoning += inert(piece)
        self._draw_soon()

    def write(self, piece: str) -> None:
        self._fold()
        self._text += inert(piece)
        self._draw_soon()

    def end(self) -> None:
        if not self._live.is_started:
            return
        if self._due is not None:
            self._due.cancel()
        self._fold()
        self._live.update(Text(""))
        if self._text.strip():
            self._print(self._text)
        self._live.stop()

    def _fold(self) -> None:
        """Put a line in place of the reasoning."""
        if self._reasoning:
            self._live.update(Text(""))
            self._console.print(folded(self._reasoning, self._reasoned))
            self._reasoning = ""

    def _draw_soon(self) -> None:
        if self._due is None:
            delay_s = max(DRAW_S, DRAWN_SHARE * self._drawing_s)
            self._due = asyncio.get_running_loop().call_later(delay_s, self._draw)

    def _draw(self) -> None:
        self._due, began = None, time.perf_counter()
        rows = max(1, self._console.height - SPARE_ROWS)
        if self._reasoning:
            shown = Tail(Text(self._reasoning.strip(), DIM), min(rows, REASONING_ROWS))
        else:
            if done := whole_blocks(self._text):
                self._live.update(Text(""))
                self._print(self._text[:done])
                self._text = self._text[done:]
            shown = Tail(markdown(self._text), rows)
        self._live.update(shown, refresh=True)
        self._drawing_s = time.perf_counter() - began

    def _print(self, blocks: str) -> None:
        """Print blocks above what is drawn."""
        if self._printed:
            self._console.print()
        self._printed = True
        self._console.print(markdown(blocks))


class PlainView:
    """Shows an answer on a terminal that can only write on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning, self._reasoned = "", Elapsed()
        self._open = False

    def reason(self, piece: str) -> None:
        self._reasoned.go()
        self._reasoning += piece

    def write(self, piece: str) -> None:
        self._fold()
        self._console.file.write(inert(piece))
        self._console.file.flush()
        self._open = True

    def end(self) -> None:
        self._fold()
        if self._open:
            self._console.print()
        self._open = False

    def _fold(self) -> None:
        if self._reasoning:
            self._console.print(folded(self._reasoning, self._reasoned))
            self._reasoning = ""


class Elapsed:
    """Seconds since something was first said to go."""

    def __init__(self) -> None:
        self._began: float | None = None

    def go(self) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


def folded(reasoning: str, reasoned: Elapsed) -> Text:
    """The line that stands for reasoning that has ended."""
    words = len(reasoning.split())
    count = f"{words} word{'s' * (words != 1)}"
    return Text(f"[reasoning: {count} in {reasoned.seconds():.1f} s; /reasoning shows it]", DIM)


class Screen:
    """Writes to a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = terminal() if console is None else console

    def view(self) -> AnswerView:
        """Begin to show an answer."""
        return PlainView(self.console) if self.console.is_dumb_terminal else LiveView(self.console)

    def say(self, text: str) -> None:
        """Print a line about the conversation."""
        self.console.print(Text(inert(text), DIM))

    def show(self, text: str) -> None:
        """Print text that was asked for."""
        self.console.print(Text(inert(text)))

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names, each with what there is to say about it."""
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(inert(name), no_wrap=True), Text(inert(text)))
        self.console.print(table)

    def complain(self, text: str) -> None:
        """Print what went wrong."""
        self.console.print(Text(f"weft: {inert(text)}", "red"))
