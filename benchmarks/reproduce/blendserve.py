"""BlendServe's traces: throughput by order, sharing, data parallel parts, density by sharing.

    python benchmarks/reproduce/blendserve.py [--out FOLDER] [--quick]

Llama-3.1-8B on one A100 80GB. The order decides what is submitted; weft's FCFS scheduler and KV
cache with prefix caching do the rest. Step times are those of the data sheet without any host
overhead, since the paper measures none (BlendServe section 6.2), and overlap of arithmetic and
reads within a step is none, as measured for NanoFlow, or ideal. Plans do not depend on times, so
one run gives all three.

The data sets are synthetic substitutes (``weft.sim.blended``), with outputs a tenth as long as in
OpenVid's quoted density, since the requests that fill the memory must change often enough in a
simulation of minutes.
"""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from reproduction import Reproduction

from weft.blend.blending import choose_samples
from weft.blend.density import Rates
from weft.blend.lengths import estimate_outputs
from weft.blend.order import Jobs, Room, make_order
from weft.blend.partition import partition
from weft.blend.tree import build_tree
from weft.blend.windows import Windows
from weft.cost.hardware import hardware
from weft.cost.roofline import NO_OVERHEAD, Roofline
from weft.cost.shape import model_shape
from weft.sched.scheduler import Limits
from weft.sim.blended import BURSTGPT, MMLU, OPENVID, TRACES, Blended, counts, shortened, synthesise
from weft.sim.offline import OfflineRun, least_work, run_offline, split_of
from weft.sim.overlap import GAINED, LOST, OVERLAPS

SHORTER = 0.1  # outputs of the video requests over those with OpenVid's quoted density
HEAVY, GRID_HEAVY, TUNING_HEAVY = 4000, 1200, 600  # video requests of a trace
QUICK_HEAVY = 100
SEQUENCES = 1024
TRIED = ((256, 512), (256, 1024), (256, 2048), (1024, 1024))  # sequences, tokens a step
DENSITIES, SHARINGS = (0.8, 1.1, 1.4), (0.05, 0.2, 0.35)
BASELINES = ("fcfs", "dfs", "random")
OFFERED = 0.8  # of the practical optimum, where requests come over time
POINTS = 60  # of a run, in plots over time

SHAPE, A100 = model_shape("llama-3.1-8b"), hardware("a100")
RATES = Rates.of(SHAPE, A100)
COST = Roofline(SHAPE, A100, overhead=NO_OVERHEAD)
KV = COST.kv_room()

# Table 3: tokens/s of BlendServe on 1, 2 and 4 GPUs.
PAPER_RATES = {
    1: (11080, 20561, 41928),
    2: (8408, 16261, 32537),
    3: (8403, 15623, 32026),
    4: (6325, 12246, 24541),
}


@dataclass(frozen=True)
class Cell:
    """A run: a trace, its order, and the limits of the engine.

    Attributes:
        part, parts: which of the data-parallel parts.
        shorter: outputs of the video requests over those with OpenVid's quoted density.
    """

    density: float
    sharing: float
    heavy: int
    order: str
    sequences: int
    step_tokens: int
    part: int = 0
    parts: int = 1
    shorter: float = SHORTER


@dataclass(frozen=True)
class Outcome:
    """What came of a run: seconds and shares of the practical optimum by overlap.

    Attributes:
        optimum: tokens/s with the sharing of the best order and the overlap of the sums.
        sharing: prompt tokens shared over those that the best order shares.
        over_time: arithmetic and reads as shares of each of ``POINTS`` spans of the run.
    """

    tokens: int
    seconds: dict[str, float]
    optimum: dict[str, float]
    sharing: float
    preempted: int
    kv_use: float
    over_time: tuple[list[float], list[float], list[float]]

    def rate(self, overlap: str) -> float:
        return self.tokens / self.seconds[overlap]

    def share(self, overlap: str) -> float:
        return self.rate(overlap) / self.optimum[overlap]


