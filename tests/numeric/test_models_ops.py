"""The op table: which kernels it has, what it refuses, and single ops."""

from __future__ import annotations

import pytest
import torch

from weft.kernels import reference
from weft.kernels.ops import select_ops
from weft.kernels.unavailable import KernelUnavailable


def test_describe_names_every_op() -> None:
    ops = select_ops("cpu", "float32", "reference")
    assert ops.describe()["paged_attention"] == "reference"
    others = {"names", "batch_invariant", "fused", "ranks", "tuning", "lanes", "link"}
    others |= {"pack", "quantise", "computes", "packed", "isa", "await_answer", "whole_norm"}
    others |= {"heads", "delta", "conv", "mamba2"}
    assert set(ops.describe()) == set(vars(ops)) - others


@pytest.mark.parametrize(
    ("device", "dtype", "kernels", "words"),
    [
        ("cpu", "int8", "auto", "int8.*float32"),
        ("cpu", "float64", "auto", "float64.*float32"),
        ("cpu", "float16", "auto", "float16.*bfloat16"),
        ("cpu", "float32", "flash", "'flash'.*reference"),
        ("meta", "float32", "cpu", "meta.*reference"),
    ],
)
def test_what_cannot_run_is_an_error(device, dtype, kernels, words) -> None:
    with pytest.raises(KernelUnavailable, match=words):
        select_ops(device, dtype, kernels)


def test_unbuilt_native_attention_is_an_error(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "weft.kernels.cpu.attention", None)
    monkeypatch.delattr("weft.kernels.cpu.attention", raising=False)
    with pytest.raises(KernelUnavailable, match="not built"):
        select_ops("cpu", "float32", "auto")
    assert select_ops("cpu", "float32", "reference").describe()["paged_attention"] == "reference"


def test_rope_pairs_halves_and_leaves_the_rest() -> None:
    x = torch.randn(3, 2, 10)
    angle = torch.randn(3, 4)
    found = reference.rope(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones(3, 4), angle)[:, None]
    assert torch.allclose(found[..., :4], turned.real, atol=1e-6)
    assert torch.allclose(found[..., 4:8], turned.imag, atol=1e-6)
    assert torch.equal(found[..., 8:], x[..., 8:])


def test_moe_is_the_weighted_sum_of_the_chosen_experts() -> None:
    x, gate_up, down = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    shares, experts = torch.rand(5, 2), torch.tensor([[0, 3], [3, 0], [1, 3], [0, 1], [1, 0]])
    found = reference.moe(x, shares, experts, gate_up, down, "silu")
    for t in range(5):
        expected = torch.zeros(8)
        for share, expert in zip(shares[t], experts[t], strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            expected += share * (down[expert] @ (gate * gate.sigmoid() * up))
        assert torch.allclose(found[t], expected, atol=1e-4)
