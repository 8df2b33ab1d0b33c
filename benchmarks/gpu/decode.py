"""Decoding at steady state through the real loop, with random weights of real shapes.

Greedy, prompts of 16 tokens, 512 generated, as rvLLM measures (section 7). Every request arrives at
once; TTFT is the time from there to the first token. The rate is that of the steps in which all
requests decode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from figures import figure, note
from peaks import read_bandwidth
from shapes import random_decoder, shape
from tracing import (
    Missing,
    Span,
    Stacks,
    add_options,
    idle_share,
    keep_trace,
    look_into,
    print_profile,
    trace_file,
    traced,
)

from weft.core.kv_types import KV_TYPES, cache_dtype
from weft.core.plan import StepOutputs
from weft.core.ports import Lease
from weft.core.types import Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.exec.device import CudaDevice, Device, HostDevice, tensor_memory
from weft.exec.graphs import GraphExecutor, Steps
from weft.exec.input_batch import InputBatch
from weft.exec.step_layout import SIZES, padded_size, sizes_for
from weft.exec.store import KVStore
from weft.kernels.ops import select_ops
from weft.kv.cache import GroupSpec, KVCache
from weft.models.decoder import Decoder
from weft.models.layout import weight_bytes
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

PROMPT, OUTPUT, BLOCK = 16, 512, 16
TRACED_STEPS = 20
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


class Engine:
    """A decoder with what is around it."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        batch: int,
        kv: str,
        sizes: Seq[int] | None = None,
    ) -> None:
        """Capture the steps of some sizes, of those that the batch has if none are given."""
        spec = decoder.spec
        blocks = batch * -(-(PROMPT + OUTPUT) // BLOCK) + 1
        groups = [GroupSpec(g.name, BLOCK, blocks, g.window) for g in spec.kv_groups]
        counts = [blocks] * len(groups)
        memory = tensor_memory(str(device.where))
        store = KVStore(spec.kv_groups, counts, BLOCK, cache_dtype(kv), memory)
        length = PROMPT + OUTPUT
        table = InputBatch(batch, length, [-(-length // BLOCK)] * len(groups))
        tokens = max(1024, batch)
        if sizes is None:
            most = padded_size(min(tokens, PROMPT * batch))
            sizes = [size for size in sizes_for(batch, tokens) if batch <= size <= most]
        steps = Steps(
            max_tokens=tokens,
            max_samples=batch,
            depth=1,
            sizes=sizes,
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

    def first_tokens(self, batch: int) -> None:
        """Compute prompts until every request has its first token."""
        loop, inbox = self._begin(batch, 2)
        while len(inbox.first) < batch:
            loop.step()
        loop.run_until_idle()

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


def new_device(kind: str) -> Device:
    """A device for one engine: the graphs of another one must not share its pool."""
    return CudaDevice("cuda:0") if kind == "cuda" else HostDevice()


def measure(
    case: Case, batch: int, decoder: Decoder, device: Device, output: int, missing: Missing
) -> None:
    """Measure a batch; what misses its goal leaves a profile and a trace."""
    name = f"{case.name}, batch {batch}"
    cuda, started = device.where.type == "cuda", time.perf_counter()
    engine = Engine(decoder, device, batch, case.kv or decoder.dtype)
    figure(f"{name}: ready", time.perf_counter() - started, "s")
    engine.run(batch, 8)  # whatever is only done once
    inbox = engine.run(batch, output)
    rate = steady_rate(inbox, batch)
    missed = missing(figure(f"{name}: decode", rate, "tok/s"))
    ttft = [1e3 * (when - inbox.started) for when in inbox.first.values()]
    late = missing(figure(f"{name}: TTFT, median", statistics.median(ttft), "ms"))
    late |= missing(figure(f"{name}: TTFT, last", max(ttft), "ms"))
    if cuda and batch == 1:
        bound = read_bandwidth(device.where) / read_bytes(decoder, case.quantize)
        missed |= missing(figure(f"{name}: share of the bandwidth bound", rate / bound))
    if cuda or missed:
        with tempfile.TemporaryDirectory() as folder:
            file = trace_file(Path(folder), name)
            spans = engine.trace(batch, min(TRACED_STEPS, output), file)
            if cuda:
                missed |= missing(figure(f"{name}: GPU idle", idle_share(spans)))
            print_profile(name, spans)
            if missed:
                keep_trace(file, missing.archive)
    if late:
        look_into(f"{name}, first tokens", missing.archive, lambda: engine.first_tokens(batch))
    engine.executor.close()


def read_bytes(decoder: Decoder, quantize: str) -> int:
    """Bytes of the weights that a decode step reads: of an embedding table of its own only rows."""
    spec = decoder.spec
    size = weight_bytes(spec, decoder.dtype, quantize)
    if spec.tied_embeddings:
        return size
    return size - spec.vocab_size * spec.hidden_size * getattr(torch, decoder.dtype).itemsize


def measure_start(
    case: Case, decoder: Decoder, device: Device, missing: Missing, sizes: Seq[int] = SIZES
) -> None:
    """How long it takes to capture the steps of every size, and the memory that they take."""
    cuda, free = device.where.type == "cuda", 0
    if cuda:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device.where)[0]
    started = time.perf_counter()
    with Stacks() as stacks:
        engine = Engine(decoder, device, max(sizes), decoder.dtype, sizes)
    took = time.perf_counter() - started
    name = f"{case.model}: {engine.executor.captured} captured graphs"
    missed = missing(figure(f"{name}, ready", took, "s"))
    if cuda:
        taken = free - torch.cuda.mem_get_info(device.where)[0] - engine.kv_bytes
        figure(f"{name}, memory beside KV", taken / 2**30, "GiB")
    if missed:
        print_profile(f"{name}, start", stacks.innermost(), "of the host's")
        with tempfile.TemporaryDirectory() as folder:
            file = trace_file(Path(folder), f"{case.name} start")
            stacks.save(file)
            keep_trace(file, missing.archive)
    engine.executor.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no batch near its end")
    parser.add_argument("--model", help="only this shape")
    parser.add_argument("--others", action="store_true", help="all shapes but the first")
    parser.add_argument("--kv", default="", choices=("", *KV_TYPES), help="only 8-bit KV so")
    parser.add_argument("--batch", help="only these batches, with commas between")
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    add_options(parser)
    options = parser.parse_args()
    missing = Missing(options.traces, every=options.every_trace)
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
                measure(case, batch, decoder, device, options.output, missing)
            except Exception as error:  # the next batch may fare better
                failed += 1
                traceback.print_exc()
                note(f"{case.name}, batch {batch}: {type(error).__name__}: {str(error)[:300]}")
                if "CUDA error" in str(error):  # nothing runs after it in this process
                    return go_on(case, todo, options, deadline)
            _free(cuda)
        if case is CASES[0] and cuda and batches is None:
            measure_start(case, decoder, new_device(options.device), missing)
        elif not cuda:
            measure_start(case, decoder, new_device(options.device), missing, (1, 2))
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
