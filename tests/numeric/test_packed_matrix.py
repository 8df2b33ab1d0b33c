"""Packed matrices in memory of others: the same products, bit for bit, and no write to it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.kernels.arrays import numpy_dtype
from weft.kernels.cpu import _native, attention
from weft.kernels.cpu.matrix import CpuMatrix, gather, linear
from weft.kernels.quantized import Quantized
from weft.kernels.storage import Storage

KINDS = ["float32", "bfloat16", "int8", "int4", "int4 with zeros"]

# Of `layout_version` 1. If one changes, so has the layout: raise the version, then record them.
DIGESTS = {
    "float32": "255d949070",
    "bfloat16": "30df95fe20",
    "int8": "b12441bba8",
    "int4": "dc895dda8a",
    "int4 with zeros": "badb15db23",
}


def numbers(*shape: int) -> NDArray[np.float32]:
    """Small multiples of an eighth, which every format but int4 holds as they are."""
    count = np.arange(int(np.prod(shape)))
    return ((count * 7919 % 251 - 125).astype(np.float32) / 8).reshape(shape)


def packed(kind: str, *, gated: bool = False, shape: tuple[int, int] = (130, 96)) -> CpuMatrix:
    weight, dtype = numbers(*shape), "float32" if kind == "float32" else "bfloat16"
    if kind in ("float32", "bfloat16"):
        return CpuMatrix(weight.astype(numpy_dtype(dtype)), gated=gated)
    storage = Storage(8, None) if kind == "int8" else Storage(4, 32, zeros="zeros" in kind)
    matrix = CpuMatrix.quantised(shape, dtype, storage, gated=gated)
    if storage.zeros:
        groups = shape[1] // 32
        values = (np.arange(shape[0] * shape[1]) % 16).astype(np.uint8).reshape(shape)
        zeros = (np.arange(shape[0] * groups) % 16).astype(np.uint8).reshape(-1, groups)
        scales = numbers(shape[0], groups).astype(numpy_dtype("bfloat16"))
        matrix.write(0, Quantized(values, scales, zeros, 4, 32))
    else:
        matrix.write(0, weight)
    return matrix


def aligned_copy(matrix: CpuMatrix) -> np.ndarray:
    """The packed bytes at another address, which is a multiple of 64."""
    room = np.zeros(matrix.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + matrix.nbytes]
    copy[:] = np.frombuffer(matrix.memory, np.uint8)
    return copy


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_matrix_computes_the_same_bits(kind, gated):
    matrix = packed(kind, gated=gated)
    found = CpuMatrix.mapped(matrix.form, memoryview(aligned_copy(matrix)))
    assert (found.shape, found.dtype, found.gated) == (matrix.shape, matrix.dtype, gated)
    assert (found.form, found.nbytes) == (matrix.form, matrix.nbytes)
    x = numbers(5, 96).astype(numpy_dtype(matrix.dtype))
    assert linear(x, found, None).tobytes() == linear(x, matrix, None).tobytes()
    every = np.arange(130)
    assert gather(found, every).tobytes() == gather(matrix, every).tobytes()


@pytest.mark.parametrize("isa", attention.isas())
def test_the_layout_is_that_of_its_version(isa):
    assert _native.layout_version == 1
    attention.use_isa(isa)
    assert {kind: digest(kind) for kind in KINDS} == DIGESTS


def digest(kind: str) -> str:
    found = blake2b(digest_size=5)
    for gated in (False, True):
        found.update(packed(kind, gated=gated).memory)
    return found.hexdigest()


def test_a_mapped_matrix_keeps_its_memory_and_is_not_written():
    matrix = packed("int8")
    copy = aligned_copy(matrix)
    kept = weakref.ref(copy.base)
    found = CpuMatrix.mapped(matrix.form, memoryview(copy))
    del copy
    gc.collect()
    assert kept() is not None
    with pytest.raises(ValueError, match="cannot be written"):
        found.write(0, numbers(130, 96))
    native = found.native
    del found
    gc.collect()
    assert kept() is not None
    del native
    gc.collect()
    assert kept() is None


def test_memory_that_does_not_fit_is_refused():
    matrix = packed("bfloat16")
    memory = memoryview(aligned_copy(matrix))
    with pytest.raises(ValueError, match="has 36864 bytes, not 36800"):
        CpuMatrix.mapped(matrix.form, memory[:-64])
    with pytest.raises(ValueError, match="aligned"):
        CpuMatrix.mapped(replace(matrix.form, shape=(130, 95)), memory[2:])
    for wrong in (
        {"shape": (-1, 96)},
        {"shape": (2**40, 2**40)},
        {"shape": (131, 96), "gated": True},
        {"format": "int8", "group": 24},
        {"dtype": "float32"},
    ):
        with pytest.raises(ValueError, match=r"matrix|activations"):
            CpuMatrix.mapped(replace(matrix.form, **wrong), memory)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_are_packed_as_one(dtype, gated):
    whole = numbers(130, 33).astype(numpy_dtype(dtype))
    wide = np.zeros((40, 50), whole.dtype)
    wide[:, :33] = whole[70:110]
    pieces = [whole[:1], whole[1:70], wide[:, :33], whole[110:]]
    found, expected = CpuMatrix(pieces, gated=gated), CpuMatrix(whole, gated=gated)
    assert found.form == expected.form
    assert bytes(found.memory) == bytes(expected.memory)


def test_pieces_that_do_not_fit_together_are_refused():
    some = numbers(4, 8)
    for pieces in ([some, numbers(4, 9)], [some, some.astype(numpy_dtype("bfloat16"))], []):
        with pytest.raises(ValueError, match="piece"):
            CpuMatrix(pieces)
    with pytest.raises(ValueError, match="cannot pack"):
        CpuMatrix([some, some.astype(np.float64)])
    with pytest.raises(ValueError, match="even"):
        CpuMatrix([some, some[:1]], gated=True)
