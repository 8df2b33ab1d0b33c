"""Unpacks the weights of quantised checkpoints: AWQ, GPTQ and compressed-tensors.

Each format is a table of the tensors that stand for one weight, and a function from those tensors
to ``Quantized``. Unpacking is exact: no integer, zero point or scale is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import CheckpointError
from weft.kernels.quantized import Quantized
from weft.models.quant_config import StoredWeights

WORD = 32  # bits of the integers that values are packed into
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that stands in each 4 bits of a word
FLOATS = frozenset({"F16", "BF16", "F32"})
INT32, INT8, INT64 = frozenset({"I32"}), frozenset({"I8"}), frozenset({"I64", "I32"})


@dataclass(frozen=True)
class Part:
    """One tensor of a stored weight; ``dtypes`` are those of safetensors that are taken."""

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    optional: bool = False


def parts_of(stored: StoredWeights, rows: int, columns: int) -> dict[str, Part]:
    """Return the tensors that stand for a weight [rows, columns], by the ends of their names.

    Raises:
        CheckpointError: the format cannot hold a weight of these sizes.
    """
    group = stored.group or columns
    groups, per_word = -(-columns // group), WORD // stored.bits
    scales = Part((rows, groups), FLOATS)
    match stored.method:
        case "awq":
            _divides(per_word, rows, "rows")
            _divides(group, columns, "columns")
            return {
                "qweight": Part((columns, rows // per_word), INT32),
                "qzeros": Part((groups, rows // per_word), INT32),
                "scales": Part((groups, rows), FLOATS),
            }
        case "gptq":
            _divides(per_word, rows, "rows")
            _divides(per_word, columns, "columns")
            return {
                "qweight": Part((columns // per_word, rows), INT32),
                "qzeros": Part((groups, rows // per_word), INT32),
                "scales": Part((groups, rows), FLOATS),
                "g_idx": Part((columns,), INT32, optional=True),
            }
        case "pack-quantized":
            parts = {
                "weight_packed": Part((rows, -(-columns // per_word)), INT32),
                "weight_scale": scales,
                "weight_shape": Part((2,), INT64, optional=True),
            }
            zeros = Part((-(-rows // per_word), groups), INT32)
        case _:
            parts = {"weight": Part((rows, columns), INT8), "weight_scale": scales}
            zeros = Part((rows, groups), INT8)
    return parts | ({"weight_zero_point": zeros} if stored.zeros else {})


def _divides(unit: int, size: int, what: str) -> None:
    if size % unit:
        raise CheckpointError(f"{size} {what} are not a multiple of {unit}")


def unpack(
    stored: StoredWeights, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> Quantized:
    """Return the weight [rows, columns] that the tensors of ``parts_of`` hold.

    Raises:
        CheckpointError: inputs are grouped in another order than their own, or a shape is stated
            that is not the weight's.
    """
    match stored.method:
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
