"""Predictions of published measurements do not get worse; see benchmarks/results/README.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def found(predictions):
    """Figures and median absolute errors by (source, quantity, predictor)."""
    rows = predictions.summary(predictions.all_checks())
    return {(row["source"], row["quantity"], row["predictor"]): row for row in rows}


@pytest.mark.parametrize(
    ("source", "quantity", "figures", "most"),
    [
        ("rvLLM 7.2", "throughput", 6, 0.20),
        ("rvLLM 7.4", "TTFT", 3, 0.45),
        ("Blink B.1", "TPOT", 16, 0.29),
        ("BlendServe 3", "throughput", 4, 0.35),
        ("extra, vllm", "TPOT", 200, 0.09),
        ("extra, trtllm", "TPOT", 400, 0.12),
        ("extra, sglang", "TPOT", 130, 0.18),
        ("extra, vllm", "throughput", 200, 0.10),
    ],
)
def test_kernels_predict_published_figures(found, source, quantity, figures, most):
    row = found[source, quantity, "kernels"]
    assert row["figures"] >= figures
    assert row["median_abs"] <= most


def test_the_roofline_is_faster_than_what_is_published(found):
    signs = {"TPOT": -1, "throughput": 1}
    bounds = [row for row in found.values() if row["predictor"] == "roofline"]
    checked = [row["median"] * signs[row["quantity"]] for row in bounds if row["quantity"] in signs]
    assert len(checked) == 9
    assert min(checked) > 0