@cache
def trace_of(density: float, sharing: float, heavy: int, shorter: float = SHORTER) -> Blended:
    kinds = (BURSTGPT, shortened(OPENVID, shorter), MMLU)
    return synthesise(counts(density, sharing, heavy, kinds, RATES), kinds, RATES)


def shard_range(trace: Blended, part: int, parts: int) -> Blended:
    """One of the data-parallel parts, cut with what a sample tells about lengths."""
    if parts == 1:
        return trace
    tree = build_tree(trace.prompts)
    known = {int(n): float(trace.outputs[n]) for n in choose_samples(len(trace))}
    numbers = partition(tree, estimate_outputs(trace.prompts, known)[tree.leaves], RATES, parts)[
        part
    ]
    return these(trace, numbers)


def these(trace: Blended, numbers: list[int]) -> Blended:
    """Some of a trace's requests."""
    prompts = [trace.prompts[n] for n in numbers]
    return Blended(prompts, trace.outputs[numbers], trace.kinds[numbers], trace.names)


def run(cell: Cell) -> Outcome:
    """Serve a trace, or its part."""
    gc.disable()  # nothing here makes cycles worth the look
    whole = trace_of(cell.density, cell.sharing, cell.heavy, cell.shorter)
    trace = shard_range(whole, cell.part, cell.parts)
    room = Room(KV, cell.sequences)
    order = make_order(cell.order, Jobs(trace.prompts), room, RATES)
    found = run_offline(trace, order, COST, Limits(cell.sequences, cell.step_tokens, KV), KV)
    shared, least = optimum(trace)
    return Outcome(
        trace.tokens,
        {name: found.seconds(overlap) for name, overlap in OVERLAPS.items()},
        {name: trace.tokens / seconds for name, seconds in least.items()},
        found.cached / shared,
        found.preempted,
        float(found.kv_use.mean()),
        over_time(found),
    )


def optimum(trace: Blended) -> tuple[int, dict[str, float]]:
    """Tokens that the best order shares, and the least seconds by overlap."""
    shared = int(build_tree(trace.prompts).shared.sum())
    compute, memory, other = split_of(COST, least_work(trace, shared))
    return shared, {name: float(f(compute, memory) + other) for name, f in OVERLAPS.items()}


def over_time(found: OfflineRun) -> tuple[list[float], list[float], list[float]]:
    """Seconds, and the shares of arithmetic and reads of the time until then."""
    seconds = OVERLAPS["measured"](found.compute_s, found.memory_s) + found.other_s
    ends = np.cumsum(seconds)
    at = np.searchsorted(ends, np.linspace(0, ends[-1], POINTS + 1)[1:]).clip(0, len(ends) - 1)
    sums = [np.append(0, np.cumsum(x)[at]) for x in (seconds, found.compute_s, found.memory_s)]
    spans = np.maximum(np.diff(sums[0]), 1e-9)
    return (
        ends[at].tolist(),
        (np.diff(sums[1]) / spans).tolist(),
        (np.diff(sums[2]) / spans).tolist(),
    )


def tune(found: Reproduction, pool: ProcessPoolExecutor, heavy: int) -> dict[str, tuple[int, int]]:
    """For each baseline the limits with which it is fastest on trace 1."""
    density, sharing = TRACES[1]
    cells = [
        Cell(density, sharing, heavy, order, *limits) for order in BASELINES for limits in TRIED
    ]
    rows, best = [], {}
    for cell, outcome in zip(cells, pool.map(run, cells), strict=True):
        share = outcome.share("measured")
        limits = (cell.sequences, cell.step_tokens)
        rows.append([cell.order, *limits, share, outcome.sharing, outcome.preempted])
        if share > best.get(cell.order, (0.0, limits))[0]:
            best[cell.order] = (share, limits)
    found.table(
        f"Baselines by their limits, on trace 1 with {heavy} long requests",
        ["order", "sequences", "tokens a step", "of practical optimum", "sharing", "preempted"],
        rows,
    )
    return {order: limits for order, (_, limits) in best.items()}


def blend_cell(density: float, sharing: float, heavy: int, part: int = 0, parts: int = 1) -> Cell:
    step = RATES.balanced_tokens(density, KV)
    return Cell(density, sharing, heavy, "blend", SEQUENCES, step, part, parts)


