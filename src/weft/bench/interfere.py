"""``weft bench interfere``: the loop in Python and the resident one, beside neighbours.

Blink's figure 3 in form: the control path alone. The engine's thread of control has one processor,
which neighbours come to share; the model computes on others, which they leave alone. Where one
thread plans and computes, there is no thread of control, and it has those. A token counts as out
when it is published, so neither HTTP nor a client is part of what is measured.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from weft.bench.options import NEIGHBOURS, InterfereBench
from weft.bench.prompts import FIRST_ID
from weft.core.errors import ConfigError
from weft.core.plan import StepOutputs
from weft.core.ports import Inbox, Lease
from weft.core.process import start_child
from weft.core.types import FinishReason, Request, SamplingParams
from weft.workload.percentiles import percentiles_ms

SETTLE_S = 0.5  # until neighbours are busy
# Programs that never end by themselves. A neighbour ends with this process, whose pipe it reads.
PROGRAMS = {
    "compress": "import bz2, os; data = os.urandom(1 << 20)\nwhile True: bz2.compress(data)",
    "compile": "text = 'def f(x):\\n    return [x + i for i in range(9)]\\n' * 2000\n"
    "while True: compile(text, 'text', 'exec')",
    "memory": "one, two = bytearray(1 << 28), bytearray(1 << 28)\nwhile True: one[:] = two",
}
assert tuple(PROGRAMS) == NEIGHBOURS
WATCH = (
    "import os, threading\nthreading.Thread(target=lambda: (os.read(0, 1), os._exit(0))).start()\n"
)


class Stamps(Protocol):
    """Notes what a resident loop publishes."""

    @property
    def outlet(self) -> object: ...

    def take(self) -> list[tuple[int, list[int]]]:
        """Return when tokens of which sequences were published, in ns of the monotonic clock."""


class MeasuredLoop(Protocol):
    """An engine whose loop in Python or resident loop is measured."""

    vocab_size: int
    computes: bool

    def run(self, inbox: Inbox) -> None:
        """Serve an inbox on the calling thread until nothing is left to do."""


class Recorder:
    """An inbox that has so many sequences open at once, and notes when their tokens come.

    Attributes:
        arrived_ns: of each sequence.
        tokens_ns: of each sequence, when its tokens were published.
    """

    def __init__(
        self, stamps: Stamps, vocab_size: int, options: InterfereBench, round_number: int
    ) -> None:
        self.arrived_ns: dict[int, int] = {}
        self.tokens_ns: dict[int, list[int]] = {}
        self._stamps, self._vocab_size, self._options = stamps, vocab_size, options
        self._draw = random.Random(f"{options.seed} {round_number}")
        self._left = options.requests
        self._stopped = False
        self._new: list[Request] = []
        for _ in range(options.sequences):
            self._arrive(0)

    def _arrive(self, now_ns: int) -> None:
        """Let another request come; one of the start asks for a part of the length."""
        if not self._left:
            return
        self._left -= 1
        number, most = len(self.arrived_ns), self._options.output_tokens
        ids = range(FIRST_ID, self._vocab_size)
        prompt = tuple(self._draw.choices(ids, k=self._options.input_tokens))
        # Those of the start end one after the other, as they would in the midst of such traffic.
        asked = most if now_ns else max(1, most * (number + 1) // self._options.sequences)
        params = SamplingParams(temperature=0.0, max_tokens=asked, ignore_eos=True, seed=number)
        self.arrived_ns[number] = now_ns or time.monotonic_ns()
        self.tokens_ns[number] = []
        self._new.append(Request(number, prompt, params.with_defaults({})))

    def stop(self) -> None:
        """Have whoever serves this raise KeyboardInterrupt."""
        self._stopped = True

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        if self._stopped:
            raise KeyboardInterrupt
        new, self._new = self._new, []
        return new, ()

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Nobody here survives the engine."""

    def publish(self, outputs: StepOutputs) -> None:
        now = time.monotonic_ns()
        self.take()
        for sequence_id, _ in outputs.tokens:
            self.tokens_ns[sequence_id].append(now)
        for update in outputs.updates:
            if update.error is not None:
                raise update.error
            if update.token is not None:
                self.tokens_ns[update.sequence_id].append(now)
            if update.finish is not None:
                self._arrive(now)

    def take(self) -> None:
        """Note what the resident loop has published."""
        for at, sequence_ids in self._stamps.take():
            for sequence_id in sequence_ids:
                self.tokens_ns[sequence_id].append(at)

    def lend(self, lease: Lease) -> None:
        lease.grant(self._stamps.outlet)

    def wait(self) -> None:
        raise AssertionError("there is always something to do")


