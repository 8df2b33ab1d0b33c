"""Launch configurations of kernels: from a file for one GPU, or by a rule. Torch-free.

A file belongs to one device name and to the sources of the kernels that it was measured with; one
for other sources or another device is refused, or if nobody has named it passed over with a
warning. A shape that it does not list is refused. Nothing is tuned while requests are served, and
nothing is kept in a home directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from weft.kernels.codes import CodeForm, launch_by_rule
from weft.kernels.unavailable import KernelUnavailable

VERSION = 1
ROWS = (16, 32, 64, 256)  # rows that a configuration is chosen for; the last is for more as well
ARTEFACTS = Path(__file__).parent / "tuned"  # pinned files of the package, by hardware
SOURCES = Path(__file__).parent / "triton"
MAKE = "weft profile --tune"
MOST_SPLITS = 8
GATED = "gated"  # gate and up of an MLP in one product, which activates
ROUNDS = 3  # of a search
EVERY = 0  # in place of rows: for any number of them

# All others are ``gemm``.
OPS = {"expert_gate_up": "moe_gate_up", "expert_up": "moe_gate_up", "expert_down": "moe_down"}
ALTERNATIVES = {
    "SPLITS": (1, 2, 4, 8, 16),
    "BLOCK_N": (32, 64, 128, 256),
    "BLOCK_K": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}

DECODE, PREFILL = "attention_decode", "attention_prefill"
MOST_PARTS = 32  # of a context, for which there is workspace
ATTENTION_ALTERNATIVES = {
    "SPLITS": (8, 16, MOST_PARTS),
    "LEAST": (128, 256, 512, 1024),
    "PROGRAMS": (1, 2, 3, 4, 6),
    "BLOCK_M": (16, 32, 64, 128),
    "BLOCK_N": (16, 32, 64, 128),
    "num_warps": (4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5),
}
TILE_PARTS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")  # each makes another kernel

# The parameters of a launch by name: block sizes and parts as the kernel calls them, and
# ``num_warps`` and ``num_stages``.
Launch = Mapping[str, int]


@dataclass(frozen=True, order=True)
class LaunchShape:
    """The key of a launch, beside the rows.

    Attributes:
        op: ``gemm``, ``GATED``, ``moe_gate_up``, ``moe_down``, ``DECODE`` or ``PREFILL``.
        kind: how the weight is stored and multiplied, ``Matrix.kind``; of attention ``kv_kind``.
        sizes: outputs and inputs of the matrix, of experts their number in front; of attention the
            KV heads, the query heads of each, their size, and of latent attention that of values.
    """

    op: str
    kind: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.kind} {list(self.sizes)}"

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of rows that have a launch each: one for all, where results depend on it."""
        return (EVERY,) if self.op in (DECODE, PREFILL) else ROWS


class Tuning(Protocol):
    """The source of launch configurations."""

    @property
    def source(self) -> str:
        """Its description in ``weft info``."""

    def launch(self, shape: LaunchShape, rows: int) -> Launch:
        """Return the configuration for so many rows. Raises KernelUnavailable: there is none."""

    def attention(self, shape: LaunchShape) -> Launch | None:
        """Return the differences from the rule of attention, None if there are none.

        Raises:
            KernelUnavailable: there is a file, and it has no entry.
        """


def bucket_of(rows: int) -> int:
    """Return which of ``ROWS`` serves so many rows."""
    return next((bucket for bucket in ROWS if rows <= bucket), ROWS[-1])


@dataclass(frozen=True)
class Heuristic:
    """Configurations by a rule, not measured.

    Attributes:
        processors: multiprocessors of the device.
        shared_bytes: shared memory that a program may have.
        why: the reason why there is no file.
    """

    processors: int
    shared_bytes: int
    why: str = "chosen"

    @property
    def source(self) -> str:
        """See ``Tuning``."""
        return f"heuristic ({self.why})"

    def launch(self, shape: LaunchShape, rows: int) -> Launch:
        """See ``Tuning``."""
        return _by_rule(self, shape, bucket_of(rows))

    def attention(self, shape: LaunchShape) -> Launch | None:  # noqa: ARG002
        """See ``Tuning``; the rule is ``triton.tiles``."""
        return None


