"""Codes of a weight with a scale for each group of inputs, as GPUs hold them. Torch-free.

The codes of 64 outputs and one group of inputs lie together, so that what a program multiplies at a
time is one piece of memory. In four bits, a unit of 16 bits has one input of each quarter of the
group, the first in its lowest bits: each quarter is an operand of a product as it is unpacked (the
aim of Marlin's layout: Frantar et al. 2024, section 3.4). Where a quarter is too short for a
product, and of MXFP4, a unit is a byte, with one input of each half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.kernels.storage import PANEL, Storage

WHOLE = 128  # inputs whose codes lie together where an output has one scale
MOST_SPLITS = 16
LEAST_PRODUCT = 16  # inputs of one operation of the tensor cores
_BITS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}


@dataclass(frozen=True)
class CodeForm:
    """How a weight is coded.

    Attributes:
        code: ``int4`` and ``int8``, less a zero point; ``e2m1`` and ``e4m3``, floats.
        group: inputs that share a scale; None: all of an output.
        rounds: whether activations are rounded to FP8, each group of a row with a scale of its own.
    """

    code: str
    group: int | None
    rounds: bool = False

    @classmethod
    def of(cls, storage: Storage) -> CodeForm | None:
        """Return the form of a storage, None for one whose scales multiply whole sums."""
        if storage.format == "int":
            if storage.bits == 8 and storage.group is None and not storage.zeros:
                return None
            return cls(f"int{storage.bits}", storage.group)
        if storage.group is None:
            return None
        return cls(storage.format, storage.group, storage.inputs == "group")

    @classmethod
    def parse(cls, kind: str) -> tuple[CodeForm, str] | None:
        """Return the form and the dtype of a ``kind``, None for one of another weight."""
        name, _, rest = kind.partition(" ")
        code, _, group = name.partition("/")
        if code not in _BITS or not group:
            return None
        how, _, dtype = rest.partition(" ")
        return cls(code, None if group == "row" else int(group), how == "to"), dtype

    def kind(self, dtype: str) -> str:
        """Return what the tuning calls products of activations of a dtype."""
        return f"{self.code}/{self.group or 'row'} {'to' if self.rounds else 'in'} {dtype}"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS[self.code]

    @property
    def inputs(self) -> int:
        """Inputs whose codes lie together."""
        return self.group or WHOLE

    @property
    def parts(self) -> int:
        """Equal parts of a group, of each of which a unit has one input."""
        if self.bits == 8:
            return 1
        return 4 if self.code == "int4" and self.inputs // 4 >= LEAST_PRODUCT else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of an output's codes that lie together."""
        return self.inputs * self.bits // 8

    def pieces(self, inputs: int) -> int:
        """Return of how many such parts an output consists, the last one padded."""
        return -(-inputs // self.inputs)


def launch_by_rule(
    form: CodeForm,
    sizes: tuple[int, ...],
    bucket: int,
    processors: int,
    *,
    wide: bool,
    gated: bool,
) -> Mapping[str, int]:
    """Return blocks for a product: as ``tuning.Heuristic`` gives those of other weights.

    A step takes 128 inputs. Few rows split the inputs until two programs run on each
    multiprocessor.

    Args:
        sizes: outputs and inputs; of experts their number in front.
        wide: activations are float32.
        gated: a program has sums of gates and of what they multiply.
    """
    *experts, outputs, inputs = sizes
    splits = 1
    if not experts and bucket <= 64:
        splits = _splits(-(-outputs // PANEL), -(-inputs // max(WHOLE, form.inputs)), processors)
    # One kernel serves up to 32 rows: more of them take longer to compile than they gain.
    rows = bucket if experts else max(bucket, 32)
    launch = {
        "BLOCK_M": min(rows, 32 if wide or gated else 64 if experts else 128),
        "BLOCK_N": 64,
        "BLOCK_K": WHOLE if not wide else max(32, form.inputs),
        "num_warps": 8 if bucket > (32 if experts else 64) and not gated else 4,
        "num_stages": 2 if wide else 3 if bucket > 64 else 4,
    }
    return launch | ({} if experts else {"SPLITS": splits})


def _splits(blocks: int, steps: int, processors: int) -> int:
    """Return into how many parts to cut the inputs: if possible parts of equally many steps."""
    wish = max(1, min(MOST_SPLITS, steps // 4, -(-2 * processors // blocks)))
    fair = [n for n in range(-(-wish // 2), min(2 * wish, MOST_SPLITS) + 1) if steps % n == 0]
    return min(fair, key=lambda n: abs(n - wish), default=wish)
