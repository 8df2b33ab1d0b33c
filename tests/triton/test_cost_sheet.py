"""What a decode step of real shapes launches, reads and multiplies, against counts by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
CONTEXT = 272
SAMPLING = {"_process_logits": 1, "_largest": 1, "_candidates": 1, "_sample": 1}
SAMPLING |= {"_verify_drafts": 1}
TORCH = {"copy_": 1, "index": 1}  # the hashes, and the hidden states that are sampled
AROUND = {
    "_enter": 1,
    "_angles": 1,
    "list_kernel": 1,
    **SAMPLING,
    **{f"torch {k}": n for k, n in TORCH.items()},
}
A_LAYER = {"_add_norm": 2, "_rotate": 1, "decode_kernel": 1}
FEW = {"gemm": 3, "gated_gemm": 1}
MANY = {"_scaled_mm": 4, "_round_rows": 1, "_act_mul_round": 1}


def sheets(*options: object) -> dict[int, dict[str, dict[str, int]]]:
    """The kernels of each batch, as the command prints them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(GPU / "cost_sheet.py"), "--json", *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {line["batch"]: line["kernels"] for line in lines}


def launches(kernels: dict[str, dict[str, int]]) -> Counter[str]:
    return Counter({name: line["launches"] for name, line in kernels.items()})


def step(layers: int, layer: dict[str, int], head: str) -> Counter[str]:
    """A step of so many layers, and what is around them."""
    each = Counter({name: layers * times for name, times in layer.items()})
    return each + Counter(AROUND) + Counter([head])


@pytest.fixture(scope="module")
def dense() -> dict[int, dict[str, dict[str, int]]]:
    return sheets("--model", "qwen2.5-7b", "--quantize", "fp8", "--batch", 1, 64, 128, 512)


@pytest.mark.parametrize("rows", [1, 64, 128, 512])
def test_steps_launch_what_they_have_to(dense, rows: int) -> None:
    """Each launch costs microseconds of a step: whoever adds one says so here."""
    products = {1: FEW, 64: FEW | {"_round_rows": 1}}.get(rows, MANY)
    expected = step(28, A_LAYER | products, "gemm" if rows <= 64 else "mm")
    assert launches(dense[rows]) == expected
    assert expected.total() == {1: 235, 64: 263}.get(rows, 291)


def test_mixtures_launch_what_they_have_to() -> None:
    (found,) = sheets("--model", "qwen3-30b-a3b", "--quantize", "none", "--batch", 64).values()
    sorting = {"torch sort": 1, "torch arange": 1, "torch searchsorted": 1}
    experts = {"_route": 1, "_blocks": 1, "_grouped": 2, "_combine": 1, **sorting}
    assert launches(found) == step(48, A_LAYER | experts | {"gemm": 3}, "gemm")


def test_latent_attention_reads_each_row_once_and_copies_nothing() -> None:
    """DeepSeek V2 Lite: 16 heads, a latent of 512 and 64 rotated numbers, one dense layer of 27."""
    options = ("--model", "deepseek-v2-lite", "--quantize", "none", "--batch", 64)
    found = {kv: sheets(*options, "--kv-dtype", kv)[64] for kv in ("bfloat16", "int8")}
    kernels = found["bfloat16"]
    sorting = {"torch sort": 1, "torch arange": 1, "torch searchsorted": 1}
    experts = Counter({"_route": 1, "_blocks": 1, "_grouped": 2, "_combine": 1, **sorting})
    dense = {"_add_norm": 2, "_latent_rows": 1, "_heads": 2, "decode_kernel": 1, **FEW}
    layers = Counter({name: 27 * times for name, times in dense.items()})
    sparse = Counter({name: 26 * times for name, times in experts.items()})
    # Routers, the sum of shared experts, whose reader takes whole rows, and the head.
    more = Counter({"gemm": 26 + 1, "add_parts": 26})
    assert launches(kernels) == layers + sparse + more + Counter(AROUND)
    rows = 27 * 64 * CONTEXT * 576 * 2
    assert rows < kernels["decode_kernel"]["read"] < 1.1 * rows
    codes = 27 * 64 * CONTEXT * (576 + 4)
    assert codes < found["int8"]["decode_kernel"]["read"] < 1.2 * codes
    assert kernels["decode_kernel"]["operations"] == 27 * 2 * 64 * CONTEXT * 16 * (576 + 512)
    assert kernels["_heads"]["operations"] == 27 * 2 * 64 * 16 * 512 * (128 + 128)
    weights = 27 * 2 * 16 * 512 * 128 * 2
    assert kernels["_heads"]["read"] > weights
    for kv, row in (("bfloat16", 2 * 576), ("int8", 580)):
        assert found[kv]["_latent_rows"]["written"] == 27 * 64 * row


