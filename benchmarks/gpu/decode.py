"""Decoding at steady state through the real loop, with random weights of real shapes.

Greedy, prompts of 16 tokens, 512 generated, as rvLLM measures (section 7). Every request arrives at
once; TTFT is the time from there to the first token. The rate is that of the steps in which all
requests decode.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from figures import figure, note
from goals import goal_of
from peaks import read_bandwidth
from shapes import random_decoder, shape

from weft.core.plan import StepOutputs
from weft.core.ports import Lease
from weft.core.types import Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.exec.device import CudaDevice, Device, HostDevice, tensor_memory
from weft.exec.graphs import GraphExecutor, Steps
from weft.exec.input_batch import InputBatch
from weft.exec.step_layout import SIZES
from weft.exec.store import KVStore
from weft.kernels.kv_storage import KV_DTYPES
from weft.kernels.ops import select_ops
from weft.kv.cache import GroupSpec, KVCache
from weft.models.decoder import Decoder
from weft.models.layout import weight_bytes
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

PROMPT, OUTPUT, BLOCK = 16, 512, 16
TRACED_STEPS = 20
TOP_KERNELS = 8
MOST_TRACE_BYTES = 15 * 2**20
NEXT_S = 20.0  # without as much time no further batch begins


@dataclass(frozen=True)
class Case:
    """A model with weights of a kind, and the batches it is measured with, the first ones first.

    What they should reach stands in ``goals.py``, under the names of the figures.
    """

    model: str
    quantize: str
    batches: tuple[int, ...]
    kv: str = ""  # type of KV, if it is not that of the model

    @property
    def name(self) -> str:
        kind = "bf16" if self.quantize == "none" else self.quantize
        return f"{self.model} {kind}{self.kv and f', {self.kv} KV'}"


CASES = [
    Case("qwen2.5-7b", "fp8", (128, 1, 512, 256)),
    *(Case("qwen2.5-7b", "fp8", (512, 256), kv) for kv in ("int8", "fp8")),
    Case("llama-3.1-8b", "none", (128, 1, 512, 256)),
    Case("qwen3-30b-a3b", "none", (64,)),
]


class Inbox:
    """Hands out all requests at once, and notes when tokens come."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self.started = 0.0
        self.first: dict[int, float] = {}
        self.steps: list[tuple[float, int]] = []  # when, and how many tokens came

    def receive(self) -> tuple[list[Request], list[Any]]:
        requests, self._requests = self._requests, []
        if requests:
            self.started = time.perf_counter()
        return requests, []

    def computing(self, sequence_ids: list[int]) -> None:
        """Nothing outlives this process."""

    def lend(self, lease: Lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        now = time.perf_counter()
        ids = [pair[0] for pair in outputs.tokens]
        ids += [update.sequence_id for update in outputs.updates if update.token is not None]
        for sequence_id in ids:
            self.first.setdefault(sequence_id, now)
        self.steps.append((now, len(ids)))

    def wait(self) -> None:
        """There is always something to do."""


@dataclass(frozen=True)
class Span:
    """Something that the GPU did, from ``start`` to ``end`` in us."""

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
    if file is not None:
        trace.export_chrome_trace(str(file))
    for event in trace.events():
        if event.device_type.name == "CUDA":
            spans.append(Span(event.name, event.time_range.start, event.time_range.end))


class Engine:
    """A decoder with what is around it."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        batch: int,
        kv_dtype: str,
        sizes: Seq[int] | None = None,
    ) -> None:
        """Capture the steps of some sizes, of the batch alone if none are given."""
        spec = decoder.spec
        blocks = batch * -(-(PROMPT + OUTPUT) // BLOCK) + 1
        groups = [GroupSpec(g.name, BLOCK, blocks, g.window) for g in spec.kv_groups]
        counts = [blocks] * len(groups)
        store = KVStore(spec.kv_groups, counts, BLOCK, kv_dtype, tensor_memory(str(device.where)))
        length = PROMPT + OUTPUT
        table = InputBatch(batch, length, [-(-length // BLOCK)] * len(groups))
        tokens = max(1024, batch)
        steps = Steps(
            max_tokens=tokens,
            max_samples=batch,
            depth=1,
            sizes=(batch,) if sizes is None else sizes,
        )
        self.executor = GraphExecutor(decoder, store, table, device, steps)
        cache = KVCache(groups, prefix_caching=False)
        self._scheduler = fcfs(cache, Limits(batch, tokens, length))
        self.kv_bytes = sum(
            t.nbytes for number in range(len(groups)) for t in store.tensors(number)
        )
        self._vocab = spec.vocab_size
        self._ids = count()

    def run(self, batch: int, output: int) -> Inbox:
        """Decode a batch to its end."""
        loop, inbox = self._begin(batch, output)
        loop.run_until_idle()
        return inbox

    def trace(self, batch: int, steps: int, file: Path | None = None) -> list[Span]:
        """What the GPU does in so many steps in which all requests decode; see ``traced``."""
        loop, inbox = self._begin(batch, steps + 2)
        while len(inbox.first) < batch:
            loop.step()
        with traced(file) as spans:
            loop.run_until_idle()
        return spans

    def _begin(self, batch: int, output: int) -> tuple[EngineLoop, Inbox]:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=0)
        sampling = sampling.with_defaults({})
        prompts = torch.randint(self._vocab, (batch, PROMPT)).tolist()
        inbox = Inbox([Request(next(self._ids), tuple(p), sampling) for p in prompts])
        return EngineLoop(self._scheduler, self.executor, inbox, WallClock()), inbox


def steady_rate(inbox: Inbox, batch: int) -> float:
    """Tokens a second of the steps in which all requests decode."""
    full = [when for when, tokens in inbox.steps if tokens == batch]
    return batch * (len(full) - 1) / (full[-1] - full[0])


def idle_share(spans: Seq[Span]) -> float:
    """The share of the time between the first and the last event in which nothing ran."""
    spans = sorted(spans, key=lambda span: span.start)
    busy, reached = 0.0, spans[0].start
    for span in spans:
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return 1 - busy / (reached - spans[0].start)


def profile_of(spans: Seq[Span]) -> list[tuple[str, float, int]]:
    """Kernels, those that took most first: name, share of the time of all, how often they ran."""
    spent: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for span in spans:
        name = short_name(span.name)
        spent[name] += span.end - span.start
        times[name] += 1
    total = sum(spent.values())
    return [(name, took / total, times[name]) for name, took in spent.most_common()]


def short_name(name: str) -> str:
    """A kernel's name without types, templates and arguments."""
    for mark in ("<", "("):
        name = name.split(mark)[0] or name
    return name.removeprefix("void ").strip()[:60]


def new_device(kind: str) -> Device:
    """A device for one engine: the graphs of another one must not share its pool."""
    return CudaDevice("cuda:0") if kind == "cuda" else HostDevice()


def measure(
    case: Case, batch: int, decoder: Decoder, device: Device, output: int, traces: Path | None
) -> None:
    """Measure a batch; add a trace to the archive ``traces`` if a goal is missed."""
    name = f"{case.name}, batch {batch}"
    cuda, started = device.where.type == "cuda", time.perf_counter()
    engine = Engine(decoder, device, batch, case.kv or decoder.dtype)
    figure(f"{name}: ready", time.perf_counter() - started, "s")
    engine.run(batch, 8)  # whatever is only done once
    inbox = engine.run(batch, output)
    found = {f"{name}: decode": (steady_rate(inbox, batch), "tok/s")}
    ttft = [1e3 * (when - inbox.started) for when in inbox.first.values()]
    found[f"{name}: TTFT, median"] = statistics.median(ttft), "ms"
    found[f"{name}: TTFT, last"] = max(ttft), "ms"
    if cuda and batch == 1:
        bound = read_bandwidth(device.where) / read_bytes(decoder, case.quantize)
        share = found[f"{name}: decode"][0] / bound
        found[f"{name}: share of the bandwidth bound"] = share, ""
    missed = False
    for label, (value, unit) in found.items():
        figure(label, value, unit)
        goal = goal_of(label)
        missed |= goal is not None and not goal.reached(value)
    kept = traces if missed else None
    if cuda or kept is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name.replace(' ', '_').replace(',', '')}.json.gz"
            spans = engine.trace(batch, TRACED_STEPS, file if kept else None)
            if kept is not None:
                keep_trace(file, kept)
    if cuda:
        figure(f"{name}: GPU idle", idle_share(spans))
        print_profile(name, spans)
    engine.executor.close()


