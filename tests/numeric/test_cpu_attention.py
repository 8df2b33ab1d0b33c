"""The native CPU attention against the plain reference, and against itself: exactness, safety."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Case, Shape, make_case, only_row, row_tokens, same_numbers
from depth import searching
from weft.kernels import reference
from weft.kernels.cpu import attention as native
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import SCALED, read_rows, row_size

# Largest difference from the float32 reference on the same inputs, relative to max(1, |value|).
# Both sides sum in float32, so a 16-bit result may differ by one rounding step of its type; of
# bfloat16 by some more, since weights are rounded to it where the machine multiplies pairs of them.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}
NAN = float("nan")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    widest = native.isa()
    native.use_isa(name)
    try:
        yield
    finally:
        native.use_isa(widest)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.threads()
    native.set_threads(2)
    yield
    native.set_threads(before)


ROWS = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(1, 40)),
        st.one_of(st.sampled_from([0, 15, 16, 255, 256, 511]), st.integers(0, 600)),
    ),
    min_size=1,
    max_size=5,
)
FLOATS = st.sampled_from(list(TOLERANCE))
ISAS = st.sampled_from(native.isas())


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([16, 24, 40, 64, 80, 96, 128, 160, 256, 7])),
        block_size=draw(st.sampled_from([1, 7, 16, 32, 100])),
        window=draw(st.one_of(st.none(), st.integers(1, 300))),
        softcap=draw(st.sampled_from([None, 1.0, 30.0])),
        dtype=draw(FLOATS),
        cache_dtype=draw(st.one_of(FLOATS, st.sampled_from(list(SCALED)))),
        fused=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@searching(150)
@given(rows=ROWS, shape=shapes(), seed=st.integers(0, 99), isa=ISAS, causal=st.booleans())
def test_equals_the_reference(
    rows: list[tuple[int, int]], shape: Shape, seed: int, isa: str, causal: bool
) -> None:
    case = make_case(rows, replace(shape, causal=causal), seed)
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(2)]
    expected = case.run_in_place(reference.paged_attention, *caches[0])
    assert expected.isfinite().all()
    with instruction_set(isa):
        assert_close(case.run_in_place(native.paged_attention, *caches[1]), expected)
    for written, wanted in zip(caches[1], caches[0], strict=True):
        assert same_numbers(written, wanted)


@searching(80)
@given(rows=ROWS, shape=shapes(), isa=ISAS)
def test_same_bits_for_any_threads_and_any_batch(
    rows: list[tuple[int, int]], shape: Shape, isa: str
) -> None:
    case = make_case(rows, shape)
    with instruction_set(isa):
        together = case.run()
        native.set_threads(1)
        assert torch.equal(case.run(), together)
        native.set_threads(5)
        for row in range(len(rows)):
            assert torch.equal(only_row(case, row).run(), together[row_tokens(case, row)])
        native.set_threads(2)


@searching(40)
@given(
    shape=shapes(),
    tokens=st.lists(st.integers(1, 3), min_size=2, max_size=24),
    shared=st.integers(0, 1200),
    isa=ISAS,
    seed=st.integers(0, 9),
)
def test_same_bits_for_shared_prefixes(
    shape: Shape, tokens: list[int], shared: int, isa: str, seed: int
) -> None:
    """Rows whose tables begin with the same blocks, some with more in common than others."""
    random = torch.Generator().manual_seed(seed)
    shape = replace(shape, window=None)
    pasts = [shared + int(torch.randint(0, 300, (), generator=random)) for _ in tokens]
    case = make_case(list(zip(tokens, pasts, strict=True)), shape, seed)
    tables, same = case.batch.block_tables, shared // shape.block_size
    tables[: len(tokens) // 2 + 1, :same] = tables[0, :same]
    tables[1::2, : same // 2] = tables[0, : same // 2]
    with instruction_set(isa):
        together = case.run()
        assert together.isfinite().all()
        assert_close(together, case.run(reference.paged_attention))
        for row in range(len(tokens)):
            assert torch.equal(only_row(case, row).run(), together[row_tokens(case, row)])


@searching(40)
@given(shape=shapes(), past=st.integers(0, 500), chunk=st.integers(1, 70))
def test_same_bits_for_any_chunks(shape: Shape, past: int, chunk: int) -> None:
    tokens = 70
    whole = make_case([(tokens, past)], shape)
    expected = whole.run()
    k_cache, v_cache = whole.k_cache.clone(), whole.v_cache.clone()
    assert whole.k is not None
    assert whole.v is not None
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        batch = replace(
            whole.batch,
            query_start=torch.tensor([0, part.stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([past + part.stop], dtype=torch.int32),
            slot_mapping=whole.batch.slot_mapping[part],
        )
        piece = replace(whole, q=whole.q[part], k=whole.k[part], v=whole.v[part], batch=batch)
        out = piece.run_in_place(native.paged_attention, k_cache, v_cache)
        assert torch.equal(out, expected[part])


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_size", [40, 64, 7])
def test_every_instruction_set(isa: str, dtype: torch.dtype, head_size: int) -> None:
    shape = Shape(head_size=head_size, dtype=dtype, cache_dtype=dtype, window=500, softcap=20.0)
    case = make_case([(1, 700), (40, 300), (1, 0)], shape)
    with instruction_set(isa):
        assert native.isa() == isa
        together = case.run()
        alone = only_row(case, 0).run()
    assert_close(together, case.run(reference.paged_attention))
    assert torch.equal(alone, together[:1])


def test_many_splits_and_heads() -> None:
    case = make_case([(1, 4000), (300, 900), (1, 0), (2, 2047)], Shape(heads=16, head_size=128))
    assert_close(case.run(), case.run(reference.paged_attention))


def test_more_query_heads_than_a_tile_holds() -> None:
    case = make_case([(3, 300), (1, 700)], Shape(heads=71, kv_heads=1))
    assert_close(case.run(), case.run(reference.paged_attention))


def test_attends_without_writing() -> None:
    case = make_case([(4, 30), (1, 16)], Shape())
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    expected = case.run_in_place(native.paged_attention, k_cache, v_cache)
    reader = replace(case, k=None, v=None, k_cache=k_cache, v_cache=v_cache)
    assert torch.equal(reader.run(), expected)


def test_caches_may_be_strided_views() -> None:
    case = make_case([(4, 30), (1, 16)], Shape())
    both = torch.stack((case.k_cache, case.v_cache), dim=1)  # [blocks, 2, Hkv, block_size, D]
    assert torch.equal(
        case.run_in_place(native.paged_attention, both[:, 0], both[:, 1]), case.run()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_survives_the_cache(dtype: torch.dtype) -> None:
    """One token sees itself alone, so its output is its value, whatever type that is kept in."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = numbers.view(-1, 1, 256)
    tokens = len(v)
    batch = AttentionMetadata(
        block_tables=torch.arange(tokens, dtype=torch.int32).view(-1, 1),
        query_start=torch.arange(tokens + 1, dtype=torch.int32),
        seq_lens=torch.ones(tokens, dtype=torch.int32),
        slot_mapping=torch.arange(tokens),
        block_size=1,
    )
    q = torch.ones(v.shape)
    for cache_dtype in (dtype, torch.float32):
        caches = [torch.empty(tokens, 1, 1, 256, dtype=cache_dtype) for _ in range(2)]
        options = {"scale": 1.0, "window": None, "softcap": None}
        out = native.paged_attention(q, torch.ones(v.shape), v, *caches, batch, **options)
        assert torch.equal(caches[1].float().nan_to_num(7.0), v[:, :, None].float().nan_to_num(7.0))
        assert torch.equal(out.nan_to_num(7.0), v.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_like_torch(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (512, 1, 128), generator=random).int()
    v = bits.view(torch.float32)
    caches = [torch.zeros(512, 1, 1, 128, dtype=dtype) for _ in range(2)]
    batch = AttentionMetadata(
        block_tables=torch.zeros(512, 1, dtype=torch.int32),
        query_start=torch.arange(513, dtype=torch.int32),
        seq_lens=torch.ones(512, dtype=torch.int32),
        slot_mapping=torch.arange(512),
        block_size=1,
    )
    native.paged_attention(v, v, v, *caches, batch, scale=1.0, window=None, softcap=None)
    expected = v.to(dtype).view(caches[1].shape)
    assert torch.equal(caches[1].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(caches[1].isnan(), expected.isnan())


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", list(SCALED))
def test_8_bit_rows_are_those_of_the_reference(dtype: torch.dtype, isa: str) -> None:
    """Every size of numbers, zeros and what is no number: written by both, the bytes are equal."""
    random = torch.Generator().manual_seed(2)
    v = torch.randn(512, 2, 72, generator=random)
    v *= 2.0 ** torch.randint(-140, 120, (512, 2, 1), generator=random)
    v *= 2.0 ** torch.randint(-12, 1, v.shape, generator=random)
    v[1], v[2, 1, 5], v[3, 0, 71], v[4, 1, 0] = 0, NAN, float("inf"), float("-inf")
    caches = [torch.zeros(32, 2, 16, row_size(dtype, 72), dtype=dtype) for _ in range(4)]
    batch = AttentionMetadata(
        block_tables=torch.zeros(512, 1, dtype=torch.int32),
        query_start=torch.arange(513, dtype=torch.int32),
        seq_lens=torch.ones(512, dtype=torch.int32),
        slot_mapping=torch.randperm(512, generator=random),
        block_size=16,
    )
    options = {"scale": 1.0, "window": None, "softcap": None}
    reference.paged_attention(v, v, v, caches[0], caches[1], batch, **options)
    with instruction_set(isa):
        native.paged_attention(v, v, v, caches[2], caches[3], batch, **options)
    for written in caches[1:]:
        assert torch.equal(written.view(torch.uint8), caches[0].view(torch.uint8))
    assert read_rows(caches[0], torch.arange(32)).isnan().any(-1).sum() == 3


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_a_bad_row_harms_no_other(value: float) -> None:
    rows = [(1, 300), (5, 40), (1, 17)]
    case = make_case(rows, Shape())
    expected = case.run()
    bad = int(case.batch.block_tables[1, 1])
    case.k_cache[bad, :, 3] = value
    case.v_cache[bad, :, 3] = value
    actual = case.run()
    assert not actual[row_tokens(case, 1)].isfinite().all()
    for row in (0, 2):
        assert torch.equal(actual[row_tokens(case, row)], expected[row_tokens(case, row)])


def test_extreme_scores() -> None:
    case = make_case([(1, 700), (8, 20)], Shape())
    loud = replace(case, q=case.q * 1e4)
    out = loud.run()
    assert_close(out, loud.run(reference.paged_attention))
    assert out.isfinite().all()


def test_rows_without_queries_and_empty_batches() -> None:
    case = make_case([(1, 20), (2, 3)], Shape())
    idle = replace(
        case.batch,
        query_start=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([21, 0, 5], dtype=torch.int32),
        block_tables=case.batch.block_tables[[0, 0, 1]],
    )
    assert torch.equal(replace(case, batch=idle).run(), case.run())
    nobody = replace(
        idle,
        query_start=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.empty(0, dtype=torch.int32),
        block_tables=torch.empty(0, 4, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    empty = replace(case, q=case.q[:0], k=case.q[:0, :2], v=case.q[:0, :2], batch=nobody)
    assert empty.run().shape == (0, 4, 64)


def test_concurrent_calls() -> None:
    cases = [
        make_case([(1, 900), (20, 40 * seed), (1, 300)], Shape(heads=8), seed) for seed in range(4)
    ]
    expected = [case.run() for case in cases]

    def repeat(i: int) -> bool:
        return all(torch.equal(cases[i].run(), expected[i]) for _ in range(40))

    with ThreadPoolExecutor(4) as pool:
        results = pool.map(repeat, range(4))
        for count in (3, 1, 4, 2) * 5:  # changing the pool under the calls must not disturb them
            native.set_threads(count)
        assert all(results)


def test_works_in_a_forked_child() -> None:
    case = make_case([(1, 2000), (64, 500)], Shape(heads=8))
    expected = case.run()
    child = os.fork()
    if child == 0:  # torch operations other than a comparison could wait for lost torch threads
        native.set_threads(3)
        out = native.paged_attention(
            case.q, None, None, case.k_cache, case.v_cache, case.batch,
            scale=0.125, window=None, softcap=None,
        )  # fmt: skip
        os._exit(0 if out.shape == expected.shape and native.threads() == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0


def broken(case: Case, **changes: object) -> Case:
    """The case with some tensors replaced, be they of the batch or not."""
    inside = {name: value for name, value in changes.items() if hasattr(case.batch, name)}
    outside = {name: value for name, value in changes.items() if name not in inside}
    return replace(case, batch=replace(case.batch, **inside), **outside)  # type: ignore[arg-type]


GOOD = make_case([(1, 20), (2, 3)], Shape())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4, 32)}, r"k_cache has shape \[5, 2, 16, 64\], .*head_size=32"),
        ({"q": torch.zeros(3, 4)}, r"q has shape \[3, 4\], expected \[tokens, heads, head_size\]"),
        ({"q": torch.zeros(3, 5, 64)}, r"q of shape \[3, 5, 64\] does not go with k_cache"),
        ({"q": torch.zeros(3, 4, 64).double()}, r"q of shape \[3, 4, 64\] has type torch.float64"),
        ({"q": torch.zeros(3, 64, 4).mT}, r"q of shape .* contiguous in its last dimension"),
        ({"q": torch.zeros(3, 4, 64, device="meta")}, r"q of shape .* on meta"),
        (
            {"k_cache": torch.zeros(5, 2, 16, 64, dtype=torch.int8)},
            r"k_cache has shape .*head_size\+4=68",
        ),
        ({"q": torch.zeros(3, 4, 64).int()}, r"q of shape \[3, 4, 64\] must be float32"),
        ({"k": torch.zeros(3, 1, 64)}, r"k has shape \[3, 1, 64\], .*kv_heads=2"),
        ({"k": None}, "k and v must both be given"),
        ({"v": torch.zeros(2, 2, 64)}, r"v has shape \[2, 2, 64\], .*tokens=3"),
        ({"v_cache": torch.zeros(4, 2, 16, 64)}, r"v_cache has shape .*blocks=5"),
        ({"block_size": 8}, r"k_cache has shape .*block_size=8"),
        ({"slot_mapping": torch.tensor([1, 2, 80])}, r"slot_mapping\[2\] is 80, outside k_cache"),
        ({"slot_mapping": torch.tensor([1, -1, 2])}, r"slot_mapping\[1\] is -1"),
        (
            {"slot_mapping": torch.tensor([1, 2])},
            r"slot_mapping has shape \[2\], expected \[tokens=3\]",
        ),
        (
            {"slot_mapping": torch.tensor([1, 2, 3]).int()},
            r"slot_mapping of shape \[3\] must be int64",
        ),
        ({"seq_lens": torch.tensor([21, 1]).int()}, "row 1: seq_lens 1 is less than its 2"),
        ({"seq_lens": torch.tensor([33, 5]).int()}, "row 0: seq_lens 33 exceeds the table"),
        ({"seq_lens": torch.tensor([21, 5])}, r"seq_lens of shape \[2\] must be int32"),
        ({"query_start": torch.tensor([0, 1, 2]).int()}, "query_start must run from 0 to"),
        ({"query_start": torch.tensor([0, 4, 3]).int()}, "row 1: query_start decreases"),
        ({"query_start": torch.tensor([0, 3]).int()}, r"query_start has shape \[2\]"),
        (
            {"block_tables": torch.tensor([[0, 9], [1, 2]]).int()},
            "row 0: block_tables entry 1 is 9",
        ),
        ({"block_tables": torch.tensor([[0, -1], [1, 2]]).int()}, "entry 1 is -1, outside k_cache"),
        (
            {"block_tables": torch.zeros(4).int(), "table_start": torch.tensor([0, 2]).int()},
            r"block_tables has shape \[4\], expected \[rows=2, blocks_per_row\]",
        ),
        ({"shape": Shape(window=0)}, "window is 0"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(4).bfloat16()}, "sinks must be float32"),
        ({"shape": Shape(softcap=0.0)}, "softcap is 0.0"),
        ({"shape": Shape(softcap=NAN)}, "softcap is nan"),
    ],
)
def test_wrong_calls_are_refused(changes: dict[str, object], message: str) -> None:
    case = broken(GOOD, **changes)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    with pytest.raises(ValueError, match=message):
        case.run_in_place(native.paged_attention, k_cache, v_cache)
    assert torch.equal(k_cache.nan_to_num(7.0), case.k_cache.nan_to_num(7.0))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        native.set_threads(0)
    with pytest.raises(ValueError, match="cannot run instruction set 'sse9'"):
        native.use_isa("sse9")


def test_pinned_threads_stay_on_cores_of_their_own() -> None:
    cores = sorted(os.sched_getaffinity(0))
    wanted = {cores[1 % len(cores)], cores[2 % len(cores)]}
    native.set_threads(3, [cores[i % len(cores)] for i in range(3)])
    try:
        make_case([(40, 300), (40, 300)], Shape()).run()
        deadline = time.monotonic() + 30  # threads pin themselves when they get to run
        while not wanted <= cores_of_bound_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert wanted <= cores_of_bound_threads()
        assert set(cores) == os.sched_getaffinity(0)
    finally:
        native.set_threads(len(cores))


def cores_of_bound_threads() -> set[int]:
    every = [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]
    return {min(allowed) for allowed in every if len(allowed) == 1}
