"""``weft top``: the loom of a running server in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.core.flags import add_server
from weft.core.inert import inert_line
from weft.running_server import RunningServer

Loom = Mapping[str, Any]

MOST_STEPS = 256
CHART_ROWS = 6
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "white", "bright_black")
PREFILL, DECODE, GAP = "█", "░", "┃"
LEVELS = "▁▂▃▄▅▆▇█"
BAR_CELLS = 20
MOST_RATE_S = 5.0  # over which rates are measured
ENDS = {
    "server_stopping": "has stopped",
    "key_revoked": "takes this key no more; give another one with --api-key or OPENAI_API_KEY",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_top, parser=parser)
    add_server(parser)
    parser.add_argument(
        "--once", action="store_true", help="print it once, as without a terminal, and end"
    )
    parser.add_argument("--model", help="which model, where the server has several; else the first")
    parser.add_argument("--json", action="store_true", help="print it once, as JSON, and end")


def run_top(options: Mapping[str, Any]) -> int:
    """Show the loom until Ctrl-C or the server ends it; the exit status: 0.

    Raises:
        WeftError: nobody answers, or somebody else than weft, or an older one, or the key is
            wrong, or the server does not have the model.
    """
    console = Console(markup=False, emoji=False)
    view = TopView()
    server = RunningServer(options["url"], options["api_key"])
    if options["json"]:
        print(json.dumps(server.loom(options["model"]), indent=2))
    elif options["once"] or not sys.stdout.isatty():
        view.push(server.loom(options["model"]))
        console.print(view.render(server.url, console.width))
    else:
        _follow(server, options["model"], view, console)
    return 0


def _follow(server: RunningServer, model: str | None, view: TopView, console: Console) -> None:
    """Show event after event, on a screen of their own."""
    reason = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for event in server.looms(model):
            if event["object"] == "loom.end":
                reason = event["reason"]
                break
            view.push(event)
            live.update(view.render(server.url, console.width), refresh=True)
    words = ENDS.get(reason, "has ended the stream")
    console.print(f"The server at {server.url} {words}.")


class TopView:
    """What the events so far have said, laid out for a terminal."""

    def __init__(self) -> None:
        self._now: Loom = {}
        self._steps: deque[Loom] = deque(maxlen=MOST_STEPS)
        self._before: deque[tuple[int, float, Loom]] = deque()  # engine, time, and its totals

    def push(self, event: Loom) -> None:
        """Take an event in."""
        event = _inert(event)
        self._now = event
        self._steps += event["steps"]
        at, engine = event["at"], event["engine"]["number"]
        self._before.append((engine, at, event["totals"]))
        while self._before[0][0] != engine or (
            len(self._before) > 2 and at - self._before[1][1] > MOST_RATE_S
        ):
            self._before.popleft()

    def render(self, url: str, width: int) -> RenderableType:
        """Lay out the latest event and the last steps."""
        parts: list[RenderableType] = [
            self._head(url),
            "",
            *self._chart(width),
            "",
            self._classes(),
        ]
        if self._now["batches"]:
            parts += ["", _batches(self._now["batches"])]
        elif self._now["batches"] is None:
            parts += ["", Text("The server cannot read its batches at present.", style="red")]
        if recoveries := self._now["recoveries"]:
            parts += ["", *(_recovery(one, self._now["at"]) for one in recoveries[-3:])]
        return Group(*parts)

    def _head(self, url: str) -> RenderableType:
        now, engine, kv = self._now, self._now["engine"], self._now["kv"]
        rows = Table.grid(padding=(0, 2))
        state = Text(engine["state"], style="green" if engine["state"] == "ready" else "bold red")
        words = Text(f"{', '.join(now['models'])} at {url}, weft {now['version']}: ") + state
        rows.add_row("server", words)
        load = now["load"]
        waits = f"{load['waiting']} waiting ({load['queued_prompt_tokens']} prompt tokens)"
        rows.add_row("queue", f"{load['running']} running of {engine['max_num_seqs']}, {waits}")
        rows.add_row("KV cache", _blocks(kv["used_blocks"], kv["blocks"], kv["block_size"]))
        if kv["host_blocks"]:
            there = _blocks(kv["used_host_blocks"], kv["host_blocks"], kv["block_size"])
            rows.add_row("on the host", there)
        rows.add_row("scheduling", f"{engine['policy']}{self._rates()}")
        return rows

    def _rates(self) -> str:
        (_, began, first), (_, ended, last) = self._before[0], self._before[-1]
        if ended <= began:
            return ""
        output, prompt, steps = (
            (last[name] - first[name]) / (ended - began)
            for name in ("output_tokens", "prompt_tokens", "steps")
        )
        return f"; {output:.0f} output and {prompt:.0f} prompt tokens/s, {steps:.0f} steps/s"

    # -- steps -------------------------------------------------------------------------------------

    def _chart(self, width: int) -> Iterator[RenderableType]:
        """A column for each of the last steps, of threads by class, above its time."""
        steps = list(self._steps)[-max(width - 12, 10) :]
        if not steps:
            yield Text("no steps yet", style="dim")
            return
        colours = self._colours()
        columns = [_column(step, most, colours) for most in [_most(steps)] for step in steps]
        gaps = {one["n"] for one in self._now["recoveries"]}
        for level in reversed(range(CHART_ROWS)):
            line = Text("rows      " if level == CHART_ROWS - 1 else " " * 10)
            for step, column in zip(steps, columns, strict=True):
                cell, colour = column[level] if level < len(column) else (" ", "default")
                line.append(GAP if step["n"] in gaps else cell, colour)
            yield line
        longest = max(step["ms"] for step in steps)
        yield Text("real ms   ") + Text(_spark([step["ms"] for step in steps], longest))
        predicted = [step["predicted_ms"] for step in steps]
        if any(value is not None for value in predicted):
            expected = _spark([value or 0 for value in predicted], longest)
            yield Text("predicted ") + Text(expected, style="dim")
        yield self._legend(steps[-1], colours)

    def _legend(self, last: Loom, colours: Mapping[str, str]) -> RenderableType:
        words = Text("          ")
        for name, colour in colours.items():
            words.append(f"{PREFILL}{DECODE} {name}  ", colour)
        words.append(f"\n{' ' * 10}{PREFILL} prefill, {DECODE} decode; ", "dim")
        words.append(f"last step {last['ms']:.1f} ms", "dim")
        if last["predicted_ms"] is not None:
            words.append(f", predicted {last['predicted_ms']:.1f} ms", "dim")
        return words

    def _colours(self) -> dict[str, str]:
        names = [row["name"] for row in self._now["classes"]]
        seen = {name for step in self._steps for name in (*step["prefill"], *step["decode"])}
        names += sorted(seen - set(names))
        return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}

    # -- classes -----------------------------------------------------------------------------------

    def _classes(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("class", overflow="fold", min_width=len("interactive"))
        for name in ("wait", "run"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("TTFT P50 P99 target", "TPOT P50 P99 target", "kept"):
            table.add_column(name, no_wrap=True)
        colours = self._colours()
        for row in self._now["classes"]:
            kept = "" if row["kept"] is None else f"{row['kept']:.0%} of {row['judged']}"
            table.add_row(
                Text(row["name"], style=colours[row["name"]]),
                *("" if row[name] is None else str(row[name]) for name in ("waiting", "running")),
                _latency(row["ttft_s"]),
                _latency(row["tpot_s"]),
                kept,
            )
        return table


def _inert(value: Any) -> Any:
    """The same value, none of whose texts controls the terminal."""
    if isinstance(value, dict):
        return {_inert(key): _inert(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_inert(inner) for inner in value]
    return inert_line(value) if isinstance(value, str) else value


def _most(steps: Seq[Loom]) -> int:
    """Of all steps, the most that one computes: prompt tokens and rows that decode."""
    most: int = max(sum((*step["prefill"].values(), *step["decode"].values())) for step in steps)
    return most


def _column(step: Loom, most: int, colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """Cells of a step from below; everything that it computes has one at least."""
    parts = [
        (count, sign, colours[name])
        for sign, counts in ((DECODE, step["decode"]), (PREFILL, step["prefill"]))
        for name, count in counts.items()
    ]
    cells: list[tuple[str, str]] = []
    for count, sign, colour in parts:
        cells += [(sign, colour)] * max(1, round(CHART_ROWS * count / max(most, 1)))
    return cells


def _spark(values: Seq[float], most: float) -> str:
    top = len(LEVELS) - 1
    return "".join(LEVELS[min(top, round(top * value / most))] if most else " " for value in values)


def _latency(row: Loom) -> str:
    found = [_seconds(row[name]) for name in ("p50", "p99") if row[name] is not None]
    target = [] if row["target"] is None else [f"<{_seconds(row['target'])}"]
    return " ".join(f"{part:>6}" for part in (found or ["", ""]) + target)


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f}ms" if value < 1 else f"{value:.3g}s"


def _blocks(used: int, there: int, block_size: int) -> str:
    share = used / there if there else 0.0
    return f"{_bar(share)} {share:.0%} of {there * block_size} tokens"


def _bar(share: float) -> str:
    full = round(BAR_CELLS * share)
    return "█" * full + "░" * (BAR_CELLS - full)


def _batches(batches: Seq[Loom]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "class", "status", "lines", "", "ends in"):
        table.add_column(name)
    for one in batches:
        done = one["completed"] + one["failed"]
        left = "" if one["eta_s"] is None else _duration(one["eta_s"])
        table.add_row(
            one["id"],
            one["service_class"],
            one["status"],
            f"{done} of {one['total']}" + (f", {one['failed']} failed" if one["failed"] else ""),
            f"{_bar(one['progress'])} {one['progress']:.0%}",
            Text(left, style="red" if one["warning"] else "default"),
        )
    return table


def _recovery(one: Loom, at: float) -> RenderableType:
    ago = _duration(max(0.0, at - one["back_at"]))
    return Text(
        f"{GAP} engine {one['engine']} took over {ago} ago, {one['gap_s']:.2f} s after the one "
        "before it died",
        style="red",
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
