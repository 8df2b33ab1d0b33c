"""Rates of a data sheet, for an engine whose own steps were not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.blend.density import Rates
from weft.core.config import DTYPE_BYTES
from weft.core.kv_types import KV_TYPES
from weft.cost.hardware import Hardware
from weft.cost.shape import ModelShape

SHEET_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def sheet_rates(shape: ModelShape, sheet: Hardware, engine: Mapping[str, Any]) -> Rates:
    """The rates of a data sheet, for the arithmetic and the KV of an engine.

    Integer weights are multiplied as floats; those in FP8 as FP8, if the device has it.

    Args:
        engine: what is known of it, by the names of ``ServedModel``; a server that says nothing is
            taken to have the sheet's usual dtype and two bytes for a value of KV.

    Raises:
        ConfigError: the device does not compute in the engine's dtype.
    """
    known = engine.get("dtype")
    if known not in SHEET_DTYPES:
        return Rates.of(shape, sheet)
    dtype, kept = SHEET_DTYPES[known], engine.get("kv_dtype") or known
    weights = str(engine.get("weights", ""))
    if "fp8" in sheet.flops and "fp8" in weights and "activations in floats" not in weights:
        dtype = "fp8"
    row = KV_TYPES.get(kept)
    values = (
        DTYPE_BYTES.get(kept, 2)
        if row is None
        else (row.code_bytes + row.scale_bytes / shape.head_size)
    )
    return Rates.of(shape, sheet, dtype, values)
