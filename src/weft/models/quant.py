"""Unpacks the weights of quantised checkpoints: AWQ, GPTQ, compressed-tensors and FP8.

Each format is a table of the tensors that stand for one weight, and a function from those tensors
to ``Quantized`` or ``Float8``. Unpacking is exact: no code, zero point or scale is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import CheckpointError
from weft.kernels.float8 import NOT_A_NUMBER, Float8
from weft.kernels.quantized import Quantized
from weft.models.quant_config import StoredWeights

WORD = 32  # bits of the integers that values are packed into
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that stands in each 4 bits of a word
FLOATS = frozenset({"F16", "BF16", "F32"})
FP8 = frozenset({"F8_E4M3"})
INT32, INT8, INT64 = frozenset({"I32"}), frozenset({"I8"}), frozenset({"I64", "I32"})


# A scale that maps the largest number of a row to the limit of FP8 leaves few others there: those
# within rounding of it, 1.6 of 4096 normally distributed ones. More than these for each scale, in
# more than so many of a million numbers, have been cut off.
AT_LIMIT = 4
CUT_OFF_PPM = 1000


class ClippedCount:
    """Counts the numbers of FP8 weights that their scales have cut off."""

    def __init__(self) -> None:
        self._over: dict[str, float] = {}  # parts in a million, by the names of weights

    def add(self, name: str, weight: Float8) -> None:
        """Check a weight that was read."""
        extra = weight.saturated() - AT_LIMIT * int(torch.unique(weight.scales).numel())
        ppm = 1e6 * extra / weight.values.numel()
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
    stored: StoredWeights, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> Quantized | Float8:
    """Return the weight [rows, columns] that the tensors of ``parts_of`` hold.

    Raises:
        CheckpointError: inputs are grouped in another order than their own, a shape is stated that
            is not the weight's, or a number of FP8 or a scale of it is none.
    """
    match stored.method:
        case "float-quantized" | "fp8":
            return _float8(stored, tensors, rows)
        case "awq":
            return _awq(stored, tensors, columns)
        case "gptq":
            return _gptq(stored, tensors, columns)
        case "pack-quantized":
            return _packed(stored, tensors, rows, columns)
    return _plain(stored, tensors, columns)


def _awq(stored: StoredWeights, tensors: Mapping[str, Tensor], columns: int) -> Quantized:
    place = torch.tensor(AWQ_ORDER).argsort()

    def columns_of(packed: Tensor) -> Tensor:
        return _fields(packed, stored.bits)[..., place].flatten(1)

    values, zeros = columns_of(tensors["qweight"]), columns_of(tensors["qzeros"])
    scales = tensors["scales"]
    return _quantized(stored, values.T, scales.T, zeros.T, columns)


def _gptq(stored: StoredWeights, tensors: Mapping[str, Tensor], columns: int) -> Quantized:
    order = tensors.get("g_idx")
    group = stored.group or columns
    if order is not None and not torch.equal(
        order, torch.arange(columns, dtype=order.dtype) // group
    ):
        raise CheckpointError("inputs are grouped out of order (desc_act), which is not supported")
    values = _fields(tensors["qweight"], stored.bits).transpose(1, 2).flatten(0, 1)
    zeros = _fields(tensors["qzeros"], stored.bits).flatten(1) + stored.zero_offset
    zeros &= 2**stored.bits - 1
    return _quantized(stored, values.T, tensors["scales"].T, zeros.T, columns)


def _packed(
    stored: StoredWeights, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> Quantized:
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [rows, columns]:
        raise CheckpointError(f"the packed weight states the shape {shape.tolist()}")
    values = _fields(tensors["weight_packed"], stored.bits).flatten(1)[:, :columns]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _fields(zeros.T, stored.bits).flatten(1)[:, :rows].T
    return _quantized(stored, values, tensors["weight_scale"], zeros, columns)


def _plain(stored: StoredWeights, tensors: Mapping[str, Tensor], columns: int) -> Quantized:
    """Signed bytes: flipping the top bit adds 128."""
    zeros = tensors.get("weight_zero_point")
    return _quantized(
        stored,
        tensors["weight"].view(torch.uint8) ^ 128,
        tensors["weight_scale"],
        None if zeros is None else zeros.view(torch.uint8) ^ 128,
        columns,
    )


def _float8(stored: StoredWeights, tensors: Mapping[str, Tensor], rows: int) -> Float8:
    values, scales = tensors["weight"], tensors["weight_scale"].float().flatten().expand(rows)
    wrong = int(((values.view(torch.uint8) & 0x7F) == NOT_A_NUMBER).sum())
    if wrong:
        raise CheckpointError(f"{wrong} numbers are NaN: they did not fit into FP8")
    inputs: str | Tensor = stored.inputs
    given = [scales]
    if inputs == "tensor":
        inputs = tensors["input_scale"].float().reshape(())
        given.append(inputs.reshape(1))
    for scale in given:
        if not bool((scale.isfinite() & (scale >= 0)).all()) or not bool(scale.any()):
            raise CheckpointError("a scale of FP8 is negative, zero or not finite")
    return Float8(values, scales.contiguous(), inputs)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Return the values of words [..., n] as uint8 [..., n, 32 / bits], lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    fields: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.to(torch.uint8)


def _quantized(
    stored: StoredWeights, values: Tensor, scales: Tensor, zeros: Tensor | None, columns: int
) -> Quantized:
    if zeros is not None and bool((zeros == 2 ** (stored.bits - 1)).all()):
        zeros = None
    return Quantized(
        values.contiguous(),
        scales.contiguous(),
        None if zeros is None else zeros.contiguous(),
        stored.bits,
        stored.group or columns,
    )
