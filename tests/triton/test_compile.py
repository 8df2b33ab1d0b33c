"""Kernels compile for GPUs that are not here, in as much memory as these have."""

from __future__ import annotations

from typing import Any

import pytest
from ahead import Compiled, compiled
from launch_attention import SHARED, heads_of

from depth import deep
from weft.kernels.triton.tiles import by_rule

# Type, KV, query heads of a KV head x head size, and a window and a soft cap: the largest tiles of
# each row of the launch tables and what models have. All others, which are
# ``launch_attention.EVERY``: ``python tests/triton/ahead.py launch_attention.launch 90``.
ATTENTION = {
    90: [
        "bfloat16/bfloat16/7x128",
        "bfloat16/fp8/2x128/4096/50",
        "float16/int8/16x64",
        "bfloat16/bfloat16/2x256/4096/50",
        "bfloat16/bfloat16/4x512",
        "bfloat16/fp8/16x192",
        "bfloat16/bfloat16/8x64/128/0/sinks",
        "bfloat16/bfloat16/128x64+512",
        "bfloat16/int8/20x64+512",
        "bfloat16/fp8/40x32+256",
    ],
    80: [
        "float16/int8/2x256/4096/50",
        "bfloat16/bfloat16/1x96",
        "bfloat16/fp8/2x128/4096/50",
        "float32/float32/1x80",
        "bfloat16/bfloat16/128x64+512",
    ],
    86: ["bfloat16/bfloat16/4x512", "float32/float32/1x512", "float32/float32/16x64+512"],
    89: ["bfloat16/bfloat16/128x64+512", "bfloat16/fp8/20x64+512", "float16/float16/16x64+512"],
    100: [
        "bfloat16/fp8/7x128",
        "bfloat16/fp8/71x64",
        "bfloat16/int8/2x128/4096/50",
        "bfloat16/bfloat16/128x64+512",
        "bfloat16/int8/20x64+512",
    ],
}
# What is compiled in every run: for the newest GPU types, limits and the largest head; one shape
# for an older one.
FEW = {90: [1, 4, 6, 7], 80: [0], 89: [1], 100: [0]}


def cases(every: dict[int, list[str]], few: dict[int, list[int]]) -> list[Any]:
    """Capabilities with the shapes to compile: a few in all runs, all of them in deep tests."""
    short = [(at, [every[at][i] for i in places]) for at, places in few.items()]
    return [
        *(pytest.param(*case, id=f"{case[0]}-few") for case in short),
        *(pytest.param(*case, id=str(case[0]), marks=deep) for case in every.items()),
    ]


MOST_SPILLED = 64  # bytes of a thread; more say that a tile is too large for the registers


@pytest.mark.parametrize(("capability", "shapes"), cases(ATTENTION, FEW))
def test_paged_attention(capability: int, shapes: list[str]) -> None:
    built = compiled("launch_attention.launch", capability, *shapes)
    assert {"_write_kernel", "list_kernel", "decode_kernel", "prefill_kernel"} == {
        kernel.kernel for kernel in built
    }
    for kernel in built:
        programmatic = capability >= 90 and kernel.kernel in ("list_kernel", "decode_kernel")
        assert kernel.programmatic == programmatic, kernel
        assert kernel.shared_bytes <= SHARED[capability], kernel
        assert kernel.spilled_bytes <= MOST_SPILLED, kernel
        assert uses_matrix_units(kernel) == multiplies_halves(kernel), kernel
        if capability == 90 and kernel.kernel == "prefill_kernel":
            # Latents of 512 numbers that are converted leave no registers for tiles of 64 rows.
            assert kernel.wgmma == (int(kernel.constants["BLOCK_M"]) >= 64), kernel


@pytest.mark.parametrize(("capability", "shapes"), cases(ATTENTION, FEW))
def test_programs_that_share_splits_run_at_once(capability: int, shapes: list[str]) -> None:
    """A multiprocessor has 65536 registers, and a KiB of shared memory more than a program."""
    facts = SHARED[capability], capability // 10
    planned = [by_rule(heads_of(shape), None, *facts).programs for shape in shapes]
    built = compiled("launch_attention.launch", capability, *shapes)
    kernels = [kernel for kernel in built if kernel.kernel == "decode_kernel"]
    for kernel, programs in zip(kernels, planned, strict=True):
        registers = -(-kernel.registers // 8) * 8 * 32 * kernel.warps
        assert programs * registers <= 65536, kernel
        assert programs * (kernel.shared_bytes + 1024) <= SHARED[capability] + 1024, kernel


def uses_matrix_units(kernel: Compiled) -> bool:
    return kernel.wgmma or kernel.mma or kernel.tcgen05


def multiplies_halves(kernel: Compiled) -> bool:
    return kernel.constants.get("TYPE") in {"bf16", "fp16"}


def test_a_kernel_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(AssertionError, match="fp8e4nv not supported"):
        compiled("launch_attention.launch_as_if_with_e4m3", 80)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=deep), 90])
