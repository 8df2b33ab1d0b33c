"""Kernels at the shapes of two models, as times and as shares of the device's measured peaks.

Products by Triton and by torch's library with fast and with exact sums; attention over each type of
KV; sampling. What is called is what the engine calls (``weft.kernels.triton``). The most valuable
come first; what has no time left is told. Kernels are compiled by several processes before.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from figures import figure, note
from peaks import clock_of, report_bandwidth, report_peak
from tracing import KEEP_NONE, Missing, add_options, look_into

from weft.kernels.kv_storage import KV_DTYPES, row_size
from weft.kernels.triton.attention import plan_on
from weft.kernels.triton.device import ROWWISE_CAPABILITY, capability, copies_beyond_caches
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.matrix import TritonMatrix, linear, logits, small_product
from weft.kernels.triton.sample import sample
from weft.kernels.triton.tiles import Heads, launches
from weft.kernels.triton.tuned import Trial as OneLaunch
from weft.kernels.triton.tuned import find_tuning, random_matrix
from weft.kernels.triton.tuned_attention import Rows, attention_calls
from weft.kernels.tuning import DECODE, LaunchShape, Tuning

BLOCK = 16
LIBRARIES = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention": "FLASH_ATTENTION"}
KV = {"bf16": torch.bfloat16, **KV_DTYPES}
SETTINGS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0.0, 1.0, 0.0),
    "temperature 0.8, top-k 50, top-p 0.9": (0.8, 50.0, 0.9, 0.0),
    "temperature 1, top-p 0.95": (1.0, 0.0, 0.95, 0.0),
    "temperature 0.8": (0.8, 0.0, 1.0, 0.0),
}
Call = Callable[[int], object]
Make = Callable[[], tuple[Call, int]]
TRACED, TRACED_ON_CPU = 10, 2  # runs of what misses its goal


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layers: query and KV heads, their size, hidden, MLP and vocabulary."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int

    def attention(self, kv: torch.dtype) -> Heads:
        """The heads of attention over KV of a type."""
        group = self.heads // self.kv_heads
        return Heads(self.kv_heads, group, self.head_dim, torch.bfloat16, kv)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's matrices."""
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "output": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    models: tuple[Model, ...]
    rows: tuple[int, ...]  # of the products of decodes
    chunks: tuple[int, ...]  # rows of the products of a prefill
    decodes: tuple[tuple[int, int], ...]  # rows and their contexts
    least: tuple[int, ...]  # tokens of a split of a context
    prefills: tuple[int, ...]  # tokens of one prompt
    samples: tuple[int, ...]  # rows
    launches: tuple[tuple[int, int, int, int], ...]  # keys, warps, stages, programs of decodes
    bandwidth_numbers: int
    peak_size: int


FULL = Sizes(
    models=(
        Model("qwen2.5-7b", 28, 4, 128, 3584, 18944, 152064),
        Model("llama-3.1-8b", 32, 8, 128, 4096, 14336, 128256),
    ),
    rows=(128, 1, 512, 256, 64, 16),
    chunks=(2048, 8192),
    decodes=(
        *((128, 272), (512, 272), (1, 272), (128, 4096), (1, 4096), (1, 16384)),
        *((512, 4096), (128, 16384)),
    ),
    least=(256, 512, 1024),
    prefills=(2048, 8192),
    samples=(128, 512),
    launches=(
        *((64, 4, 5, 2), (64, 8, 5, 2), (64, 4, 3, 2), (32, 4, 5, 3), (128, 4, 3, 2)),
        *((128, 4, 5, 2), (128, 8, 3, 2), (128, 8, 5, 1), (128, 16, 3, 1)),
    ),
    bandwidth_numbers=2**29,
    peak_size=8192,
)
QUICK = Sizes(
    models=(Model("tiny", 4, 2, 16, 32, 48, 200),),
    rows=(1, 70),
    chunks=(80,),
    decodes=((3, 40),),
    least=(256,),
    prefills=(24,),
    samples=(3,),
    launches=((32, 4, 3, 1),),
    bandwidth_numbers=2**16,
    peak_size=64,
)


@dataclass(frozen=True)
class Peaks:
    """Bytes and operations a second that the device reaches."""

    bandwidth: float = 1.0
    halves: float = 1.0
    eighths: float = 1.0


@dataclass(frozen=True)
class Trial:
    """A call to be measured.

    Attributes:
        make: returns it, and with how many copies of its data; it may only then take memory.
        tell: prints the figures of so many seconds; returns whether one misses its goal, or None
            if the figure that may have one is not there yet.
        whole: name and calls of what misses it, if that is more than this one.
    """

    name: str
    make: Make
    tell: Callable[[float], bool | None]
    whole: tuple[str, Sequence[Make]] | None = None


