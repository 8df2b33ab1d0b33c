"""Small geometries, and contents of frames for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.attend import frames
from weft.attend.geometry import Geometry, GroupGeometry, LayerGeometry
from weft.kernels.cpu.courier import ClaimedJobs


def joined(parts: tuple[frames.Part, ...]) -> memoryview:
    return memoryview(b"".join(parts))


def numbers(count: int, kind: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, count).astype(kind)


def content(rows: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)


def jobs(rows: int, layer: int, begins: bool, widths: list[int], size: int) -> ClaimedJobs:
    tables = tuple(numbers(rows * w, "int32", w).reshape(rows, w) for w in widths)
    return ClaimedJobs(
        layer, numbers(rows, "int32", 1), numbers(rows, "uint64", 2),
        numbers(rows, "int32", 3) if begins else None, tables if begins else (),
        content(rows, 2 * size, 4), content(rows, size, 5), content(rows, size, 6),
    )  # fmt: skip


def geometry(**more: Any) -> Geometry:
    given = {
        "engine": "e", "isa": "avx2", "dtype": "float32", "kv_dtype": "float32", "block_size": 8,
        "slots": 4, "table_width": 6, "timeout_s": 10.0,
        "groups": (GroupGeometry(1, 2, 16, 12, 4 * 2 * 8 * 16),),
        "layers": (LayerGeometry(0, 0, 4, 0.25, None, None, True, (0.5, -1.0, 2.0, 0.0)),),
    }  # fmt: skip
    return Geometry(**{**given, **more})