def keep_trace(file: Path, archive: Path) -> None:
    """Add a file to an archive, which is a whole one at every moment, if there is room for it."""
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


def print_profile(name: str, spans: Seq[Span]) -> None:
    """Say which kernels took most of the time of a step, and show all that took a thousandth."""
    for kernel, part, times in profile_of(spans)[:TOP_KERNELS]:
        figure(f"{name}: time in {kernel} ({times} times)", part, "of the GPU's")
    print(f"{name}: kernels of {TRACED_STEPS} steps (share, times, us each)")
    spent = sum(span.end - span.start for span in spans)
    for kernel, part, times in profile_of(spans):
        if part >= 0.001:
            print(f"  {part:6.1%} {times:7} {part * spent / times:9.1f}  {kernel}")


def read_bytes(decoder: Decoder, quantize: str) -> int:
    """Bytes of the weights that a decode step reads: of an embedding table of its own only rows."""
    spec = decoder.spec
    size = weight_bytes(spec, decoder.dtype, quantize)
    if spec.tied_embeddings:
        return size
    return size - spec.vocab_size * spec.hidden_size * getattr(torch, decoder.dtype).itemsize


def measure_start(case: Case, decoder: Decoder, device: Device) -> None:
    """How long it takes to capture the steps of every size, and the memory that they take."""
    torch.cuda.empty_cache()
    free, started = torch.cuda.mem_get_info(device.where)[0], time.perf_counter()
    engine = Engine(decoder, device, 512, decoder.dtype, SIZES)
    name = f"{case.model}: {engine.executor.captured} captured graphs"
    figure(f"{name}, ready", time.perf_counter() - started, "s")
    taken = free - torch.cuda.mem_get_info(device.where)[0] - engine.kv_bytes
    figure(f"{name}, memory beside KV", taken / 2**30, "GiB")
    engine.executor.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no batch near its end")
    parser.add_argument("--model", help="only this shape")
    parser.add_argument("--others", action="store_true", help="all shapes but the first")
    parser.add_argument("--kv", default="", choices=("", *KV_DTYPES), help="only 8-bit KV so")
    parser.add_argument("--batch", help="only these batches, with commas between")
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--traces", type=Path, help="archive for traces of what misses its goal")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    cases = [
        case
        for case in CASES
        if options.model in (None, case.model)
        and not (options.others and case.model == CASES[0].model)
        and options.kv in ("", case.kv)
    ]
    batches = [int(word) for word in options.batch.split(",")] if options.batch else None
    if not cases:
        cases = [Case(options.model, "none", (1,), options.kv)]
    deadline, failed = time.perf_counter() + options.seconds, 0
    made, decoder = ("", ""), None
    for case in cases:
        if time.perf_counter() > deadline - NEXT_S * cuda:
            note(f"no time left for {case.name}")
            continue
        where = torch.device("cuda:0" if cuda else "cpu")
        ops = select_ops(str(where), "bfloat16", "auto" if cuda else "reference")
        if made != (case.model, case.quantize):
            decoder = None
            _free(cuda)
            with torch.inference_mode():
                spec = shape(case.model, PROMPT + OUTPUT)
                decoder = random_decoder(spec, torch.bfloat16, where, ops, case.quantize)
            made = case.model, case.quantize
        todo = list(batches or case.batches)
        while todo:
            batch = todo.pop(0)
            if time.perf_counter() > deadline - NEXT_S * cuda:
                note(f"no time left for {case.name}, batch {batch}")
                continue
            try:
                device = new_device(options.device)
                measure(case, batch, decoder, device, options.output, options.traces)
            except Exception as error:  # the next batch may fare better
                failed += 1
                traceback.print_exc()
                note(f"{case.name}, batch {batch}: {type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):  # nothing runs after it in this process
                    return go_on(case, todo, options, deadline)
            _free(cuda)
        if case is CASES[0] and cuda and batches is None:
            measure_start(case, decoder, new_device(options.device))
    return int(failed > 0)


def go_on(case: Case, todo: Seq[int], options: argparse.Namespace, deadline: float) -> int:
    """Measure the batches that are left in another process; returns 1, as one has failed."""
    note(f"{case.model}: the rest runs in a new process; shapes after it were not measured")
    left = deadline - time.perf_counter()
    if todo and left > NEXT_S:
        command = [sys.executable, __file__, "--model", case.model, "--seconds", f"{left:.0f}"]
        command += ["--batch", ",".join(map(str, todo)), "--output", str(options.output)]
        command += ["--kv", case.kv] if case.kv else []
        command += ["--traces", str(options.traces)] if options.traces else []
        subprocess.run(command)
    return 1


def _free(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