@cache
def _by_rule(device: Heuristic, shape: LaunchShape, bucket: int) -> Launch:
    """Fill the device: two programs for each multiprocessor, by parts of the inputs.

    Blocks are as large as registers hold the sums of; as many are loaded ahead as two programs
    have shared memory for, up to four.
    """
    if (coded := CodeForm.parse(shape.kind)) is not None:
        form, dtype = coded
        kinds = {"wide": dtype == "float32", "gated": shape.op == "moe_gate_up"}
        return launch_by_rule(form, shape.sizes, bucket, device.processors, **kinds)
    outputs, inputs = shape.sizes[-2:]
    gated = shape.op in (GATED, "moe_gate_up")
    weight, row = item_bytes(shape.kind)
    wide = row == 4
    block_m = min(bucket, 64 if wide else 128)
    # FP8 sums twice: short sums by the tensor cores are added to long ones.
    block_n = 32 if wide and gated else 64
    if bucket > 64 and shape.op == "gemm" and not wide and not shape.kind.startswith("fp8 to"):
        block_n = 128
    block_k = 32 if wide else 64 if bucket > 64 else 128
    stage = int(block_k * (weight * block_n * (2 if gated else 1) + row * block_m))
    splits = 1
    while (
        shape.op == "gemm"
        and bucket <= 64
        and splits < MOST_SPLITS
        and -(-outputs // block_n) * splits < 2 * device.processors
        and inputs >= 4 * block_k * splits
    ):
        splits *= 2
    splits = _even(splits, -(-inputs // block_k), -(-device.processors // -(-outputs // block_n)))
    launch = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 8 if bucket > 64 or (gated and bucket > 32) else 4,
        "num_stages": max(2, min(4, device.shared_bytes // 2 // stage)),
    }
    return launch | ({"SPLITS": splits} if shape.op == "gemm" else {})


def _even(splits: int, steps: int, least: int) -> int:
    """Return as many splits, or down to half of them, that divide the steps; or none is empty.

    Steps beyond the inputs read nothing and take their time nevertheless.

    Args:
        least: splits that give each multiprocessor a program.
    """
    fewer = range(splits, max(splits // 2, least) - 1, -1)
    whole = -(-steps // -(-steps // splits))
    return next((count for count in fewer if steps % count == 0), whole)


def item_bytes(kind: str) -> tuple[float, int]:
    """Bytes of a weight and of a number of a row, as they are loaded."""
    row = 4 if kind.endswith("float32") else 2  # rounded rows are one byte on some devices
    if (coded := CodeForm.parse(kind)) is not None:
        return coded[0].bits / 8, row
    return (1 if kind.startswith(("fp8", "int8")) else row), row


@dataclass(frozen=True)
class Pinned:
    """Configurations that were measured, read from a file."""

    path: Path
    hardware: str
    entries: Mapping[tuple[LaunchShape, int], Launch]

    @property
    def source(self) -> str:
        """See ``Tuning``."""
        return f"{self.path} ({len(self.entries)} launches measured on {self.hardware})"

    def launch(self, shape: LaunchShape, rows: int) -> Launch:
        """See ``Tuning``."""
        return self._entry(shape, bucket_of(rows))

    def attention(self, shape: LaunchShape) -> Launch:
        """See ``Tuning``."""
        return self._entry(shape, EVERY)

    def _entry(self, shape: LaunchShape, bucket: int) -> Launch:
        found = self.entries.get((shape, bucket))
        if found is None:
            self.require([shape])
            raise KernelUnavailable(f"{self.path} has no tuned launch for {shape}")
        return found

    def require(self, shapes: Iterable[LaunchShape]) -> None:
        """Check that there is an entry for every shape, and each of its numbers of rows.

        Raises:
            KernelUnavailable: there is none; the message names the first few and the remedy.
        """
        missing = [
            str(shape) if bucket == EVERY else f"{shape} with up to {bucket} rows"
            for shape in shapes
            for bucket in shape.buckets
            if (shape, bucket) not in self.entries
        ]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise KernelUnavailable(
                f"{self.path} has no tuned launch for {'; '.join(missing[:4])}{more}; make one "
                f"with '{MAKE}' and the settings of this model, or set tuning='heuristic'"
            )


def kind_of(dtype: str, stored: str | None, rounds: bool) -> str:
    """Return how a weight is multiplied.

    Args:
        dtype: of activations and results.
        stored: ``Storage.format`` of 8 bits; None: in ``dtype``.
        rounds: whether activations are rounded to FP8.
    """
    if stored is None:
        return dtype
    if rounds:
        return f"fp8 to {dtype}"
    return f"{'fp8' if stored == 'e4m3' else 'int8'} weights in {dtype}"


def kv_kind(dtype: str, kv: str) -> str:
    """Return how attention reads its cache: in the dtype of the queries, or another."""
    return dtype if kv == dtype else f"{kv} KV in {dtype}"


def op_of(parameter: str) -> str:
    """Return what the tuning calls the product with a parameter."""
    return OPS.get(parameter.rpartition(".")[2], "gemm")


def search(
    start: Launch,
    cost: Callable[[Launch], float],
    alternatives: Mapping[str, tuple[int, ...]],
) -> tuple[Launch, float]:
    """Change one parameter after another to what costs least, until no round gains anything.

    Less than a hundredth is no gain: measured times differ by as much.

    Args:
        cost: seconds of a launch; infinity for one that cannot run.
        alternatives: values of each parameter; those that ``start`` does not have are left out.
    """
    best, least, tried = dict(start), cost(start), [dict(start)]
    for _ in range(ROUNDS):
        before = least
        for name, values in alternatives.items():
            for value in values if name in start else ():
                trial = best | {name: value}
                if trial in tried:
                    continue
                tried.append(trial)
                if (found := cost(trial)) < 0.99 * least:
                    best, least = trial, found
        if least == before:
            break
    return best, least


def source_hash() -> str:
    """Return a hash of the sources of all Triton kernels; it is part of a file of launches."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def artefact_path(hardware: str) -> Path:
    """Return where the package keeps the file of a device by its name."""
    return ARTEFACTS / (hardware.lower().replace(" ", "-").replace("/", "-") + ".json")


def load(path: Path, hardware: str, triton: str) -> Pinned:
    """Read a file of launches.

    Args:
        hardware: name of the device that will run.
        triton: version of the compiler that will compile.

    Raises:
        KernelUnavailable: the file cannot be read or belongs to another device, other kernels,
            another compiler or another version of the format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {name: content[name] for name in ("version", "hardware", "triton", "kernels")}
        entries = dict(map(_entry, content["entries"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KernelUnavailable(f"cannot read tuned launches from {path}: {error!r}") from error
    expected = _head(hardware, triton)
    for name, value in expected.items():
        if found[name] != value:
            raise KernelUnavailable(
                f"{path}: {name} is {found[name]!r}, not {value!r}; its launches were measured for "
                f"something else: make new ones with '{MAKE}', or set tuning='heuristic'"
            )
    return Pinned(path, hardware, entries)


def save(
    path: Path, hardware: str, triton: str, entries: Mapping[tuple[LaunchShape, int], Launch]
) -> None:
    """Write a file of launches that ``load`` reads."""
    lines = [
        {
            "op": shape.op,
            "kind": shape.kind,
            "sizes": list(shape.sizes),
            "rows": rows,
            "launch": dict(launch),
        }
        for (shape, rows), launch in sorted(entries.items(), key=lambda item: item[0])
    ]
    content = _head(hardware, triton) | {"entries": lines}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _head(hardware: str, triton: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "hardware": hardware,
        "triton": triton,
        "kernels": source_hash(),
    }


def _entry(line: Mapping[str, Any]) -> tuple[tuple[LaunchShape, int], Launch]:
    shape = LaunchShape(str(line["op"]), str(line["kind"]), tuple(map(int, line["sizes"])))
    launch = {str(name): int(value) for name, value in line["launch"].items()}
    return (shape, int(line["rows"])), launch
