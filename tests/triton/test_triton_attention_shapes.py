"""Paged attention in Triton over real shapes: head sizes, KV types, ratios, windows, caps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covering, each_once
from test_triton_attention import assert_right

from attention_cases import Case, Shape, make_case
from depth import deep_on_cpu

BF16, FP16, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
# Rows of (query tokens, earlier tokens), in blocks of 16 tokens. Rows of more than 16 tokens are
# prefills, whatever the heads; see ``tiles.by_rule``.
CONTEXTS = {
    "one token": [(1, 0), (17, 0)],
    "whole block": [(1, 15), (2, 14), (17, 15)],
    "block and token": [(1, 16), (17, 16)],
    "whole tiles": [(1, 63), (32, 32)],
    "two splits": [(1, 128), (18, 126)],
}
FACTORS = {
    "head_size": (64, 80, 96, 128, 192, 256, 512),
    "types": ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (BF16, INT8), (FP16, INT8)),
    "group": (1, 3, 5, 7, 11, 15),  # others: ``test_every_number_of_heads_for_a_kv_head``
    "contexts": tuple(CONTEXTS),
    "window": (None, 1, 16, 37),
    "softcap": (None, 1.5),
    "sinks": (False, True),
}


def named(value: object) -> str:
    return "-".join(map(str, value.values())).replace("torch.", "")


@pytest.mark.parametrize("chosen", each_once(FACTORS), ids=named)
def test_each_of_what_models_have(chosen) -> None:
    assert_right(made(chosen))


@deep_on_cpu
@pytest.mark.parametrize("chosen", covering(FACTORS), ids=named)
def test_every_two_of_what_models_have(chosen) -> None:
    """Every head size with every KV type, window, cap and so on; see ``covering``."""
    assert_right(made(chosen))


def made(chosen) -> Case:
    dtype, cache_dtype = chosen["types"]
    shape = Shape(
        heads=chosen["group"],
        kv_heads=1,
        head_size=chosen["head_size"],
        window=chosen["window"],
        softcap=chosen["softcap"],
        sinks=chosen["sinks"],
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    return make_case(CONTEXTS[chosen["contexts"]], shape, seed=chosen["group"])


@pytest.mark.parametrize(
    ("head_size", "cache_dtype"),
    [
        *((128, BF16), (256, FP8), (128, INT8)),
        *(
            pytest.param(*case, marks=deep_on_cpu)
            for case in ((256, BF16), (128, FP8), (256, INT8))
        ),
    ],
)
def test_windows_and_caps_of_gemma(head_size: int, cache_dtype: torch.dtype) -> None:
    """Scores up to about 100, so that a cap of 50 changes them; contexts around the window."""
    shape = Shape(
        head_size=head_size,
        window=32,
        softcap=50.0,
        dtype=BF16,
        cache_dtype=cache_dtype,
        fused=True,
    )
    case = make_case([(1, 0), (1, 31), (1, 32), (33, 31)], shape)
    assert_right(replace(case, q=case.q * 32))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_seven_heads_of_size_128_for_an_fp8_kv_head(dtype: torch.dtype) -> None:
    shape = Shape(
        heads=14, kv_heads=2, head_size=128, dtype=dtype, cache_dtype=FP8, block_size=32, fused=True
    )
    assert_right(make_case([(1, 0), (1, 127), (5, 27), (33, 31)], shape))


def test_a_context_beyond_a_window_of_4096() -> None:
    shape = Shape(
        heads=2, kv_heads=1, head_size=64, window=4096, softcap=50.0, dtype=BF16, cache_dtype=BF16
    )
    assert_right(make_case([(1, 4096)], shape))