def traces(
    found: Reproduction, pool: ProcessPoolExecutor, limits: dict[str, tuple[int, int]], heavy: int
) -> dict[tuple[int, str], Outcome]:
    """The four traces in four orders."""
    cells = {}
    for number, (density, sharing) in TRACES.items():
        cells[number, "blend"] = blend_cell(density, sharing, heavy)
        for order in BASELINES:
            cells[number, order] = Cell(density, sharing, heavy, order, *limits[order])
    outcomes = dict(zip(cells, pool.map(run, cells.values()), strict=True))
    rows = [
        [
            number, order, outcome.rate("measured"),
            *(outcome.share(name) for name in ("measured", "none", "ideal")),
            outcome.sharing, outcome.kv_use, outcome.preempted,
        ]
        for (number, order), outcome in outcomes.items()
    ]  # fmt: skip
    found.table(
        f"Traces 1 to 4 with {heavy} long requests: tokens/s, and shares of the optimum by overlap",
        [
            "trace",
            "order",
            "tokens/s",
            "measured",
            "none",
            "ideal",
            "sharing",
            "KV use",
            "preempted",
        ],
        rows,
    )
    orders = ("blend", *BASELINES)
    found.curves(
        "traces",
        "Throughput over the practical optimum, overlap as measured",
        "trace",
        "share of optimum",
        {o: (list(TRACES), [outcomes[n, o].share("measured") for n in TRACES]) for o in orders},
        xticks=list(TRACES),
        ylim=(0.5, 1.0),
    )
    curves = {}
    for order in ("blend", "dfs", "random"):
        seconds, _, memory = outcomes[2, order].over_time
        curves[order] = (seconds, memory)
    found.curves("memory", "Trace 2: share of the time that reads take", "s", "share", curves)
    return outcomes


def against_paper(found: Reproduction, outcomes: dict[tuple[int, str], Outcome]) -> None:
    """The paper's claims beside weft's figures."""
    share, gain, ideal = [], [], []
    for number in TRACES:
        blend, dfs = outcomes[number, "blend"], outcomes[number, "dfs"]
        share.append(blend.share("measured"))
        gain.append(blend.rate("measured") / dfs.rate("measured"))
        ideal.append(blend.rate("ideal") / dfs.rate("ideal"))
        found.compare(f"trace {number}: blend / practical optimum", None, share[-1])
        found.compare(f"trace {number}: blend / depth first", None, gain[-1])
        plain = blend.rate("none") / dfs.rate("none")
        found.compare(f"trace {number}: the same, neither with overlap", None, plain)
        apart = blend.rate("measured") / dfs.rate("none")
        found.compare(f"trace {number}: blend with overlap / depth first without", None, apart)
        paper = PAPER_RATES[number][0]
        found.compare(f"trace {number}: tokens/s", paper, blend.rate("measured"), "", "table 3")
    found.compare("lowest share of practical optimum", 0.86, min(share), "", "section 6.3")
    found.compare("highest share of practical optimum", 0.90, max(share), "", "abstract")
    found.compare("mean gain over depth first", 1.20, float(np.mean(gain)), "", "section 6.3")
    found.compare("the same with ideal overlap", None, float(np.mean(ideal)))
    against_rows = [
        outcomes[n, "blend"].rate("measured") / outcomes[n, "dfs"].rate("none") for n in TRACES
    ]
    found.compare(
        "highest gain over depth first without overlap (vLLM, SGLang)", 1.44, max(against_rows),
        "", "section 6.3",
    )  # fmt: skip
    lowest = min(outcomes[n, "blend"].sharing for n in TRACES)
    found.compare("lowest sharing over the best", 0.97, lowest, "", "figure 9")


