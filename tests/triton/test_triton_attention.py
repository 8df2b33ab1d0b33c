"""Paged attention in Triton against the plain reference, and against itself, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, Shape, make_case, only_row, padded_batch, row_tokens, same_numbers
from depth import searching
from weft.kernels import reference
from weft.kernels.kv_storage import SCALED, read_rows, row_size
from weft.kernels.triton import attention
from weft.kernels.triton.attention import paged_attention
from weft.kernels.triton.kv_write import write
from weft.kernels.triton.storage import decode, encode_e4m3
from weft.kernels.triton.tiles import Plan, Tile

# Largest difference from the float32 reference on the same inputs, relative to max(1, |value|).
# Both sides sum in float32. The interpreter cuts bfloat16 off where a GPU rounds. The weights of
# values, or the values of 8 bits, are rounded to float16 before they are multiplied in it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2.5e-3}


def assert_right(case: Case) -> Tensor:
    """The result and what is written are those of the reference; tokens of no row are 0."""
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(2)]
    expected = case.run_in_place(reference.paged_attention, *caches[0])
    actual = case.run_in_place(paged_attention, *caches[1])
    assert expected.isfinite().all()
    assert_close(actual, expected)
    assert not actual[int(case.batch.query_start[-1]) :].any()
    for written, wanted in zip(caches[1], caches[0], strict=True):
        assert same_numbers(written, wanted)
    return actual


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def padded(case: Case, rows: int, tokens: int) -> Case:
    """The case with padding after its rows and tokens, and flat tables."""

    def longer(x: Tensor | None) -> Tensor:
        assert x is not None
        return torch.cat((x, torch.full((tokens, *x.shape[1:]), float("nan"), dtype=x.dtype)))

    batch = padded_batch(case.batch, rows, tokens)
    return replace(case, q=longer(case.q), k=longer(case.k), v=longer(case.v), batch=batch)


def few_splits(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Plans of small tiles, so that short contexts have several splits, or of ``changes``."""
    chosen = attention.plan_for

    def plan_for(*arguments: object) -> Plan:
        plan = chosen(*arguments)  # type: ignore[arg-type]
        small = Tile(plan.decode.block_m, 16, 4, 1)
        return replace(plan, **{"decode": small, "splits": 4, "least": 16, **changes})

    monkeypatch.setattr(attention, "plan_for", plan_for)


CONTEXTS = st.one_of(st.sampled_from([0, 1, 15, 16, 63, 64, 127, 128, 300]), st.integers(0, 200))
ROWS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 5, 33]), CONTEXTS), min_size=1, max_size=3)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.sampled_from([1, 1, 2]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    return Shape(
        heads=kv_heads * draw(st.integers(1, 16)),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([16, 20, 64, 80, 96, 128, 192, 256, 512])),
        block_size=draw(st.sampled_from([1, 7, 16, 32, 100])),
        window=draw(st.one_of(st.none(), st.integers(1, 150))),
        softcap=draw(st.sampled_from([None, 1.0, 30.0])),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, torch.float32, *SCALED])),
        fused=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@searching(10, least=4)
@given(
    rows=ROWS,
    shape=shapes(),
    padding=st.sampled_from([None, (0, 0), (1, 1), (2, 20)]),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(
    rows: list[tuple[int, int]], shape: Shape, padding: tuple[int, int] | None, seed: int
) -> None:
    case = make_case(rows, shape, seed)
    assert_right(case if padding is None else padded(case, *padding))


@pytest.mark.parametrize("group", [*range(1, 17), 71])
def test_every_number_of_heads_for_a_kv_head(group: int) -> None:
    cache_dtype = torch.float8_e4m3fn if group % 4 < 2 else torch.float16
    shape = Shape(group, 1, 64, block_size=8, dtype=torch.float16, cache_dtype=cache_dtype)
    assert_right(make_case([(3, 64), (1, 7)], shape))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("tokens", "sinks"), [(1, False), (3, False), (1, True)])
