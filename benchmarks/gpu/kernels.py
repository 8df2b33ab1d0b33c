"""Kernels at the shapes of two models, as shares of the device's measured peaks.

Attention and small products read: their share is of the read bandwidth. Prefill multiplies: its
share is of the matrix peak. What is called is what the engine calls (``weft.kernels.triton``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from figures import figure
from peaks import Clock, clock_of, report_bandwidth, report_peak

from weft.kernels.kv_storage import KV_DTYPES, row_size
from weft.kernels.triton.device import copies_beyond_caches
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.matrix import TritonMatrix, linear, logits
from weft.kernels.triton.sample import sample
from weft.kernels.triton.tiles import Heads
from weft.kernels.triton.tuned import find_tuning, random_matrix
from weft.kernels.triton.tuned_attention import Rows, attention_calls
from weft.kernels.tuning import LaunchShape, Tuning

ATTENTION_GOAL = 0.80  # of the read bandwidth, decodes at contexts from 4k on
PREFILL_GOAL = 0.60  # of the matrix peak in FP8
BLOCK = 16
KV = {"bf16": torch.bfloat16, **KV_DTYPES}


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
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prefills: tuple[int, ...]  # tokens of one prompt
    chunks: tuple[int, ...]  # rows of the products of a prefill
    rows: tuple[int, ...]  # of the products of decodes
    samples: tuple[int, int]  # rows and vocabulary
    bandwidth_numbers: int
    peak_size: int


FULL = Sizes(
    models=(
        Model("qwen2.5-7b", 28, 4, 128, 3584, 18944, 152064),
        Model("llama-3.1-8b", 32, 8, 128, 4096, 14336, 128256),
    ),
    contexts=(4096, 16384),
    batches=(1, 32, 128),
    prefills=(2048, 8192),
    chunks=(512, 2048, 8192),
    rows=(1, 16, 64),
    samples=(512, 152064),
    bandwidth_numbers=2**29,
    peak_size=8192,
)
QUICK = Sizes(
    models=(Model("tiny", 4, 2, 16, 32, 48, 200),),
    contexts=(40,),
    batches=(1, 3),
    prefills=(24,),
    chunks=(70,),
    rows=(1, 16),
    samples=(3, 200),
    bandwidth_numbers=2**16,
    peak_size=64,
)


def measure_decode_attention(
    sizes: Sizes, device: torch.device, bandwidth: float, tuning: Tuning
) -> None:
    """Decodes: the KV that is read, with its scales, over what memory gives in that time."""
    clock = clock_of(device)
    for model in sizes.models:
        for kv, dtype in KV.items():
            for context in sizes.contexts:
                for rows in sizes.batches:
                    asked = model.attention(dtype), Rows(rows, 1, context)
                    call = attention_calls(*asked, BLOCK, device, tuning)
                    seconds = clock(*call)
                    row = row_size(dtype, model.head_dim) * dtype.itemsize
                    read = 2 * rows * context * model.kv_heads * row
                    name = f"{model.name} decode attention, {kv}, context {context}, batch {rows}"
                    goal = ATTENTION_GOAL if sizes is FULL else None
                    figure(name, read / seconds / bandwidth, "of bandwidth", goal, "more")


def measure_prefill_attention(
    sizes: Sizes, device: torch.device, peak: float, tuning: Tuning
) -> None:
    """A prompt by itself: the products of what each token may see."""
    clock = clock_of(device)
    for model in sizes.models:
        for tokens in sizes.prefills:
            asked = model.attention(torch.bfloat16), Rows(1, tokens, tokens)
            call = attention_calls(*asked, BLOCK, device, tuning)
            seconds = clock(*call)
            operations = 4 * model.heads * model.head_dim * tokens * (tokens + 1) / 2
            name = f"{model.name} prefill attention, bf16, {tokens} tokens"
            figure(name, operations / seconds / peak, "of the matrix peak")


def matrices(
    model: Model, kind: str, device: torch.device, tuning: Tuning
) -> Iterator[TritonMatrix]:
    """A layer's matrices with random numbers, one after another."""
    for sizes in model.products.values():
        yield random_matrix(LaunchShape("gemm", kind, sizes), device, tuning)


def product_seconds(
    first: TritonMatrix, rows: int, device: torch.device, clock: Clock, tuning: Tuning
) -> float:
    """Seconds of a product whose weights are not in the caches, its activations rounded before."""
    shape = LaunchShape("gemm", first.kind, tuple(first.shape))
    count = copies_beyond_caches(first.nbytes, device)
    weights = [first, *(random_matrix(shape, device, tuning) for _ in range(count - 1))]
    x = torch.randn(rows, first.shape[1], device=device, dtype=first.dtype)
    given = round_rows(x) if first.rounds else x
    return clock(lambda copy: _discard(linear(given, weights[copy], None)), count)


