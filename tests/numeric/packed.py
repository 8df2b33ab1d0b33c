"""A model folder, some weights as if they were its, and a cache folder for them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from weft.kernels.arrays import numpy_dtype
from weft.kernels.cpu.matrix import CpuMatrix
from weft.models.packed_cache import PackedCache, PackedKey, identity_of


def some_weights(seed: int = 1) -> dict[str, object]:
    """A matrix, one for each of three experts, arrays, and an empty one."""
    random = np.random.default_rng(seed)
    half = numpy_dtype("bfloat16")
    experts = [CpuMatrix(random.standard_normal((64, 32), np.float32)) for _ in range(3)]
    return {
        "embed": random.standard_normal((700, 2000), np.float32).astype(half),
        "layers.0.qkv": CpuMatrix(random.standard_normal((130, 33), np.float32).astype(half)),
        "layers.0.expert_down": tuple(experts),
        "norm": random.standard_normal(5, np.float32),
        "flat": np.zeros((0,), np.float32),
    }


def bytes_of(weight: object) -> list[bytes]:
    if isinstance(weight, tuple):
        return [bytes(part.memory) for part in weight]
    if isinstance(weight, np.ndarray):
        return [weight.tobytes()]
    return [bytes(weight.memory)]


def same(found: dict[str, object] | None, expected: dict[str, object]) -> bool:
    if found is None:
        return False
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert type(found[name]) is type(weight)
        assert bytes_of(found[name]) == bytes_of(weight)
        if isinstance(weight, np.ndarray):
            assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
    return True


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")
    return folder


def key_of(model: Path, **settings: str) -> PackedKey:
    identity = identity_of([model / "model.safetensors"], [model / "config.json"])
    return PackedKey(model, identity, {"dtype": "bfloat16", **settings})


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(64 * 2**20, tmp_path / "cache" / "packed")


def find(cache: PackedCache, key: PackedKey, **how: bool) -> dict[str, object] | None:
    return cache.find(key, CpuMatrix.mapped, **how)


def file_of(cache: PackedCache, key: PackedKey) -> Path:
    return cache.folder / key.file_name


def rewrite(file: Path) -> None:
    """Change the content, keeping size, inode and the time of the last change of content."""
    before = file.stat()
    with file.open("r+b") as open_file:
        open_file.write(b"1")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
