"""Weights in FP8 E4M3 with scales per output or per group of inputs, and activations in FP8.

Plain torch: what checkpoints in FP8 are read into, what ``kernels=reference`` computes with, and
the reference of the GPU kernels' tests. E4M3 (Micikevicius et al. 2022): 4 bits of exponent
with bias 7, 3 of mantissa, no infinities, the largest number 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from weft.kernels.arrays import Array, to_torch
from weft.kernels.storage import Storage, end_of_rows

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
SMALLEST = 2.0**-100  # rows of smaller numbers are stored as zeros, as in ``kv_storage``
PHASES = 8  # scales that are tried for each output of a weight


@dataclass(frozen=True)
class Rounded:
    """Activations rounded to FP8: a row is ``codes * scale``.

    Attributes:
        codes: [T, K] E4M3; where the device has no arithmetic in it, bfloat16 of the same values.
        scales: [T] float32, or [T, K / group rounded up].
        group: numbers of a row that share a scale; None: all.
    """

    codes: Tensor
    scales: Tensor
    group: int | None = None

    def widen(self) -> Tensor:
        """Return the rows in float32."""
        if self.group is not None:
            scales = self.scales.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
            return self.codes.float() * scales
        return self.codes.float() * self.scales.unsqueeze(1)


def round_rows(x: Tensor, scale: Tensor | None = None) -> Rounded:
    """Round x [T, K] to FP8.

    A row that holds an infinity or a NaN gets the scale NaN, so that its results show it.

    Args:
        scale: [] float32, the one of every row, beyond which numbers are clamped; None: each row
            has its own, which maps its largest number to 448.
    """
    x = x.float()
    finite = x.isfinite().all(-1)
    if scale is None:
        largest = x.abs().amax(-1)
        usable = (largest >= SMALLEST) & finite
        most = torch.full_like(largest, LARGEST)  # a number / a tensor would be a reciprocal
        factors = torch.where(usable, most / largest, 0.0)
        scales = torch.where(usable, largest / most, 0.0)
    else:
        scales = scale.float().expand(x.shape[0])
        factors = 1.0 / scales
    scaled = torch.where(finite.unsqueeze(1), x * factors.unsqueeze(1), 0.0)
    codes = scaled.clamp(-LARGEST, LARGEST).to(E4M3)
    return Rounded(codes, torch.where(finite, scales, float("nan")))


def round_groups(x: Tensor, group: int) -> Rounded:
    """Round x [T, K] to FP8, each group of a row as ``round_rows`` rounds a row.

    Returns:
        codes [T, K], and scales [T, K / group rounded up].
    """
    rows, inputs = x.shape
    padded = functional.pad(x.float(), (0, -inputs % group))
    rounded = round_rows(padded.reshape(-1, group))
    codes = rounded.codes.view(torch.uint8).reshape(rows, -1)[:, :inputs]
    return Rounded(codes.contiguous().view(E4M3), rounded.scales.reshape(rows, -1), group)


def round_weights(weight: Tensor) -> Rounded:
    """Round the outputs of a weight [N, K] to FP8, each with the best of a few scales.

    Codes stand closer just below a power of two than just above, so the error depends on where a
    scale puts the bulk of an output's numbers. Of ``PHASES`` scales within a factor of two, all of
    which clamp nothing, each output gets the one with the least sum of squared errors.
    """
    weight = weight.float()
    largest = weight.abs().amax(-1).clamp(min=SMALLEST)
    best = round_rows(weight, weight.new_ones(()))
    least = torch.full_like(largest, float("inf"))
    for phase in range(PHASES):
        scales = largest / LARGEST * 2.0 ** (phase / PHASES)
        codes = (weight / scales.unsqueeze(1)).clamp(-LARGEST, LARGEST).to(E4M3)
        error = (codes.float() * scales.unsqueeze(1) - weight).pow(2).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        kept = torch.where(
            better.unsqueeze(1), codes.view(torch.uint8), best.codes.view(torch.uint8)
        )
        best = Rounded(kept.view(E4M3), torch.where(better, scales, best.scales))
    return best


class Float8:
    """A weight w[n, k] = values[n, k] * scales[n]; experts have one more dimension in front.

    With a scale for each group of inputs it is values[n, k] * scales[n, k // group].

    Attributes:
        values: [.., N, K] E4M3.
        scales: [.., N] float32, or [.., N, K / group rounded up].
        inputs: how activations are rounded before a product: ``token`` (each row with a scale of
            its own), ``group`` (each group of a row), ``float`` (not at all), or the scale []
            float32 of all rows. Weights that share their activations have one: the largest, which
            clamps nothing of either.
        dtype: of rows that are looked up, as in an embedding.
        group: inputs that share a scale; None: all.
    """

    __slots__ = ("dtype", "group", "inputs", "scales", "values")

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        inputs: str | Tensor = "token",
        dtype: torch.dtype = torch.float32,
        group: int | None = None,
    ) -> None:
        self.values = values
        self.scales = scales
        self.inputs = inputs
        self.dtype = dtype
        self.group = group

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        inputs: str = "token",
        device: torch.device | None = None,
        group: int | None = None,
    ) -> Float8:
        """Return a weight of zeros that ``write`` fills.

        Args:
            inputs: see ``Storage.inputs``; of ``tensor`` the scale comes with what is written.
        """
        values = torch.zeros(*shape, dtype=torch.uint8, device=device).view(E4M3)
        groups = () if group is None else (-(-shape[-1] // group),)
        scales = torch.zeros(*shape[:-1], *groups, dtype=torch.float32, device=device)
        stored = torch.zeros((), dtype=torch.float32, device=device)
        return cls(values, scales, stored if inputs == "tensor" else inputs, group=group)

    @property
    def storage(self) -> Storage:
        """Its storage format."""
        inputs = "tensor" if isinstance(self.inputs, Tensor) else self.inputs
        return Storage(8, self.group, "float32", format="e4m3", inputs=inputs)

    def part(self, rows: slice, columns: slice) -> Float8:
        """Return some outputs and inputs of a weight [N, K].

        Raises:
            ValueError: the inputs cut through a group.
        """
        scales = self.scales[rows]
        if self.group is not None and self.group < self.shape[1]:
            low, high, _ = columns.indices(self.shape[1])
            if low % self.group or (high % self.group and high != self.shape[1]):
                raise ValueError(f"columns {low} to {high} cut through groups of {self.group}")
            scales = scales[:, low // self.group : -(-high // self.group)]
        return Float8(self.values[rows, columns], scales, self.inputs, group=self.group)

    def reordered(self, rows: NDArray[np.int64]) -> Float8:
        """Return the weight whose output n is output ``rows[n]`` of this one."""
        order = torch.from_numpy(rows)
        values = self.values.view(torch.uint8)[order].view(self.values.dtype)
        return Float8(values, self.scales[order], self.inputs, group=self.group)

    @property
    def shape(self) -> torch.Size:
        """N and K, of experts their number in front."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, expert: int) -> Float8:
        return Float8(self.values[expert], self.scales[expert], self.inputs, group=self.group)

    def __len__(self) -> int:
        return len(self.values)

    def write(self, first: int, rows: Array | Float8) -> None:
        """Write the outputs from ``first`` on: FP8 as it is, floats [n, K] rounded.

        Raises:
            ValueError: the rows do not fit, or have numbers that are not finite.
        """
        stop = end_of_rows(self.shape, first, rows)
        if isinstance(rows, Float8):
            values, scales = rows.values, rows.scales
            if isinstance(self.inputs, Tensor) and isinstance(rows.inputs, Tensor):
                torch.maximum(self.inputs, rows.inputs.to(self.inputs.device), out=self.inputs)
        else:
            rows = rows if isinstance(rows, Tensor) else to_torch(rows)
            if not rows.isfinite().all():
                raise ValueError("only finite numbers can be rounded to FP8")
            rounded = round_weights(rows.to(self.values.device))
            values, scales = rounded.codes, rounded.scales
        self.values[first:stop].view(torch.uint8).copy_(values.view(torch.uint8))
        self.scales[first:stop] = scales.to(self.scales.device)

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        if self.group is None:
            return self.values.float() * self.scales.unsqueeze(-1)
        scales = self.scales.repeat_interleave(self.group, -1)[..., : self.shape[-1]]
        return self.values.float() * scales


def stacked(parts: Sequence[Float8]) -> Float8:
    """Return the rows of weights one below the other.

    Raises:
        ValueError: they want their activations rounded in different ways.
    """
    kinds = {(part.storage.inputs, part.group) for part in parts}
    if len(kinds) > 1:
        raise ValueError("weights with different activations or groups cannot be stacked")
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(E4M3)
    inputs: str | Tensor = parts[0].inputs
    scales = [part.inputs for part in parts if isinstance(part.inputs, Tensor)]
    if scales:
        inputs = torch.stack(scales).amax()
    scales_of_all = torch.cat([part.scales for part in parts])
    return Float8(values, scales_of_all, inputs, group=parts[0].group)


def computes(storage: Storage) -> bool:
    """Whether this module computes with weights that are stored so: FP8 it does."""
    return storage.format == "e4m3"


def quantised(
    parameter: str,  # noqa: ARG001
    shape: Sequence[int],
    dtype: str,
    storage: Storage,
    *,
    device: torch.device,
) -> Float8:
    """Return what a parameter is written into that is stored in FP8; see ``interface.Quantise``."""
    weight = Float8.empty(shape, storage.inputs, device, storage.group)
    weight.dtype = getattr(torch, dtype)
    return weight


def linear(
    x: Tensor, weight: Tensor | Float8, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x [T, I] @ weight [O, I].T + bias [O] in float32, then converted.

    Of an FP8 weight it is the product of the numbers that weight and rounded activations stand for.

    Args:
        dtype: of the result; that of ``x`` if not given.
    """
    if isinstance(weight, Float8):
        rows, matrix = rounded_inputs(x, weight.inputs, weight.group), weight.dequantize()
    else:
        rows, matrix = x.float(), weight.float()
    y = functional.linear(rows, matrix, None if bias is None else bias.float())
    return y.to(dtype or x.dtype)


def rounded_inputs(x: Tensor, inputs: str | Tensor, group: int | None = None) -> Tensor:
    """Return x [T, K] in float32 as a product with a weight of these ``Float8.inputs`` sees it."""
    if isinstance(inputs, str) and inputs == "float":
        return x.float()
    if isinstance(inputs, str) and inputs == "group":
        assert group is not None
        rounded = round_groups(x, group)
        scales = rounded.scales.repeat_interleave(group, 1)[:, : x.shape[1]]
        return rounded.codes.float() * scales
    return round_rows(x, None if isinstance(inputs, str) else inputs).widen()
