"""Weights packed for the native CPU kernels, and products with them.

A row of a product is the same bits whatever rows are computed with it: every number is one float32
sum over the inputs in ascending order (``panel.hpp``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np

from weft.kernels.arrays import (
    CODES,
    Array,
    address,
    contiguous,
    dense_rows,
    dtype_name,
    empty,
    on_cpu,
    strides,
    to_numpy,
    view,
)
from weft.kernels.cpu import _native
from weft.kernels.quantized import Quantized
from weft.kernels.storage import (
    BY_HEAD,
    GATED,
    MULTIPLIED,
    TABLES,
    PackedForm,
    Storage,
    end_of_rows,
)

# By `Format` in panel.hpp.
FORMATS = {0: "float32", 1: "bfloat16", 2: "int8", 3: "int4", 4: "int5", 5: "int6"}
FORMATS |= {6: "nl4", 7: "mx4"}
CODE_OF = {name: code for code, name in FORMATS.items()}
ACTIVATIONS = ("float32", "bfloat16")  # names of the types of what is multiplied


class CpuMatrix:
    """A weight [outputs, inputs] in the panels that ``panel.hpp`` describes.

    Attributes:
        shape: outputs and inputs.
        dtype: the name of the type of the activations that it is multiplied with.
        gated: whether gates and the values that they multiply share panels.
        native: the packed numbers.
    """

    __slots__ = ("dtype", "gated", "native", "shape")

    def __init__(self, weight: Array | list[Array], *, gated: bool = False) -> None:
        """Pack an array [outputs, inputs] of float32 or bfloat16, or arrays below each other.

        Args:
            gated: the first half of the outputs are gates, the second half the values that they
                multiply; a panel then holds both of its outputs. What ``linear`` returns does not
                depend on it.

        Raises:
            ValueError: an array has another dtype, rank or device, or they do not fit together.
        """
        pieces = weight if isinstance(weight, list) else [weight]
        for piece in pieces:
            if dtype_name(piece.dtype) not in ACTIVATIONS or piece.ndim != 2 or not on_cpu(piece):
                raise ValueError(f"cannot pack {list(piece.shape)} of {piece.dtype}")
        pieces = [dense_rows(piece) for piece in pieces]
        self.native = _native.Matrix.pack([view("weight", piece) for piece in pieces], gated)
        self.shape = (sum(len(piece) for piece in pieces), pieces[0].shape[1])
        self.dtype = dtype_name(pieces[0].dtype)
        self.gated = gated

    @classmethod
    def quantised(
        cls, shape: Sequence[int], dtype: str, storage: Storage, *, gated: bool = False
    ) -> CpuMatrix:
        """Return a matrix of integers [outputs, inputs] that ``write`` fills.

        Its products round the activations to 8 bits, a group of inputs at a time (``quant.hpp``).

        Args:
            dtype: the name of that of the activations: float32 or bfloat16.

        Raises:
            ValueError: the sizes or the storage cannot be packed.
        """
        outputs, inputs = shape
        matrix = cls.__new__(cls)
        matrix.shape, matrix.dtype, matrix.gated = (outputs, inputs), dtype, gated
        name = f"int{storage.bits}" if storage.format == "int" else storage.format
        form = PackedForm(
            name,
            (outputs, inputs),
            gated,
            dtype,
            storage.group or 0,
            storage.scales,
            storage.zeros,
            storage.minimums,
            storage.nested,
        )
        matrix.native = _native.Matrix.quantised(_numbers(form))
        return matrix

    @classmethod
    def mapped(cls, form: PackedForm, memory: memoryview) -> CpuMatrix:
        """Return a matrix whose packed numbers lie in memory that is only read, such as a file's.

        The matrix keeps the memory alive.

        Raises:
            ValueError: the memory is not aligned, or does not have the bytes of such a matrix.
        """
        numbers = np.frombuffer(memory, np.uint8)
        matrix = cls.__new__(cls)
        matrix.shape, matrix.gated = form.shape, form.gated
        matrix.dtype = form.dtype
        matrix.native = _native.Matrix.mapped(
            _numbers(form), address(numbers), len(numbers), numbers
        )
        return matrix

    @property
    def form(self) -> PackedForm:
        """What ``mapped`` takes beside the bytes."""
        code, outputs, inputs, gated, dtype, group, scales, *flags = self.native.form
        names = list(CODES)
        return PackedForm(
            FORMATS[code], (outputs, inputs), gated, names[dtype], group, names[scales], *flags
        )

    @property
    def memory(self) -> memoryview:
        """The packed numbers. The matrix must live as long as they are read."""
        count = self.native.bytes
        numbers = (ctypes.c_uint8 * count).from_address(self.native.data)
        return memoryview(numbers).cast("B").toreadonly()

    def write(self, first: int, rows: Array | Quantized) -> None:
        """Write the outputs from ``first`` on: integers as they are, floats [n, I] rounded.

        Raises:
            ValueError: the rows do not fit, or have numbers that are not finite.
        """
        count = end_of_rows(self.shape, first, rows) - first
        if isinstance(rows, Quantized):
            scales = rows.scales
            if rows.storage.group is None:
                scales = scales.astype(np.float32)
            parts = [rows.values, scales, rows.zeros, rows.minimums, rows.steps, rows.minimum_steps]
            kept = [None if part is None else np.ascontiguousarray(part) for part in parts]
            places = [0 if part is None else address(part) for part in kept]
            self.native.write(first, count, *places)
            return
        rows = to_numpy(rows)
        rows = dense_rows(rows if rows.dtype.name in ACTIVATIONS else rows.astype(np.float32))
        code = CODES[rows.dtype.name]
        self.native.write_rounded(first, count, address(rows), code, strides(rows)[0])

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.native.bytes

    @property
    def format(self) -> str:
        """The storage format of the numbers: one of ``FORMATS``."""
        return FORMATS[self.native.format]


def _numbers(form: PackedForm) -> tuple[int, int, int, bool, int, int, int, bool, bool, bool]:
    """A form as the native part has it."""
    flags = (form.zeros, form.minimums, form.nested)
    sizes = (*form.shape, form.gated, CODES[form.dtype], form.group, CODES[form.scales])
    return (CODE_OF[form.format], *sizes, *flags)


def linear(x: Array, matrix: CpuMatrix, bias: Array | None, dtype: str | None = None) -> Array:
    """Return x [T, I] times the matrix [O, I], plus bias [O] -> [T, O].

    Args:
        x: of the matrix's dtype.
        dtype: the name of that of the result; that of ``x`` if not given.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    outputs, inputs = matrix.shape
    if x.ndim != 2 or x.shape[1] != inputs or dtype_name(x.dtype) != matrix.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit a matrix {list(matrix.shape)} of "
            f"{matrix.dtype}"
        )
    if bias is not None and (bias.shape != (outputs,) or dtype_name(bias.dtype) != matrix.dtype):
        raise ValueError(f"bias {list(bias.shape)} of {bias.dtype} does not fit {outputs} outputs")
    x, rows = dense_rows(x), x.shape[0]
    dtype = dtype or matrix.dtype
    out = empty(x, (rows, outputs), dtype)
    if bias is not None:
        bias = contiguous(bias)
    bias_at = 0 if bias is None else address(bias)
    matrix.native.linear(address(x), strides(x)[0], rows, bias_at, address(out), CODES[dtype])
    return out


