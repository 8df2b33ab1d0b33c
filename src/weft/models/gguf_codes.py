"""The blocks of GGUF's quantised types as codes with scales, whose numbers are those of ``gguf``.

The layouts are those of ggml-quants.h; what a block means, ``gguf.quants`` defines. Types of two
and three bits become codes of four, the smallest that kernels have. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import numpy_dtype
from weft.kernels.quantized import Quantized
from weft.kernels.storage import Storage

Bytes = NDArray[np.uint8]
_FOUR = np.uint8(4)


@dataclass(frozen=True)
class BlockForm:
    """How a type is kept: its storage, and a function from blocks [rows, blocks, bytes]."""

    storage: Storage
    unpack: Callable[[Bytes], Quantized]


def unpack(kind: str, data: Bytes) -> Quantized:
    """Return the weight that rows of blocks are.

    Args:
        kind: a key of ``FORMS``.
        data: [rows, bytes of all blocks of a row].
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return FORMS[kind].unpack(np.ascontiguousarray(data).reshape(len(data), -1, size))


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at a place of each block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Codes of 4 bits: of each ``run`` bytes first the low halves, then the high ones."""
    cut = packed.reshape(*packed.shape[:2], -1, 1, run)
    return _rows(np.concatenate((cut & 15, cut >> 4), -2))


def _fields(packed: Bytes, run: int, bits: int) -> Bytes:
    """Codes of 1 or 2 bits: of each ``run`` bytes first the lowest of all, and so on."""
    cut = packed.reshape(*packed.shape[:2], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return _rows(cut >> shifts & np.uint8(2**bits - 1))


def _rows(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers.reshape(len(numbers), -1)


def _plain(values: Bytes, scales: NDArray[Any], bits: int, **more: Any) -> Quantized:
    return Quantized(values, scales, None, bits, 32, **more)


def _q4_0(blocks: Bytes) -> Quantized:
    return _plain(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0), 4)


def _q4_1(blocks: Bytes) -> Quantized:
    values = _nibbles(blocks[..., 4:], 16)
    return _plain(values, _halves(blocks, 0), 4, minimums=-_halves(blocks, 2))


def _fifth(blocks: Bytes, at: int) -> Bytes:
    """The codes of Q5_0 and Q5_1: 32 high bits, then the low ones."""
    high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return _nibbles(blocks[..., at + 4 :], 16) | _rows(high) << _FOUR


def _q5_0(blocks: Bytes) -> Quantized:
    return _plain(_fifth(blocks, 2), _halves(blocks, 0), 5)


def _q5_1(blocks: Bytes) -> Quantized:
    return _plain(_fifth(blocks, 4), _halves(blocks, 0), 5, minimums=-_halves(blocks, 2))


def _q8_0(blocks: Bytes) -> Quantized:
    return _plain(_rows(blocks[..., 2:]) ^ np.uint8(128), _halves(blocks, 0), 8)


def _nested(
    values: Bytes, coarse: NDArray[Any], steps: NDArray[Any], bits: int, group: int, **more: Any
) -> Quantized:
    return Quantized(values, coarse, None, bits, group, steps=_rows(steps).astype(np.int8), **more)


def _q2_k(blocks: Bytes) -> Quantized:
    more = {"minimums": _halves(blocks, 82), "minimum_steps": _rows(blocks[..., :16] >> 4)}
    more["minimum_steps"] = more["minimum_steps"].astype(np.int8)
    values = _fields(blocks[..., 16:80], 32, 2)
    return _nested(values, _halves(blocks, 80), blocks[..., :16] & 15, 4, 16, **more)


def _q3_k(blocks: Bytes) -> Quantized:
    """Codes of 0 to 7, of which 4 stands for 0; the high bit is that of ``hmask``."""
    high, low = _fields(blocks[..., :32], 32, 1), _fields(blocks[..., 32:96], 32, 2)
    packed = blocks[..., 96:108]
    first = packed[..., :8]
    steps = np.concatenate((first & 15, first >> 4), -1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    steps = steps | (packed[..., None, 8:] >> shifts & 3).reshape(steps.shape) << 4
    centred = steps.astype(np.int8) - 32
    return _nested((low | high << np.uint8(2)) + _FOUR, _halves(blocks, 108), centred, 4, 16)


def _scales_of_k(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and minimums of 6 bits each, from 12 bytes."""
    low, minimum, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    steps = np.concatenate((low & 63, rest & 15 | low >> 2 & 48), -1)
    return steps, np.concatenate((minimum & 63, rest >> 4 | minimum >> 2 & 48), -1)