def _discard(_: torch.Tensor) -> None:
    """A clock wants calls that return nothing."""


def measure_prefill_products(
    sizes: Sizes, device: torch.device, peak: float, tuning: Tuning
) -> None:
    """The four products of a layer in FP8, together and each."""
    clock = clock_of(device)
    for model in sizes.models:
        for rows in sizes.chunks:
            spent = operations = 0.0
            for name, matrix in zip(
                model.products, matrices(model, "fp8 to bfloat16", device, tuning), strict=True
            ):
                seconds = product_seconds(matrix, rows, device, clock, tuning)
                work = 2.0 * rows * matrix.shape[0] * matrix.shape[1]
                spent, operations = spent + seconds, operations + work
                label = f"{model.name} FP8 product {name}, {rows} tokens"
                figure(label, work / seconds / peak, "of the matrix peak")
            label = f"{model.name} FP8 products of a layer, {rows} tokens"
            goal = PREFILL_GOAL if sizes is FULL else None
            figure(label, operations / spent / peak, "of the matrix peak", goal, "more")


def measure_small_products(
    sizes: Sizes, device: torch.device, bandwidth: float, tuning: Tuning
) -> None:
    """The four products of a layer with few rows: their weights, over what memory gives."""
    clock = clock_of(device)
    for model in sizes.models:
        for label, kind in (("FP8", "fp8 to bfloat16"), ("bf16", "bfloat16")):
            for rows in sizes.rows:
                spent = read = 0.0
                for matrix in matrices(model, kind, device, tuning):
                    spent += product_seconds(matrix, rows, device, clock, tuning)
                    read += matrix.nbytes
                name = f"{model.name} {label} products of a layer, {rows} tokens"
                figure(name, read / spent / bandwidth, "of bandwidth")
        for rows in sizes.rows:
            shape = LaunchShape("gemm", "bfloat16", (model.vocab, model.hidden))
            head = random_matrix(shape, device, tuning)
            x = torch.randn(rows, model.hidden, device=device, dtype=torch.bfloat16)
            seconds = clock(lambda _, x=x, head=head: _discard(logits(x, head)), 1)
            name = f"{model.name} bf16 output head, {rows} tokens"
            figure(name, head.nbytes / seconds / bandwidth, "of bandwidth")


SETTINGS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0.0, 1.0, 0.0),
    "temperature 0.8": (0.8, 0.0, 1.0, 0.0),
    "temperature 0.8, top-k 50, top-p 0.9": (0.8, 50.0, 0.9, 0.0),
    "temperature 1, top-p 0.95": (1.0, 0.0, 0.95, 0.0),
}


def measure_sampling(sizes: Sizes, device: torch.device, bandwidth: float) -> None:
    """The choice of a token for each row of logits of a deviation of 3."""
    clock = clock_of(device)
    rows, vocab = sizes.samples
    numbers = 3 * torch.randn(rows, vocab, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    finite = torch.zeros(rows, dtype=torch.bool, device=device)
    count = torch.arange(rows, device=device)
    for name, values in SETTINGS.items():
        asked = torch.tensor([values] * rows, dtype=torch.float64, device=device)
        seconds = clock(
            lambda _, asked=asked: sample(numbers, asked, count, count, tokens, finite), 1
        )
        label = f"sampling {rows} x {vocab}, {name}"
        figure(label, 1e3 * seconds, "ms")
        figure(f"{label}: reading once", numbers.nbytes / seconds / bandwidth, "of bandwidth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a test")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = QUICK if options.quick else FULL
    tuning = find_tuning("auto", device)
    print(f"launches: {tuning.source}")
    bandwidth = report_bandwidth(device, sizes.bandwidth_numbers)
    halves = report_peak(device, torch.bfloat16, sizes.peak_size)
    eighths = report_peak(device, torch.float8_e4m3fn, sizes.peak_size)
    measure_decode_attention(sizes, device, bandwidth, tuning)
    assert halves is not None
    measure_prefill_attention(sizes, device, halves, tuning)
    measure_small_products(sizes, device, bandwidth, tuning)
    measure_prefill_products(sizes, device, eighths or halves, tuning)
    measure_sampling(sizes, device, bandwidth)


if __name__ == "__main__":
    main()
