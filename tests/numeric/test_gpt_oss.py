"""gpt-oss with experts in MXFP4, and engines of models with sinks or gates that are short of KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    build,
    edit_config,
    prompt,
    reference_logits,
    save,
    save_with_tokenizer,
)
from mxfp4_checkpoint import save_in_mxfp4
from paged import PagedRunner, run_chunks
from tight_kv import least_kv_memory, run, settings_for, traffic

from depth import deep
from weft.core.errors import UnsupportedModelError
from weft.engine.build import build_engine
from weft.kernels.cpu.matrix import gather
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layout import storage_of
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec

TOKENS = prompt(120)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mxfp4")
    return folder, save_in_mxfp4(folder)


def load(folder: Path, kernels: str = "reference", **more: Any) -> Decoder:
    return load_model(folder, "float32", None, select_ops("cpu", "float32", kernels), **more)


def test_blocks_are_the_numbers_of_the_reference(packed) -> None:
    """Whole, in chunks and token by token."""
    folder, model = packed
    expected, decoder = reference_logits(model, TOKENS), load(folder)
    assert expected.std() > 0.3
    runner = PagedRunner(decoder)
    found = [
        runner.step([("a", TOKENS)])[0],
        run_chunks(runner, "b", TOKENS, 7),
        torch.cat(
            (runner.step([("c", TOKENS[:100])])[0], run_chunks(runner, "c", TOKENS[100:], 1))
        ),
    ]
    for logits in found:
        assert (logits - expected).abs().max() < 1e-4


def test_a_cpu_keeps_them_as_integers(packed) -> None:
    """The numbers are the same; products round activations to 8 bits."""
    folder, model = packed
    expected, decoder = reference_logits(model, TOKENS), load(folder, "cpu")
    layer, truth = decoder.layers[1], model.model.layers[1].mlp.experts
    assert layer.expert_gate_up is not None
    assert layer.expert_down is not None
    for expert, weight in zip(layer.expert_down, truth.down_proj, strict=True):
        assert expert.format == "int8"
        assert torch.equal(gather(expert, torch.arange(64)), weight.T)
    for expert, weight in zip(layer.expert_gate_up, truth.gate_up_proj, strict=True):
        apart = torch.cat((weight.T[::2], weight.T[1::2]))
        assert torch.equal(gather(expert, torch.arange(2 * 96)), apart)
    found = PagedRunner(decoder, bound=True).step([("a", TOKENS)])[0]
    assert 0 < (found - expected).norm() / expected.norm() < 0.15


@pytest.mark.parametrize("stored", ["floats", "blocks"])
def test_alternating_gates_are_rounded_in_order(packed, tmp_path, stored: str) -> None:
    """Rounding at load reads experts whole, floats as well as blocks."""
    folder, model = packed
    if stored == "floats":
        folder = save(model, tmp_path)
    rounding = lambda name: storage_of(name, "int8", 32)  # noqa: E731
    layer = load(folder, "cpu", rounding=rounding).layers[1]
    assert layer.expert_gate_up is not None
    truth = model.model.layers[1].mlp.experts.gate_up_proj
    for expert, weight in zip(layer.expert_gate_up, truth, strict=True):
        apart = torch.cat((weight.T[::2], weight.T[1::2]))
        step = apart.abs().amax(1, keepdim=True) / 127
        assert (gather(expert, torch.arange(2 * 96)) - apart).abs().le(0.51 * step).all()


def test_another_limit_of_the_activation_is_refused(packed) -> None:
    folder, _ = packed
    edit_config(folder, swiglu_limit=5.0)
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit.*kernels compute with 7.0"):
        read_spec(folder)
    edit_config(folder, swiglu_limit=7.0)


FAMILIES = [
    ("gpt-oss", {}),
    ("gpt-oss", {"kv_dtype": "int8", "dtype": "bfloat16"}),
    ("granite-swa", {}),
    ("muse-glimmer", {}),
    *(
        pytest.param(name, {"kv_dtype": "fp8"}, marks=deep)
        for name in ("gpt-oss", "granite-swa", "muse-glimmer")
    ),
]


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_sequences_that_give_way_lose_no_token(family, more, tmp_path, monkeypatch) -> None:
    """Prefixes that are found again, preempted sequences, drafts: the tokens of ample KV, cold."""
    folder = save_with_tokenizer(build(family), tmp_path)
    cold = build_engine(settings_for(folder, **more, prefix_caching=False))
    wanted, _ = run(cold, traffic(1, cancels=False), monkeypatch)
    tight = least_kv_memory(folder, **more)
    for memory, happens in ((2**22, "cached_tokens"), (tight, "preemptions")):
        engine = build_engine(settings_for(folder, **more, kv_memory=memory))
        found, _ = run(engine, traffic(1, cancels=False), monkeypatch)
        assert {number: answer.tokens for number, answer in found.items()} == {
            number: answer.tokens for number, answer in wanted.items()
        }
        assert getattr(engine.scheduler.totals, happens) > 0