def test_kernels_beside_attention(capability: int) -> None:
    built = compiled("launch_layers.launch", capability)
    assert {kernel.kernel for kernel in built} == {
        "_rms_norm", "_add_norm", "_embedding", "_act_mul", "_act_mul_round", "_angles", "_rotate",
        "_gate", "_xielu", "_relu2",
        "_enter", "_softcap", "_route", "_process_logits", "_largest", "_candidates", "_sample",
        "_verify_drafts", "_copy_blocks", "_choose_lanes", "_join_lanes", "_keep_lanes",
        "_send_lanes", "_wait_for_lanes", "_receive_lanes", "_advance", "_await_answer", "_publish",
        "_sum", "_square_sums", "_norm_by_sums", "_latent_rows", "_heads", "gemm",
        "_delta_rule", "_gated_norm", "_mamba2", "_gated_group_norm", "_short_convolution",
    }  # fmt: skip
    for kernel in built:
        assert kernel.shared_bytes <= SHARED[capability], kernel
        assert kernel.spilled_bytes == 0, kernel


# Small ones of every kind; all others: ``python tests/triton/ahead.py launch_products.launch 90``.
PRODUCTS = {
    90: [
        *("gemm/fp8/8", "gemm/fp8/300", "gemm/bfloat16/64", "gemm/fp8 weights/8", "moe/fp8/8"),
        *("gated/fp8/8", "gated/fp8/64", "gated/bfloat16/64", "gated/int8/8", "gated/fp8/300"),
    ],
    80: ["gemm/fp8/8", "gemm/int8/64", "moe/bfloat16/8", "gated/fp8/8", "gated/bfloat16/64"],
}
CODED = {
    90: [
        "gemm/int4 by 128, zeros/8",
        "gemm/e4m3 by 128/300",
        "moe/mxfp4/8",
        "gemm/int8 by 64/300",
        "moe/int4 by 32/64",
        "moe/e4m3 by 128/300",
    ],
    80: ["gemm/int4 by 32/300", "gemm/e4m3 by 128/64", "moe/int4 by row, zeros/64"],
    86: ["gemm/int8 by 64/300", "moe/int4 by 128, zeros/300", "moe/mxfp4/64"],
}


@pytest.mark.parametrize(("capability", "products"), cases(PRODUCTS, {90: [0, 2, 4, 5, 6]}))
def test_products(capability: int, products: list[str]) -> None:
    built = compiled("launch_products.launch", capability, *products)
    names = {kernel.kernel for kernel in built}
    mixture = {"_blocks", "_grouped", "_combine"}
    assert names == {"gemm", "gated_gemm", "add_parts", "_round_rows"} | mixture
    for kernel in built:
        assert kernel.shared_bytes <= SHARED[capability], kernel
        assert kernel.spilled_bytes <= MOST_SPILLED, kernel
        if kernel.kernel in ("gemm", "gated_gemm", "_grouped"):
            assert uses_matrix_units(kernel), kernel
            assert kernel.wgmma == (capability == 90), kernel


@pytest.mark.parametrize(("capability", "products"), cases(CODED, {90: [0, 1, 2]}))
def test_products_with_codes(capability: int, products: list[str]) -> None:
    built = compiled("launch_products.launch", capability, *products)
    found = [kernel for kernel in built if kernel.kernel in ("coded_gemm", "grouped_codes")]
    assert len({kernel.kernel for kernel in found}) == 2
    early = {kernel.kernel for kernel in found if kernel.programmatic}
    assert early == ({"coded_gemm"} if capability >= 90 else set())
    for kernel in built:
        assert kernel.shared_bytes <= SHARED[capability], kernel
        assert kernel.spilled_bytes <= MOST_SPILLED, kernel
    for kernel in found:
        assert uses_matrix_units(kernel), kernel
        assert kernel.wgmma == (capability == 90), kernel
