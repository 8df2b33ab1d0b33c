"""Predictions of published measurements do not get worse; see benchmarks/results/README.md."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from depth import deep

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def predictions():
    """The script as a module; it imports its neighbour by name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("predictions", BENCHMARKS / "predictions.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["predictions"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("predictions", None)


def rows_of(predictions, checks):
    """Figures and median absolute errors by (source, quantity, predictor)."""
    rows = predictions.summary([check for check in checks if check.published > 0])
    return {(row["source"], row["quantity"], row["predictor"]): row for row in rows}


@pytest.fixture(scope="module")
def some(predictions):
    """Two papers, and one model of the extra."""
    published = json.loads((BENCHMARKS / "published.json").read_text("utf-8"))
    one = dict(list(predictions.SILICON_MODELS.items())[:1])
    checks = [predictions.rvllm(published), predictions.blendserve(published)]
    return rows_of(predictions, itertools.chain(*checks, predictions.silicon(one)))


@pytest.fixture(scope="module")
def found(predictions):
    """All that is published."""
    return rows_of(predictions, predictions.all_checks())


def assert_near(rows, source, quantity, figures, most):
    row = rows[source, quantity, "kernels"]
    assert row["figures"] >= figures
    assert row["median_abs"] <= most


@pytest.mark.parametrize(
    ("source", "quantity", "figures", "most"),
    [
        ("rvLLM 7.2", "throughput", 6, 0.20),
        ("rvLLM 7.4", "TTFT", 3, 0.45),
        ("BlendServe 3", "throughput", 4, 0.35),
        ("extra, trtllm", "TPOT", 150, 0.08),
        ("extra, sglang", "throughput", 40, 0.14),
    ],
)
def test_kernels_predict_some_published_figures(some, source, quantity, figures, most):
    assert_near(some, source, quantity, figures, most)


@deep
@pytest.mark.parametrize(
    ("source", "quantity", "figures", "most"),
    [
        ("Blink B.1", "TPOT", 16, 0.29),
        ("extra, vllm", "TPOT", 200, 0.09),
        ("extra, trtllm", "TPOT", 400, 0.12),
        ("extra, sglang", "TPOT", 130, 0.18),
        ("extra, vllm", "throughput", 200, 0.10),
    ],
)
def test_kernels_predict_published_figures(found, source, quantity, figures, most):
    assert_near(found, source, quantity, figures, most)


def assert_faster(rows, count):
    """The roofline is faster than what is published."""
    signs = {"TPOT": -1, "throughput": 1}
    bounds = [row for row in rows.values() if row["predictor"] == "roofline"]
    checked = [row["median"] * signs[row["quantity"]] for row in bounds if row["quantity"] in signs]
    assert len(checked) == count
    assert min(checked) > 0


def test_the_roofline_is_faster_than_some_of_what_is_published(some):
    assert_faster(some, 6)


@deep
def test_the_roofline_is_faster_than_what_is_published(found):
    assert_faster(found, 9)
