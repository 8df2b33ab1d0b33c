"""The facts of an engine's model with which a place attends for it: layers, KV groups, sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.errors import PlaceError, PlaceRefusedError, short
from weft.core.kv_types import row_size
from weft.core.settings import format_bytes
from weft.kernels.arrays import CODES, numpy_dtype

MOST_NUMBER = 2**24  # of any size
MOST_LAYERS, MOST_GROUPS = 4096, 64
ROW_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """A KV group: ``2 * layers`` tensors, keys then values, of [blocks, kv_heads, block_size, D].

    Attributes:
        share: blocks of the device's tier, in whose proportions places split their memory.
        tensor_bytes: of a block in one of the tensors, as the engine has it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    share: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """The attention of a layer; see ``weft.kernels.cpu.host.HostLayer``."""

    group: int
    index: int
    heads: int
    scale: float
    window: int | None
    softcap: float | None
    writes: bool
    sinks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The model and the settings of an engine, as far as a place computes with them.

    Attributes:
        engine: names the engine's process, so that it can follow itself after a broken link.
        isa: instruction set of its kernels. The same set gives the same bits.
        dtype: of q, k, v and results.
        kv_dtype: of KV as it is stored.
        slots: rows that can be on their way at once.
        table_width: blocks of a sequence at most.
        timeout_s: silence after which either side gives the other one up.
    """

    engine: str
    isa: str
    dtype: str
    kv_dtype: str
    block_size: int
    slots: int
    table_width: int
    timeout_s: float
    groups: tuple[GroupGeometry, ...]
    layers: tuple[LayerGeometry, ...]

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes | memoryview) -> Geometry:
        """Read and check what an engine says of itself.

        Raises:
            PlaceError: it is malformed or out of bounds.
            PlaceRefusedError: a block has another size there than here.
        """
        try:
            given = json.loads(bytes(body))
            groups = tuple(
                GroupGeometry(**_typed(GroupGeometry, row)) for row in given.pop("groups")
            )
            layers = tuple(
                LayerGeometry(**_typed(LayerGeometry, row)) for row in given.pop("layers")
            )
            found = cls(**_typed(cls, given), groups=groups, layers=layers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PlaceError(f"The engine's geometry is malformed: {short(error)}.") from None
        found.check()
        return found

    def check(self) -> None:
        """See ``decode``."""
        numbers = [self.block_size, self.slots, self.table_width]
        for group in self.groups:
            numbers += [group.layers, group.kv_heads, group.head_dim, group.share]
        good = (
            all(1 <= number <= MOST_NUMBER for number in numbers)
            and 1 <= len(self.groups) <= MOST_GROUPS
            and 1 <= len(self.layers) <= MOST_LAYERS
            and self.dtype in ROW_TYPES
            and self.kv_dtype in CODES
            and 0.1 <= self.timeout_s <= 3600
            and all(self._good(layer) for layer in self.layers)
        )
        if not good:
            raise PlaceError("The engine's geometry is out of bounds.")
        for number, group in enumerate(self.groups):
            mine = self.tensor_bytes(number)
            if mine != group.tensor_bytes:
                raise PlaceRefusedError(
                    f"A KV block of group {number} has {group.tensor_bytes} bytes a tensor in the "
                    f"engine and {mine} at the place; both must keep KV alike."
                )

    def _good(self, layer: LayerGeometry) -> bool:
        if not 0 <= layer.group < len(self.groups):
            return False
        group = self.groups[layer.group]
        return (
            0 <= layer.index < group.layers
            and 1 <= layer.heads <= MOST_NUMBER
            and layer.heads % group.kv_heads == 0
            and math.isfinite(layer.scale)
            and (layer.window is None or 1 <= layer.window < 2**31)
            and (layer.softcap is None or 0 < layer.softcap < math.inf)
            and len(layer.sinks) in (0, layer.heads)
            and all(map(math.isfinite, layer.sinks))
        )

    def tensor_bytes(self, group: int) -> int:
        """Bytes of a block in one tensor of a group."""
        return math.prod(self.block_shape(group)) * numpy_dtype(self.kv_dtype).itemsize

    def block_shape(self, group: int) -> tuple[int, int, int]:
        """[Hkv, block_size, D] of a block in one tensor; of 8-bit types D + 4."""
        row = self.groups[group]
        return row.kv_heads, self.block_size, row_size(self.kv_dtype, row.head_dim)

    def split(self, memory_bytes: int) -> tuple[int, ...]:
        """Blocks of each group that so much memory holds, in the proportions of the device.

        Raises:
            PlaceRefusedError: not even one block of each.
        """
        sizes = [2 * row.layers * self.tensor_bytes(i) for i, row in enumerate(self.groups)]
        whole = sum(size * row.share for size, row in zip(sizes, self.groups, strict=True))
        blocks = tuple(row.share * memory_bytes // whole for row in self.groups)
        if 0 in blocks:
            raise PlaceRefusedError(
                f"A block of each KV group of the engine's model takes {format_bytes(sum(sizes))}, "
                f"and the place has {format_bytes(memory_bytes)} for the KV of "
                f"{format_bytes(whole)} that the device keeps; raise its --kv-memory."
            )
        return tuple(min(count, MOST_NUMBER) for count in blocks)


def _typed(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row if they have the types of the fields; bool is no number here."""
    allowed = {
        "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,),
        "int | None": (int, type(None)), "float | None": (int, float, type(None)),
        "tuple[float, ...]": (tuple,),
    }  # fmt: skip
    types, row = kind.__annotations__, dict(row)
    if (sinks := row.get("sinks")) is not None:
        row["sinks"] = tuple(map(float, sinks))
    for name, value in row.items():
        if not isinstance(value, allowed[types[name]]) or (
            isinstance(value, bool) and types[name] != "bool"
        ):
            raise TypeError(f"{name} is not {types[name]}")
    return row
