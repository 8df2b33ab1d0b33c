"""Weights on a GPU, in floats or codes, and products with them.

Up to 64 rows every product is ``gemm.py``'s, whose epilogue scales and adds bias and residual; the
sum over the inputs is split in a fixed order, so equal calls give equal bits. Above, floats and FP8
with rounded activations go to torch's own products (cuBLAS, CUTLASS) where the device has them, all
else stays with ``gemm.py``. In the interpreter everything does. Weights with scales for groups of
inputs are ``coded.py``'s, whatever the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.arrays import Array, to_torch
from weft.kernels.codes import CodeForm
from weft.kernels.float8 import E4M3, Float8, Rounded
from weft.kernels.quantized import Quantized
from weft.kernels.reference import on_device
from weft.kernels.storage import MULTIPLIED, Storage, end_of_rows
from weft.kernels.triton import coded, pdl
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.triton.device import (
    NONE,
    ROWWISE_CAPABILITY,
    capability,
    has_fp8,
)
from weft.kernels.triton.embedding import embedding as rows_of
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.gemm import GIVEN, MADE, SplitProduct, add_parts, gemm
from weft.kernels.triton.launch import FLOATS, interpreted
from weft.kernels.tuning import Launch, LaunchShape, Tuning, kind_of, op_of

SMALL = 64  # rows up to which ``gemm.py`` computes every product
ROUNDED_WITHIN = 32  # rows up to which a product may round them itself
MOST_STAGES = 8
EXACT = 128  # inputs of FP8 products that the tensor cores add by themselves
_ADD_BLOCK = 1024  # outputs that a program of ``add_parts`` takes


class TritonMatrix:
    """A weight [N, K], or of E experts [E, N, K], that ``linear`` or ``moe`` multiplies with.

    Attributes:
        values: the numbers, in a float dtype, E4M3 or int8.
        scales: [N] or [E, N] float32, the factor of each output; None for floats.
        inputs: how activations are rounded first; see ``float8.Float8``.
        fast_sums: see ``device.fast_sums``.
        dtype: of the activations and of the results.
        op: what the tuning calls it.
    """

    __slots__ = ("_shapes", "_tuning", "dtype", "fast_sums", "inputs", "op", "scales", "values")

    def __init__(
        self,
        values: Tensor,
        scales: Tensor | None,
        dtype: torch.dtype,
        tuning: Tuning,
        *,
        inputs: str | Tensor = "float",
        op: str = "gemm",
        fast_sums: bool = False,
    ) -> None:
        self.values = values
        self.scales = scales
        self.dtype = dtype
        self.inputs = inputs
        self.op = op
        self.fast_sums = fast_sums
        self._tuning = tuning
        self._shapes: dict[str, LaunchShape] = {}

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs, of experts their number in front."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to FP8."""
        return isinstance(self.inputs, Tensor) or self.inputs == "token"

    @property
    def kind(self) -> str:
        """The tuning key of its format and product."""
        formats = {E4M3: "e4m3", torch.int8: "int"}
        dtype = str(self.dtype).removeprefix("torch.")
        return kind_of(dtype, formats.get(self.values.dtype), self.rounds)

    def launch(self, rows: int, op: str | None = None) -> Launch:
        """Return the launch of so many rows. Raises KernelUnavailable.

        Args:
            op: of another product with the same weight.
        """
        op = op or self.op
        if op not in self._shapes:
            self._shapes[op] = LaunchShape(op, self.kind, tuple(self.shape))
        return self._tuning.launch(self._shapes[op], rows)

    def __getitem__(self, expert: int) -> TritonMatrix:
        scales = None if self.scales is None else self.scales[expert]
        return TritonMatrix(
            self.values[expert],
            scales,
            self.dtype,
            self._tuning,
            inputs=self.inputs,
            op=self.op,
            fast_sums=self.fast_sums,
        )

    def __len__(self) -> int:
        return len(self.values)

    def write(self, first: int, rows: Array | Float8 | Quantized) -> None:
        """Write the outputs from ``first`` on: codes as they are, floats [n, K] rounded.

        Raises:
            ValueError: the rows do not fit, or have numbers that are not finite.
        """
        assert self.scales is not None
        if self.values.dtype == E4M3:
            assert not isinstance(rows, Quantized)
            Float8(self.values, self.scales, self.inputs).write(first, rows)
            return
        assert not isinstance(rows, Float8)
        stop = end_of_rows(self.shape, first, rows)
        values, scales = _int8(rows)
        self.values[first:stop] = values.to(self.values.device)
        self.scales[first:stop] = scales.to(self.scales.device)

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        values = self.values.float()
        return values if self.scales is None else values * self.scales.unsqueeze(-1)


