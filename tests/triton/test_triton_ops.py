"""The plain Triton ops against their references, over fuzzed shapes."""

from __future__ import annotations

import random

import pytest
import torch
from closeness import DTYPES, assert_close

import where
from weft.kernels import reference
from weft.kernels.block_arrays import BlockArrays, block_pairs
from weft.kernels.routing import Routing
from weft.kernels.triton.activation import ACTIVATIONS, GATINGS, act_mul, gate, softcap
from weft.kernels.triton.blocks import copy_blocks
from weft.kernels.triton.embedding import embedding
from weft.kernels.triton.norm import rms_norm
from weft.kernels.triton.rope import angles, rope
from weft.kernels.triton.route import route
from weft.kernels.triton.whole_norm import norm_by_sums, square_sums

FUZZED = 12


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    torch.manual_seed(1)
    return request.param


def test_rms_norm(dtype) -> None:
    sample = random.Random(f"norm{dtype}")
    for _ in range(FUZZED):
        tokens, size = sample.randint(1, 9), sample.choice([1, 31, 64, 130, 1100])
        x, weight = torch.randn(tokens, size).to(dtype), torch.randn(size).to(dtype)
        arguments = (
            sample.choice([weight, None]),
            sample.choice([1e-6, 1e-5]),
            sample.random() < 0.5,
        )
        assert_close(rms_norm(x, *arguments), reference.rms_norm(x, *arguments))


@pytest.mark.parametrize(("heads", "first"), [(6, 4), (3, 2), (5, 5)])
def test_norms_over_heads_of_several_ranks(dtype, heads, first) -> None:
    """A rank with so many heads of each of two, of a wider row."""
    tokens, size = 3, 40
    x = torch.randn(tokens, heads + 2, size, dtype=dtype)[:, :heads]
    weight = torch.randn(heads * size, dtype=dtype)
    sums = square_sums(x, first)
    assert_close(sums, reference.square_sums(x, first))
    sums = sums + torch.rand_like(sums) * 90
    for plus_one in (False, True):
        given = x, first, sums, weight, 1e-5, plus_one, 2
        assert_close(norm_by_sums(*given), reference.norm_by_sums(*given))
    for wrong in ((x, heads + 1), (x[0], 1)):
        with pytest.raises(ValueError, match="heads of"):
            square_sums(*wrong)
    with pytest.raises(ValueError, match="do not fit"):
        norm_by_sums(x, first, sums[:2], weight, 1e-5, False, 2)
    assert len(square_sums(x[:0], first)) == 0


def test_rms_norm_of_heads(dtype) -> None:
    sample = random.Random(f"heads{dtype}")
    for _ in range(FUZZED):
        tokens, heads, size = (
            sample.randint(1, 5),
            sample.randint(1, 7),
            sample.choice([8, 80, 256]),
        )
        x = torch.randn(tokens, heads + 3, size).to(dtype)[:, 2 : 2 + heads]
        weight = sample.choice([None, torch.randn(size), torch.randn(heads, size)])
        weight = None if weight is None else weight.to(dtype)
        plus_one = sample.random() < 0.5
        assert_close(
            rms_norm(x, weight, 1e-6, plus_one), reference.rms_norm(x, weight, 1e-6, plus_one)
        )


@pytest.mark.parametrize("scale", [1.0, 1.19])
def test_angles(scale) -> None:
    for width in (1, 20, 64):
        positions = torch.tensor([0, 1, 77, 4096, 131_071, 1_000_003])
        frequencies = 1e4 ** (-torch.arange(width) / width)
        found = angles(positions, frequencies, scale)
        for one, expected in zip(
            found, reference.angles(positions, frequencies, scale), strict=True
        ):
            assert_close(one, expected)


def test_rope(dtype) -> None:
    sample = random.Random(f"rope{dtype}")
    for _ in range(FUZZED):
        tokens, heads, size = (
            sample.randint(1, 5),
            sample.randint(1, 9),
            sample.choice([8, 80, 96, 256]),
        )
        half = sample.choice([size // 2, size // 4, 3])
        x = torch.randn(tokens, heads + 2, size).to(dtype)[:, :heads]
        cos, sin = torch.randn(2, tokens, half)
        assert_close(rope(x, cos, sin), reference.rope(x, cos, sin))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "silu<=0.5"])
def test_act_mul(dtype, activation) -> None:
    for tokens, size in ((1, 1), (3, 70), (2, 1025)):
        gate_up = 4 * torch.randn(tokens, 2 * size).to(dtype)
        gate_up[0, 0] = -60.0
        assert_close(act_mul(gate_up, activation), reference.act_mul(gate_up, activation))


def test_activations_without_gates(dtype) -> None:
    numbers = torch.tensor([0.3, -0.8, 0.5, -1e-6])
    for tokens, size in ((1, 1), (3, 70), (2, 1025)):
        x = 4 * torch.randn(tokens, size + 2).to(dtype)[:, 1:-1]
        x[:1, 0] = -60.0
        assert_close(act_mul(x, "relu2"), reference.act_mul(x, "relu2"))
        expected = reference.act_mul(x, "xielu", numbers)
        assert_close(act_mul(x, "xielu", numbers), expected)