# How experts are stored: bytes of a weight with its share of scales, the kernel that multiplies
# them, and what else a layer launches for its products and theirs.
EXPERTS = {
    "fp8": (1 + 4 / 2048, "_grouped", {"gemm": 3, "_round_rows": 3}),
    "int4": (0.5 + 2 / 64, "grouped_codes", {"coded_gemm": 2, "gemm": 1}),
    "awq": (0.5 + 3 / 128, "grouped_codes", {"coded_gemm": 2, "gemm": 1}),  # and zero points
    "fp8-blocks": (
        1 + 4 / 128, "grouped_codes", {"coded_gemm": 2, "gemm": 1, "_round_groups": 4}
    ),
    "mxfp4": (0.5 + 1 / 32, "grouped_codes", {"gemm": 3}),
}  # fmt: skip


@pytest.mark.parametrize("stored", EXPERTS)
def test_experts_in_codes_cost_what_they_have_to(stored: str) -> None:
    """None but chosen ones are read, with their scales; nothing is added up by a kernel alone."""
    each, kernel, more = EXPERTS[stored]
    (found,) = sheets("--model", "qwen3-30b-a3b", "--quantize", stored, "--batch", 64).values()
    sorting = {"torch sort": 1, "torch arange": 1, "torch searchsorted": 1}
    layer = A_LAYER | {"_route": 1, "_blocks": 1, kernel: 2, "_combine": 1, **sorting, **more}
    head = "coded_gemm" if stored == "int4" else "gemm"
    assert launches(found) == step(48, layer, head)
    chosen = 128 * (1 - (1 - 8 / 128) ** 64)
    weights = 48 * chosen * (2 * 768 * 2048 + 2048 * 768) * each
    assert weights < found[kernel]["read"] < 1.01 * weights
    assert found[kernel]["operations"] == 48 * 2 * 64 * 8 * 3 * 768 * 2048


def test_codes_with_zero_points_and_blocks_of_fp8_are_read_once() -> None:
    """A block's scale is held for each of its outputs."""
    layers = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 3584 * 18944)
    for stored, each, rounds in (("awq", 0.5 + 3 / 128, 0), ("fp8-blocks", 1 + 4 / 128, 4)):
        (found,) = sheets("--model", "qwen2.5-7b", "--quantize", stored, "--batch", 1).values()
        coded = {"coded_gemm": 4, "_act_mul": 1, "_round_groups": rounds}
        assert launches(found) == +step(28, A_LAYER | coded, "gemm")
        assert each * layers < found["coded_gemm"]["read"] < 1.002 * each * layers


def test_codes_are_read_once() -> None:
    """The head is not cut into parts; what is, is added by whoever reads it."""
    found = sheets("--model", "qwen2.5-7b", "--quantize", "int4", "--batch", 1, 128)
    for rows in (1, 128):
        layer = A_LAYER | {"coded_gemm": 4, "_act_mul": 1}
        assert launches(found[rows]) == step(28, layer, "coded_gemm")
    layers = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 3584 * 18944)
    head = 152_064 * 3584
    stored = (layers + head) / 2 + 2 * layers / 64 + 2 * head / 32  # and scales in bfloat16
    read = found[1]["coded_gemm"]["read"]
    assert stored < read < 1.002 * stored
    assert found[128]["coded_gemm"]["operations"] == 2 * 128 * (layers + head)


def test_the_head_and_the_layers_are_read_once(dense, monkeypatch) -> None:
    """The benchmark's bound is what a step has to read of the weights, and no embedding table."""
    monkeypatch.syspath_prepend(str(GPU))
    from decode import read_bytes
    from shapes import shape

    decoder: Any = SimpleNamespace(spec=shape("qwen2.5-7b", CONTEXT), dtype="bfloat16")
    weights = read_bytes(decoder, "fp8")
    layers = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 3584 * 18944)
    assert weights == pytest.approx(layers + 2 * 152_064 * 3584, rel=1e-3)
    read = dense[1]["gemm"]["read"] + dense[1]["gated_gemm"]["read"]
    assert weights < read < 1.002 * weights


@pytest.mark.parametrize("rows", [1, 64, 128, 512])
def test_numbers_are_those_of_a_step(dense, rows: int) -> None:
    kernels = dense[rows]
    parameters = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 3584 * 18944) + 152_064 * 3584
    products = sum(kernels[name]["operations"] for name in kernels if name != "decode_kernel")
    assert products == 2 * rows * parameters
    assert kernels["decode_kernel"]["operations"] == 28 * 4 * rows * CONTEXT * 28 * 128
    kv = 28 * rows * CONTEXT * 2 * 4 * 128 * 2
    assert kv < kernels["decode_kernel"]["read"] < 1.05 * kv
    logits = rows * 152_064 * 4
    assert logits <= kernels["_largest"]["read"] < 1.001 * logits


def test_what_it_cannot_count_is_an_error() -> None:
    for wrong in (["--model", "qwen9"], ["--batch", "0"], ["--quantize", "mxfp4"]):
        with pytest.raises(AssertionError, match=r"called qwen9|at least 1|has no experts"):
            sheets(*wrong)
