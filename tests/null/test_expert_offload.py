"""Predicted speed with experts on the host: figures by hand."""

from __future__ import annotations

import pytest

from weft.core.config import EngineConfig
from weft.cost.expert_offload import (
    EXCHANGE_S,
    PRODUCT_SHARE,
    READ_SHARE,
    OffloadedModel,
    OffloadRates,
    predict_step,
)
from weft.engine.host_experts import describe_offload, sheet_of

# As Qwen3-30B-A3B in bfloat16: an expert has 3 matrices of 2048 x 768.
EXPERT = 3 * 2048 * 768
MODEL = OffloadedModel(
    layers=40,
    device_layers=8,
    experts=128,
    top_k=8,
    expert_bytes=2 * EXPERT,
    device_expert_bytes=EXPERT,
    expert_flops=2 * EXPERT,
    row_bytes=2 * 2 * 2048,
    device_bytes=3e9,
    kind="bfloat16",
)
RATES = OffloadRates(host_read=200e9, host_flops=4e12, device_read=3e12, link=60e9)


def test_a_step_of_one_row_reads_its_experts() -> None:
    step = predict_step(MODEL, RATES, 1)
    reading = 40 * 8 * 2 * EXPERT / (200e9 * READ_SHARE["bfloat16"])
    products = 40 * 8 * 2 * EXPERT / (4e12 * PRODUCT_SHARE["bfloat16"])
    assert step.host_s == pytest.approx(reading + products)
    assert step.link_s == pytest.approx(40 * (EXCHANGE_S + 2 * 2 * 2048 / 60e9))
    assert step.device_s == pytest.approx((3e9 + 8 * 8 * EXPERT) / 3e12)
    assert step.seconds == step.host_s + step.link_s + step.device_s


def test_rows_share_experts() -> None:
    assert MODEL.active(1) == pytest.approx(8)
    assert MODEL.active(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert MODEL.active(10**6) == pytest.approx(128)
    few, many = predict_step(MODEL, RATES, 8), predict_step(MODEL, RATES, 4096)
    assert few.seconds / 8 > many.seconds / 4096 > 0


def test_unknown_rates_of_the_device_leave_its_part_out() -> None:
    step = predict_step(MODEL, OffloadRates(200e9, 4e12), 1)
    assert step.device_s == 0
    assert step.link_s == 40 * EXCHANGE_S
    config = EngineConfig(max_num_batched_tokens=512)
    words = "; ".join(describe_offload(config, MODEL, OffloadRates(200e9, 4e12), 2**35))
    assert "experts of 40 of 48 layers on the host: 32.00 GiB in bfloat16" in words
    assert "the device's part, of unknown rates, is left out" in words
    assert "a step of 512 takes" in words
    assert "left out" not in "; ".join(describe_offload(config, MODEL, RATES, 2**35))


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_sheets_are_found_by_the_name_of_the_driver(name, sheet) -> None:
    found = sheet_of(name)
    assert (None if found is None else found.name) == sheet