def test_any_number_of_splits(
    monkeypatch: pytest.MonkeyPatch, window: int | None, tokens: int, sinks: bool
) -> None:
    """Contexts around where one more split begins, and where splits become twice as long."""
    few_splits(monkeypatch)
    shape = Shape(heads=3, kv_heads=1, head_size=16, block_size=4, window=window, sinks=sinks)
    contexts = [15, 16, 17, 32, 33, 63, 64, 65, 128, 130]
    assert_right(make_case([(tokens, context - tokens) for context in contexts], shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_row_does_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Nor on how many programs share its splits, nor on padding."""
    few_splits(monkeypatch)
    shape = Shape(heads=4, kv_heads=2, head_size=16, cache_dtype=dtype)
    case = make_case([(1, 90), (20, 30), (2, 5), (1, 40)], shape)
    together = case.run(paged_attention)
    for programs in (1, 64):
        for row in range(4):
            alone = only_row(case, row)
            alone = alone if programs == 1 else padded(alone, 2, 3)
            alone = replace(alone, batch=replace(alone.batch, programs=programs))
            tokens = row_tokens(case, row)
            out = alone.run(paged_attention)[: tokens.stop - tokens.start]
            assert torch.equal(out, together[tokens])


@pytest.mark.parametrize("window", [None, 50])
def test_same_bits_for_any_chunks_of_more_than_few_tokens(window: int | None) -> None:
    whole = make_case([(70, 60)], Shape(heads=4, kv_heads=1, head_size=16, window=window))
    expected = whole.run(paged_attention)
    caches = whole.k_cache.clone(), whole.v_cache.clone()
    assert whole.k is not None
    assert whole.v is not None
    for part in (slice(0, 5), slice(5, 42), slice(42, 70)):
        batch = replace(
            whole.batch,
            query_start=torch.tensor([0, part.stop - part.start], dtype=torch.int32),
            seq_lens=torch.tensor([60 + part.stop], dtype=torch.int32),
            slot_mapping=whole.batch.slot_mapping[part],
        )
        piece = replace(whole, q=whole.q[part], k=whole.k[part], v=whole.v[part], batch=batch)
        assert torch.equal(piece.run_in_place(paged_attention, *caches), expected[part])


@pytest.mark.parametrize("most", [1, 4, 8])
def test_a_bound_of_queries_only_leaves_kernels_out(most: int) -> None:
    """Rows of some tokens, as when drafts are verified, are cut into splits, too."""
    case = make_case([(most, 150), (1, 20)], Shape(heads=8, kv_heads=2, head_size=16))
    batch = replace(case.batch, max_query_len=most)
    assert attention.plan_for(case.q, case.k_cache, most).few >= most
    assert_right(replace(case, batch=batch))


def test_attends_without_writing() -> None:
    case = make_case([(12, 30), (1, 16)], Shape(head_size=16))
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    expected = case.run_in_place(paged_attention, k_cache, v_cache)
    reader = replace(case, k=None, v=None, k_cache=k_cache, v_cache=v_cache)
    assert torch.equal(reader.run(paged_attention), expected)


def test_caches_may_be_strided_views() -> None:
    case = make_case([(12, 30), (1, 16)], Shape(head_size=16, cache_dtype=torch.int8))
    both = torch.stack((case.k_cache, case.v_cache), dim=1)  # [blocks, 2, Hkv, block_size, D + 4]
    out = case.run_in_place(paged_attention, both[:, 0], both[:, 1])
    assert torch.equal(out, case.run(paged_attention))


def test_rows_without_queries_and_empty_batches() -> None:
    case = make_case([(1, 20), (2, 3)], Shape(head_size=16))
    idle = replace(
        case.batch,
        query_start=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([21, 0, 5], dtype=torch.int32),
        block_tables=case.batch.block_tables[[0, 0, 1]],
    )
    assert torch.equal(replace(case, batch=idle).run(paged_attention), case.run(paged_attention))
    nobody = replace(
        idle,
        query_start=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.empty(0, dtype=torch.int32),
        block_tables=torch.empty(0, 4, dtype=torch.int32),
    )
    assert not replace(case, batch=nobody).run(paged_attention).any()
    nobody = replace(nobody, slot_mapping=torch.empty(0, dtype=torch.int64))
    empty = replace(case, q=case.q[:0], k=case.q[:0, :2], v=case.q[:0, :2], batch=nobody)
    assert empty.run(paged_attention).shape == (0, 4, 16)


def test_loud_scores_and_bad_rows() -> None:
    case = make_case([(1, 90), (9, 20), (1, 17)], Shape(head_size=16))
    assert assert_right(replace(case, q=case.q * 1e4)).isfinite().all()
    expected = case.run(paged_attention)
    case.v_cache[int(case.batch.block_tables[1, 0]), :, 3] = float("nan")
    actual = case.run(paged_attention)
    assert not actual[row_tokens(case, 1)].isfinite().any()
    for row in (0, 2):
        assert torch.equal(actual[row_tokens(case, row)], expected[row_tokens(case, row)])


@pytest.mark.parametrize("dtype", list(SCALED))
def test_8_bit_rows_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """Every size of numbers, zeros and what is no number: written by both, the bytes are equal."""
    torch.manual_seed(2)
    rows, slots = torch.randn(96, 1, 72), torch.randperm(96)
    rows *= 2.0 ** torch.randint(-140, 120, (96, 1, 1))
    rows *= 2.0 ** torch.randint(-12, 1, rows.shape)
    rows[1], rows[2, 0, 5], rows[3, 0, 71] = 0, float("nan"), float("inf")
    rows[4, 0, 0], rows[5, 0] = float("-inf"), torch.arange(-36, 36) * 0.5
    expected, k_cache, v_cache = (
        torch.zeros(6, 1, 16, row_size(dtype, 72), dtype=dtype) for _ in range(3)
    )
    reference.write_rows(expected, slots // 16, slots % 16, rows)
    write(k_cache, v_cache, rows, rows, slots)
    for written in (k_cache, v_cache):
        assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
    assert read_rows(expected, torch.arange(6)).isnan().any(-1).sum() == 3


@triton.jit
def _encode(numbers, codes, again, size: tl.constexpr):
    at = tl.arange(0, size)
    code = encode_e4m3(tl.load(numbers + at))
    tl.store(codes + at, code)
    tl.store(again + at, decode(code, tl.float32))


def test_e4m3_is_rounded_as_torch_does() -> None:
    """Every code, every number in the middle of two, its neighbours, and others."""
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes[(codes & 127) != 127].view(torch.float8_e4m3fn).float().sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (-1e9, 1e9)]
    some = torch.randn(4096 - 254 - 3 * 253) * 60
    numbers = torch.cat((exact, middle, *beside, some.clamp(-448, 448)))
    found, again = torch.empty(4096, dtype=torch.uint8), torch.empty(4096)
    _encode[(1,)](numbers, found, again, 4096)
    expected = numbers.to(torch.float8_e4m3fn)
    assert torch.equal(found, expected.view(torch.uint8))
    assert torch.equal(again, expected.float())


def test_looks_at_no_data_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step can be captured: tensors give no numbers, nor sizes that depend on them."""

    def refuse(*_: object) -> None:
        raise AssertionError("data of a tensor was asked for")

    case = padded(make_case([(12, 30), (1, 16)], Shape(head_size=16)), 1, 2)
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "unique"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    out = paged_attention(
        case.q, case.k, case.v, case.k_cache, case.v_cache, case.batch,
        scale=0.25, window=None, softcap=None,
    )  # fmt: skip
    monkeypatch.undo()
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 5, 16)}, "5 query heads are no multiple of the 2"),
        ({"q": torch.zeros(3, 4, 32)}, r"k_cache has shape .*expected \[5, 2, 16, 32\]"),
        ({"q": torch.zeros(3, 4, 16).double()}, "has type torch.float64"),
        ({"q": torch.zeros(3, 16, 4).mT}, "q must be contiguous in its last"),
        ({"k": None}, "k and v must both be given"),
        ({"v": torch.zeros(2, 2, 16)}, r"v has shape \[2, 2, 16\], expected \[3, 2, 16\]"),
        ({"v_cache": torch.zeros(5, 2, 16, 16).int()}, "v_cache has shape .* of torch.int32"),
        ({"k_cache": torch.zeros(5, 2, 16, 16).mT}, "k_cache must hold the rows"),
    ],
)
def test_wrong_calls_are_refused(changes: dict[str, Tensor | None], message: str) -> None:
    case = replace(make_case([(1, 20), (2, 3)], Shape(head_size=16)), **changes)
    with pytest.raises(ValueError, match=message):
        case.run(paged_attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([1, 2])}, r"slot_mapping has shape \[2\] .*expected \[3\]"),
        ({"seq_lens": torch.tensor([21, 5])}, "seq_lens has shape .* of torch.int64"),
        ({"query_start": torch.tensor([0, 3]).int()}, "query_start has shape"),
        ({"table_start": torch.tensor([0, 2]).int()}, r"block_tables has shape \[2, 2\]"),
        ({"block_tables": torch.tensor([1, 2]).int()}, "block_tables has shape"),
    ],
)
def test_wrong_batches_are_refused(changes: dict[str, Tensor], message: str) -> None:
    case = make_case([(1, 20), (2, 3)], Shape(head_size=16))
    with pytest.raises(ValueError, match=message):
        replace(case, batch=replace(case.batch, **changes)).run(paged_attention)


def test_sizes_without_a_kernel_are_named() -> None:
    case = make_case([(1, 3)], Shape(heads=1, kv_heads=1, head_size=600))
    with pytest.raises(ValueError, match="no attention kernel for heads of size 600"):
        case.run(paged_attention)
    case = make_case([(1, 3)], Shape(head_size=18, cache_dtype=torch.int8))
    with pytest.raises(ValueError, match=r"size 18 .* multiple of 4"):
        case.run(paged_attention)