def _with_minimums(blocks: Bytes, values: Bytes, bits: int) -> Quantized:
    steps, minimums = _scales_of_k(blocks[..., 4:16])
    more = {"minimums": _halves(blocks, 2), "minimum_steps": _rows(minimums).astype(np.int8)}
    return _nested(values, _halves(blocks, 0), steps, bits, 32, **more)


def _q4_k(blocks: Bytes) -> Quantized:
    return _with_minimums(blocks, _nibbles(blocks[..., 16:], 32), 4)


def _q5_k(blocks: Bytes) -> Quantized:
    high = _fields(blocks[..., 16:48], 32, 1)
    return _with_minimums(blocks, _nibbles(blocks[..., 48:], 32) | high << _FOUR, 5)


def _q6_k(blocks: Bytes) -> Quantized:
    values = _nibbles(blocks[..., :128], 64) | _fields(blocks[..., 128:192], 32, 2) << _FOUR
    return _nested(values, _halves(blocks, 208), blocks[..., 192:208].view(np.int8), 6, 16)


def _iq4_nl(blocks: Bytes) -> Quantized:
    return _plain(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0), 4, table="nl4")


def _iq4_xs(blocks: Bytes) -> Quantized:
    low, high = blocks[..., 4:8, None], blocks[..., 2:4, None]
    steps = low >> np.array([0, 4], np.uint8) & 15
    tops = high >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    shape = (*blocks.shape[:2], 8)
    centred = (steps.reshape(shape) | tops.reshape(shape) << 4).astype(np.int8) - 32
    values = _nibbles(blocks[..., 8:], 16)
    return _nested(values, _halves(blocks, 0), centred, 4, 32, table="nl4")


def _mxfp4(blocks: Bytes) -> Quantized:
    """Twice the numbers of E2M1, and halves of the powers of two, which bfloat16 holds."""
    scales = np.ldexp(np.float32(0.5), blocks[..., 0].astype(np.int32) - 127)
    values = _nibbles(blocks[..., 1:], 16)
    return _plain(values, scales.astype(numpy_dtype("bfloat16")), 4, table="mx4")


_K4, _K5 = (Storage(bits, 32, "float16", minimums=True, nested=True) for bits in (4, 5))
_K6 = Storage(6, 16, "float16", nested=True)

FORMS = {
    "Q4_0": BlockForm(Storage(4, 32, "float16"), _q4_0),
    "Q4_1": BlockForm(Storage(4, 32, "float16", minimums=True), _q4_1),
    "Q5_0": BlockForm(Storage(5, 32, "float16"), _q5_0),
    "Q5_1": BlockForm(Storage(5, 32, "float16", minimums=True), _q5_1),
    "Q8_0": BlockForm(Storage(8, 32, "float16"), _q8_0),
    "Q2_K": BlockForm(Storage(4, 16, "float16", minimums=True, nested=True), _q2_k),
    "Q3_K": BlockForm(Storage(4, 16, "float16", nested=True), _q3_k),
    "Q4_K": BlockForm(_K4, _q4_k),
    "Q5_K": BlockForm(_K5, _q5_k),
    "Q6_K": BlockForm(_K6, _q6_k),
    "IQ4_NL": BlockForm(Storage(4, 32, "float16", format="nl4"), _iq4_nl),
    "IQ4_XS": BlockForm(Storage(4, 32, "float16", format="nl4", nested=True), _iq4_xs),
    "MXFP4": BlockForm(Storage(4, 32, "bfloat16", format="mx4"), _mxfp4),
}
WIDENED = ("Q2_K", "Q3_K")  # kept in more bits than they are stored in
