"""Launches for a device, from its tuning file or by rule, and measuring matrix products."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import triton

from weft.kernels.codes import CodeForm
from weft.kernels.storage import Storage
from weft.kernels.triton.coded import linear as coded_product
from weft.kernels.triton.coded_matrix import CodedMatrix, random_codes
from weft.kernels.triton.device import copies_beyond_caches, gpu_at, processors, shared_bytes
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.gated import gated_product
from weft.kernels.triton.matrix import TritonMatrix, pack, quantised, small_product
from weft.kernels.triton.moe import moe
from weft.kernels.tuning import GATED, Heuristic, Launch, LaunchShape, Tuning, artefact_path, load
from weft.kernels.unavailable import KernelUnavailable

logger = logging.getLogger("weft")

REPLAYS = 5  # of a graph of launches; the shortest counts
CANNOT_RUN = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PARAMETERS = {"gemm": "qkv", "moe_gate_up": "expert_gate_up", "moe_down": "expert_down"}
_PARAMETERS[GATED] = "gate_up"


def rule(device: torch.device, why: str) -> Heuristic:
    """Return launches by the rule."""
    return Heuristic(processors(device), shared_bytes(device), why)


def find_tuning(wish: str, device: torch.device) -> Tuning:
    """Return where launches come from, by the setting ``tuning``.

    A file of the package that is not for these kernels or this compiler is told and passed over.

    Raises:
        KernelUnavailable: the file that is named cannot be used.
    """
    gpu = gpu_at(device)
    if gpu is None:
        return rule(device, "kernels are interpreted")
    if wish == "heuristic":
        return rule(device, "as set")
    name = gpu.name
    if wish != "auto":
        return load(Path(wish), name, triton.__version__)
    path = artefact_path(name)
    if not path.exists():
        return rule(device, f"weft has no measured launches for {name}")
    try:
        return load(path, name, triton.__version__)
    except KernelUnavailable as error:
        logger.warning("Launches of kernels are chosen by a rule: %s", error)
        return rule(device, f"the measured launches for {name} are of other kernels")


class Trial:
    """One launch for one op, those of the rule for all others."""

    source = "trial"

    def __init__(self, otherwise: Tuning) -> None:
        self._otherwise = otherwise
        self.chosen: dict[str, Launch] = {}

    def launch(self, shape: LaunchShape, rows: int) -> Launch:
        """See ``Tuning``."""
        return self.chosen.get(shape.op) or self._otherwise.launch(shape, rows)

    def attention(self, shape: LaunchShape) -> Launch | None:
        """See ``Tuning``."""
        return self.chosen.get(shape.op)


def tune(
    shape: LaunchShape,
    rows: int,
    device: torch.device,
    launches: Sequence[Launch],
    seconds: Callable[[Callable[[int], None], int], float],
) -> tuple[Launch, float]:
    """Return the best launch for a shape and so many rows, and its seconds.

    Less than a hundredth is no gain over one that comes before: measured times differ by as much.

    Args:
        rows: of a product; of experts the pairs of each.
        launches: those that are measured.
        seconds: ``graph_seconds``, or another clock.

    Raises:
        KernelUnavailable: no launch runs.
    """
    trial = Trial(rule(device, "start"))
    call, copies = _calls(shape, rows, device, trial)
    best, least = None, math.inf
    for launch in launches:
        trial.chosen[shape.op] = launch
        try:
            found = seconds(call, copies)
        except CANNOT_RUN:
            continue
        if found < 0.99 * least:
            best, least = launch, found
    if best is None:
        raise KernelUnavailable(f"no launch of {shape} with {rows} rows runs on {device}")
    return best, least


def launch_each(
    shape: LaunchShape, rows: int, device: torch.device, launches: Iterable[Launch]
) -> Iterator[None]:
    """Call a product with each launch, one whenever the next is asked for."""
    trial = Trial(rule(device, "start"))
    call, _ = _calls(shape, rows, device, trial)
    for launch in launches:
        trial.chosen[shape.op] = launch
        call(0)
        yield


def graph_seconds(call: Callable[[int], None], copies: int) -> float:
    """Return the seconds of a call in a captured graph of one call for each copy."""
    for copy in range(copies):
        call(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / copies)
    return min(times)


def _calls(
    shape: LaunchShape, rows: int, device: torch.device, trial: Trial
) -> tuple[Callable[[int], None], int]:
    """Return a product with one of several copies of a weight, together larger than the caches."""
    first = random_matrix(shape, device, trial)
    copies = copies_beyond_caches(first.nbytes, device)
    weights = [first, *(random_matrix(shape, device, trial) for _ in range(copies - 1))]
    if shape.op in ("gemm", GATED):
        return _product(shape, rows, device, weights), copies
    return _mixture(shape, rows, device, trial, weights), copies


def _product(
    shape: LaunchShape,
    rows: int,
    device: torch.device,
    weights: Sequence[TritonMatrix | CodedMatrix],
) -> Callable[[int], None]:
    dtype = weights[0].dtype
    x = torch.randn(rows, shape.sizes[1], device=device, dtype=dtype)
    rounded = round_rows(x) if weights[0].rounds else None
    codes, scales = (x, None) if rounded is None else (rounded.codes, rounded.scales)
    inputs = "float" if rounded is None else "token"

    def call(copy: int) -> None:
        weight = weights[copy]
        if isinstance(weight, CodedMatrix):
            coded_product(x, weight, None, None, dtype)
        elif shape.op == GATED:
            gated_product(x if rounded is None else rounded, weight, None, "silu", inputs)
        else:
            small_product(codes, scales, weight, None, None, dtype)

    return call


def _mixture(
    shape: LaunchShape,
    rows: int,
    device: torch.device,
    trial: Trial,
    weights: Sequence[TritonMatrix | CodedMatrix],
) -> Callable[[int], None]:
    """A mixture in which every expert has as many pairs; what is not tuned is by the rule."""
    count, *sizes = shape.sizes
    gated = shape.op == "moe_gate_up"
    inner = sizes[0] // 2 if gated else sizes[1]
    hidden = sizes[1] if gated else sizes[0]
    other = LaunchShape("moe_down", shape.kind, (count, hidden, inner))
    if not gated:
        other = LaunchShape("moe_gate_up", shape.kind, (count, 2 * inner, hidden))
    partner = random_matrix(other, device, trial)
    experts = torch.arange(count, device=device).repeat(rows).unsqueeze(1)  # [T, 1]
    x = torch.randn(len(experts), hidden, device=device, dtype=partner.dtype)
    shares = torch.ones(len(experts), 1, device=device)

    def call(copy: int) -> None:
        pair = (weights[copy], partner) if gated else (partner, weights[copy])
        moe(x, shares, experts, *pair, "silu")

    return call


def random_matrix(
    shape: LaunchShape, device: torch.device, tuning: Tuning
) -> TritonMatrix | CodedMatrix:
    """Return a weight of a shape with random numbers."""
    parameter, sizes = _PARAMETERS[shape.op], torch.Size(shape.sizes)
    if (coded := CodeForm.parse(shape.kind)) is not None:
        return random_codes(shape, coded[0], device, tuning)
    stored, _, name = shape.kind.rpartition(" ")
    dtype = DTYPES[name]
    if not stored:
        numbers = torch.randn(sizes, device=device, dtype=dtype)
        made = pack(parameter, numbers, tuning)
        assert isinstance(made, TritonMatrix)
        return made
    inputs = "token" if stored == "fp8 to" else "float"
    storage = Storage(8, None, format="int" if stored.startswith("int8") else "e4m3", inputs=inputs)
    coded8 = quantised(parameter, sizes, name, storage, device=device, tuning=tuning)
    assert isinstance(coded8, TritonMatrix)
    assert coded8.scales is not None
    codes = torch.randint(0, 0x78, sizes, device=device, dtype=torch.uint8)  # none is NaN
    coded8.values.view(torch.uint8).copy_(codes)
    coded8.scales.fill_(0.01)
    return coded8
