"""Weights on a GPU as codes with a scale for each group of inputs: packed as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.arrays import Array, to_torch
from weft.kernels.codes import CodeForm
from weft.kernels.float4 import BIAS, TWICE, Float4
from weft.kernels.float8 import E4M3, Float8
from weft.kernels.quantized import Quantized
from weft.kernels.storage import PANEL, Storage, end_of_rows
from weft.kernels.tuning import Launch, LaunchShape, Tuning

TILE = PANEL  # outputs whose codes lie together
CANDIDATES = 16  # scales that are tried for each group of four bits
_SCALES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
}


class CodedMatrix:
    """A weight [N, K], or of E experts [E, N, K], that ``linear`` or ``moe`` multiplies with.

    Attributes:
        codes: [.., tiles of 64 outputs, pieces of the inputs, 64, bytes] uint8, as ``codes.py``
            describes them.
        scales: [.., pieces, N], or [.., 1, N] if an output has one scale.
        zeros: the same of uint8, the zero points of integers; None: all are 2 ** (bits - 1).
        form: how the weight is coded.
        dtype: of the activations and of the results.
        inputs: how whoever makes activations rounds them: never, this matrix does by itself.
        op: what the tuning calls it.
    """

    __slots__ = ("_sizes", "_tuning", "codes", "dtype", "form", "inputs", "op", "scales", "zeros")

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        form: CodeForm,
        shape: LaunchShape,
        tuning: Tuning,
    ) -> None:
        """See ``empty``; ``shape`` has sizes and kind."""
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.form = form
        self.dtype: torch.dtype = getattr(torch, shape.kind.rpartition(" ")[2])
        self.inputs = "float"
        self.op = shape.op
        self._sizes = shape.sizes
        self._tuning = tuning

    @classmethod
    def empty(
        cls,
        shape: LaunchShape,
        form: CodeForm,
        storage: Storage,
        device: torch.device,
        tuning: Tuning,
    ) -> CodedMatrix:
        """Return a weight of zeros that ``write`` fills."""
        *experts, outputs, inputs = shape.sizes
        pieces = form.pieces(inputs)
        tiles = -(-outputs // TILE)
        codes = torch.zeros(
            *experts, tiles, pieces, TILE, form.row_bytes, dtype=torch.uint8, device=device
        )
        groups = (*experts, 1 if form.group is None else pieces, outputs)
        kind = torch.float32 if form.group is None else _SCALES[storage.scales]
        scales = torch.zeros(groups, dtype=kind, device=device)
        zeros = torch.zeros(groups, dtype=torch.uint8, device=device) if storage.zeros else None
        return cls(codes, scales, zeros, form, shape, tuning)

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs, of experts their number in front."""
        return torch.Size(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded before they come: never."""
        return False

    @property
    def launch_shape(self) -> LaunchShape:
        """The key of its launches."""
        kind = self.form.kind(str(self.dtype).removeprefix("torch."))
        return LaunchShape(self.op, kind, tuple(self._sizes))

    def launch(self, rows: int) -> Launch:
        """Return the launch configuration for so many rows. Raises KernelUnavailable."""
        return self._tuning.launch(self.launch_shape, rows)

    def __getitem__(self, expert: int) -> CodedMatrix:
        whole = self.launch_shape
        shape = LaunchShape(whole.op, whole.kind, whole.sizes[1:])
        zeros = None if self.zeros is None else self.zeros[expert]
        codes, scales = self.codes[expert], self.scales[expert]
        return CodedMatrix(codes, scales, zeros, self.form, shape, self._tuning)

    def __len__(self) -> int:
        return self._sizes[0]

    def write(self, first: int, rows: Array | Quantized | Float4 | Float8) -> None:
        """Write the outputs from ``first`` on: codes as they are, floats [n, K] rounded.

        Raises:
            ValueError: the rows do not fit, or have numbers that are not finite.
        """
        stop = end_of_rows(self.shape, first, rows)
        values, scales, zeros = self._parts(rows)
        at = torch.arange(first, stop, device=self.codes.device)
        packed = _packed(values.to(self.codes.device), self.form)
        self.codes[at // TILE, :, at % TILE] = packed  # [n, pieces, bytes]
        self.scales[:, first:stop] = scales.T.to(self.scales)
        if self.zeros is not None:
            middle = 2 ** (self.form.bits - 1)
            given = torch.full_like(scales, middle) if zeros is None else zeros
            self.zeros[:, first:stop] = given.T.to(self.zeros)
        elif zeros is not None:
            raise ValueError("the weight has zero points, and the matrix has none")

    def _parts(
        self, rows: Array | Quantized | Float4 | Float8
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes [n, K] and scales and zero points [n, G]."""
        if isinstance(rows, Quantized):
            zeros = None if rows.zeros is None else to_torch(rows.zeros)
            return to_torch(rows.values), to_torch(rows.scales), zeros
        if isinstance(rows, Float4):
            return to_torch(rows.codes), to_torch(rows.scales), None
        if isinstance(rows, Float8):
            return rows.values.view(torch.uint8), rows.scales, None
        numbers = (rows if isinstance(rows, Tensor) else to_torch(rows)).to(self.codes.device)
        if not numbers.isfinite().all():
            raise ValueError("only finite numbers can be rounded")
        if not self.form.code.startswith("int"):
            raise ValueError(f"no floats are rounded to {self.form.code} with a scale a group")
        group = self.form.group or numbers.shape[1]
        return *round_groups(numbers.float(), group, self.form.bits, self.scales.dtype), None

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        *_, outputs, inputs = self.shape
        codes = self.codes.movedim(-2, -3).flatten(-4, -3)  # [.., N, pieces, bytes]
        if self.form.parts == 2:
            codes = torch.cat((codes & 15, codes >> 4), -1)
        elif self.form.parts == 4:
            low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
            codes = torch.cat((low & 15, low >> 4, high & 15, high >> 4), -1)
        codes = codes.flatten(-2)[..., :outputs, :inputs]
        scales = self._spread(self.scales)
        if self.form.code == "e4m3":
            return codes.contiguous().view(E4M3).float() * scales
        if self.form.code == "e2m1":
            numbers = torch.from_numpy(TWICE).to(codes.device)[codes.long()]
            return torch.ldexp(numbers.float(), (scales - BIAS - 1).to(torch.int32))
        middle = torch.tensor(2.0 ** (self.form.bits - 1), device=codes.device)
        return (
            codes.float() - (middle if self.zeros is None else self._spread(self.zeros))
        ) * scales

    def _spread(self, numbers: Tensor) -> Tensor:
        """Repeat [.., G, N] to [.., N, K] in float32."""
        wide = numbers.float().mT
        if self.form.group is None:
            return wide
        return wide.repeat_interleave(self.form.group, -1)[..., : self.shape[-1]]


def random_codes(
    shape: LaunchShape, form: CodeForm, device: torch.device, tuning: Tuning
) -> CodedMatrix:
    """Return a weight with random codes, for measurements."""
    kind = {"e4m3": "float32", "e2m1": "e8m0"}.get(form.code, "bfloat16")
    storage = Storage(form.bits, form.group, kind)
    made = CodedMatrix.empty(shape, form, storage, device, tuning)
    codes = torch.randint(0, 0x78, made.codes.shape, device=device, dtype=torch.uint8)
    made.codes.copy_(codes)  # none is NaN
    made.scales.fill_(BIAS - 7 if form.code == "e2m1" else 0.01)
    return made


def _packed(values: Tensor, form: CodeForm) -> Tensor:
    """Pack codes [n, K] -> [n, pieces, bytes]; inputs that pad a piece have the code 0."""
    rows, inputs = values.shape
    pieces = form.pieces(inputs)
    whole = values.new_zeros(rows, pieces * form.inputs)
    whole[:, :inputs] = values
    cut = whole.reshape(rows, pieces, form.inputs)
    if form.parts == 1:
        return cut
    parts = cut.chunk(form.parts, -1)
    pairs = [low | (high << 4) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return torch.stack(pairs, -1).flatten(-2)


def round_groups(
    weight: Tensor, group: int, bits: int, scales: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K] float32 to integers as ``quant_tile.cpp`` does.

    In four bits the number of a group with the largest magnitude gets the code of -8 or one near
    it: of the scales that do so, each group gets the one with the least sum of squared errors.

    Returns:
        values [N, K] uint8 with zero points of 2 ** (bits - 1), and scales [N, G].
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    padded = weight.new_zeros(outputs, groups * group)
    padded[:, :inputs] = weight
    cut = padded.reshape(outputs, groups, group)
    most, least = cut.amax(-1), cut.amin(-1)
    largest = torch.where(most >= -least, most, least)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    if bits == 8:
        best = (largest.abs() / 127.0).to(scales).float()
    else:
        best, smallest = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
        for number in range(CANDIDATES):
            scale = (largest * (1.0 - 0.025 * number) / -8.0).to(torch.bfloat16).float()
            error = (_codes(cut, scale, low, high) * scale[..., None] - cut).square().sum(-1)
            better = error < smallest
            best = torch.where(better, scale, best)
            smallest = torch.where(better, error, smallest)
    codes = _codes(cut, best, low, high) + 2 ** (bits - 1)
    return codes.to(torch.uint8).flatten(1)[:, :inputs], best.to(scales)


def _codes(cut: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Return the nearest of the integers [low, high] that a group's scale [N, G] allows."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return (cut * inverse[..., None]).round().clamp(low, high)
