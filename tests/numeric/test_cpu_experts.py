"""Routing and experts on the CPU: the reference's results, whatever else is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depth import searching
from weft.kernels import reference
from weft.kernels.arrays import dtype_name, to_numpy, to_torch
from weft.kernels.cpu import attention
from weft.kernels.cpu.experts import moe, route
from weft.kernels.cpu.matrix import CpuMatrix, linear
from weft.kernels.cpu.rows import act_mul
from weft.kernels.routing import SCORINGS, Routing
from weft.kernels.storage import Storage

DTYPES = [torch.bfloat16, torch.float32]
ISAS = attention.isas()
INT8, INT4 = Storage(8, None), Storage(4, 32)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_order(scores: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """``reference.route`` that takes the first of equal experts."""
    shares = scores.float().softmax(-1)
    shares, ids = shares.sort(dim=-1, descending=True, stable=True)
    shares, ids = shares[:, :top_k], ids[:, :top_k]
    return (shares / shares.sum(-1, keepdim=True) if normalise else shares), ids


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@searching(100)
@given(st.integers(0, 9), st.integers(1, 140), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_route(isa, dtype, tokens, experts, top_k, normalise, seed) -> None:
    """Scores are steps of a quarter, so that many are equal, and no others are nearly so."""
    attention.use_isa(isa)
    top_k = min(top_k, experts)
    scores = (numbers(seed, tokens, experts + 1) * 8).round().to(dtype)[:, 1:] / 4
    routing = Routing(top_k, normalise)
    shares, ids = route(scores, routing)
    expected, expected_ids = in_order(scores, top_k, normalise)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected, rtol=3e-6, atol=0)
    torch.testing.assert_close(shares, reference.route(scores, routing)[0])


@searching(100)
@given(st.data())
def test_route_by_other_weights(data) -> None:
    """Sigmoids, biases that only choose, groups, a factor."""
    size, groups = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 6))
    kept = data.draw(st.integers(1, groups))
    routing = Routing(
        data.draw(st.integers(1, min(6, kept * size))),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(SCORINGS)),
        groups,
        kept,
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1.0, 2.5])),
    )
    scores = numbers(data.draw(st.integers(0, 99)), 5, groups * size)
    bias = numbers(7, groups * size) / 4 if data.draw(st.booleans()) else None
    shares, ids = route(scores, routing, bias)
    expected, expected_ids = reference.route(scores, routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected)
    if bias is not None:
        with pytest.raises(ValueError, match="correction_bias"):
            route(scores, routing, bias[:-1])


def test_a_bias_chooses_and_weighs_nothing() -> None:
    """By hand: sigmoids of 0, 1 and 2 are 0.5, 0.731 and 0.881."""
    scores, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 0.0, 0.0])
    shares, ids = route(scores, Routing(2, True, "sigmoid", routed_scaling_factor=2.0), bias)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(shares, torch.tensor([[0.72422, 1.27578]]), rtol=1e-4, atol=0)


def test_groups_are_chosen_before_experts() -> None:
    """The best expert is in a group whose best two are worse than those of another one."""
    scores = torch.tensor([[9.0, -9.0, 3.0, 3.0, 2.0, 2.0]])
    routing = Routing(2, scoring="sigmoid", n_group=3, topk_group=1)
    assert route(scores, routing)[1].tolist() == [[2, 3]]
    assert route(scores, replace(routing, group_best=1))[1].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (Routing(2, scoring="tanh"), "unknown scoring 'tanh'"),
        (Routing(2, n_group=4), "6 experts cannot stand in 4 groups"),
        (Routing(3, n_group=3, topk_group=1), "3 experts cannot be chosen from 1 of 3 groups of 2"),
        (Routing(1, n_group=6, topk_group=2), "the best 2 of 1 experts cannot rank a group"),
    ],
)
def test_routings_that_cannot_be_are_errors(routing, words) -> None:
    for of in (route, reference.route):
        with pytest.raises(ValueError, match=words):
            of(torch.zeros(1, 6), routing)


def test_scores_that_are_no_numbers() -> None:
    lowest, nan = float("-inf"), float("nan")
    scores = torch.tensor([[lowest, 1.0, lowest, 0.0], [0.0, nan, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    shares, ids = route(scores, Routing(3))
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(shares[0], torch.tensor([0.7310586, 0.2689414, 0.0]))
    assert shares[1].isnan().all()
    assert shares[2].tolist() == [0.25] * 3
    for odd in (torch.full((1, 3), lowest), torch.tensor([[0.0, float("inf"), 0.0]])):
        shares, ids = route(odd, Routing(2, normalise=True))
        assert ids.tolist() == [[0, 1]]
        assert shares.isnan().all()


class Mixture:
    """Random experts, each stored in a way of its own if so wished."""

    def __init__(self, dtype: torch.dtype, count: int, hidden: int, size: int, *stored) -> None:
        self.gate_up, self.down = [], []
        for expert in range(count):
            storage = stored[expert % len(stored)] if stored else None
            first = numbers(expert, 2 * size, hidden) / hidden**0.5
            second = numbers(expert + 50, hidden, size) / size**0.5
            self.gate_up.append(self._packed(first.to(dtype), storage, gated=True))
            self.down.append(self._packed(second.to(dtype), storage))

    @staticmethod
    def _packed(weight: Tensor, storage: Storage | None, *, gated: bool = False) -> CpuMatrix:
        if storage is None:
            return CpuMatrix(weight, gated=gated)
        matrix = CpuMatrix.quantised(weight.shape, dtype_name(weight.dtype), storage, gated=gated)
        matrix.write(0, weight)
        return matrix

    def run(self, x: Tensor, shares: Tensor, ids: Tensor, activation: str = "silu") -> Tensor:
        return moe(x, shares, ids, self.gate_up, self.down, activation)

    def one_by_one(self, x: Tensor, shares: Tensor, ids: Tensor, activation: str) -> Tensor:
        """Each expert of each token by the ops, added up in the order of the experts."""
        out = []
        for row, weights, experts in zip(x, shares, ids, strict=True):
            total = torch.zeros(x.shape[1], dtype=torch.float64)
            for share, expert in sorted(
                zip(weights.tolist(), experts.tolist(), strict=True), key=lambda pair: pair[1]
            ):
                y = act_mul(linear(row[None], self.gate_up[expert], None), activation)
                total += linear(y, self.down[expert], None)[0].double() * share
            out.append(total)
        return torch.stack(out).to(x.dtype) if out else x.new_empty(x.shape)


def some_routes(seed: int, tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    return reference.route(numbers(seed, tokens, experts), Routing(top_k, normalise=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [(), (INT8,), (INT4, INT8, None)], ids=["floats", "int8", "mix"])
def test_moe_is_the_weighted_sum_of_the_experts(isa, dtype, stored) -> None:
    attention.use_isa(isa)
    for tokens, experts, top_k, hidden, size, activation in (
        (7, 5, 2, 33, 21, "silu"),
        (1, 3, 3, 64, 40, "gelu_tanh"),
        (110, 2, 1, 130, 70, "silu"),
        (0, 4, 2, 16, 8, "silu"),
    ):
        mixture = Mixture(dtype, experts, hidden, size, *stored)
        x = numbers(1, tokens, hidden + 2).to(dtype)[:, 1:-1]
        shares, ids = some_routes(2, tokens, experts, top_k)
        found = mixture.run(x, shares, ids, activation)
        expected = mixture.one_by_one(x, shares, ids, activation)
        torch.testing.assert_close(found, expected)
        by_reference = reference.moe(
            x, shares, ids, mixture.gate_up, mixture.down, activation, linear=linear
        )
        limits = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 5e-3)}[dtype]
        if not stored:  # a last bit of an activation rounds to another integer
            torch.testing.assert_close(found, by_reference, rtol=limits[0], atol=limits[1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [(), (INT4,)], ids=["floats", "int4"])
def test_biases_of_experts(isa, dtype, stored) -> None:
    """With and without each of both, in the activation of the models that have them."""
    attention.use_isa(isa)
    mixture = Mixture(dtype, 4, 70, 42, *stored)
    x, (shares, ids) = numbers(1, 9, 70).to(dtype) * 4, some_routes(2, 9, 4, 2)
    biases = numbers(3, 4, 84).to(dtype) * 4, numbers(4, 4, 70).to(dtype)
    for first in (None, biases[0]):
        for second in (None, biases[1]):
            of = x, shares, ids, mixture.gate_up, mixture.down, "swiglu_oai", first, second
            expected = reference.moe(*of, linear=linear)
            limits = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}[dtype]
            if stored:  # a last bit of an activation rounds to another integer
                limits = (5e-2, 1e-1)
            torch.testing.assert_close(moe(*of), expected, rtol=limits[0], atol=limits[1])
    with pytest.raises(ValueError, match="gate_up_bias"):
        moe(*of[:6], biases[1])
    with pytest.raises(ValueError, match="down_bias"):
        moe(*of[:7], biases[1].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [(), (INT4,)], ids=["floats", "int4"])
def test_a_token_depends_on_no_other_nor_on_threads(dtype, stored) -> None:
    mixture = Mixture(dtype, 6, 96, 130, *stored)
    x, (shares, ids) = numbers(3, 70, 96).to(dtype), some_routes(4, 70, 6, 3)
    attention.set_threads(1)
    whole = mixture.run(x, shares, ids)
    attention.set_threads(3)
    assert torch.equal(mixture.run(x, shares, ids), whole)
    for first, last in ((0, 1), (5, 12), (60, 70), (69, 70)):
        part = slice(first, last)
        assert torch.equal(mixture.run(x[part], shares[part], ids[part]), whole[part])
    turned = torch.arange(69, -1, -1)
    assert torch.equal(mixture.run(x[turned], shares[turned], ids[turned]), whole[turned])
    assert torch.equal(mixture.run(x, shares.flip(1), ids.flip(1)), whole)


def test_arrays_of_numpy_give_the_same_bits() -> None:
    mixture = Mixture(torch.bfloat16, 3, 32, 16)
    x, scores = numbers(0, 6, 32).bfloat16(), numbers(1, 6, 3).bfloat16()
    routing = Routing(2, normalise=True)
    shares, ids = route(scores, routing)
    found_shares, found_ids = route(to_numpy(scores), routing)
    assert torch.equal(to_torch(found_shares), shares)
    assert torch.equal(to_torch(found_ids), ids)
    found = moe(to_numpy(x), found_shares, found_ids, mixture.gate_up, mixture.down, "silu")
    assert torch.equal(to_torch(found), mixture.run(x, shares, ids))


def test_a_nan_stays_with_its_token() -> None:
    mixture = Mixture(torch.float32, 3, 32, 16, INT8, None)
    x, (shares, ids) = numbers(0, 6, 32), some_routes(1, 6, 3, 2)
    clean = mixture.run(x, shares, ids)
    x[2, 5] = float("nan")
    found = mixture.run(x, shares, ids)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


def test_what_does_not_fit_is_an_error() -> None:
    mixture = Mixture(torch.float32, 3, 32, 16)
    x, (shares, ids) = numbers(0, 4, 32), some_routes(1, 4, 3, 2)
    for wrong in (x[:3], x[:, 1:], x.bfloat16()):
        with pytest.raises(ValueError, match="do not fit experts"):
            mixture.run(wrong, shares, ids)
    with pytest.raises(ValueError, match="do not fit experts"):
        mixture.run(x, shares[:, :1], ids)
    with pytest.raises(ValueError, match="float64"):
        mixture.run(x, shares.double(), ids)
    with pytest.raises(ValueError, match="relu"):
        mixture.run(x, shares, ids, "relu")
    for expert in (-1, 3):
        with pytest.raises(IndexError, match=f"expert {expert}"):
            mixture.run(x, shares, torch.where(ids == 0, expert, ids))
    mixture.gate_up[1] = CpuMatrix(numbers(0, 32, 32))
    with pytest.raises(ValueError, match="expert 1"):
        mixture.run(x, shares, ids)
    mixture.gate_up.pop()
    with pytest.raises(ValueError, match="2 first and 3 second"):
        mixture.run(x, shares, ids)
    for scores, top_k in ((x, 0), (x, 33), (x[0], 1)):
        with pytest.raises(ValueError, match="cannot be chosen"):
            route(scores, Routing(top_k))
    with pytest.raises(ValueError, match="no kernel"):
        route(x.half(), Routing(1))