def heads(x: Array, matrices: Sequence[CpuMatrix]) -> Array:
    """Multiply each head of x [T, H, I] with its own matrix [O, I] -> [T, H, O].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    count, (outputs, inputs) = len(matrices), matrices[0].shape
    if x.shape[1:] != (count, inputs) or any(
        matrix.shape != (outputs, inputs) or matrix.dtype != dtype_name(x.dtype)
        for matrix in matrices
    ):
        raise ValueError(f"x {list(x.shape)} of {x.dtype} does not fit {count} heads")
    x = dense_rows(x)
    out = empty(x, (len(x), count, outputs))
    _native.heads([matrix.native for matrix in matrices], view("x", x), address(out))
    return out


def logits(hidden: Array, matrix: CpuMatrix) -> Array:
    """Return ``linear`` without a bias in float32: the sums as they are, not rounded."""
    return linear(hidden, matrix, None, "float32")


def embedding(ids: Array, table: Array | CpuMatrix) -> Array:
    """Return the rows [T, C] of the ids [T] int64.

    Raises:
        IndexError: there is no such row.
        ValueError: the table has a type without a kernel.
    """
    if isinstance(table, CpuMatrix):
        return gather(table, ids)
    ids, table = contiguous(ids), dense_rows(table)
    out = empty(ids, (len(ids), table.shape[1]), dtype_name(table.dtype))
    _native.gather_rows(view("table", table), address(ids), len(ids), address(out))
    return out


def pack(parameter: str, array: Array | list[Array]) -> Array | CpuMatrix | tuple[CpuMatrix, ...]:
    """Pack the parameters that ``linear`` multiplies with; see ``interface.Pack``.

    Others are copied, as ``array`` may be a view of a file.

    Args:
        array: of a parameter that ``linear`` multiplies with also a list of arrays [n, I], which
            are its outputs in their order.
    """
    name = parameter.rpartition(".")[2]
    if name not in MULTIPLIED | BY_HEAD:
        return np.array(to_numpy(array))
    if not isinstance(array, list) and array.ndim == 3:
        return tuple(CpuMatrix(expert, gated=name in GATED) for expert in array)
    return CpuMatrix(array, gated=name in GATED)


def computes(storage: Storage) -> bool:
    """Whether there are kernels for this storage; there are for all integer formats."""
    return storage.format == "int" or storage.format in TABLES


def quantised(
    parameter: str, shape: Sequence[int], dtype: str, storage: Storage
) -> CpuMatrix | tuple[CpuMatrix, ...]:
    """Return where a parameter in integers is written; see ``interface.Quantise``."""
    gated = parameter.rpartition(".")[2] in GATED
    if len(shape) == 3:
        quantised = partial(CpuMatrix.quantised, shape[1:], dtype, storage, gated=gated)
        return tuple(quantised() for _ in range(shape[0]))
    return CpuMatrix.quantised(shape, dtype, storage, gated=gated)


def gather(matrix: CpuMatrix, outputs: Array) -> Array:
    """Return the weights [T, I] of some outputs [T] int64, such as the embeddings of tokens.

    Raises:
        IndexError: there is no such output.
    """
    outputs = contiguous(outputs)
    if len(outputs) and not 0 <= int(outputs.min()) <= int(outputs.max()) < matrix.shape[0]:
        raise IndexError(f"an output is outside [0, {matrix.shape[0]})")
    found = empty(outputs, (len(outputs), matrix.shape[1]), matrix.dtype)
    matrix.native.gather(address(outputs), len(outputs), address(found))
    return found


def layout() -> str:
    """Return what the bytes of packed matrices depend on beside the weights."""
    return f"cpu {_native.isa()} layout {_native.layout_version}"