@contextmanager
def neighbours(kinds: Seq[str], cpu: int) -> Iterator[None]:
    """Processes of these kinds on one processor, until the block ends."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for kind in kinds:
            command = [sys.executable, "-S", "-c", WATCH + PROGRAMS[kind]]
            children.append(start_child(command, stdin=subprocess.PIPE))
            os.sched_setaffinity(children[-1].pid, {cpu})
        if children:
            time.sleep(SETTLE_S)
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


@contextmanager
def control_cpu() -> Iterator[int]:
    """The processor of the control path, which this thread, and those it starts, leave meanwhile.

    Raises:
        ConfigError: there is but one.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise ConfigError("This needs two processors: one for the loop, one for the model.")
    os.sched_setaffinity(0, set(allowed[:-1]))
    try:
        yield allowed[-1]
    finally:
        os.sched_setaffinity(0, set(allowed))


def bench_interfere(
    loops: Mapping[str, MeasuredLoop],
    stamps: Stamps,
    model: str,
    cpu: int,
    options: InterfereBench,
) -> dict[str, Any]:
    """Measure each loop alone and with neighbours, in turns.

    Args:
        loops: by what they are called.
        cpu: the processor of the loops, and of the neighbours.
    """
    samples: dict[tuple[str, bool], list[Recorder]] = {}
    seconds: dict[tuple[str, bool], float] = {}
    for number in range(options.repeats + 1):
        for beside in (False, True):
            kinds = options.neighbours if beside else ()
            with neighbours(kinds, cpu):
                for name in sorted(loops, reverse=bool(number % 2)):
                    loop = loops[name]
                    recorder = Recorder(stamps, loop.vocab_size, options, number)
                    began = time.monotonic()
                    cpus = os.sched_getaffinity(0) if loop.computes else {cpu}
                    _run_on(cpus, partial(loop.run, recorder), recorder.stop)
                    if number:  # the first round warms up
                        key = name, beside
                        samples.setdefault(key, []).append(recorder)
                        seconds[key] = seconds.get(key, 0.0) + time.monotonic() - began
    rows = {
        name: {
            "alone": _figures(samples[name, False], seconds[name, False]),
            "with neighbours": _figures(samples[name, True], seconds[name, True]),
        }
        for name in loops
    }
    return {
        "command": "weft bench interfere",
        "options": asdict(options),
        "model": model,
        "control_cpu": cpu,
        "loops": rows,
    }


def _run_on(cpus: set[int], run: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run something on a thread that stays on these processors; raises what it raises.

    Args:
        stop: has it end soon.
    """
    raised: list[BaseException] = []
    ended = threading.Event()  # Python 3.11 takes a thread for ended whose join was interrupted

    def body() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            run()
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=body, name="weft-control")
    thread.start()
    try:
        ended.wait()
    except BaseException:  # Ctrl-C
        stop()
        ended.wait()
        raise
    finally:
        thread.join()
    if raised:
        raise raised[0]


def _figures(recorders: Seq[Recorder], seconds: float) -> dict[str, Any]:
    """What came of some runs: tokens a second, and percentiles in ms."""
    first, between, mean = [], [], []
    for recorder in recorders:
        for number, times in recorder.tokens_ns.items():
            first.append((times[0] - recorder.arrived_ns[number]) / 1e9)
            gaps = [(b - a) / 1e9 for a, b in pairwise(times)]
            between += gaps
            if gaps:
                mean.append(sum(gaps) / len(gaps))
    tokens = sum(len(times) for r in recorders for times in r.tokens_ns.values())
    return {
        "tokens_per_s": tokens / seconds,
        "ttft_ms": percentiles_ms(first),
        "tpot_ms": percentiles_ms(mean),
        "itl_ms": percentiles_ms(between),
    }
