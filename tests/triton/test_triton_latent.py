"""Latent attention in Triton: a row of the cache is key of all heads, and its end their value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_triton_attention import CONTEXTS, TOLERANCE, few_splits, padded
from torch import Tensor

from attention_cases import Case, Shape, make_case, only_row, row_tokens, same_numbers
from depth import deep_on_cpu, searching
from weft.kernels import reference
from weft.kernels.kv_storage import SCALED
from weft.kernels.triton import attention
from weft.kernels.triton.attention import paged_attention

BF16, FP16, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
# Numbers of the key alone, and of the latent, as families have them or as tests do.
SIZES = [(64, 512), (32, 256), (16, 48), (8, 32), (20, 36), (64, 16)]


def latent(
    rows: list[tuple[int, int]], heads: int, sizes: tuple[int, int], seed: int = 0, **more: Any
) -> Case:
    """A case whose values are keys."""
    shape = Shape(heads=heads, kv_heads=1, head_size=sum(sizes), **more)
    case = make_case(rows, shape, seed)
    return replace(case, v=case.k, v_cache=case.k_cache)


def run(case: Case, kernel: Any, value: int) -> tuple[Tensor, Tensor]:
    """The last numbers of what a kernel gives, and the cache that it leaves."""
    cache = case.k_cache.clone()
    found = kernel(
        case.q, case.k, case.v, cache, cache, case.batch, scale=case.shape.head_size**-0.5,
        window=case.shape.window, softcap=case.shape.softcap, value_dim=value,
    )  # fmt: skip
    assert found.shape == case.q.shape
    return found[..., -value:], cache


def assert_right(case: Case, value: int) -> Tensor:
    """The result and what is written are those of the reference; tokens of no row are 0."""
    expected, written = run(case, reference.paged_attention, value)
    found, cache = run(case, paged_attention, value)
    assert expected.isfinite().all()
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not found[int(case.batch.query_start[-1]) :].any()
    assert same_numbers(cache, written)
    return found


ROWS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 5, 19]), CONTEXTS), min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    before, value = draw(st.sampled_from(SIZES))
    case = latent(
        draw(ROWS),
        draw(st.integers(1, 20)),
        (before, value),
        seed=draw(st.integers(0, 99)),
        block_size=draw(st.sampled_from([1, 7, 16, 32])),
        window=draw(st.sampled_from([None, None, 1, 40])),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, torch.float32, *SCALED])),
        fused=draw(st.booleans()),
    )
    return case, value


@searching(8, least=4)
@given(case=cases(), padding=st.sampled_from([None, (0, 0), (2, 20)]))
def test_equals_the_reference(case: tuple[Case, int], padding: tuple[int, int] | None) -> None:
    given_case, value = case
    assert_right(given_case if padding is None else padded(given_case, *padding), value)


TYPES = [(BF16, BF16), (BF16, FP8), (BF16, INT8), (FP16, FP16), (FP16, FP8), (FP16, INT8)]


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "sizes"), [(16, (64, 512)), pytest.param(40, (32, 256), marks=deep_on_cpu)], ids=str
)
def test_rows_of_real_sizes_in_every_type(types, heads, sizes) -> None:
    """Contexts at the borders of blocks, tiles and splits; a prompt beside tokens."""
    case = latent([(1, 15), (2, 126), (5, 31)], heads, sizes, dtype=types[0], cache_dtype=types[1])
    assert_right(case, sizes[1])


@pytest.mark.parametrize(("heads", "together"), [(1, 1), (20, 20), (33, 11), (37, 1), (128, 32)])
def test_tiles_of_heads_share_rows(heads: int, together: int) -> None:
    """More heads than a tile has are several tiles alike, which read the same rows."""
    case = latent([(1, 40), (3, 20)], heads, (8, 24), cache_dtype=INT8)
    assert attention.plan_for(case.q, case.k_cache, None, None, 24).group == together
    assert_right(case, 24)


@pytest.mark.parametrize(("tokens", "window"), [(1, None), (3, None), (1, 40)])
def test_any_number_of_splits(monkeypatch, tokens: int, window: int | None) -> None:
    """Contexts around where one more split begins, and where splits become twice as long."""
    few_splits(monkeypatch)
    contexts = [15, 16, 17, 33, 64, 65, 128, 130]
    rows = [(tokens, context - tokens) for context in contexts]
    assert_right(latent(rows, 3, (16, 48), block_size=4, window=window), 48)


@pytest.mark.parametrize("cache_dtype", [torch.float32, INT8])
def test_a_row_does_not_depend_on_the_batch(monkeypatch, cache_dtype: torch.dtype) -> None:
    few_splits(monkeypatch)
    case = latent([(1, 90), (20, 30), (2, 5)], 4, (8, 40), cache_dtype=cache_dtype)
    together, _ = run(case, paged_attention, 40)
    for row in range(3):
        alone, tokens = only_row(case, row), row_tokens(case, row)
        assert torch.equal(run(alone, paged_attention, 40)[0], together[tokens])


def test_numbers_that_are_of_keys_alone_count_in_scores_alone() -> None:
    """With them at 0 in queries, scores are those of latents; values never have them."""
    case = latent([(2, 30), (9, 20)], 4, (16, 32))
    q = case.q.clone()
    q[..., :16] = 0
    blind = replace(case, q=q)
    changed = case.k_cache.clone()
    changed[..., :16] *= 7
    first = run(replace(blind, k=None, v=None), paged_attention, 32)[0]
    second = run(replace(blind, k=None, v=None, k_cache=changed), paged_attention, 32)[0]
    assert torch.equal(first.nan_to_num(9e9), second.nan_to_num(9e9))
    assert_right(case, 32)


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (64, {}, "value_dim is 64; it must be in 1 to 63"),
        (0, {}, "value_dim is 0"),
        (48, {"kv_heads": 2}, "with value_dim there is one KV head; k_cache has 2"),
    ],
)
def test_wrong_calls_are_refused(value: int, changes: dict[str, Any], message: str) -> None:
    shape = Shape(**{"heads": 4, "kv_heads": 1, "head_size": 64} | changes)
    case = make_case([(1, 20)], shape)
    with pytest.raises(ValueError, match=message):
        run(case, paged_attention, value)


def test_latents_without_a_kernel_are_named() -> None:
    case = latent([(1, 3)], 4, (64, 1024))
    with pytest.raises(
        ValueError, match="no attention kernel for latents of 1024 numbers; up to 512"
    ):
        run(case, paged_attention, 1024)
