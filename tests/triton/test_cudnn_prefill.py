"""Prefill attention by cuDNN: what is asked of it, by a stand-in, and its own checks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretended_cudnn
import pytest
import torch

from attention_cases import Shape, make_case
from weft.core.config import EngineConfig
from weft.engine.model import find_model
from weft.engine.weights import attention_shapes, prefill_bytes
from weft.kernels import reference
from weft.kernels.triton import cudnn_prefill
from weft.kernels.triton.cudnn_prefill import (
    CUDNN,
    PrefillByCudnn,
    PromptRows,
    describe,
    step_bytes,
)
from weft.kernels.triton.launch import power_of_2
from weft.kernels.triton.tiles import Heads, by_rule, launches
from weft.kernels.triton.tuned import Trial
from weft.kernels.tuning import PREFILL, Heuristic, LaunchShape, Pinned
from weft.kernels.unavailable import KernelUnavailable

HALVES = Shape(dtype=torch.bfloat16, cache_dtype=torch.bfloat16, head_size=32)


class Asking(Trial):
    """A tuning whose entry of prefill attention asks for cuDNN."""

    def __init__(self, asks: int = 1) -> None:
        super().__init__(Heuristic(1, 99 * 1024))
        self._asks = asks

    def attention(self, shape: LaunchShape) -> Any:
        if shape.op != PREFILL:
            return None
        heads = Heads.of(shape.sizes, torch.bfloat16, torch.bfloat16)
        return launches(by_rule(heads, None, 99 * 1024))[PREFILL] | {CUDNN: self._asks}


def flat(case, max_context: int):
    """The same with flat tables, as captured steps have them."""
    tables = case.batch.block_tables
    start = torch.arange(len(tables), dtype=torch.int32) * tables.shape[1]
    flat_ = {"block_tables": tables.flatten(), "table_start": start, "max_context": max_context}
    return replace(case, batch=replace(case.batch, **flat_))


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_many_tokens_are_cudnns_and_all_others_are_not(is_flat: bool, fused: bool) -> None:
    """Prompts, chunks behind earlier tokens, decodes, rows without tokens and padding."""
    case = make_case([(20, 0), (1, 30), (33, 17), (0, 0), (2, 5)], replace(HALVES, fused=fused))
    if is_flat:
        case = flat(case, 64)
    attend = PrefillByCudnn(Asking(), pretended_cudnn.module)
    found = case.run_in_place(attend, *(zeros_for_nan(c) for c in (case.k_cache, case.v_cache)))
    wanted = case.run(reference.paged_attention)
    assert (found.float() - wanted.float()).abs().max() < 0.03
    assert len(attend._graphs) == 1


def test_layers_share_what_is_made_of_a_step(monkeypatch) -> None:
    """Its list of splits, and the tables and lengths that graphs take."""
    case = make_case([(20, 0), (1, 30)], HALVES)
    attend = PrefillByCudnn(Asking(), pretended_cudnn.module)
    gathered, plain = [], cudnn_prefill.dense_tables
    monkeypatch.setattr(
        cudnn_prefill, "dense_tables", lambda *given: gathered.append(given) or plain(*given)
    )
    caches = zeros_for_nan(case.k_cache), zeros_for_nan(case.v_cache)
    for _ in range(2):
        case.run_in_place(attend, *caches)
        short = next(x for x in case.batch.derived.values() if not isinstance(x, PromptRows))
        lists = list(short.derived.values())
    assert len(lists) == len(gathered) == 1
    case.run_in_place(attend, *caches)
    assert next(iter(short.derived.values())) is lists[0]
    assert len(case.batch.derived) == 2


def test_steps_of_many_sizes_share_few_graphs() -> None:
    """Of 1 to 5 rows with 20 to 140 tokens: powers of 2, whatever the step has."""
    attend, wrong = PrefillByCudnn(Asking(), pretended_cudnn.module), 0.0
    cases = [[(20, 0)], [(29, 9)], [(33, 0), (31, 2)], [(40, 0), (1, 7), (12, 30)]]
    cases += [[(20, 3), (30, 0), (1, 3), (13, 4)], [(28, 0)] * 5]
    for rows in cases:
        case = make_case(rows, HALVES)
        caches = zeros_for_nan(case.k_cache), zeros_for_nan(case.v_cache)
        found = case.run_in_place(attend, *caches)
        gap = found.float() - case.run(reference.paged_attention).float()
        wrong = max(wrong, gap.abs().max().item())
    assert wrong < 0.03
    shapes = {(x.rows, x.tokens) for x in attend._graphs}
    assert shapes == {(1, 32), (2, 64), (4, 64), (8, 256)}
    assert all(power_of_2(x.pages) == x.pages for x in attend._graphs)


def test_its_workspace_counts_as_memory_of_steps() -> None:
    """With tables, lengths and results; of an absent GPU all but what only cuDNN tells."""
    heads = cudnn_prefill.Heads(2, 2, 32, torch.bfloat16, torch.bfloat16)
    asked = heads, (5, 100, 60), 16
    found = step_bytes(*asked, torch.device("cpu"), pretended_cudnn.module)
    absent = step_bytes(*asked, torch.device("meta"))
    assert found - absent == 8 * 128
    assert absent > 8 * 64 * 4 + 128 * 4 * 32 * 2

    def config(**settings: Any) -> EngineConfig:
        return EngineConfig(model="builtin", max_num_seqs=5, max_num_batched_tokens=100, **settings)

    spec = find_model(config(dtype="bfloat16")).spec
    entries: dict[Any, Any] = {}
    for asks in (0, 1):
        for shape in attention_shapes(config(), spec, "bfloat16"):
            entries[shape, 0] = {CUDNN: asks}
        pinned = SimpleNamespace(tuning=Pinned(Path("gpu.json"), "any", dict(entries)))
        bytes_ = prefill_bytes(config(), spec, "bfloat16", pinned, "meta", 60)
        assert (bytes_ > 8 * 64 * 4) == bool(asks)
    assert prefill_bytes(config(), spec, "bfloat16", SimpleNamespace(tuning=None), "meta", 60) == 0


def zeros_for_nan(cache: torch.Tensor) -> torch.Tensor:
    """Engines start with zeros: cuDNN multiplies what it masks with 0."""
    return torch.nan_to_num(cache.clone())


def test_steps_without_long_rows_leave_cudnn_out() -> None:
    case = make_case([(1, 30), (2, 5)], HALVES)
    attend = PrefillByCudnn(Asking(), None)
    decodes = replace(case, batch=replace(case.batch, max_query_len=2))
    decodes.run(attend)
    assert not attend._graphs


def test_only_a_tuning_file_asks_for_it() -> None:
    case = make_case([(20, 0)], HALVES)

    def load():
        raise AssertionError("cuDNN was asked for")

    for tuning in (None, Heuristic(1, 99 * 1024), Asking(0)):
        case.run(PrefillByCudnn(tuning, load))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(HALVES, window=8), "layers with a window, capped scores or sinks"),
        (replace(HALVES, softcap=5.0), "layers with a window, capped scores or sinks"),
        (replace(HALVES, sinks=True), "layers with a window, capped scores or sinks"),
        (replace(HALVES, cache_dtype=torch.int8), "over KV of torch.int8"),
        (replace(HALVES, head_size=136), "heads of size 136"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_remedy(shape: Shape, words: str) -> None:
    case = make_case([(20, 0)], shape)
    with pytest.raises(KernelUnavailable, match=f"does not serve .*{words}.*; take CUDNN out of"):
        case.run(PrefillByCudnn(Asking(), pretended_cudnn.module))


def test_latent_attention_is_refused_with_the_remedy() -> None:
    case = make_case([(20, 0)], replace(HALVES, kv_heads=1))
    words = r"does not serve latent attention \(MLA\); take CUDNN out of"
    with pytest.raises(KernelUnavailable, match=words):
        case.run(partial(PrefillByCudnn(Asking(), pretended_cudnn.module), value_dim=16))
    latent = Heads(1, 16, 576, torch.bfloat16, torch.bfloat16, 512)
    with pytest.raises(KernelUnavailable, match=words):
        step_bytes(latent, (4, 64, 8), 16, torch.device("meta"), pretended_cudnn.module)


def test_a_missing_library_is_named_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(KernelUnavailable, match="pip install nvidia-cudnn-frontend, or take CUDNN"):
        make_case([(20, 0)], HALVES).run(PrefillByCudnn(Asking()))


def test_a_graph_without_a_plan_is_named(monkeypatch) -> None:
    def refuse(_: object) -> None:
        raise pretended_cudnn.cudnnGraphNotSupportedError("no engine for it")

    monkeypatch.setattr(pretended_cudnn.PyGraph, "check_support", refuse)
    with pytest.raises(KernelUnavailable, match=r"prefill attention for 4 heads of 32.*no engine"):
        make_case([(20, 0)], HALVES).run(PrefillByCudnn(Asking(), pretended_cudnn.module))


def test_flat_tables_need_a_bound() -> None:
    case = flat(make_case([(20, 0)], HALVES), 64)
    case = replace(case, batch=replace(case.batch, max_context=None))
    with pytest.raises(ValueError, match="flat block tables need max_context"):
        case.run(PrefillByCudnn(Asking(), pretended_cudnn.module))


def test_the_graph_passes_cudnns_own_checks() -> None:
    """Those that need no GPU: sizes, strides and a well-formed combination of what is asked."""
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    shape = cudnn_prefill.Shape(
        rows=4, tokens=1024, heads=28, kv_heads=4, dim=128, blocks=300, block_size=16, pages=64,
        q_strides=(36 * 128, 128), k_strides=(4 * 16 * 128, 16 * 128, 128, 1),
        v_strides=(4 * 16 * 128, 16 * 128, 128, 1), dtype=torch.bfloat16, scale=0.1,
    )  # fmt: skip
    graph, parts = describe(cudnn, shape)
    assert parts.keys() > {"q", "keys", "values", "out"}
    assert graph is not None
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="stride for the last dimension"):
        describe(cudnn, replace(shape, k_strides=(4 * 16 * 256, 16 * 256, 256, 2)))
