"""Unpacks the weights of quantised checkpoints: AWQ, GPTQ, compressed-tensors, FP8 and MXFP4.

Each format is a table of the tensors that stand for one weight, and a function from those tensors
to ``Quantized``, ``Float4`` or ``Float8``. Unpacking is exact: no code, zero point or scale is
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError
from weft.kernels.arrays import numpy_dtype, to_torch
from weft.kernels.float4 import BIAS, MOST_EXPONENT, Float4
from weft.kernels.quantized import Quantized
from weft.models.quant_config import FP8_METHODS, StoredWeights

if TYPE_CHECKING:
    from weft.kernels.float8 import Float8

Numbers: TypeAlias = NDArray[Any]
Codes: TypeAlias = NDArray[np.uint8]

WORD = 32  # bits of the integers that values are packed into
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that stands in each 4 bits of a word
FLOATS = frozenset({"F16", "BF16", "F32"})
FP8 = frozenset({"F8_E4M3"})
EXPONENTS = frozenset({"F8_E8M0"})
BYTES = frozenset({"U8"}) | EXPONENTS
INT32, INT8, INT64 = frozenset({"I32"}), frozenset({"I8"}), frozenset({"I64", "I32"})


NOT_A_NUMBER, SATURATED = 0x7F, 0x7E  # bits of E4M3 beside the sign: none, and the largest number

# A scale that maps the largest number of a row to the limit of FP8 leaves few others there: those
# within rounding of it, 1.6 of 4096 normally distributed ones. More than these for each scale, in
# more than so many of a million numbers, have been cut off.
AT_LIMIT = 4
CUT_OFF_PPM = 1000


class ClippedCount:
    """Counts the numbers of FP8 weights that their scales have cut off."""

    def __init__(self) -> None:
        self._over: dict[str, float] = {}  # parts in a million, by the names of weights

    def add(self, name: str, values: Numbers, scales: int) -> None:
        """Check the numbers of a weight that was read, with so many scales."""
        limit = int(((values.view(np.uint8) & 0x7F) == SATURATED).sum())
        ppm = 1e6 * (limit - AT_LIMIT * scales) / values.size
        if ppm > CUT_OFF_PPM:
            self._over[name] = ppm

    def warning(self) -> str | None:
        """Name the weights that have too many; None if none has."""
        if not self._over:
            return None
        worst = max(self._over, key=lambda name: self._over[name])
        return (
            f"the scales of {len(self._over)} FP8 weights cut numbers off, most in '{worst}': "
            f"{self._over[worst] / 1e4:.2g}% are at the limit, which may cost accuracy"
        )


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of a stored weight; ``dtypes`` are those of safetensors that are taken.

    ``also`` is another shape that is taken for the same numbers.
    """

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    optional: bool = False
    also: tuple[int, ...] | None = None