class Layer:
    """The products of a layer by one way, whose sum is told when all are there."""

    def __init__(self, name: str, share: Callable[[float], tuple[float, str]], count: int) -> None:
        self._name, self._share, self._left, self._spent = name, share, count, 0.0

    def tell(self, product: str, seconds: float) -> bool | None:
        figure(product, 1e6 * seconds, "us")
        self._spent += seconds
        self._left -= 1
        if self._left:
            return None
        figure(f"{self._name}: time", 1e6 * self._spent, "us")
        return figure(self._name, *self._share(self._spent))


def product_calls(
    shape: LaunchShape, rows: int, way: str, device: torch.device, tuning: Tuning
) -> tuple[Call, int]:
    """A product whose weights are not in the caches, its activations rounded before.

    Args:
        way: "Triton", "library fast" or "library exact"; "engine": what the engine would take.
    """
    first = random_matrix(shape, device, tuning)
    count = copies_beyond_caches(first.nbytes, device)
    weights = [first, *(random_matrix(shape, device, tuning) for _ in range(count - 1))]
    x = torch.randn(rows, first.shape[1], device=device, dtype=first.dtype)
    given = round_rows(x) if first.rounds else x
    if way == "engine":
        return lambda copy: linear(given, weights[copy], None), count
    codes, scales = (
        (given, None) if isinstance(given, torch.Tensor) else (given.codes, given.scales)
    )
    if way == "Triton":
        return (
            lambda copy: small_product(codes, scales, weights[copy], None, None, first.dtype),
            count,
        )
    assert scales is not None
    fast = way == "library fast"

    def library(copy: int) -> torch.Tensor:
        weight: TritonMatrix = weights[copy]
        factors = scales.unsqueeze(1), weight.scales.unsqueeze(0)
        return torch._scaled_mm(
            codes, weight.values.t(), *factors, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return library, count


def product_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """The four products of a layer in FP8, by each way."""
    ways = ["Triton"]
    if capability(device) >= ROWWISE_CAPABILITY:
        ways += ["library fast", "library exact"]
    for rows in sizes.rows:
        for way in ways:
            name = f"{model.name} FP8 products of a layer, {rows} rows, {way}"
            yield from _layer(model, "fp8 to bfloat16", rows, way, name, device, tuning, peaks)


def other_product_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """Products of prompts in FP8, and of few rows in bfloat16; the output head."""
    for rows in sizes.chunks:
        name = f"{model.name} FP8 products of a layer, prefill, {rows} rows"
        yield from _layer(model, "fp8 to bfloat16", rows, "engine", name, device, tuning, peaks)
    for rows in sizes.rows[:2]:
        name = f"{model.name} bf16 products of a layer, {rows} rows"
        yield from _layer(model, "bfloat16", rows, "engine", name, device, tuning, peaks)
        shape = LaunchShape("gemm", "bfloat16", (model.vocab, model.hidden))
        label = f"{model.name} bf16 output head, {rows} rows"

        def make(shape: LaunchShape = shape, rows: int = rows) -> tuple[Call, int]:
            head = random_matrix(shape, device, tuning)
            x = torch.randn(rows, shape.sizes[1], device=device, dtype=torch.bfloat16)
            return lambda _: logits(x, head), 1

        read = 2 * model.vocab * model.hidden
        yield Trial(label, make, partial(_tell_reading, label, read, peaks))


def _layer(
    model: Model, kind: str, rows: int, way: str, name: str, device: torch.device, tuning: Tuning,
    peaks: Peaks,
) -> Iterator[Trial]:  # fmt: skip
    fp8 = kind.startswith("fp8")
    numbers = sum(outputs * inputs for outputs, inputs in model.products.values())

    def share(spent: float) -> tuple[float, str]:
        if rows >= 256:
            peak = peaks.eighths if fp8 else peaks.halves
            return 2.0 * rows * numbers / spent / peak, "of the matrix peak"
        return numbers * (1 if fp8 else 2) / spent / peaks.bandwidth, "of bandwidth"

    layer, makes = Layer(name, share, len(model.products)), []
    for product, shape in model.products.items():
        label = f"{name.replace('products of a layer', f'product {product}')}"
        asked = LaunchShape("gemm", kind, shape), rows, way, device, tuning
        makes.append(partial(product_calls, *asked))
        yield Trial(label, makes[-1], partial(layer.tell, label), (name, makes))


def _tell_reading(label: str, read: int, peaks: Peaks, seconds: float) -> bool:
    figure(f"{label}: time", 1e6 * seconds, "us")
    return figure(label, read / seconds / peaks.bandwidth, "of bandwidth")


def decode_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """Decodes: the KV that is read, with its scales, over what memory gives in that time."""
    for rows, context in sizes.decodes:
        for kv, dtype in KV.items():
            row = row_size(dtype, model.head_dim) * dtype.itemsize
            read = 2 * rows * context * model.kv_heads * row
            asked = model.attention(dtype), Rows(rows, 1, context), BLOCK, device
            label = f"{model.name} decode attention, {kv}, context {context}, batch {rows}"
            tell = partial(_tell_reading, label, read, peaks)
            yield Trial(label, partial(attention_calls, *asked, tuning), tell)


def split_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """Decodes of many rows of short contexts, cut into longer splits than the rule's."""
    heads = model.attention(torch.bfloat16)
    by_rule = launches(plan_on(heads, device))[DECODE]
    for rows, context in sizes.decodes[:2]:
        for least in sizes.least:
            chosen = OneLaunch(tuning)
            chosen.chosen[DECODE] = by_rule | {"LEAST": least}
            read = 4 * rows * context * model.kv_heads * model.head_dim
            label = f"{model.name} decode splits of {least}, bf16, context {context}, batch {rows}"
            asked = heads, Rows(rows, 1, context), BLOCK, device, chosen
            tell = partial(_tell_reading, label, read, peaks)
            yield Trial(label, partial(attention_calls, *asked), tell)


def launch_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """Decodes of long contexts over each type of KV by other launches than the rule's."""
    rows, context = next((each for each in sizes.decodes if each[1] >= 4096), sizes.decodes[0])
    for kv, dtype in KV.items():
        heads = model.attention(dtype)
        by_rule = launches(plan_on(heads, device))[DECODE]
        for keys, warps, stages, programs in sizes.launches:
            chosen = OneLaunch(tuning)
            launch = {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
            chosen.chosen[DECODE] = by_rule | launch | {"PROGRAMS": programs}
            read = 2 * rows * context * model.kv_heads * row_size(dtype, model.head_dim)
            label = (
                f"{model.name} decode launch, {kv}, context {context}, batch {rows}, {keys} keys, "
                f"{warps} warps, {stages} stages, {programs} programs"
            )
            asked = heads, Rows(rows, 1, context), BLOCK, device, chosen
            tell = partial(_tell_reading, label, read * dtype.itemsize, peaks)
            yield Trial(label, partial(attention_calls, *asked), tell)


def prefill_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """A prompt by itself: the products of what each token may see."""
    for tokens in sizes.prefills:
        operations = 4 * model.heads * model.head_dim * tokens * (tokens + 1) / 2
        label = f"{model.name} prefill attention, bf16, {tokens} tokens"

        def tell(seconds: float, label: str = label, operations: float = operations) -> bool:
            figure(f"{label}: time", 1e6 * seconds, "us")
            return figure(label, operations / seconds / peaks.halves, "of the matrix peak")

        asked = model.attention(torch.bfloat16), Rows(1, tokens, tokens), BLOCK, device, tuning
        yield Trial(label, partial(attention_calls, *asked), tell)
        for name in LIBRARIES if device.type == "cuda" else ():
            other = f"{label}, {name} of torch, keys and values without blocks"
            make = partial(library_prefill, model, tokens, name, device)
            yield Trial(other, make, partial(tell, label=other))


def library_prefill(model: Model, tokens: int, name: str, device: torch.device) -> tuple[Call, int]:
    """The same attention by a kernel of torch's: what another backend could gain."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = model.heads, model.kv_heads, model.kv_heads
    q, k, v = (
        torch.randn(1, tokens, each, model.head_dim, device=device, dtype=torch.bfloat16)
        for each in heads
    )
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))

    def call(_: int) -> torch.Tensor:
        with sdpa_kernel([getattr(SDPBackend, LIBRARIES[name])]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return call, 1


def sampling_trials(
    sizes: Sizes, model: Model, device: torch.device, tuning: Tuning, peaks: Peaks
) -> Iterator[Trial]:
    """The choice of a token for each row of logits of a deviation of 3."""
    del tuning
    for rows in sizes.samples:
        for name, values in SETTINGS.items():

            def make(rows: int = rows, values: tuple[float, ...] = values) -> tuple[Call, int]:
                numbers = 3 * torch.randn(rows, model.vocab, device=device)
                tokens = torch.zeros(rows, dtype=torch.int64, device=device)
                finite = torch.zeros(rows, dtype=torch.bool, device=device)
                count = torch.arange(rows, device=device)
                asked = torch.tensor([values] * rows, dtype=torch.float64, device=device)
                return lambda _: sample(numbers, asked, count, count, tokens, finite), 1

            label = f"sampling {rows} x {model.vocab}, {name}"
            tell = partial(_tell_reading, label, 4 * rows * model.vocab, peaks)
            yield Trial(label, make, tell)


def trials(sizes: Sizes, device: torch.device, tuning: Tuning, peaks: Peaks) -> Iterator[Trial]:
    """All of them, the most valuable first."""
    first, *others = sizes.models
    asked = device, tuning, peaks
    kinds: tuple[Callable[..., Iterator[Trial]], ...]
    kinds = product_trials, decode_trials, split_trials, sampling_trials
    for kind in (*kinds, prefill_trials, other_product_trials, launch_trials):
        yield from kind(sizes, first, *asked)
    for model in others:
        for kind in (decode_trials, prefill_trials, other_product_trials):
            yield from kind(sizes, model, *asked)


def named(pattern: str, every: Iterator[Trial]) -> Iterator[Trial]:
    """Yield those whose names match."""
    return (trial for trial in every if re.search(pattern, trial.name))


def measure(
    every: Iterator[Trial], device: torch.device, deadline: float, missing: Missing = KEEP_NONE
) -> int:
    """Measure while there is time; return how many could not be measured.

    What misses its goal is run again, for a profile and a trace.
    """
    clock, failed, late = clock_of(device), 0, 0
    for trial in every:
        if time.perf_counter() > deadline:
            late += 1
            continue
        try:
            call, copies = trial.make()
            missed = trial.tell(clock(lambda copy, call=call: _discard(call(copy)), copies))
            del call
            if missing(missed):
                name, makes = trial.whole or (trial.name, [trial.make])
                calls = [make() for make in makes]
                times = TRACED if device.type == "cuda" else TRACED_ON_CPU
                look_into(name, missing.archive, partial(_repeat, calls, times))
                del calls
        except Exception as error:  # the others may run
            failed += 1
            traceback.print_exc()
            note(f"{trial.name}: {type(error).__name__}: {str(error)[:200]}")
            if "CUDA error" in str(error):  # nothing runs after it in this process
                note("the sweep ends with it")
                break
        gc.collect()
    if late:
        note(f"no time left for {late} of the sweep's figures")
    return failed


def _repeat(calls: Sequence[tuple[Call, int]], times: int) -> None:
    """Run calls in turns, each time with another copy of their data."""
    for number in range(times):
        for call, copies in calls:
            call(number % copies)


def _discard(_: object) -> None:
    """A clock wants calls that return nothing."""


def compile_share(every: Iterator[Trial], share: tuple[int, int], deadline: float) -> None:
    """Run each call of a share once, so that its kernels are compiled."""
    for number, trial in enumerate(every):
        if number % share[1] != share[0] or time.perf_counter() > deadline:
            continue
        try:
            trial.make()[0](0)
            torch.cuda.synchronize()
        except Exception as error:  # it is told when it is measured
            print(f"{trial.name}: {error}")
        gc.collect()
        torch.cuda.empty_cache()


def compile_beside(workers: int, seconds: float, only: str) -> None:
    """Have other processes compile all kernels, within some time."""
    command = [sys.executable, __file__, "--seconds", str(seconds), "--only", only]
    each = [
        subprocess.Popen([*command, "--share", f"{number}/{workers}"]) for number in range(workers)
    ]
    deadline = time.perf_counter() + seconds
    for process in each:
        try:
            process.wait(max(0.1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a test")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no measurement after")
    parser.add_argument("--only", default="", help="what names match, as a regular expression")
    parser.add_argument("--share", help="compile only: which of how many processes, as 0/12")
    add_options(parser)
    options = parser.parse_args()
    missing = Missing(options.traces, every=options.every_trace)
    deadline = time.perf_counter() + options.seconds
    device = torch.device(options.device)
    sizes = QUICK if options.quick else FULL
    tuning = find_tuning("auto", device)
    if options.share:
        number, count = map(int, options.share.split("/"))
        every = named(options.only, trials(sizes, device, tuning, Peaks()))
        compile_share(every, (number, count), deadline)
        return 0
    if device.type == "cuda":
        started = time.perf_counter()
        workers = max(1, min(10, len(os.sched_getaffinity(0)) - 2))
        compile_beside(workers, options.seconds * 0.4, options.only)
        figure("compiled by several processes", time.perf_counter() - started, "s")
    print(f"launches: {tuning.source}")
    bandwidth = report_bandwidth(device, sizes.bandwidth_numbers)
    halves = report_peak(device, torch.bfloat16, sizes.peak_size)
    eighths = report_peak(device, torch.float8_e4m3fn, sizes.peak_size)
    assert halves is not None
    peaks = Peaks(bandwidth, halves, eighths or halves)
    every = named(options.only, trials(sizes, device, tuning, peaks))
    return int(measure(every, device, deadline, missing) > 0)


if __name__ == "__main__":
    sys.exit(main())
