"""Where the time of a figure goes that misses its goal: a table of what ran, and a trace.

``traced`` asks torch's profiler what the GPU did; ``Stacks`` samples what Python did, for work of
the host such as a start. Traces go into one archive, and open in <https://ui.perfetto.dev>.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from figures import figure, note

TOP = 8  # of what ran: as many become figures
MOST_TRACE_BYTES = 15 * 2**20  # of the archive
SAMPLE_S = 0.005


@dataclass(frozen=True)
class Span:
    """Something that ran, from ``start`` to ``end`` in us."""

    name: str
    start: float
    end: float


@contextmanager
def traced(file: Path | None = None) -> Iterator[list[Span]]:
    """All that the GPU did within, filled in at the end.

    Without a GPU it is what torch did on the host.

    Args:
        file: gets it compressed, for a viewer.
    """
    from torch.profiler import ProfilerActivity, profile

    spans: list[Span] = []
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        yield spans
        if cuda:
            torch.cuda.synchronize()
    if file is not None:
        trace.export_chrome_trace(str(file))
    for event in trace.events():
        on_gpu = event.device_type.name == "CUDA"
        if on_gpu if cuda else event.cpu_parent is None:
            spans.append(Span(event.name, event.time_range.start, event.time_range.end))


@dataclass(frozen=True)
class Missing:
    """What is done about figures that miss their goals.

    Attributes:
        archive: for traces; None: there are none.
        every: every figure counts as one that misses its goal, to test what follows.
    """

    archive: Path | None = None
    every: bool = False

    def __call__(self, missed: bool | None) -> bool:
        """Whether a figure is to be looked into; None: there is none yet."""
        return missed is not None and (missed or self.every)


KEEP_NONE = Missing()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add those that ``Missing`` is made of."""
    words = "archive for traces of what misses its goal"
    parser.add_argument("--traces", type=Path, metavar="FILE", help=words)
    words = "as if every figure missed its goal, to test that"
    parser.add_argument("--every-trace", action="store_true", help=words)


class Stacks:
    """What the thread that opens it does in Python meanwhile, by samples of its stack.

    Sampling costs the thread next to nothing, so that what is timed within stays a measurement.
    """

    def __init__(self, every_s: float = SAMPLE_S) -> None:
        self._every_s = every_s
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, tuple[str, ...]]] = []  # us, functions, the outermost first

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            frame = sys._current_frames().get(self._thread)
            self.samples.append((1e6 * time.perf_counter(), functions_of(frame)))

    def innermost(self) -> list[Span]:
        """A span for each sample: the function that ran, until the next one."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [Span(stack[-1], at, after) for (at, stack), (after, _) in pairs if stack]

    def save(self, file: Path) -> None:
        """Write the calls as a compressed trace for a viewer."""
        events: list[dict[str, Any]] = []
        opened: list[tuple[str, float]] = []
        for at, stack in [*self.samples, *((at, ()) for at, _ in self.samples[-1:])]:
            same = 0
            while same < min(len(opened), len(stack)) and opened[same][0] == stack[same]:
                same += 1
            while len(opened) > same:
                name, start = opened.pop()
                call = {"name": name, "ph": "X", "ts": start, "dur": at - start}
                events.append(call | {"pid": 0, "tid": 0})
            opened += [(name, at) for name in stack[same:]]
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def functions_of(frame: FrameType | None) -> tuple[str, ...]:
    """The functions that a frame is called by, the outermost first, and its own."""
    found: list[str] = []
    while frame is not None:
        found.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(found))


def idle_share(spans: Seq[Span]) -> float:
    """The share of the time between the first and the last event in which nothing ran."""
    spans = sorted(spans, key=lambda span: span.start)
    busy, reached = 0.0, spans[0].start
    for span in spans:
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return 1 - busy / (reached - spans[0].start)


def profile_of(spans: Seq[Span]) -> list[tuple[str, float, int]]:
    """What ran, what took most first: name, share of the time of all, how often."""
    spent: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for span in spans:
        name = short_name(span.name)
        spent[name] += span.end - span.start
        times[name] += 1
    total = sum(spent.values())
    return [(name, took / max(total, 1e-9), times[name]) for name, took in spent.most_common()]


def short_name(name: str) -> str:
    """A kernel's name without types, templates and arguments."""
    for mark in ("<", "("):
        name = name.split(mark)[0] or name
    return name.removeprefix("void ").strip()[:60]


def print_profile(name: str, spans: Seq[Span], of: str = "of the GPU's") -> None:
    """Say what took most of the time, and show all that took a thousandth.

    Args:
        of: whose time the shares are of.
    """
    ran = profile_of(spans)
    for what, part, times in ran[:TOP]:
        figure(f"{name}: time in {what} ({times} times)", part, of)
    print(f"{name}: what ran (share, times, us each)")
    spent = sum(span.end - span.start for span in spans)
    for what, part, times in ran:
        if part >= 0.001:
            print(f"  {part:6.1%} {times:7} {part * spent / times:9.1f}  {what}")


def look_into(name: str, archive: Path | None, run: Callable[[], object]) -> None:
    """Run what has missed its goal once more, print what ran, and add a trace to the archive."""
    with tempfile.TemporaryDirectory() as folder:
        file = trace_file(Path(folder), name)
        with traced(None if archive is None else file) as spans:
            run()
        print_profile(name, spans)
        keep_trace(file, archive)


def trace_file(folder: Path, name: str) -> Path:
    """Where the trace of a figure is written."""
    return folder / f"{name.replace(' ', '_').replace(',', '').replace(':', '')}.json.gz"


def keep_trace(file: Path, archive: Path | None) -> None:
    """Add a file to an archive, which is a whole one at every moment, if there is room for it."""
    if archive is None:
        return
    size = archive.stat().st_size if archive.exists() else 0
    if size + file.stat().st_size > MOST_TRACE_BYTES:
        note(f"there is no room for the trace {file.name}")
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(".new")
    if size:
        shutil.copyfile(archive, unfinished)
    with tarfile.open(unfinished, "a" if size else "w") as tar:
        tar.add(file, file.name)
    unfinished.replace(archive)