@pytest.mark.parametrize("kind", GATINGS)
def test_gate(dtype, kind) -> None:
    for tokens, heads, size in ((1, 1, 1), (3, 5, 7), (2, 9, 128)):
        x = torch.randn(tokens, heads, size).to(dtype)
        for each in (1, size):
            gates = 9 * torch.randn(tokens, heads * size // each + 3).to(dtype)[:, 1:-2]
            assert_close(gate(x, gates, kind), reference.gate(x, gates, kind))


def test_softcap() -> None:
    for rows, size, cap in ((1, 1, 30.0), (3, 1025, 8.0), (0, 5, 1.0)):
        logits = 40 * torch.randn(rows, size) ** 3
        torch.testing.assert_close(softcap(logits, cap), reference.softcap(logits, cap))
    edges = torch.tensor([[0.0, -0.0, 1e-6, 0.4, -0.4, 9e9, -9e9, float("inf"), float("nan")]])
    torch.testing.assert_close(
        softcap(edges, 8.0), reference.softcap(edges, 8.0), equal_nan=True, rtol=5e-6, atol=0
    )  # the exponentials of a GPU have 22 bits
    with pytest.raises(ValueError, match="cap"):
        softcap(edges, 0.0)


def test_embedding(dtype) -> None:
    table = torch.randn(11, 1030).to(dtype)
    ids = torch.tensor([3, 0, 10, 3])
    assert torch.equal(embedding(ids, table), table[ids])
    assert torch.equal(embedding(torch.tensor([11, -1]), table), torch.zeros(2, 1030, dtype=dtype))


@pytest.mark.parametrize("size", [1, 3, 1024, 1030])
def test_copy_blocks(size) -> None:
    """Of whole words, and of bytes."""
    for kind in (torch.int64, torch.int8):
        sources, targets = (
            [torch.randint(100, (n, 3, size), dtype=kind) for _ in range(3)] for n in (6, 5)
        )
        wanted, pairs = [target.clone() for target in targets], ([5, 0, 2], [1, 4, 0])
        arrays = BlockArrays(sources), BlockArrays(targets)
        for source, target in zip(sources, wanted, strict=True):
            target[pairs[1]] = source[pairs[0]]
        copy_blocks(*arrays, block_pairs(*arrays, *pairs), lambda x: x.to(where.NAME))
        copy_blocks(*arrays, block_pairs(*arrays, [], []), torch.clone)
        for target, expected in zip(targets, wanted, strict=True):
            assert torch.equal(target, expected)


@pytest.mark.parametrize("normalise", [False, True])
def test_route(dtype, normalise) -> None:
    for tokens, experts, top_k in ((1, 1, 1), (5, 6, 6), (4, 130, 8)):
        scores = 3 * torch.randn(tokens, experts).to(dtype)
        routing = Routing(top_k, normalise)
        expected, ids = reference.route(scores, routing)
        shares, found = route(scores, routing)
        assert_close(shares, expected)
        # Equal scores, which 16 bits make, may come in another order.
        assert torch.equal(scores.gather(1, found), scores.gather(1, ids))
        assert all(len(set(row)) == top_k for row in found.tolist())
    broken = torch.zeros(3, 5, dtype=dtype)
    broken[0, 1], broken[1, 4] = float("nan"), float("inf")
    shares, _ = route(broken, Routing(2, normalise))
    assert shares.isfinite().tolist() == [[False] * 2, [False] * 2, [True] * 2]
    equal, _ = route(torch.zeros(1, 5, dtype=dtype), Routing(3, normalise=True))[::-1]
    assert equal.tolist() == [[0, 1, 2]]


ROUTINGS = (
    Routing(3, normalise=True, scoring="sigmoid", routed_scaling_factor=2.5),
    Routing(5, scoring="sigmoid", n_group=4, topk_group=2),
    Routing(4, normalise=True, n_group=8, topk_group=3, group_best=1),
)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("corrected", [False, True])
def test_route_by_other_weights(routing, corrected) -> None:
    """Also beside one more score, whose sigmoid is wanted."""
    torch.manual_seed(3)
    scores = torch.randn(7, 25)
    bias = torch.linspace(-0.4, 0.4, 24).sin() if corrected else None
    expected, ids = reference.route(scores[:, :24], routing, bias)
    gates = torch.empty(7)
    shares, found = route(scores, routing, bias, gates)
    assert torch.equal(found, ids)
    assert_close(shares, expected)
    assert_close(gates, scores[:, 24].sigmoid())
    for alone, same in zip(route(scores[:, :24], routing, bias), (shares, found), strict=True):
        assert torch.equal(alone, same)
    with pytest.raises(ValueError, match="a bias"):
        route(scores[:, :24], routing, torch.zeros(23))


def test_no_tokens_are_no_programs(dtype) -> None:
    none = torch.empty(0, 4, 8, dtype=dtype)
    assert rms_norm(none, None, 1e-6, False).shape == none.shape
    assert rope(none, torch.empty(0, 4), torch.empty(0, 4)).shape == none.shape
    assert act_mul(none.flatten(1), "silu").shape == (0, 16)
    assert gate(none, none[:, :, 0], "sigmoid").shape == none.shape


def test_what_does_not_fit_is_an_error() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.randn(7), 1e-6, False)
    with pytest.raises(ValueError, match="angles"):
        rope(x, torch.randn(2, 5), torch.randn(2, 5))
    with pytest.raises(ValueError, match="relu"):
        act_mul(x.flatten(1), "relu")
    for gates, kind in ((x[:, :, 0], "tanh"), (x[:, 0], "sigmoid")):
        with pytest.raises(ValueError, match="gate"):
            gate(x, gates, kind)
    with pytest.raises(ValueError, match="experts"):
        route(x.flatten(1), Routing(25))
