"""One row makes a type of KV known: to settings, memory, costs, reference and CPU kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import build, save

from attention_cases import Shape, make_case
from weft.core.config import EngineConfig
from weft.core.kv_types import KV_TYPES
from weft.core.settings import settings_of
from weft.cost.roofline import KV_BYTES
from weft.engine.model import find_model
from weft.kernels import reference
from weft.kernels.kv_storage import KV_DTYPES, SCALED, cache_dtype, row_size


def test_the_setting_offers_every_type():
    declared = settings_of(EngineConfig)["kv_dtype"]
    assert declared.choices == ("auto", *KV_TYPES)
    assert all(name in declared.help for name in KV_TYPES)


@pytest.mark.parametrize(("name", "row"), KV_TYPES.items())
def test_rows_take_what_the_record_says(name, row, tmp_path):
    dtype = cache_dtype(name)
    assert dtype == KV_DTYPES[name]
    assert SCALED[dtype] is row
    assert (dtype.itemsize, KV_BYTES[name]) == (row.code_bytes, row.code_bytes)
    assert row_size(dtype, 64) * dtype.itemsize == 64 * row.code_bytes + row.scale_bytes
    assert float(torch.tensor(row.largest).to(dtype)) == row.largest

    folder = str(save(build("llama-gqa"), tmp_path))
    model = find_model(EngineConfig(model=folder, kv_dtype=name))
    (facts,), (group,) = model.facts.groups, model.rank_spec.kv_groups
    rows = 2 * len(group.layers) * group.num_kv_heads
    assert facts.bytes_per_token == rows * row_size(dtype, group.head_dim) * dtype.itemsize


@pytest.mark.parametrize("name", KV_TYPES)
def test_reference_and_cpu_kernels_serve_every_type(name):
    shape = Shape(cache_dtype=cache_dtype(name))
    case = make_case([(1, 40), (7, 20), (5, 0)], shape)
    found, expected = case.run(), case.run(reference.paged_attention)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = make_case([(1, 40), (7, 20), (5, 0)], replace(shape, cache_dtype=torch.float32))
    apart = (expected - plain.run(reference.paged_attention)).abs().max()
    assert 0 < apart < 0.3  # 8 bits are not 32