def linear(
    x: Tensor | Rounded,
    matrix: TritonMatrix | CodedMatrix,
    bias: Tensor | None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x [M, K] times the matrix [N, K], plus bias [N] and residual [M, N] -> [M, N].

    Args:
        x: of the matrix's dtype, or rounded already if the matrix rounds its inputs.
        dtype: of the result; that of the matrix if not given.

    Raises:
        ValueError: shapes or dtypes do not fit.
        KernelUnavailable: the tuning has no launch for the shape.
    """
    out = _multiply(x, matrix, bias, residual, dtype or matrix.dtype, whole=True)
    assert isinstance(out, Tensor)
    return out


def product(
    x: Tensor | Rounded, matrix: TritonMatrix | CodedMatrix, bias: Tensor | None
) -> Tensor | SplitProduct:
    """Return ``linear`` without a residual, its parts not added yet if the inputs were split.

    Up to ``ROUNDED_WITHIN`` rows that it rounds have a scale for each group of inputs that a step
    of the kernel takes, which is finer than ``linear``'s scale for each row.

    Args:
        x: may also be rounded in groups.
    """
    rounds = isinstance(matrix, TritonMatrix) and matrix.rounds
    if rounds and isinstance(x, Tensor) and len(x) <= ROUNDED_WITHIN:
        assert isinstance(matrix, TritonMatrix)
        _check(x, matrix)
        x = x if x.stride(1) == 1 else x.contiguous()
        static = matrix.inputs if isinstance(matrix.inputs, Tensor) else None
        return small_product(
            x, static, matrix, bias, None, matrix.dtype, whole=False, rounding=(MADE, None)
        )
    return _multiply(x, matrix, bias, None, matrix.dtype, whole=False)


def rows_for(x: Tensor | Rounded, matrix: TritonMatrix) -> tuple[Tensor, Tensor | None]:
    """Return rows [M, K] as the kernels multiply them, and the scales of those that are rounded.

    Raises:
        ValueError: they do not fit.
    """
    if isinstance(x, Tensor):
        _check(x, matrix)
        if matrix.rounds:
            x = round_rows(x, matrix.inputs if isinstance(matrix.inputs, Tensor) else None)
    rows, scales = (x.codes, x.scales) if isinstance(x, Rounded) else (x, None)
    return (rows if rows.stride(1) == 1 else rows.contiguous()), scales


def not_by_gemm(rows: int, matrix: TritonMatrix | CodedMatrix, device: torch.device) -> bool:
    """Whether torch multiplies so many rows, with one scale each if rounded, or codes are."""
    if isinstance(matrix, CodedMatrix):
        return True
    return rows > SMALL and _is_library(matrix, device, matrix.dtype)


def _multiply(
    x: Tensor | Rounded,
    matrix: TritonMatrix | CodedMatrix,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    whole: bool,
) -> Tensor | SplitProduct:
    if isinstance(matrix, CodedMatrix):
        assert isinstance(x, Tensor)
        return coded.linear(x, matrix, bias, residual, dtype, whole=whole)
    rows, scales = rows_for(x, matrix)
    group = x.group if isinstance(x, Rounded) else None
    if group is None and len(rows) > SMALL and _is_library(matrix, rows.device, dtype):
        return _library(rows, scales, matrix, bias, residual, dtype)
    rounding = None if group is None else (GIVEN, group)
    return small_product(
        rows, scales, matrix, bias, residual, dtype, whole=whole, rounding=rounding
    )


def logits(hidden: Tensor | Rounded, matrix: TritonMatrix | CodedMatrix) -> Tensor:
    """Return ``linear`` without a bias in float32: the sums as they are, not rounded."""
    return linear(hidden, matrix, None, None, torch.float32)


def gather(matrix: TritonMatrix | CodedMatrix, outputs: Tensor) -> Tensor:
    """Return the weights [T, K] of some outputs [T], such as the embeddings of tokens."""
    if isinstance(matrix, CodedMatrix):
        return coded.gather(matrix, outputs)
    if matrix.scales is None:
        return rows_of(outputs, matrix.values)
    codes = rows_of(outputs, matrix.values.view(torch.uint8)).view(matrix.values.dtype)
    return (codes.float() * rows_of(outputs, matrix.scales.unsqueeze(1))).to(matrix.dtype)


def embedding(ids: Tensor, table: Tensor | TritonMatrix | CodedMatrix) -> Tensor:
    """Return the rows [T, C] of the ids [T] int64, of a table or of the output head."""
    return rows_of(ids, table) if isinstance(table, Tensor) else gather(table, ids)


def pack(
    parameter: str, array: Array, tuning: Tuning, device: torch.device | None = None
) -> Tensor | TritonMatrix:
    """Wrap the parameters that are multiplied with; see ``interface.Pack``.

    Args:
        device: to which all parameters are brought; None: they are there.
    """
    tensor = array if device is None else on_device(array, device)
    name = parameter.rpartition(".")[2]
    if name not in MULTIPLIED:
        return tensor
    return TritonMatrix(tensor.contiguous(), None, tensor.dtype, tuning, op=op_of(name))


def computes(storage: Storage) -> bool:
    """Whether weights that are stored so are multiplied with as they are.

    All are but those of GGUF files that have minimums, nested scales, tables, or 5 and 6 bits.
    """
    return storage.is_plain


def quantised(
    parameter: str,
    shape: Sequence[int],
    dtype: str,
    storage: Storage,
    *,
    device: torch.device,
    tuning: Tuning,
    fast_sums: bool = False,
) -> TritonMatrix | CodedMatrix:
    """Return where a parameter in codes is written; see ``interface.Quantise``."""
    kind = getattr(torch, dtype)
    form = CodeForm.of(storage)
    if form is not None:
        key = LaunchShape(op_of(parameter), form.kind(dtype), tuple(shape))
        return CodedMatrix.empty(key, form, storage, device, tuning)
    op = op_of(parameter)
    if storage.format == "e4m3":
        empty = Float8.empty(shape, storage.inputs, device)
        return TritonMatrix(
            empty.values,
            empty.scales,
            kind,
            tuning,
            inputs=empty.inputs,
            op=op,
            fast_sums=fast_sums,
        )
    scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
    values = torch.zeros(shape, dtype=torch.int8, device=device)
    return TritonMatrix(values, scales, kind, tuning, op=op)


def operand_of(matrix: TritonMatrix, device: torch.device) -> tuple[object, bool]:
    """Return the type in which ``tl.dot`` multiplies, and whether weights are read as bits of E4M3.

    The interpreter multiplies in float32: its products of bfloat16 are those of the bit patterns.
    """
    fp8 = matrix.values.dtype == E4M3
    if interpreted():
        return tl.float32, False
    if fp8 and has_fp8(device):
        return (tl.float8e4nv if matrix.rounds else FLOATS[matrix.dtype]), False
    return (tl.bfloat16 if matrix.rounds else FLOATS[matrix.dtype]), fp8


def arithmetic(
    matrix: TritonMatrix, launch: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the constants of a product's kernel that say how it multiplies; see ``gemm.gemm``."""
    operand, bits = operand_of(matrix, device)
    return {
        "OPERAND": operand,
        "BITS": bits,
        "PRECISION": "ieee" if matrix.dtype == torch.float32 else "tf32",
        "EXACT": min(EXACT, launch["BLOCK_K"]) if operand == tl.float8e4nv else None,
    }


def weight_of(matrix: TritonMatrix, bits: bool) -> Tensor:
    """Return the values as a kernel gets them, E4M3 as its bits if it is to read those."""
    return matrix.values.view(torch.uint8) if bits else matrix.values


def _check(x: Tensor, matrix: TritonMatrix) -> None:
    if x.dim() != 2 or x.shape[1] != matrix.shape[-1] or x.dtype != matrix.dtype:
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} does not fit a matrix {list(matrix.shape)} of "
            f"{matrix.dtype}"
        )


