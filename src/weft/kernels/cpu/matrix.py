"""Weights packed for the native CPU kernels, and products with them.

A row of a product is the same bits whatever rows are computed with it: every number is one float32
sum over the inputs in ascending order (``panel.hpp``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels.cpu import _native
from weft.kernels.quantized import Quantized
from weft.kernels.storage import MULTIPLIED, Storage

FORMATS = {0: "float32", 1: "bfloat16", 2: "int8", 3: "int4"}  # by `Format` in panel.hpp
_CODES = {torch.float32: 0, torch.bfloat16: 1}  # those of `DType` in tensor.hpp
_SCALE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}


class CpuMatrix:
    """A weight [outputs, inputs] in the panels that ``panel.hpp`` describes.

    Attributes:
        shape: outputs and inputs.
        dtype: the dtype of the activations that it is multiplied with.
        gated: whether gates and the values that they multiply share panels.
        native: the packed numbers.
    """

    __slots__ = ("dtype", "gated", "native", "shape")

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        """Pack a tensor [outputs, inputs] of float32 or bfloat16.

        Args:
            gated: the first half of the outputs are gates, the second half the values that they
                multiply; a panel then holds both of its outputs. What ``linear`` returns does not
                depend on it.

        Raises:
            ValueError: the tensor has another dtype, rank or device.
        """
        if weight.dtype not in _CODES or weight.dim() != 2 or not weight.is_cpu:
            raise ValueError(f"cannot pack {list(weight.shape)} of {weight.dtype}")
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.gated = gated
        self.native = _native.Matrix.pack(
            weight.data_ptr(),
            _CODES[weight.dtype],
            weight.shape[0],
            weight.shape[1],
            weight.stride(0),
            gated,
        )

    @classmethod
    def quantised(
        cls, shape: Sequence[int], dtype: torch.dtype, storage: Storage, *, gated: bool = False
    ) -> CpuMatrix:
        """Return a matrix of integers [outputs, inputs] that ``write`` fills.

        Its products round the activations to 8 bits, a group of inputs at a time (``quant.hpp``).

        Args:
            dtype: of the activations: float32 or bfloat16.

        Raises:
            ValueError: the sizes or the storage cannot be packed.
        """
        outputs, inputs = shape
        matrix = cls.__new__(cls)
        matrix.shape, matrix.dtype, matrix.gated = torch.Size(shape), dtype, gated
        matrix.native = _native.Matrix.quantised(
            {8: 2, 4: 3}[storage.bits],
            outputs,
            inputs,
            gated,
            _CODES[dtype],
            storage.group or 0,
            _SCALE_CODES[storage.scales],
            storage.zeros,
        )
        return matrix

    def write(self, first: int, rows: Tensor | Quantized) -> None:
        """Write the outputs from ``first`` on: integers as they are, floats [n, I] rounded.

        Raises:
            ValueError: the rows do not fit, or have numbers that are not finite.
        """
        outputs, inputs = self.shape
        count = rows.shape[0]
        if rows.shape[1] != inputs or not 0 <= first <= first + count <= outputs:
            raise ValueError(f"rows {list(rows.shape)} from {first} do not fit {list(self.shape)}")
        if isinstance(rows, Quantized):
            scales = rows.scales.float() if rows.storage.group is None else rows.scales
            values, scales = rows.values.contiguous(), scales.contiguous()
            zeros = None if rows.zeros is None else rows.zeros.contiguous()
            zeros_at = 0 if zeros is None else zeros.data_ptr()
            self.native.write(first, count, values.data_ptr(), scales.data_ptr(), zeros_at)
            return
        rows = rows if rows.dtype in _CODES else rows.float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        code = _CODES[rows.dtype]
        self.native.write_rounded(first, count, rows.data_ptr(), code, rows.stride(0))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.native.bytes

    @property
    def format(self) -> str:
        """The storage format of the numbers: one of ``FORMATS``."""
        return FORMATS[self.native.format]


def linear(
    x: Tensor, matrix: CpuMatrix, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x [T, I] times the matrix [O, I], plus bias [O] -> [T, O].

    Args:
        x: of the matrix's dtype.
        dtype: of the result; that of ``x`` if not given.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    outputs, inputs = matrix.shape
    if x.dim() != 2 or x.shape[1] != inputs or x.dtype != matrix.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit a matrix {list(matrix.shape)} of "
            f"{matrix.dtype}"
        )
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != matrix.dtype):
        raise ValueError(f"bias {list(bias.shape)} of {bias.dtype} does not fit {outputs} outputs")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype)
    if bias is not None:
        bias = bias.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    matrix.native.linear(
        x.data_ptr(), x.stride(0), rows, bias_at, out.data_ptr(), _CODES[out.dtype]
    )
    return out


def logits(hidden: Tensor, matrix: CpuMatrix) -> Tensor:
    """Return ``linear`` without a bias in float32: the sums as they are, not rounded."""
    return linear(hidden, matrix, None, torch.float32)


def embedding(ids: Tensor, table: Tensor | CpuMatrix) -> Tensor:
    """Return the rows [T, C] of the ids [T] int64; see ``gather``."""
    return functional.embedding(ids, table) if isinstance(table, Tensor) else gather(table, ids)


def pack(parameter: str, tensor: Tensor) -> Tensor | CpuMatrix | tuple[CpuMatrix, ...]:
    """Pack the parameters that ``linear`` multiplies with; see ``interface.Pack``."""
    name = parameter.rpartition(".")[2]
    if name not in MULTIPLIED:
        return tensor
    if tensor.dim() == 3:
        return tuple(CpuMatrix(expert) for expert in tensor)
    return CpuMatrix(tensor, gated=name == "gate_up")


def computes(storage: Storage) -> bool:
    """Whether there are kernels for this storage; there are for all integer formats."""
    return storage.format == "int"


def quantised(
    parameter: str, shape: torch.Size, dtype: torch.dtype, storage: Storage
) -> CpuMatrix | tuple[CpuMatrix, ...]:
    """Return where a parameter in integers is written; see ``interface.Quantise``."""
    gated = parameter.rpartition(".")[2] == "gate_up"
    if len(shape) == 3:
        return tuple(CpuMatrix.quantised(shape[1:], dtype, storage) for _ in range(shape[0]))
    return CpuMatrix.quantised(shape, dtype, storage, gated=gated)


def gather(matrix: CpuMatrix, outputs: Tensor) -> Tensor:
    """Return the weights [T, I] of some outputs [T] int64, such as the embeddings of tokens.

    Raises:
        IndexError: there is no such output.
    """
    outputs = outputs.contiguous()
    if len(outputs) and not 0 <= int(outputs.min()) <= int(outputs.max()) < matrix.shape[0]:
        raise IndexError(f"an output is outside [0, {matrix.shape[0]})")
    found = torch.empty((len(outputs), matrix.shape[1]), dtype=matrix.dtype)
    matrix.native.gather(outputs.data_ptr(), len(outputs), found.data_ptr())
    return found
