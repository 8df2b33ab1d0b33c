"""Launches of matrix products that are worth measuring on a GPU. Torch-free.

All combinations of block sizes, parts, warps and stages would be hundreds for each shape, each to
be compiled. Those are left out that the GPU cannot run, that another one dominates, or that move
more bytes than it takes to read the weight; of the others those are kept that an estimate by bytes
prefers.
"""

from __future__ import annotations

from itertools import product

from weft.kernels.codes import CodeForm
from weft.kernels.tuning import ALTERNATIVES, GATED, Heuristic, Launch, LaunchShape, item_bytes

MOST = 24  # launches of a shape and a number of rows, that of the rule included
MOST_SUMS = 128  # float32 sums of a thread, which has 255 registers
LEAST_SUMS = 4  # with fewer, half as many warps do the same
PARTS_SHARE = 0.25  # of the weight's bytes, that writing and reading parts may add
# Bytes that a multiprocessor must have asked for to be served at full bandwidth: an estimate, by
# 3.35 TB/s of an H100 times a latency of 0.8 us, over its 132, with some room.
IN_FLIGHT_BYTES = 32 * 1024
REREAD_SHARE = 0.25  # of the activations that each program reads again, mostly from a cache
FLOATS = ("float32", "bfloat16", "float16")
FP8 = "fp8 to bfloat16"
FP8_CAPABILITY = (8, 9)
TWICE = (GATED, "moe_gate_up")  # sums of gates and of what they multiply


def computed_by_torch(
    shape: LaunchShape, rows: int, capability: tuple[int, int], *, is_head: bool = False
) -> bool:
    """Whether products with so many rows go to torch, so that no launch of them is ever used.

    See ``triton.matrix``: more than 64 rows of floats, and of FP8 where torch has the product.

    Args:
        is_head: whether it is the output head's, whose logits are float32: torch multiplies FP8
            with a scale a row into bfloat16 alone.
    """
    if rows <= 64 or shape.op not in ("gemm", GATED):
        return False
    if shape.kind in FLOATS:
        return True
    aligned = all(size % 16 == 0 for size in shape.sizes)
    return shape.kind == FP8 and aligned and capability >= FP8_CAPABILITY and not is_head


def candidates(device: Heuristic, shape: LaunchShape, rows: int, most: int = MOST) -> list[Launch]:
    """Return launches for so many rows: first that of the rule, then those that may be faster."""
    rule = device.launch(shape, rows)
    names = [name for name in ALTERNATIVES if name in rule and name != "num_stages"]
    if CodeForm.parse(shape.kind) is not None:  # blocks are as codes are packed
        names = [name for name in names if not name.startswith("BLOCK")]
    found: list[tuple[float, int, Launch]] = []
    for values in product(*(ALTERNATIVES[name] for name in names)):
        launch = {**rule, **dict(zip(names, values, strict=True))}
        if launch.get("SPLITS", 1) > 1 and rows > 64:
            continue
        for stages in _stages(device, shape, launch):
            chosen = {**launch, "num_stages": stages}
            if chosen != rule and _is_sound(shape, rows, chosen):
                found.append((_estimate(device, shape, rows, chosen), len(found), chosen))
    return [rule, *(chosen for *_, chosen in sorted(found)[: most - 1])]


def _stage_bytes(shape: LaunchShape, launch: Launch) -> int:
    """Shared memory of a step of a program: of weights and of rows."""
    weight, row = item_bytes(shape.kind)
    gated = 2 if shape.op in TWICE else 1
    step = weight * launch["BLOCK_N"] * gated + row * launch["BLOCK_M"]
    return int(launch["BLOCK_K"] * step)


def _stages(device: Heuristic, shape: LaunchShape, launch: Launch) -> list[int]:
    """Return the deepest pipeline for each number of programs that a multiprocessor holds."""
    stage = _stage_bytes(shape, launch)
    steps = -(-shape.sizes[-1] // (launch["BLOCK_K"] * launch.get("SPLITS", 1)))
    deepest: dict[int, int] = {}
    for stages in ALTERNATIVES["num_stages"]:
        programs = device.shared_bytes // (stage * stages)
        if programs and stages <= max(2, steps):
            deepest[programs] = stages
    return list(deepest.values())


def _is_sound(shape: LaunchShape, rows: int, launch: Launch) -> bool:
    """Whether sums fit into registers, blocks into the matrix, and parts are worth their bytes."""
    outputs, inputs = shape.sizes[-2:]
    splits = launch.get("SPLITS", 1)
    wasted = launch["BLOCK_N"] >= 2 * outputs or launch["BLOCK_K"] * splits >= 2 * inputs
    sums = launch["BLOCK_M"] * launch["BLOCK_N"] // (32 * launch["num_warps"])
    sums *= (2 if shape.op in TWICE else 1) * (2 if shape.kind.startswith("fp8 to") else 1)
    weight, _ = item_bytes(shape.kind)
    parts = 8 * splits * rows * outputs if splits > 1 else 0
    fits = LEAST_SUMS <= sums <= MOST_SUMS
    return fits and not wasted and parts <= PARTS_SHARE * weight * outputs * inputs


def _estimate(device: Heuristic, shape: LaunchShape, rows: int, launch: Launch) -> float:
    """Return the bytes that a product moves, more where the GPU is not kept busy by them."""
    outputs, inputs = shape.sizes[-2:]
    count = shape.sizes[0] if len(shape.sizes) == 3 else 1
    splits = launch.get("SPLITS", 1)
    columns, heights = -(-outputs // launch["BLOCK_N"]), -(-rows // launch["BLOCK_M"])
    weight, row = item_bytes(shape.kind)
    stage = _stage_bytes(shape, launch)
    held = max(1, device.shared_bytes // (stage * launch["num_stages"]))
    held = min(held, 48 // launch["num_warps"])  # programs of a multiprocessor
    programs = count * columns * heights * splits
    moved: float = count * heights * weight * outputs * inputs
    moved += (8 * splits * rows * outputs if splits > 1 else 0) * count
    moved += REREAD_SHARE * count * row * rows * inputs * columns
    at_once = min(programs / device.processors, held)
    busy = min(1.0, at_once * stage * (launch["num_stages"] - 1) / IN_FLIGHT_BYTES)
    waves = programs / (device.processors * held)
    tail = max(1.0, -(-programs // (device.processors * held)) / max(waves, 1.0))
    return moved / busy * tail
