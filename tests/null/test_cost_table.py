"""Costs from measured kernels: at table points, between them, and beyond them."""

from __future__ import annotations

import importlib.util

import pytest

from weft.core.errors import ConfigError
from weft.cost.hardware import hardware
from weft.cost.measured_tables import MeasuredCurve, Surface, Tables
from weft.cost.roofline import NO_OVERHEAD
from weft.cost.shape import model_shape
from weft.cost.table import SYSTEMS, MeasuredCosts
from weft.cost.work import Work


def measured(model: str, machine: str, dtype: str = "bf16", tp: int = 1) -> MeasuredCosts:
    return MeasuredCosts(model_shape(model), hardware(machine), dtype, tp=tp, overhead=NO_OVERHEAD)


def decodes(number: int, context: int) -> Work:
    work = Work()
    for _ in range(number):
        work.add(context - 1, 1)
    return work


def prompts(number: int, length: int) -> Work:
    work = Work()
    for _ in range(number):
        work.add(0, length)
    return work


def test_lines_are_power_laws_between_points_and_grow_in_proportion_beyond():
    line = MeasuredCurve({4: 2.0, 16: 4.0})
    assert line.at(8) == pytest.approx(2 * 2**0.5)
    assert line.at(64) == pytest.approx(16.0)
    assert line.at(1) == pytest.approx(2.0)
    surface = Surface({(x, y): 1e-6 * x * y for x in (2, 8, 32) for y in (10, 1000) if x * y < 9e3})
    for x, y in ((2, 10), (4, 77), (32, 1000), (100, 5000)):
        assert surface.at(x, y) == pytest.approx(1e-6 * x * y)


def test_measured_points_come_out_as_they_went_in():
    """Llama-3.1-8B on an A100: 32 decodes of 1024 tokens is a point of the table."""
    tables = Tables("a100_sxm")
    ((_, point),) = tables.read(
        "attention",
        "generation_attention_perf.parquet",
        ("batch_size",),
        batch_size=32,
        step=1023,
        num_heads=32,
        num_key_value_heads=8,
    )
    terms = measured("llama-3.1-8b", "a100").terms(decodes(32, 1024))
    assert terms.decode_attention == pytest.approx(32 * point)
    products = {
        (n, k): seconds
        for n, k, seconds in tables.read("gemm", "gemm_perf.parquet", ("n", "k"), m=32)
    }
    parts = products[6144, 4096] + products[4096, 4096]
    assert terms.dense > 32 * parts  # and the MLP's, whose width lies between measured ones
    assert terms.head > products[65536, 4096]


@pytest.mark.parametrize("machine", ["a100", "h100", "h200", "l40s"])
@pytest.mark.parametrize("work", [decodes(1, 500), decodes(64, 2000), prompts(1, 2048)])
def test_no_kernel_beats_the_roofline(machine, work):
    cost = measured("llama-3.1-8b", machine)
    bound = cost.roofline.terms(work)
    terms = cost.terms(work)
    for name in ("dense", "prefill_attention", "decode_attention"):
        assert getattr(terms, name) >= 0.97 * getattr(bound, name), name  # clocks may exceed sheets
    assert terms.total < 4 * bound.total + 2e-3


def test_more_kv_heads_than_measured_are_more_requests_of_fewer():
    many = measured("llama-2-7b", "a100").terms(decodes(8, 2048)).decode_attention
    few = measured("llama-3.1-8b", "a100").terms(decodes(8, 2048)).decode_attention
    assert 3 < many / few < 5  # four times the KV


def test_tensor_parallelism_pays_for_collectives():
    one, two = (measured("llama-3.1-70b", "h100", tp=tp).terms(prompts(1, 2048)) for tp in (1, 2))
    assert two.dense < 0.6 * one.dense
    assert one.collectives == 0 < two.collectives
    pcie = measured("llama-2-70b", "omniserve-a100", tp=2)
    assert pcie.terms(prompts(1, 64)).collectives == pytest.approx(
        pcie.roofline.terms(prompts(1, 64)).collectives
    )


def test_experts_cost_what_was_measured():
    cost = measured("qwen3-30b-a3b", "h100")
    one, many = cost.terms(decodes(1, 100)).dense, cost.terms(decodes(64, 100)).dense
    assert one < many / 3
    assert many > cost.roofline.terms(decodes(64, 100)).dense


def test_what_was_not_measured_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no measured tables for a10g; but for: a100"):
        measured("llama-3.1-8b", "a10g")
    with pytest.raises(ConfigError, match="in int8"):
        measured("llama-3.1-8b", "a100", "int8")
    with pytest.raises(ConfigError, match=r"gemm on a100_sxm with gemm_dtype fp8|does not compute"):
        measured("llama-3.1-8b", "a100", "fp8")
    with pytest.raises(ConfigError, match="sliding window"):
        measured("mistral-7b", "a100")
    with pytest.raises(ConfigError, match="KV heads cannot be split"):
        measured("qwen2.5-7b", "h100", tp=8)
    with pytest.raises(ConfigError, match="no machine 'h100'"):
        Tables("h100")
    with pytest.raises(ConfigError, match="unknown engine"):
        Tables("h100_sxm", "weft")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[sim\]'"):
        Tables("h100_sxm")


def test_every_measured_machine_is_in_the_catalogue():
    for name in SYSTEMS:
        assert hardware(name).name == name
