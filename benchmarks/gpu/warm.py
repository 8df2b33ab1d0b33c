"""Compiles what decoding needs, in several processes at once, and says what each kernel takes.

A model of one layer, with the widths and the vocabulary of the real one, runs a step of each kind,
so that the engines which follow find compiled kernels. It needs no native part. Says the seconds of
compilation, registers, spills and shared memory of each variant.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from figures import figure, note
from shapes import random_decoder, shape

from weft.exec.attend import bind_forward
from weft.exec.device import tensor_memory
from weft.exec.store import KVStore
from weft.kernels import ops as op_tables
from weft.kernels.interface import AttentionMetadata
from weft.kernels.sampling import SETTINGS, RowState, SampleBatch

BLOCK = 16
# Model, weights, rows and tokens of a step; as many tokens as rows: decodes.
STEPS = (
    ("qwen2.5-7b", "fp8", 128, 128),
    ("qwen2.5-7b", "fp8", 1, 1),
    ("qwen2.5-7b", "fp8", 512, 512),
    ("qwen2.5-7b", "fp8", 256, 256),
    ("qwen2.5-7b", "fp8", 64, 1024),
    ("qwen2.5-7b", "fp8", 1, 16),
    ("llama-3.1-8b", "none", 128, 128),
    ("llama-3.1-8b", "none", 1, 1),
    ("llama-3.1-8b", "none", 64, 1024),
    ("tiny", "none", 4, 4),
)


def run_step(model: str, quantize: str, rows: int, tokens: int, where: torch.device) -> None:
    """Compute a step of a model of one layer, and sample its tokens."""
    kernels = "auto" if where.type == "cuda" else "triton"
    ops = op_tables.select_ops(str(where), "bfloat16", kernels)
    decoder = random_decoder(shape(model, 1024, layers=1), torch.bfloat16, where, ops, quantize)
    spec, each = decoder.spec, -(-tokens // rows)
    blocks = rows * -(-each // BLOCK)
    groups = spec.kv_groups
    store = KVStore(groups, [blocks] * len(groups), BLOCK, "bfloat16", tensor_memory(str(where)))
    forward = bind_forward(decoder, store, padded=True)
    width = blocks // rows
    at = torch.arange(tokens, device=where)
    positions = at // rows  # each row has its tokens one after another
    bounds = torch.arange(rows + 1, device=where, dtype=torch.int32) * (tokens // rows)
    batch = AttentionMetadata(
        block_tables=torch.arange(blocks, device=where, dtype=torch.int32),
        query_start=bounds,
        seq_lens=bounds[1:] - bounds[:-1],
        slot_mapping=at % (blocks * BLOCK),
        block_size=BLOCK,
        table_start=torch.arange(rows, device=where, dtype=torch.int32) * width,
        max_query_len=1 if tokens == rows else None,
    )
    hidden = forward(at % spec.vocab_size, positions, [batch] * len(groups))
    logits = decoder.logits(hidden[:rows])
    numbers = torch.zeros(rows, device=where, dtype=torch.int64)
    words = torch.zeros(rows, device=where, dtype=torch.int32)
    samples = SampleBatch(numbers, numbers, words, words - 1)
    state = RowState.empty(rows, 8, spec.vocab_size, where)
    settings = torch.zeros(rows, len(SETTINGS), device=where, dtype=torch.float64)
    finite = torch.zeros(rows, device=where, dtype=torch.bool)
    chosen = torch.zeros_like(numbers)
    ops.process_logits(logits, samples, state)
    ops.sample(logits, settings, numbers, numbers, chosen, finite)
    results = torch.zeros(rows, 2, device=where, dtype=torch.int64)
    ops.verify_drafts(chosen, finite, samples, state, results)
    if where.type == "cuda":
        torch.cuda.synchronize()
    if not bool(finite.all()):
        raise RuntimeError(f"logits of {model} {quantize} are not finite")


def compiled() -> Iterator[tuple[str, Any]]:
    """Every variant of weft's kernels that this process has loaded, with its kernel's name."""
    import weft.kernels.triton as package

    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"weft.kernels.triton.{found.name}")
        for name, value in vars(module).items():
            caches = getattr(value, "device_caches", None)
            if caches and getattr(value, "__module__", "") == module.__name__:
                for variants, *_ in caches.values():
                    yield from ((name, kernel) for kernel in variants.values())


def report(took: list[tuple[str, float]]) -> None:
    """Say what the kernels need that this process has compiled or loaded."""
    for name, seconds in took:
        figure(f"compiled {name}", seconds, "s")
    for name, kernel in compiled():
        registers, spilled = getattr(kernel, "n_regs", 0), getattr(kernel, "n_spills", 0)
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        print(f"{name}: {registers} registers, {spilled} spilled, {shared} shared, {warps} warps")
        if spilled:
            note(f"{name} spills {spilled} registers a thread ({warps} warps, {registers} used)")


def one(step: int, where: torch.device) -> None:
    """Run one of the steps in this process."""
    took: list[tuple[str, float]] = []
    if where.type == "cuda":
        import triton

        def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                took.append((getattr(src, "name", "kernel"), times.total / 1e6))

        triton.knobs.compilation.listener = listen
    started = time.perf_counter()
    with torch.inference_mode():
        run_step(*STEPS[step], where)
    model, quantize, rows, tokens = STEPS[step]
    name = f"{model} {quantize}, {rows} rows of {tokens} tokens"
    figure(f"{name}: first step", time.perf_counter() - started, "s")
    if where.type == "cuda":
        report(took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--step", type=int, help="only this one, in this process")
    options = parser.parse_args()
    where = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    if options.step is not None:
        one(options.step, where)
        return 0
    steps = range(len(STEPS)) if options.device == "cuda" else [len(STEPS) - 1]
    workers = max(1, min(12, len(os.sched_getaffinity(0))))
    waiting, running, failed = list(steps), {}, []
    while waiting or running:
        while waiting and len(running) < workers:
            step = waiting.pop(0)
            command = [sys.executable, *sys.argv, "--step", str(step)]
            running[step] = subprocess.Popen(command)
        for step in list(running):
            if (code := running[step].poll()) is not None:
                del running[step]
                failed += [step] if code else []
        time.sleep(0.05)
    for step in failed:
        note(f"a step of {STEPS[step]} did not run")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