def data_parallel(
    found: Reproduction,
    pool: ProcessPoolExecutor,
    heavy: int,
    alone: dict[tuple[int, str], Outcome],
) -> None:
    """Two and four engines, each with its part; the slowest one decides."""
    sizes = (2, 4)
    cells = {
        (number, parts, part): blend_cell(*TRACES[number], heavy, part, parts)
        for number in TRACES
        for parts in sizes
        for part in range(parts)
    }
    outcomes = dict(zip(cells, pool.map(run, cells.values()), strict=True))
    small = {(n, parts): blend_cell(*TRACES[n], heavy // parts) for n in TRACES for parts in sizes}
    of_size = dict(zip(small, pool.map(run, small.values()), strict=True))
    rows = []
    for number in TRACES:
        one = alone[number, "blend"]
        for at, parts in enumerate(sizes, 1):
            mine = [outcomes[number, parts, part] for part in range(parts)]
            slowest = max(outcome.seconds["measured"] for outcome in mine)
            optima = [outcome.tokens / outcome.optimum["measured"] for outcome in mine]
            speed = one.seconds["measured"] / slowest
            paper = PAPER_RATES[number][at] / PAPER_RATES[number][0]
            found.compare(f"trace {number}: speed of {parts} engines", paper, speed, "", "table 3")
            uneven = max(optima) * parts / sum(optima)
            extra = sum(optima) / (one.tokens / one.optimum["measured"])
            share = sum(optima) / sum(outcome.seconds["measured"] for outcome in mine)
            itself = of_size[number, parts].share("measured")
            rows.append([number, parts, speed, uneven, extra, share, itself])
    found.table(
        "Data parallel: largest part over the average, work of all parts over that of the whole",
        [
            "trace",
            "engines",
            "speed",
            "largest part",
            "work",
            "of practical optimum",
            "a trace of that size alone",
        ],
        rows,
    )


def grid(
    found: Reproduction, pool: ProcessPoolExecutor, heavy: int, limits: tuple[int, int]
) -> None:
    """Blend over depth first by density and sharing."""
    places = [(density, sharing) for density in DENSITIES for sharing in SHARINGS]
    cells = [blend_cell(*place, heavy) for place in places]
    cells += [Cell(*place, heavy, "dfs", *limits) for place in places]
    outcomes = list(pool.map(run, cells))
    rows = []
    for place, blend, dfs in zip(places, outcomes, outcomes[len(places) :], strict=False):
        gain = blend.rate("measured") / dfs.rate("measured")
        rows.append([*place, gain, blend.share("measured"), dfs.share("measured"), blend.sharing])
    found.table(
        f"Grid with {heavy} long requests: blend over depth first, overlap as measured",
        ["density", "sharing", "blend / depth first", "blend", "depth first", "sharing kept"],
        rows,
    )


def reasons(
    found: Reproduction, pool: ProcessPoolExecutor, heavy: int, limits: tuple[int, int]
) -> None:
    """Why the gain over depth first is what it is: trace 1 with one thing changed."""
    density, sharing = TRACES[1]
    ours = blend_cell(density, sharing, heavy)
    dfs = Cell(density, sharing, heavy, "dfs", *limits)
    longer = {"shorter": 2 * SHORTER}
    pairs = {
        "as it is": (ours, dfs),
        "depth first with the limits of blend": (
            ours, replace(dfs, sequences=SEQUENCES, step_tokens=ours.step_tokens),
        ),
        "video outputs twice as long": (replace(ours, **longer), replace(dfs, **longer)),
    }  # fmt: skip
    outcomes = iter(list(pool.map(run, [cell for pair in pairs.values() for cell in pair])))
    rows = []
    for what in pairs:
        blend, other = next(outcomes), next(outcomes)
        gains = [blend.rate(name) / other.rate(name) for name in ("measured", "none", "ideal")]
        shares = (blend.share("measured"), other.share("measured"))
        rows.append([what, *gains, *shares, other.preempted])
    found.table(
        f"Blend over depth first on trace 1 with {heavy} long requests, one thing changed",
        ["changed", "measured", "no overlap", "ideal", "blend", "depth first", "its preemptions"],
        rows,
    )


@dataclass(frozen=True)
class Windowed:
    """Trace 1 coming evenly over time, blended in pools under a deadline; in shares of that time.

    Attributes:
        deadline: from the arrival of a request to its end.
    """

    heavy: int
    deadline: float


def run_windowed(cell: Windowed) -> tuple[int, float, float, float, int]:
    """Pools, seconds at work, worst time from arrival to end over the deadline, span, late ones.

    Requests are collected for half of the deadline and served in the other half (section 7).
    """
    trace = trace_of(*TRACES[1], cell.heavy)
    least = optimum(trace)[1]["measured"]
    span = least / OFFERED
    arrivals = np.linspace(0, span, len(trace)).tolist()
    deadline = cell.deadline * span
    lengths = np.array([len(prompt) for prompt in trace.prompts], float)
    alone = RATES.compute_s(lengths, trace.outputs) + RATES.memory_s(lengths, trace.outputs)
    work = (alone * least / alone.sum()).tolist()
    windows, room = Windows(deadline, deadline / 4), Room(KV, SEQUENCES)
    step = blend_cell(*TRACES[1], cell.heavy).step_tokens
    now, come, pools, busy, worst, late = 0.0, 0, 0, 0.0, 0.0, 0
    while come < len(trace) or len(windows):
        if not len(windows):
            now = max(now, arrivals[come] + deadline / 2)
        while come < len(trace) and arrivals[come] <= now:
            windows.add(come, arrivals[come], work[come])
            come += 1
        numbers = windows.take(now)
        part = these(trace, numbers)
        order = make_order("blend", Jobs(part.prompts), room, RATES)
        served = run_offline(part, order, COST, Limits(SEQUENCES, step, KV), KV)
        busy += served.seconds(OVERLAPS["measured"])
        now += served.seconds(OVERLAPS["measured"])
        pools += 1
        worst = max(worst, now - arrivals[numbers[0]])
        late += sum(now > arrivals[number] + deadline for number in numbers)
    return pools, busy, worst / deadline, span, late


def windows(found: Reproduction, pool: ProcessPoolExecutor, heavy: int) -> None:
    """What a deadline costs (section 7, "end-to-end latency")."""
    cells = [Windowed(heavy, deadline) for deadline in (2.0, 1.0, 0.5, 0.25)]
    least = optimum(trace_of(*TRACES[1], heavy))[1]["measured"]
    rows = [
        [cell.deadline * span, pools, least / busy, worst, late]
        for cell, (pools, busy, worst, span, late) in zip(
            cells, pool.map(run_windowed, cells), strict=True
        )
    ]
    found.table(
        f"Trace 1 with {heavy} long requests, coming evenly at {OFFERED:.0%} of the practical "
        "optimum, in pools under a deadline",
        ["deadline, s", "pools", "of practical optimum", "latest end / deadline", "late"],
        rows,
    )


def main() -> None:
    found = Reproduction.start("blendserve", __doc__.splitlines()[0])
    heavy, few = (QUICK_HEAVY, QUICK_HEAVY) if found.quick else (HEAVY, GRID_HEAVY)
    with ProcessPoolExecutor(2) as pool:
        limits = tune(found, pool, QUICK_HEAVY if found.quick else TUNING_HEAVY)
        outcomes = traces(found, pool, limits, heavy)
        against_paper(found, outcomes)
        write(found, limits, heavy)
        data_parallel(found, pool, heavy, outcomes)
        write(found, limits, heavy)
        grid(found, pool, few, limits["dfs"])
        reasons(found, pool, few, limits["dfs"])
        windows(found, pool, few)
    write(found, limits, heavy)


def write(found: Reproduction, limits: dict[str, tuple[int, int]], heavy: int) -> None:
    """Save what there is so far."""
    kinds = (BURSTGPT, shortened(OPENVID, SHORTER), MMLU)
    found.finish(
        hardware="a100",
        model=SHAPE.name,
        kv_tokens=KV,
        heavy=heavy,
        limits=limits,
        synthetic=[f"{kind.name}: {kind.output(RATES):.0f} tokens out" for kind in kinds],
        interference={"lost": LOST.tolist(), "gained": GAINED.tolist()},
    )


if __name__ == "__main__":
    main()