def _int8(rows: Array | Quantized) -> tuple[Tensor, Tensor]:
    """Return int8 values [n, K] and scales [n] float32."""
    if isinstance(rows, Quantized):
        scales = to_torch(rows.scales).float().flatten()
        return to_torch(rows.values ^ 128).view(torch.int8), scales
    rows = (rows if isinstance(rows, Tensor) else to_torch(rows)).float()
    if not rows.isfinite().all():
        raise ValueError("only finite numbers can be rounded to int8")
    scales = rows.abs().amax(-1) / 127.0
    factors = torch.where(scales > 0, 1.0 / scales, 0.0)
    values = (rows * factors.unsqueeze(1)).round().clamp(-127, 127)
    return values.to(torch.int8), scales


@cache
def _rowwise(device: torch.device) -> bool:
    return capability(device) >= ROWWISE_CAPABILITY


def _is_library(matrix: TritonMatrix, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has the product: floats, and FP8 with a scale a row into bfloat16."""
    if capability(device) == NONE:
        return False
    if matrix.scales is None:
        return True
    outputs, inputs = matrix.shape
    aligned = outputs % 16 == 0 and inputs % 16 == 0
    return matrix.rounds and aligned and dtype == torch.bfloat16 and _rowwise(device)


def _library(
    rows: Tensor,
    row_scales: Tensor | None,
    matrix: TritonMatrix,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    weight = matrix.values.t()
    if row_scales is not None:
        assert matrix.scales is not None
        scales = (row_scales.unsqueeze(1), matrix.scales.unsqueeze(0))
        out = torch._scaled_mm(
            rows, weight, *scales, bias=bias, out_dtype=dtype, use_fast_accum=matrix.fast_sums
        )
        return out if residual is None else out.add_(residual)
    if dtype != matrix.dtype:
        out = torch.mm(rows, weight, out_dtype=dtype)
        out = out if bias is None else out.add_(bias)
    elif residual is not None and bias is None:
        return torch.addmm(residual, rows, weight)
    else:
        out = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return out if residual is None else out.add_(residual)


def small_product(
    rows: Tensor,
    row_scales: Tensor | None,
    matrix: TritonMatrix,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    whole: bool = True,
    rounding: tuple[int, int | None] | None = None,
) -> Tensor | SplitProduct:
    """Return a product by ``gemm.py``, whatever the rows; see ``linear``.

    Args:
        rows: contiguous along the inputs, of the matrix's dtype or rounded.
        row_scales: [M] float32 of rounded rows, else None.
        rounding: of rows in groups, ``GIVEN`` and the size of a group, or ``MADE`` by the product:
            ``row_scales`` are [M, groups] then, or the one of all, or None.
        whole: whether parts are added if the inputs are split. A product whose reader is known is
            launched while the kernel before it ends: that must be none but a kernel, see ``pdl``.
    """
    count, (outputs, inputs) = len(rows), matrix.shape
    if count == 0:
        return torch.empty((count, outputs), dtype=dtype, device=rows.device)
    launch, groups = dict(matrix.launch(count)), 0
    if rounding is not None:
        groups, size = rounding
        size = size or min(EXACT, launch["BLOCK_K"])
        stages = launch["num_stages"] * launch["BLOCK_K"] // size  # as many bytes ahead
        launch |= {"BLOCK_K": size, "num_stages": min(max(2, stages), MOST_STAGES)}
    splits = launch["SPLITS"]
    options = arithmetic(matrix, launch, rows.device)
    parts = (row_scales, matrix.scales, bias, residual)
    flags = sum(1 << place for place, part in enumerate(parts) if part is not None)
    flags &= ~1 if groups else ~0  # which a step multiplies with
    target = torch.empty(
        (count, outputs) if splits == 1 else (splits, count, outputs),
        dtype=dtype if splits == 1 else torch.float32,
        device=rows.device,
    )
    stride = 0 if residual is None else residual.stride(0)
    grid = (triton.cdiv(count, launch["BLOCK_M"]) * triton.cdiv(outputs, launch["BLOCK_N"]), splits)
    gemm[grid](
        rows,
        weight_of(matrix, options["BITS"]),
        *parts,
        target,
        count,
        rows.stride(0),
        stride,
        N=outputs,
        K=inputs,
        FLAGS=flags,
        GROUPS=groups,
        STATIC=groups == MADE and row_scales is not None,
        **options,
        **({} if whole else pdl.options(rows.device)),
        **launch,
    )
    if splits == 1:
        return target
    if not whole:
        return SplitProduct(target, None if groups else row_scales, matrix.scales, bias, dtype)
    out = torch.empty((count, outputs), dtype=dtype, device=rows.device)
    add_parts[count, triton.cdiv(outputs, _ADD_BLOCK)](
        target,
        *parts,
        out,
        count,
        stride,
        N=outputs,
        BLOCK=min(_ADD_BLOCK, triton.next_power_of_2(outputs)),
        SPLITS=splits,
        FLAGS=flags,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
