"""The op table, the native attention inside whole models, and rows exchanged by ``attend``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import CASES, build, save

from weft.core.errors import InvariantError
from weft.kernels import reference
from weft.kernels.ops import select_ops
from weft.kernels.unavailable import KernelUnavailable
from weft.models.decoder import Decoder
from weft.models.loader import load_model

CPU = torch.device("cpu")


def load(name: str, folder: Path, kernels: str = "reference") -> Decoder:
    ops = select_ops("cpu", "float32", kernels)
    save(build(name), folder)
    return load_model(folder, "float32", CASES[name].max_model_len, ops)


def test_describe_names_every_op() -> None:
    ops = select_ops("cpu", "float32", "reference")
    assert ops.describe()["paged_attention"] == "reference"
    others = {"names", "batch_invariant", "fused", "ranks", "tuning"}
    others |= {"pack", "quantise", "computes", "widens", "packed", "isa"}
    assert set(ops.describe()) == set(vars(ops)) - others


@pytest.mark.parametrize(
    ("device", "dtype", "kernels", "words"),
    [
        ("cpu", "int8", "auto", "int8.*float32"),
        ("cpu", "float64", "auto", "float64.*float32"),
        ("cpu", "float16", "auto", "float16.*bfloat16"),
        ("cpu", "float32", "flash", "'flash'.*reference"),
        ("meta", "float32", "auto", "meta.*reference"),
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


def _local(q, k, v):
    """Stands in for attention: depends on the row alone, and on its position through q and k."""
    return q + (k * 0.5 + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def test_attend_may_hand_back_other_rows(tmp_path) -> None:
    """A row leaves at layer 1 of one step and comes back at layer 1 of the next, as piggybacked
    rows do.
    """
    decoder = load("llama3-rope", tmp_path)
    assert decoder.spec.rows_exchangeable
    ids, positions = torch.tensor([5, 9, 7]), torch.tensor([3, 90, 41])
    held: list[torch.Tensor] = []

    def plain(_layer, q, k, v, residual, positions):
        return _local(q, k, v), residual, positions

    def leave(layer, q, k, v, residual, positions):
        rows = [_local(q, k, v), residual, positions]
        if layer != 1:
            return tuple(rows)
        held.extend(row[:1] for row in rows)
        return tuple(row[1:] for row in rows)

    def come_back(layer, q, k, v, residual, positions):
        rows = (_local(q, k, v), residual, positions)
        if layer != 1:
            return rows
        return tuple(torch.cat(pair) for pair in zip(held, rows, strict=True))

    expected = decoder.forward(ids, positions, plain)
    first = decoder.forward(ids[:2], positions[:2], leave)
    second = decoder.forward(ids[2:], positions[2:], come_back)
    assert torch.allclose(first, expected[1:2], atol=1e-5)
    assert torch.allclose(second, expected[[0, 2]], atol=1e-5)
    moved = decoder.forward(ids, positions + 1, plain)
    assert not torch.allclose(moved, expected, atol=1e-2), "positions must matter here"


def test_per_layer_inputs_refuse_other_rows(tmp_path) -> None:
    decoder = load("gemma4", tmp_path)
    assert not decoder.spec.rows_exchangeable

    def attend(_layer, q, _k, _v, residual, positions):
        return torch.zeros_like(q), residual, positions.clone()

    with pytest.raises(InvariantError, match="per-layer inputs"):
        decoder.forward(torch.tensor([1]), torch.tensor([0]), attend)
