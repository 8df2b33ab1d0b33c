"""Stored formats of a matrix as codes with scales, and their memory. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernels.arrays import Array

PANEL = 64  # outputs that are packed together, see quant.hpp
GATED_PANEL = 32  # of each half of a gated matrix
ACTIVATION_GROUP = 128  # inputs that are rounded together where a row of weights has one scale
MULTIPLIED = {
    *("qkv", "output", "output_gate", "gate_up", "down", "lm_head", "router", "expert_gate_up"),
    *("expert_down", "input_gate", "input_projection", "per_layer_projection", "state_gates"),
    *("query_up", "up", "expert_up", "state_gate_up", "forget_up"),
}  # the parameters of products, by the names of ``layout.parameters`` without the layer
BY_HEAD = {"key_up", "value_up"}  # those of products of each head with a matrix of its own
GATED = {"gate_up", "expert_gate_up"}  # those whose first half of outputs are gates
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1}
NEST = 256  # inputs that share a float16 where scales are nested
TABLES = ("nl4", "mx4")  # formats of 4 bits that choose one of sixteen numbers


@dataclass(frozen=True)
class PackedForm:
    """What the bytes of a packed matrix mean; see ``MatrixForm`` in matrix.hpp.

    Attributes:
        format: ``float32``, ``bfloat16``, ``int8``, ``int6``, ``int5``, ``int4``, or one of
            ``TABLES``.
        shape: outputs and inputs.
        dtype: the name of that of the activations.
        group: of integers, inputs that share a scale; 0: each output has one.
        scales: of integers, the name of the dtype of grouped scales.
        zeros: of integers, zero points are stored.
        minimums, nested: of integers, see ``Storage``.
    """

    format: str
    shape: tuple[int, int]
    gated: bool
    dtype: str
    group: int
    scales: str
    zeros: bool
    minimums: bool = False
    nested: bool = False


@dataclass(frozen=True)
class Storage:
    """Codes of a matrix [outputs, inputs].

    Attributes:
        bits: 8 or 4; of integers also 6 and 5.
        group: inputs that share a scale; None: all of them, and the scale is float32.
        scales: name of the dtype of grouped scales.
        zeros: zero points are stored, a byte for each scale.
        format: ``int``; ``e4m3``, which is FP8; ``e2m1``, which is MXFP4; or integers of 8 bits
            chosen from a table by 4: ``nl4`` (GGUF's IQ4_NL) or ``mx4`` (twice E2M1's numbers).
        inputs: of FP8, how activations are rounded before a product: ``token`` (FP8, each row with
            a scale of its own), ``group`` (each group of inputs of a row), ``tensor`` (FP8 with a
            stored scale), or ``float`` (not at all).
        minimums: a number is scale * code - minimum, with a minimum for each scale.
        nested: scales and minimums are a byte each, a multiple of one float16 for ``NEST`` inputs.
    """

    bits: int
    group: int | None
    scales: str = "bfloat16"
    zeros: bool = False
    format: str = "int"
    inputs: str = "token"
    minimums: bool = False
    nested: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is one that other checkpoints than GGUF files have."""
        blocky = self.minimums or self.nested or self.format in TABLES
        return not blocky and self.bits in (4, 8)

    def __str__(self) -> str:
        grouped = "a scale an output" if self.group is None else f"groups of {self.group}"
        if self.format == "int" or self.format in TABLES:
            grouped += ", with minimums" * self.minimums
            name = f"int{self.bits}" if self.format == "int" else self.format
            return f"{name} ({grouped})"
        if self.format == "e2m1":
            return f"mxfp4 ({grouped})"
        rounded = {"token": "FP8 by token", "tensor": "FP8 by a stored scale", "float": "floats"}
        rounded["group"] = f"FP8 by groups of {self.group}"
        return f"fp8 ({grouped}, activations in {rounded[self.inputs]})"

    def nbytes(self, outputs: int, inputs: int, *, gated: bool = False) -> int:
        """Return the bytes of a packed matrix, padding included."""
        if self.format != "int" and self.format not in TABLES:
            groups = 1 if self.group is None else -(-inputs // self.group)
            return outputs * (inputs * self.bits // 8 + groups * SCALE_BYTES[self.scales])
        panels = -(-(outputs // 2) // GATED_PANEL) if gated else -(-outputs // PANEL)
        group = self.group or ACTIVATION_GROUP
        scales = (1 if self.nested else SCALE_BYTES[self.scales]) if self.group else 0
        scales *= 1 + self.minimums
        block = PANEL * (scales + int(self.zeros) + group * self.bits // 8)
        nests = -(-inputs // NEST) * PANEL * 2 * (1 + self.minimums) if self.nested else 0
        return panels * (-(-inputs // group) * block + nests + (0 if self.group else 4 * PANEL))


def common_storage(storages: Sequence[Storage]) -> Storage:
    """Return the smallest storage that holds weights of all these without a change of a number.

    Args:
        storages: of integers in groups or by a table, without zero points.
    """
    first = storages[0]
    if len(set(storages)) == 1:
        return first
    group = min(storage.group or NEST for storage in storages)
    some, every = (test(storage.minimums for storage in storages) for test in (any, all))
    bits = max(8 if storage.format in TABLES else storage.bits for storage in storages)
    if some and not every:
        bits = max(bits, 6)  # so that codes of both kinds can be counted from one middle
    if bits == 5 and group % 32:
        bits = 6
    nested = all(storage.nested for storage in storages)
    scales = {storage.scales for storage in storages}
    plain = not any(storage.nested for storage in storages) and len(scales) == 1
    kind = "float16" if nested else scales.pop() if plain else "float32"
    return Storage(bits, group, kind, minimums=some, nested=nested)


def computed_as(storage: Storage, computes: Callable[[Storage], bool]) -> Storage | None:
    """Return how kernels hold weights that are stored so: so, MXFP4 as int8, or None for floats.

    Args:
        computes: whether they multiply with codes of a storage.
    """
    if computes(storage):
        return storage
    integers = Storage(8, storage.group)  # the same numbers, see ``Float4.integers``
    return integers if storage.format == "e2m1" and computes(integers) else None


def end_of_rows(shape: Sequence[int], first: int, rows: Array) -> int:
    """Return where rows [n, K] end that are written to a matrix [N, K] from ``first`` on.

    Raises:
        ValueError: they do not fit.
    """
    outputs, inputs = shape
    stop = first + int(rows.shape[0])
    if rows.shape[1] != inputs or not 0 <= first <= stop <= outputs:
        raise ValueError(f"rows {list(rows.shape)} from {first} do not fit {list(shape)}")
    return stop