def parts_of(stored: StoredWeights, rows: int, columns: int) -> dict[str, ExpectedTensor]:
    """Return the tensors that make up a weight [rows, columns], by the ends of their names.

    Raises:
        CheckpointError: the format cannot hold a weight of these sizes.
    """
    group = stored.group or columns
    groups, per_word = -(-columns // group), WORD // stored.bits
    mark = "weight_scale_inv" if stored.method == "fp8" else "weight_scale"
    scales = ExpectedTensor((rows, groups), FLOATS)
    match stored.method:
        case "awq":
            _divides(per_word, rows, "rows")
            _divides(group, columns, "columns")
            return {
                "qweight": ExpectedTensor((columns, rows // per_word), INT32),
                "qzeros": ExpectedTensor((groups, rows // per_word), INT32),
                "scales": ExpectedTensor((groups, rows), FLOATS),
            }
        case "gptq":
            _divides(per_word, rows, "rows")
            _divides(per_word, columns, "columns")
            return {
                "qweight": ExpectedTensor((columns // per_word, rows), INT32),
                "qzeros": ExpectedTensor((groups, rows // per_word), INT32),
                "scales": ExpectedTensor((groups, rows), FLOATS),
                "g_idx": ExpectedTensor((columns,), INT32, optional=True),
            }
        case "float-quantized" | "fp8" if stored.block_rows:
            shape = (-(-rows // stored.block_rows), groups)
            scale = ExpectedTensor(shape, FLOATS | EXPONENTS)
            return {"weight": ExpectedTensor((rows, columns), FP8), mark: scale}
        case "mxfp4-pack-quantized":
            return {
                "weight_packed": ExpectedTensor((rows, columns // 2), BYTES),
                "weight_scale": ExpectedTensor((rows, groups), BYTES),
            }
        case "mxfp4":
            return {
                "blocks": ExpectedTensor((rows, groups, group // 2), BYTES),
                "scales": ExpectedTensor((rows, groups), BYTES),
            }
        case "float-quantized" | "fp8":
            one = ExpectedTensor((1,), FLOATS, also=())
            scale = one if stored.one_scale else ExpectedTensor((rows, 1), FLOATS, also=(rows,))
            parts = {"weight": ExpectedTensor((rows, columns), FP8), "weight_scale": scale}
            return parts | ({"input_scale": one} if stored.inputs == "tensor" else {})
        case "pack-quantized":
            parts = {
                "weight_packed": ExpectedTensor((rows, -(-columns // per_word)), INT32),
                "weight_scale": scales,
                "weight_shape": ExpectedTensor((2,), INT64, optional=True),
            }
            zeros = ExpectedTensor((-(-rows // per_word), groups), INT32)
        case _:
            parts = {"weight": ExpectedTensor((rows, columns), INT8), "weight_scale": scales}
            zeros = ExpectedTensor((rows, groups), INT8)
    return parts | ({"weight_zero_point": zeros} if stored.zeros else {})


def _divides(unit: int, size: int, what: str) -> None:
    if size % unit:
        raise CheckpointError(f"{size} {what} are not a multiple of {unit}")


def unpack(
    stored: StoredWeights, tensors: Mapping[str, Numbers], rows: int, columns: int
) -> Quantized | Float4 | Float8:
    """Return the weight [rows, columns] that the tensors of ``parts_of`` hold.

    Raises:
        CheckpointError: inputs are grouped in another order than their own, a shape is stated that
            is not the weight's, or a number of FP8 or a scale of it is none.
    """
    match stored.method:
        case "float-quantized" | "fp8":
            return _float8(stored, tensors, rows)
        case "mxfp4" | "mxfp4-pack-quantized":
            return _float4(tensors, rows, columns)
        case "awq":
            return _awq(stored, tensors, columns)
        case "gptq":
            return _gptq(stored, tensors, columns)
        case "pack-quantized":
            return _packed(stored, tensors, rows, columns)
    return _plain(stored, tensors, columns)


def _awq(stored: StoredWeights, tensors: Mapping[str, Numbers], columns: int) -> Quantized:
    place = np.argsort(AWQ_ORDER)

    def columns_of(packed: Numbers) -> Codes:
        return _flat(_fields(packed, stored.bits)[..., place])

    values, zeros = columns_of(tensors["qweight"]), columns_of(tensors["qzeros"])
    scales = tensors["scales"]
    return _quantized(stored, values.T, scales.T, zeros.T, columns)


def _gptq(stored: StoredWeights, tensors: Mapping[str, Numbers], columns: int) -> Quantized:
    order = tensors.get("g_idx")
    group = stored.group or columns
    if order is not None and not np.array_equal(order, np.arange(columns) // group):
        raise CheckpointError("inputs are grouped out of order (desc_act), which is not supported")
    words = _fields(tensors["qweight"], stored.bits).swapaxes(1, 2)  # [n, 32 / bits, rows]
    values = words.reshape(-1, words.shape[2])
    zeros = _flat(_fields(tensors["qzeros"], stored.bits)) + np.uint8(stored.zero_offset)
    zeros &= np.uint8(2**stored.bits - 1)
    return _quantized(stored, values.T, tensors["scales"].T, zeros.T, columns)


def _packed(
    stored: StoredWeights, tensors: Mapping[str, Numbers], rows: int, columns: int
) -> Quantized:
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [rows, columns]:
        raise CheckpointError(f"the packed weight states the shape {shape.tolist()}")
    values = _flat(_fields(tensors["weight_packed"], stored.bits))[:, :columns]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _flat(_fields(zeros.T, stored.bits))[:, :rows].T
    return _quantized(stored, values, tensors["weight_scale"], zeros, columns)


def _plain(stored: StoredWeights, tensors: Mapping[str, Numbers], columns: int) -> Quantized:
    """Signed bytes: flipping the top bit adds 128."""
    zeros = tensors.get("weight_zero_point")
    return _quantized(
        stored,
        tensors["weight"].view(np.uint8) ^ np.uint8(128),
        tensors["weight_scale"],
        None if zeros is None else zeros.view(np.uint8) ^ np.uint8(128),
        columns,
    )


def _float4(tensors: Mapping[str, Numbers], rows: int, columns: int) -> Float4:
    """Two numbers a byte, the first one in the low bits."""
    packed = tensors["blocks" if "blocks" in tensors else "weight_packed"].reshape(rows, -1)
    scales = tensors["scales" if "scales" in tensors else "weight_scale"]
    if int(scales.max(initial=0)) > MOST_EXPONENT:
        raise CheckpointError("a scale of MXFP4 is too large or not a number")
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(rows, -1)
    return Float4(codes[:, :columns], np.ascontiguousarray(scales))


def float8_scales(stored: StoredWeights, tensors: Mapping[str, Numbers], rows: int) -> Numbers:
    """Return the scales of an FP8 weight in float32: [rows], or [rows, groups of inputs].

    Raises:
        CheckpointError: see ``unpack``.
    """
    wrong = int(((tensors["weight"].view(np.uint8) & 0x7F) == NOT_A_NUMBER).sum())
    if wrong:
        raise CheckpointError(f"{wrong} numbers are NaN: they did not fit into FP8")
    name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
    scales = tensors[name].astype(np.float32)
    if tensors[name].dtype == np.uint8:  # UE8M0: exponents, of which the largest stands for NaN
        scales = np.where(scales == 255, np.nan, np.exp2(scales - BIAS)).astype(np.float32)
    given = [scales]
    if stored.inputs == "tensor":
        given.append(tensors["input_scale"].astype(np.float32).reshape(1))
    for scale in given:
        if not (np.isfinite(scale) & (scale >= 0)).all() or not scale.any():
            raise CheckpointError("a scale of FP8 is negative, zero or not finite")
    if stored.block_rows:
        return np.repeat(scales, stored.block_rows, 0)[:rows]
    return np.ascontiguousarray(np.broadcast_to(scales.reshape(-1), rows))


def _float8(stored: StoredWeights, tensors: Mapping[str, Numbers], rows: int) -> Float8:
    from weft.kernels.float8 import Float8  # no kernel of a CPU takes it

    scales = to_torch(float8_scales(stored, tensors, rows))
    inputs: Any = stored.inputs
    if inputs == "tensor":
        inputs = to_torch(np.array(tensors["input_scale"].astype(np.float32).reshape(())))
    return Float8(to_torch(tensors["weight"]), scales, inputs, group=stored.group)


@cache
def _e4m3() -> Numbers:
    """The number of each byte in E4M3, in float32."""
    numbers = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn"))
    return numbers.astype(np.float32)


def dequantize(
    stored: StoredWeights, tensors: Mapping[str, Numbers], rows: int, columns: int
) -> Numbers:
    """Return the weight that the tensors of ``parts_of`` stand for, in float32 and without torch.

    Raises:
        CheckpointError: see ``unpack``.
    """
    if stored.method not in FP8_METHODS:
        weight = unpack(stored, tensors, rows, columns)
        assert isinstance(weight, Quantized | Float4)
        return weight.dequantize()
    scales = float8_scales(stored, tensors, rows)
    numbers = _e4m3()[tensors["weight"].view(np.uint8)]
    if scales.ndim == 1:
        numbers *= scales[:, None]
        return numbers
    group = stored.group or columns
    whole = columns // group * group
    cut = numbers[:, :whole].reshape(rows, -1, group)
    cut *= scales[:, : columns // group, None]
    numbers[:, :whole] = cut.reshape(rows, whole)
    numbers[:, whole:] *= scales[:, -1:]
    return numbers


def _fields(packed: Numbers, bits: int) -> Codes:
    """Return the values of words [..., n] as uint8 [..., n, 32 / bits], lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.int32)
    return ((packed[..., None] >> shifts) & np.int32(2**bits - 1)).astype(np.uint8)


def _flat(fields: Codes) -> Codes:
    """Return [m, n, k] as [m, n * k]."""
    return fields.reshape(len(fields), -1)


def _quantized(
    stored: StoredWeights, values: Codes, scales: Numbers, zeros: Codes | None, columns: int
) -> Quantized:
    if zeros is not None and (zeros == 2 ** (stored.bits - 1)).all():
        zeros = None
    return Quantized(
        np.ascontiguousarray(values),
        np.ascontiguousarray(scales),
        None if zeros is None else np.ascontiguousarray(zeros),
        stored.bits,
        stored.group or columns,
    )
