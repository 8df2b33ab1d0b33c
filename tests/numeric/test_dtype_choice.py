"""``dtype: auto``: what a checkpoint is computed in, on CPUs with and without bfloat16."""

from __future__ import annotations

import pytest

from weft.core.config import EngineConfig
from weft.engine import model


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("kernels", "slow_dtype"), [("auto", "bfloat16"), ("reference", "float32")]
)
def test_native_kernels_keep_bfloat16_on_any_cpu(monkeypatch, fast, kernels, slow_dtype) -> None:
    monkeypatch.setattr(model, "has_fast_bfloat16", lambda: fast)
    found = model.find_model(EngineConfig(model="builtin", device="cpu", kernels=kernels))
    assert found.spec.dtype == "bfloat16"
    assert found.dtype == ("bfloat16" if fast else slow_dtype)
    assert bool(found.ops.isa) == (kernels == "auto")
