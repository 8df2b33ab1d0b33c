"""Native ops that stand alone: each equals the reference, on every instruction set."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.kernels import reference
from weft.kernels.arrays import to_numpy, to_torch
from weft.kernels.cpu import attention
from weft.kernels.cpu.matrix import embedding
from weft.kernels.cpu.rows import (
    act_mul,
    gate,
    norm_by_sums,
    rms_norm,
    rope,
    softcap,
    square_sums,
)

DTYPES = [torch.bfloat16, torch.float32]
ISAS = attention.isas()
SIZES = st.integers(1, 80)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@searching(60)
@given(st.integers(0, 9), st.integers(1, 5), SIZES, st.integers(0, 40), st.integers(0, 99))
def test_rope(isa, dtype, tokens, heads, size, half, seed) -> None:
    attention.use_isa(isa)
    half = min(half, size // 2)
    x = numbers(seed, tokens, heads + 2, size).to(dtype)[:, 1 : heads + 1]
    turns = numbers(seed + 1, tokens, half)
    found = rope(x, turns.cos(), turns.sin())
    torch.testing.assert_close(found, reference.rope(x, turns.cos(), turns.sin()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", ["silu", "silu<=0.5", "gelu_tanh", "swiglu_oai", "relu2", "xielu", "gelu"]
)
def test_act_mul(isa, dtype, activation) -> None:
    numbers_of = (torch.tensor([0.3, -0.8, 0.5, -1e-6]),) if activation == "xielu" else ()
    attention.use_isa(isa)
    for tokens, size in ((1, 1), (3, 31), (2, 32), (40, 1025), (0, 7)):
        gate_up = 4 * numbers(size, tokens, 2 * size + 3).to(dtype)[:, 1:-2]
        if tokens:
            gate_up[0, 0] = -60.0
            gate_up[-1, -1] = float("nan")
        torch.testing.assert_close(
            act_mul(gate_up, activation, *numbers_of),
            reference.act_mul(gate_up, activation, *numbers_of),
            equal_nan=True,
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
def test_gate(isa, dtype, kind) -> None:
    attention.use_isa(isa)
    for tokens, heads, size in ((1, 1, 1), (3, 5, 7), (2, 3, 64), (40, 12, 33), (0, 2, 8)):
        x = 4 * numbers(size, tokens, heads, size).to(dtype)
        for each in (1, size):
            gates = 9 * numbers(each, tokens, heads * size // each + 3).to(dtype)[:, 1:-2]
            if tokens:
                gates[0, 0], gates[-1, -1] = -60.0, float("nan")
            torch.testing.assert_close(
                gate(x, gates, kind), reference.gate(x, gates, kind), equal_nan=True
            )


@pytest.mark.parametrize("isa", ISAS)
def test_softcap(isa) -> None:
    attention.use_isa(isa)
    for rows, size, cap in ((1, 1, 30.0), (3, 4097, 8.0), (0, 5, 1.0), (17, 4096, 50.0)):
        logits = 40 * numbers(size, rows, size) ** 3
        torch.testing.assert_close(softcap(logits.clone(), cap), reference.softcap(logits, cap))
    edges = torch.tensor([[0.0, 1e-30, -3e-7, 5.0, -5.1, 9e9, float("inf"), float("nan")]])
    expected = reference.softcap(edges, 8.0)
    found = softcap(edges.clone(), 8.0)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=5e-7, atol=0)
    assert torch.equal(softcap(edges[:, :7].expand(2, 7), 8.0), found[:, :7].expand(2, 7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_a_table(dtype) -> None:
    table = numbers(0, 11, 1033).to(dtype)[:, :-3]
    for count in (0, 1, 300):
        ids = torch.randint(0, 11, (2 * count,), generator=torch.Generator().manual_seed(1))[::2]
        assert torch.equal(embedding(ids, table), table[ids])
        assert torch.equal(embedding(ids, table.T.contiguous().T), table[ids])
    for wrong in (-1, 11):
        with pytest.raises(IndexError, match=str(wrong)):
            embedding(torch.tensor([3, wrong]), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_numpy_give_the_same_bits(dtype) -> None:
    heads, turns = numbers(0, 5, 3, 12).to(dtype), numbers(1, 5, 4)
    ids, table, logits = torch.tensor([2, 0]), heads.flatten(1), numbers(2, 3, 9)
    for call, inputs in (
        (rope, (heads, turns.cos(), turns.sin())),
        (partial(rms_norm, eps=1e-6, plus_one=True), (heads, heads[0])),
        (partial(square_sums, first=2), (heads,)),
        (partial(act_mul, activation="silu"), (table,)),
        (lambda x, gates: gate(x, gates, "softplus"), (heads, heads[:, :, 0])),
        (embedding, (ids, table)),
        (partial(softcap, cap=3.0), (logits,)),
    ):
        found = call(*(to_numpy(x.clone()) for x in inputs))
        assert torch.equal(to_torch(found), call(*inputs))


def test_results_are_the_same_on_any_number_of_threads() -> None:
    heads, turns = numbers(0, 90, 12, 64), numbers(1, 90, 32)
    calls = [
        lambda: rope(heads, turns.cos(), turns.sin()),
        lambda: rms_norm(heads, None, 1e-6, False),
        lambda: square_sums(heads, 8),
        lambda: norm_by_sums(heads, 8, heads[:, 0, :2], heads[0].flatten(), 50.0, False, 2),
        lambda: act_mul(heads.flatten(1), "silu"),
        lambda: softcap(heads.flatten(1).clone(), 3.0),
        lambda: embedding(torch.arange(89, -1, -1), heads.flatten(1)),
    ]
    attention.set_threads(1)
    expected = [call() for call in calls]
    attention.set_threads(3)
    for call, one in zip(calls, expected, strict=True):
        assert torch.equal(call(), one)


def test_what_does_not_fit_is_an_error() -> None:
    x = numbers(0, 2, 3, 8)
    turns = numbers(0, 2, 4)
    for cos, sin in ((turns, turns[:1]), (turns[:, :3], turns), (turns.double(), turns.double())):
        with pytest.raises(ValueError, match="angles"):
            rope(x, cos, sin)
    with pytest.raises(ValueError, match="angles"):
        rope(x, numbers(0, 2, 5), numbers(0, 2, 5))
    with pytest.raises(ValueError, match="type"):
        rope(x.to(torch.complex64), turns, turns)
    with pytest.raises(ValueError, match="relu"):
        act_mul(x.flatten(1), "relu")
    with pytest.raises(ValueError, match="silu"):
        act_mul(x.flatten(1)[:, 1:], "silu")
    for gates, kind in ((x[:, :, 0], "tanh"), (x[:, 0], "sigmoid"), (x[:, :, 0].bfloat16(), "s")):
        with pytest.raises(ValueError, match="gate"):
            gate(x, gates, kind)
    for logits, cap in ((x.bfloat16(), 3.0), (x, 0.0), (x, float("nan"))):
        with pytest.raises(ValueError, match="cap"):
            softcap(logits, cap)
    with pytest.raises(ValueError, match="table"):
        embedding(torch.tensor([0]), torch.zeros(3, 4, dtype=torch.complex64))
