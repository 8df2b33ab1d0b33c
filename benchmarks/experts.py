"""Decoding with experts on a CPU: one native call, its ops one by one, and routing in torch.

    python benchmarks/experts.py [--out benchmarks/results/experts.json]

A random model of the shape of Qwen3-MoE, small. All run in turn; a ratio is the median of those of
the rounds. In torch are routing, rotation, the gate, and the loop over the experts, around the same
native products: what weft did before. On one thread the time is that of the CPU, so that other load
does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import report
from weft.exec.attend import bind_forward
from weft.exec.store import KVStore
from weft.kernels import reference
from weft.kernels.arrays import numpy_dtype, to_torch
from weft.kernels.cpu import attention as cpu
from weft.kernels.cpu import matrix
from weft.kernels.interface import AttentionMetadata, OpTable
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layout import is_kept_float32, parameters, storage_of
from weft.models.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec

HEAD, LAYERS, EXPERTS, TOP_K, VOCABULARY = 64, 8, 32, 4, 8000
CONTEXT, BLOCK, GROUP = 128, 16, 64
SPEC = ModelSpec(
    vocab_size=VOCABULARY,
    hidden_size=512,
    num_heads=8,
    layers=(LayerSpec(num_kv_heads=2, head_dim=HEAD, intermediate_size=1024, moe=True),) * LAYERS,
    ropes=(RopeSpec("default", 1e6, HEAD),),
    norm_eps=1e-6,
    max_position_embeddings=4096,
    attention_scale=HEAD**-0.5,
    qk_norm=True,
    tied_embeddings=True,
    moe=MoeSpec(EXPERTS, TOP_K, intermediate_size=256, normalise=True),
)


def tables() -> dict[str, OpTable]:
    """The ops of each way to compute."""
    native = select_ops("cpu", "bfloat16", "cpu")
    single = replace(native, fused=None)
    in_torch = replace(
        single,
        rope=reference.rope,
        act_mul=reference.act_mul,
        route=reference.route,
        moe=partial(reference.moe, linear=matrix.linear),
    )
    return {"one call": native, "op by op": single, "torch": in_torch}


def random_weights(ops: OpTable, quantize: str, spec: ModelSpec = SPEC) -> dict[str, Any]:
    draw, weights = np.random.default_rng(0), {}
    for parameter in parameters(spec, stacked_experts=True):
        numbers = draw.standard_normal(parameter.shape, np.float32) / parameter.shape[-1] ** 0.5
        kind = "float32" if is_kept_float32(parameter.name) else "bfloat16"
        numbers = numbers.astype(numpy_dtype(kind))
        name = "lm_head" if parameter.name == "embed" else parameter.name
        storage = storage_of(name, quantize, GROUP)
        if storage is None:
            weights[parameter.name] = ops.pack(name, numbers)
            continue
        packed = ops.quantise(name, numbers.shape, "bfloat16", storage)
        pairs = zip(packed, numbers, strict=True) if numbers.ndim == 3 else [(packed, numbers)]
        for one, rows in pairs:
            one.write(0, rows)
        weights[parameter.name] = packed
    return weights


def step_of(
    weights: dict[str, Any], ops: OpTable, rows: int, tensors: bool, spec: ModelSpec = SPEC
) -> Callable[[], None]:
    """Return what computes the next token of so many rows."""
    wrap = to_torch if tensors else lambda array: array
    weights = {n: wrap(w) if isinstance(w, np.ndarray) else w for n, w in weights.items()}
    decoder = Decoder(spec, weights, ops)
    blocks = CONTEXT // BLOCK
    store = KVStore(spec.kv_groups, [rows * blocks], BLOCK, "bfloat16")
    if tensors:
        store.keys = [[wrap(cache) for cache in group] for group in store.keys]
        store.values = [[wrap(cache) for cache in group] for group in store.values]
    forward = bind_forward(decoder, store)
    table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    batch = AttentionMetadata(
        block_tables=wrap(table),
        query_start=wrap(np.arange(rows + 1, dtype=np.int32)),
        seq_lens=wrap(np.full(rows, CONTEXT, np.int32)),
        slot_mapping=wrap(table[:, -1].astype(np.int64) * BLOCK + BLOCK - 1),
        block_size=BLOCK,
    )
    positions = wrap(np.full(rows, CONTEXT - 1))
    draw = np.random.default_rng(1)

    def step() -> None:
        ids = wrap(draw.integers(0, VOCABULARY, rows))
        with torch.inference_mode():
            decoder.logits(forward(ids, positions, [batch]))

    return step


def rate(step: Callable[[], None], rows: int, steps: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(steps):
        step()
    return rows * steps / (clock() - start)


def parsed(doc: str, rounds: int, steps: int) -> argparse.Namespace:
    """The arguments, whose threads are set, with the ``clock`` that goes with them."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    cpu.set_threads(options.threads)
    options.clock = time.process_time if options.threads == 1 else time.perf_counter
    return options


def rates_in_turn(
    steps: Mapping[str, Callable[[], None]], rows: int, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Of each round the rate of each kind of step, all of which are warm."""
    for step in steps.values():
        rate(step, rows, 3, options.clock)
    return [
        {name: rate(step, rows, options.steps, options.clock) for name, step in steps.items()}
        for _ in range(options.rounds)
    ]


def main() -> None:
    options = parsed(__doc__, 9, 40)
    torch.set_num_threads(options.threads)
    ways = tables()
    print(f"{'tok/s':<12}{'rows':>6}" + "".join(f"{way:>10}" for way in ways) + f"{'ratio':>8}")
    found = []
    for quantize in ("none", "int4"):
        weights = random_weights(ways["one call"], quantize)
        for rows in (1, 32):
            steps = {n: step_of(weights, ops, rows, n == "torch") for n, ops in ways.items()}
            rounds = rates_in_turn(steps, rows, options)
            rates = {name: statistics.median(one[name] for one in rounds) for name in ways}
            ratio = statistics.median(one["one call"] / one["torch"] for one in rounds)
            kind = "bfloat16" if quantize == "none" else quantize
            found.append({"weights": kind, "rows": rows, "rates": rates, "ratio": ratio})
            numbers = "".join(f"{value:>10.0f}" for value in rates.values())
            print(f"{kind:<12}{rows:>6}{numbers}{ratio:>8.2f}", flush=True)
    if options.out:
        facts = {"torch": torch.__version__, "isa": cpu.isa(), "threads": options.threads}
        report.save(options.out, **facts, rows=found)


if __name__ == "__main__":
    main()
