"""Steps in two halves give what whole ones give: with KV of every type, with the kernels of GPUs.

These are interpreted where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import build, prompt, save, save_with_tokenizer
from halved import use_halves
from served import opened, serve, tight
from test_gpu_kinds import KERNELS, PROMPTS, aligned  # noqa: F401

import where
from depth import deep_on_cpu
from weft.core.types import SamplingParams
from weft.exec import halves_pass
from weft.kernels.triton import attention
from weft.kernels.triton.launch import interpreted

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=0)
EXTRAS = ("gemma3", "qwen3-moe", "deepseek-v3")
LONGER = [*PROMPTS, prompt(60, 4), prompt(11, 5)]


def whole_and_halved(folder, prompts, asked, monkeypatch, **settings):
    """Answers of whole steps, captured halves and uncaptured ones, and what of these were split."""
    found = []
    with opened(folder, graphs=False, **settings) as engine:
        found.append(serve(engine, prompts, asked))
        assert engine.scheduler.totals.split_steps == 0
    counts = use_halves(monkeypatch, 5, least=2)
    for graphs in (True, False):
        with opened(folder, graphs=graphs, resident="off", **settings) as engine:
            assert engine.executor.overlaps
            found.append(serve(engine, prompts, asked))
            totals = engine.scheduler.totals
            assert totals.split_steps > 5
    return *([answer.tokens for answer in answers] for answers in found), counts, totals


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8", "bfloat16"])
def test_kv_of_every_type(aligned, kv_dtype, monkeypatch) -> None:  # noqa: F811
    """Prompts in chunks beside decodes, and decodes alone."""
    settings = {"kv_dtype": kv_dtype} if kv_dtype != "bfloat16" else {"dtype": "bfloat16"}
    whole, captured, uncaptured, counts, _ = whole_and_halved(
        aligned, LONGER, [GREEDY] * 6, monkeypatch, kernels=KERNELS, **settings
    )
    assert captured == uncaptured == whole
    assert min(counts[kind] for kind in ("captured", "uncaptured", "mixed")) > 3


@pytest.mark.parametrize(
    "family",
    ["gemma4-shared-kv", *(pytest.param(n, marks=deep_on_cpu) for n in EXTRAS)],
)
def test_families_with_more_between_the_layers(family, tmp_path, monkeypatch) -> None:
    """Sliding windows, KV that layers share, inputs of each layer, experts, latents."""
    folder = save_with_tokenizer(build(family), tmp_path)
    whole, captured, uncaptured, _, _ = whole_and_halved(
        folder, LONGER, [GREEDY] * 6, monkeypatch, kernels=KERNELS
    )
    assert captured == uncaptured == whole


def test_rows_that_give_way(aligned, monkeypatch) -> None:  # noqa: F811
    asked = [replace(GREEDY, max_tokens=40)] * 5
    prompts = [prompt(6 + i, i) for i in range(5)]
    memory = {"kv_memory": tight(aligned), "kernels": KERNELS}
    whole, captured, uncaptured, _, totals = whole_and_halved(
        aligned, prompts, asked, monkeypatch, **memory
    )
    assert totals.preemptions > 0
    assert captured == uncaptured == whole


def test_kernels_of_gpus_with_few_programs(tmp_path, monkeypatch) -> None:
    """As many programs as a row and head have, or fewer than their splits."""
    folder = save(build("llama-gqa"), tmp_path / "llama-gqa")
    prompts = [prompt(9, 1), prompt(2, 2)]
    settings = {"kernels": "triton", "max_num_batched_tokens": 8, "graphs": False}
    asked = [replace(GREEDY, max_tokens=2)] * 2
    with opened(folder, **settings) as engine:
        whole = [answer.tokens for answer in serve(engine, prompts, asked)]
    counts = use_halves(monkeypatch, 2, least=2)
    seen: list[int | None] = []
    few = attention._few

    def counted(plan, batch, *more):
        seen.append(batch.programs)
        few(plan, batch, *more)

    monkeypatch.setattr(attention, "_few", counted)
    with opened(folder, resident="off", **settings) as engine:
        assert interpreted() != where.ON_GPU
        assert isinstance(engine.executor._functions.overlap, halves_pass.HalvesPass)
        engine.executor.limit_attention(1)
        halved = [answer.tokens for answer in serve(engine, prompts, asked)]
    assert halved == whole
    assert 0 < counts["mixed"] < counts["uncaptured"]
    assert 1 in seen
