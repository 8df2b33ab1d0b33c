"""Decoding at steady state through the real loop, with random weights of real shapes.

Greedy, prompts of 16 tokens, 512 generated, as rvLLM measures (section 7). Every request arrives at
once; TTFT is the time from there to the first token. The rate is that of the steps in which all
requests decode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from figures import figure
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
from weft.kernels.ops import select_ops
from weft.kv.cache import GroupSpec, KVCache
from weft.models.decoder import Decoder
from weft.models.layout import weight_bytes
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

PROMPT, OUTPUT, BLOCK = 16, 512, 16
TRACED_STEPS = 20
TOP_KERNELS = 8


@dataclass(frozen=True)
class Case:
    """A model with weights of a kind, and the batches it is measured with: batch -> goal tok/s."""

    model: str
    quantize: str
    goals: dict[int, float | None]


CASES = [
    Case("qwen2.5-7b", "fp8", {128: 25_000, 1: None, 256: 40_000, 512: 55_000}),
    Case("llama-3.1-8b", "none", {128: None, 1: None, 256: None, 512: None}),
    Case("qwen3-30b-a3b", "none", {64: None}),
]
TTFT_GOAL_MS = 50.0  # Qwen2.5-7B in FP8 at batch 128
BANDWIDTH_GOAL = 0.85  # of what reading all weights once a step allows, at batch 1
IDLE_GOAL = 0.03  # of a step, at batch 128


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
def traced() -> Iterator[list[Span]]:
    """All that the GPU did within, filled in at the end."""
    from torch.profiler import ProfilerActivity, profile

    spans: list[Span] = []
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        yield spans
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

    def trace(self, batch: int, steps: int) -> list[Span]:
        """What the GPU does in so many steps in which all requests decode."""
        loop, inbox = self._begin(batch, steps + 2)
        while len(inbox.first) < batch:
            loop.step()
        with traced() as spans:
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
    """The kernels that took most time: name, share of the time of all, and how often they ran."""
    spent: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for span in spans:
        name = short_name(span.name)
        spent[name] += span.end - span.start
        times[name] += 1
    total = sum(spent.values())
    return [(name, took / total, times[name]) for name, took in spent.most_common(TOP_KERNELS)]


def short_name(name: str) -> str:
    """A kernel's name without types, templates and arguments."""
    for mark in ("<", "("):
        name = name.split(mark)[0] or name
    return name.removeprefix("void ").strip()[:60]


def new_device(kind: str) -> Device:
    """A device for one engine: the graphs of another one must not share its pool."""
    return CudaDevice("cuda:0") if kind == "cuda" else HostDevice()


def measure(case: Case, batch: int, decoder: Decoder, device: Device, output: int) -> None:
    name = f"{case.model} {'bf16' if case.quantize == 'none' else case.quantize}, batch {batch}"
    cuda = device.where.type == "cuda"
    started = time.perf_counter()
    engine = Engine(decoder, device, batch, decoder.dtype)
    figure(f"{name}: ready", time.perf_counter() - started, "s")
    engine.run(batch, 8)  # whatever is only done once
    inbox = engine.run(batch, output)
    rate = steady_rate(inbox, batch)
    figure(f"{name}: decode", rate, "tok/s", case.goals.get(batch), "more")
    ttft = [1e3 * (when - inbox.started) for when in inbox.first.values()]
    main = case.model == "qwen2.5-7b" and batch == 128
    figure(f"{name}: TTFT, median", statistics.median(ttft), "ms")
    figure(f"{name}: TTFT, last", max(ttft), "ms", TTFT_GOAL_MS if main else None, "less")
    if cuda and batch == 1:
        size = read_bytes(decoder, case.quantize)
        bound = read_bandwidth(device.where) / size
        share = rate / bound
        figure(f"{name}: share of the bandwidth bound", share, "", BANDWIDTH_GOAL, "more")
    if cuda:
        spans = engine.trace(batch, TRACED_STEPS)
        figure(f"{name}: GPU idle", idle_share(spans), "", IDLE_GOAL if main else None, "less")
        for kernel, part, times in profile_of(spans):
            figure(f"{name}: time in {kernel} ({times} times)", part, "of the GPU's")
    engine.executor.close()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no case after that")
    parser.add_argument("--model", help="only this shape")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    cuda = options.device == "cuda"
    where = new_device(options.device).where
    cases = [case for case in CASES if options.model in (None, case.model)]
    if not cases:
        cases = [Case(options.model, "none", {options.batch or 1: None})]
    started, failed = time.perf_counter(), False
    for case in cases:
        spec = shape(case.model, PROMPT + OUTPUT)
        ops = select_ops(str(where), "bfloat16", "auto" if cuda else "reference")
        with torch.inference_mode():
            decoder = random_decoder(spec, torch.bfloat16, where, ops, case.quantize)
        for batch in case.goals:
            if options.batch not in (None, batch):
                continue
            if time.perf_counter() - started > options.seconds:
                print(f"no time left for {case.model}, batch {batch}")
                continue
            try:
                measure(case, batch, decoder, new_device(options.device), options.output)
            except Exception:  # the next batch may fare better
                failed = True
                traceback.print_exc()
            gc.collect()
        if case is CASES[0] and cuda and options.batch is None:
            measure_start(case, decoder, new_device(options.device))
        del decoder
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
