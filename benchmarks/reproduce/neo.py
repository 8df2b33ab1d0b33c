"""NEO (MLSys 2025): decode attention on the host enlarges the batch; figures 6, 8, 9 and 10a.

    python benchmarks/reproduce/neo.py [--out FOLDER] [--quick]

Every cell serves the same requests by FCFS on the device alone (what NEO calls SwiftLLM), by the
load-aware scheduler, and where the paper does by the one that keeps all KV with the host
(FastDecode+). Throughput is over the time until all requests have ended: the middle of a run, which
the authors' scripts take, flatters whoever computes all of them side by side. KV blocks and longest
sequence of the T4 are those of the authors' artefact. Each scheduler has the best of several token
budgets in each cell.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from reproduction import SHARED, Reproduction

from weft.core.errors import ConfigError
from weft.cost.fit import ProfileKey
from weft.cost.roofline import Roofline
from weft.kv.cache import GroupSpec
from weft.kv.tiers import TieredCache
from weft.sched.registry import load_aware, make_scheduler
from weft.sched.scheduler import Scheduler
from weft.sim.build import World, build
from weft.sim.learn import learn
from weft.sim.options import SimOptions
from weft.sim.run import Simulated, simulate
from weft.sim.simulated import Errors

AT_ONCE = 1e5  # requests a second: all of them are there at the start
OUTPUTS = (50, 100, 200, 300, 400)
LONGER = (600, 800)  # beyond figure 10a, for the fast hosts, whose curves still rise at its end
BUDGETS = (512, 256)  # tokens a step, beside the machine's 2048 (the T4's 832)
SCHEDULERS = ("fcfs", "load-aware", "host-only")
CODE = SHARED / "azure" / "AzureLLMInferenceTrace_code.csv"

# evaluation/configs/config-t4-7b.json of NEO's artefact: 54 blocks of 16 tokens on the device,
# sequences up to 832 tokens, 20 GB of swap space
T4_BLOCKS, T4_LONGEST, T4_SWAP = 54, 832, 20 * 10**9


@dataclass(frozen=True)
class Machine:
    """A testbed of section 5.1 with its model."""

    label: str
    hardware: str
    model: str
    tp: int = 1


T4 = Machine("T4 + Llama-2-7B", "g4dn.4xlarge", "llama-2-7b")
A10G = [
    Machine(f"A10G + Llama-3.1-8B, g5.{size}xlarge", f"g5.{size}xlarge", "llama-3.1-8b")
    for size in (2, 4, 8, 16)
]
H100 = Machine("2 x H100 + Llama-3.1-70B", "neo-h100", "llama-3.1-70b", tp=2)


@dataclass(frozen=True)
class Load:
    """A load-latency curve of figure 6; ``paper`` is the gain in load at ``bound_s`` a token."""

    title: str
    machine: Machine
    rates: tuple[float, ...]
    bound_s: float
    paper: float
    where: str
    schedulers: tuple[str, ...] = SCHEDULERS[:2]
    trace: str = str(CODE)
    given: str = ""
    asked: str = ""


LOADS = (
    # OSC's prompts are posts of at most 512 tokens, its answers summaries of 24 to 48 (Stiennon et
    # al. 2020, section 3.2): drawn evenly, synthetic
    Load(
        "T4 + Llama-2-7B, OSC-like",
        T4,
        (0.5, 1, 2, 3, 4, 6, 8, 12),
        1.0,
        6.63,
        "5.2, fig. 6c",
        trace="synthetic",
        given="128..512",
        asked="24..48",
    ),
    Load(
        "A10G + Llama-3.1-8B, Azure code",
        A10G[1],
        (0.5, 1, 2, 3, 4, 6, 8),
        2.0,
        1.064,
        "5.2, fig. 6b",
    ),
    Load(
        "2 x H100 + Llama-3.1-70B, Azure code",
        H100,
        (1, 2, 4, 6, 8, 12, 16),
        2.0,
        1.143,
        "5.2, fig. 6a",
        SCHEDULERS,
    ),
)


@dataclass(frozen=True)
class Cell:
    """One run of each scheduler.

    Attributes:
        host: how many times as fast the host is in everything.
        device_kv: share of the device's memory for KV that is used.
    """

    machine: Machine
    scheduler: str
    requests: int
    rate: float = AT_ONCE
    input_tokens: str = ""
    output_tokens: str = ""
    trace: str = "synthetic"
    host: float = 1.0
    device_kv: float = 1.0


def world_of(cell: Cell) -> World:
    """Hardware, costs and traffic of a cell."""
    machine = cell.machine
    more: dict[str, Any] = {}
    if cell.trace == "synthetic":
        more |= {"input_tokens": cell.input_tokens, "output_tokens": cell.output_tokens}
    if machine == T4:
        more |= {"host_kv": T4_SWAP, "max_model_len": T4_LONGEST}
        more["max_num_batched_tokens"] = T4_LONGEST
    options = SimOptions(
        model=machine.model,
        hardware=machine.hardware,
        tp=machine.tp,
        scheduler="load-aware",  # so that costs are learnt; the scheduler is made below
        trace=cell.trace,
        rate=str(cell.rate),
        requests=cell.requests,
        prefix_caching=False,  # SwiftLLM has none
        max_num_seqs=512,
        **more,
    )
    world = build(options)
    if cell.host != 1:
        world = with_host(world, cell.host)
    if machine == T4:
        return with_blocks(world, T4_BLOCKS)
    if cell.device_kv != 1:
        blocks = world.planned.groups[0].num_blocks
        return with_blocks(world, int(cell.device_kv * blocks))
    return world


def with_blocks(world: World, blocks: int) -> World:
    """The same with so many blocks of KV on the device."""
    groups, limits = (GroupSpec("full", 16, blocks),), world.planned.limits
    limits = replace(limits, max_model_len=min(limits.max_model_len, 16 * blocks))
    return replace(world, planned=replace(world.planned, groups=groups, limits=limits))


def with_host(world: World, times: float) -> World:
    """The same with a host that is so many times as fast, which schedulers learn as well."""
    given, host = world.options, world.hardware.host
    if host is None:
        raise ConfigError(f"{world.hardware.name} has no host")
    host = replace(host, bandwidth=times * host.bandwidth, flops=times * host.flops)
    machine = replace(world.hardware, host=host)
    cost = Roofline(world.shape, machine, world.sheet.dtype, world.sheet.kv_dtype, given.tp)
    key = ProfileKey(machine.name, world.shape.name, cost.dtype, f"tp{given.tp}", "simulated")
    noise = Errors(given.error, 0.0, 1.0, given.seed)
    planned = learn(cost, key, world.planned.limits, noise, host=True)
    return replace(
        world, hardware=machine, cost=cost, sheet=cost, planned=replace(world.planned, cost=planned)
    )


def scheduler_of(cell: Cell, world: World) -> Scheduler:
    given = world.planned
    if cell.scheduler != "host-only":
        return make_scheduler(cell.scheduler, given)
    if given.cost is None:
        raise ConfigError("no costs were learnt")
    cache = TieredCache(given.groups, given.host_blocks, prefix_caching=False)
    return load_aware(cache, given.limits, given.cost, given.classes, host_only=True)


def run(cell: Cell) -> dict[str, float]:
    """Simulate a cell: its figures with the best token budget."""
    world = world_of(cell)
    most = world.planned.limits.max_num_batched_tokens
    found = []
    for budget in (most, *(budget for budget in BUDGETS if budget < most)):
        limits = replace(
            world.planned.limits, max_num_batched_tokens=budget, max_num_seqs=min(512, budget)
        )
        found.append(_run(cell, replace(world, planned=replace(world.planned, limits=limits))))
    if cell.rate == AT_ONCE:
        return max(found, key=lambda each: each["requests_per_s"])
    return min(found, key=lambda each: each["token_latency_s"])


def _run(cell: Cell, world: World) -> dict[str, float]:
    done = simulate(
        scheduler_of(cell, world),
        world.cost,
        world.traffic(cell.rate),
        world.errors(),
        world.planned.classes,
    )
    return figures(done, world.planned.limits.max_num_batched_tokens)


def figures(done: Simulated, budget: int) -> dict[str, float]:
    """Requests a second, latency per output token, and use of the host."""
    record, log = done.record, done.log
    seconds = log.column("seconds")
    return {
        "requests_per_s": len(record) / done.seconds,
        "token_latency_s": fmean(
            (end - start) / output
            for end, start, output in zip(
                record.end_s, record.arrival_s, record.output, strict=True
            )
        ),
        "two_batches": float((log.column("sub_batches") == 2).mean()),
        "host_share": float(log.column("host_decodes").sum() / max(1, log.column("sampled").sum())),
        "cpu_busy": float(log.column("cpu_s").sum() / seconds.sum()),
        "budget": float(budget),
        "preemptions": float(done.totals.preemptions),
    }


def sweep(pool: ProcessPoolExecutor, cells: list[Cell]) -> list[dict[str, float]]:
    """Run cells side by side, in order."""
    return list(pool.map(run, cells))


def over_outputs(
    pool: ProcessPoolExecutor,
    machine: Machine,
    input_tokens: int,
    outputs: tuple[int, ...],
    requests: int,
    schedulers: tuple[str, ...],
) -> dict[str, list[dict[str, float]]]:
    """Figures of each scheduler over output lengths, all requests at once (section 5.4)."""
    cells = [
        Cell(machine, scheduler, requests, AT_ONCE, f"{input_tokens}+-10%", f"{output}+-10%")
        for scheduler in schedulers
        for output in outputs
    ]
    found = sweep(pool, cells)
    return {
        scheduler: found[index * len(outputs) :][: len(outputs)]
        for index, scheduler in enumerate(schedulers)
    }


def relative(found: dict[str, list[dict[str, float]]], scheduler: str) -> list[float]:
    """Throughput over that of FCFS."""
    pairs = zip(found[scheduler], found["fcfs"], strict=True)
    return [own["requests_per_s"] / base["requests_per_s"] for own, base in pairs]


def lengths(made: Reproduction, pool: ProcessPoolExecutor) -> None:
    """Figures 8b, 9 and 10a: relative throughput over output length."""
    rows: list[list[object]] = []
    curves: dict[str, tuple[tuple[int, ...], list[float]]] = {}
    requests = 120 if made.quick else 500
    short = OUTPUTS[::2] if made.quick else OUTPUTS

    def add(
        machine: Machine,
        given: int,
        schedulers: tuple[str, ...],
        paper: float | None,
        where: str,
        count: int = requests,
        longer: tuple[int, ...] = (),
    ) -> None:
        outputs = (*short, *longer)
        found = over_outputs(pool, machine, given, outputs, count, schedulers)
        for scheduler in schedulers[1:]:
            gains = relative(found, scheduler)
            label = (
                machine.label if scheduler == "load-aware" else f"{machine.label}, all on the host"
            )
            curves[label] = (outputs, gains)
            for output, gain, own, base in zip(
                outputs, gains, found[scheduler], found["fcfs"], strict=True
            ):
                rows.append(
                    [
                        label,
                        given,
                        output,
                        base["requests_per_s"],
                        gain,
                        own["host_share"],
                        own["two_batches"],
                        own["cpu_busy"],
                        own["budget"],
                        base["budget"],
                        base["preemptions"],
                    ]
                )
        best = max(relative(found, "load-aware")[: len(short)])
        made.compare(f"{machine.label}: highest relative throughput", paper, best, "x", where)
        made.compare(
            f"{machine.label}: lowest", None, min(relative(found, "load-aware")), "x", where
        )
        if "host-only" in found:
            made.compare(
                f"{machine.label}: all on the host, longest answers",
                0.6,
                relative(found, "host-only")[-1],
                "x",
                "fig. 8b, 'less than'",
            )

    both, all_three = SCHEDULERS[:2], SCHEDULERS
    add(T4, 250, all_three[:2], 7.5, "5.4, fig. 9c", requests // 2)
    for machine, paper in zip(A10G, (1.122, 1.133, 1.297, 1.793), strict=True):
        longer = LONGER if machine in A10G[2:] and not made.quick else ()
        add(machine, 1000, both, paper, "5.5, fig. 10a", longer=longer)
    add(H100, 2000, all_three, 1.14, "5.4, fig. 9a")
    header = (
        "machine",
        "input",
        "output",
        "FCFS req/s",
        "relative",
        "decoded on host",
        "steps in two",
        "CPU busy",
        "budget",
        "FCFS budget",
        "its preemptions",
    )
    made.table("Relative throughput over output length", header, rows)
    a10g = {label: points for label, points in curves.items() if "A10G" in label}
    rest = {label: points for label, points in curves.items() if "A10G" not in label}
    made.curves(
        "a10g",
        "A10G + Llama-3.1-8B, 1000 tokens in: four hosts",
        "output tokens",
        "throughput over FCFS",
        a10g,
    )
    made.curves(
        "t4-h100",
        "T4 (250 tokens in), 2 x H100 (2000 in)",
        "output tokens",
        "throughput over FCFS",
        rest,
    )


def hosts(made: Reproduction, pool: ProcessPoolExecutor) -> None:
    """What the gains hang on: the same cells with hosts that are slower or faster."""
    speeds = (0.01, 1, 2, 4)
    places = ((T4, 250, 100), (A10G[3], 1000, 400))
    rows: list[list[object]] = []
    for machine, given, asked in places:
        count = 120 if made.quick else 250
        lengths = (AT_ONCE, f"{given}+-10%", f"{asked}+-10%")
        cells = [Cell(machine, "load-aware", count, *lengths, host=speed) for speed in speeds]
        base, *found = sweep(pool, [Cell(machine, "fcfs", count, *lengths), *cells])
        for speed, own in zip(speeds, found, strict=True):
            gain = own["requests_per_s"] / base["requests_per_s"]
            shares = (own[name] for name in ("host_share", "two_batches", "cpu_busy"))
            rows.append([machine.label, asked, speed, gain, *shares, base["preemptions"]])
    header = ("machine", "output", "speed of the host", "relative", "decoded on host",
              "steps in two", "CPU busy", "FCFS's preemptions")  # fmt: skip
    made.table("The same with other hosts", header, rows)


def loads(made: Reproduction, pool: ProcessPoolExecutor) -> None:
    """Figures 6 and 8a: latency per output token over load, Poisson arrivals (section 5.2)."""
    requests = 100 if made.quick else 800
    rows: list[list[object]] = []
    for load in LOADS:
        title, rates, bound_s = load.title, load.rates, load.bound_s
        cells = [
            Cell(load.machine, scheduler, requests, rate, load.given, load.asked, load.trace)
            for scheduler in load.schedulers
            for rate in rates
        ]
        found = sweep(pool, cells)
        curves = {}
        for index, scheduler in enumerate(load.schedulers):
            latencies = [
                each["token_latency_s"] for each in found[index * len(rates) :][: len(rates)]
            ]
            curves[scheduler] = (rates, latencies)
            rows += [
                [title, scheduler, rate, latency]
                for rate, latency in zip(rates, latencies, strict=True)
            ]
        gain = sustained(*curves["load-aware"], bound_s) / sustained(*curves["fcfs"], bound_s)
        made.compare(f"{title}: load at {bound_s:g} s a token", load.paper, gain, "x", load.where)
        name = "load-" + load.machine.hardware.split(".")[0]
        made.curves(name, title, "requests/s", "latency per output token, s", curves, yscale="log")
    made.table(
        "Latency per output token", ("setting", "scheduler", "requests/s", "s a token"), rows
    )


def sustained(rates: tuple[float, ...], latencies: list[float], bound_s: float) -> float:
    """The load at which latency reaches the bound, between two loads by a straight line."""
    before = (0.0, 0.0)
    for rate, latency in zip(rates, latencies, strict=True):
        if latency > bound_s:
            share = (bound_s - before[1]) / (latency - before[1])
            return before[0] + share * (rate - before[0])
        before = (rate, latency)
    return rates[-1]


def main() -> None:
    made = Reproduction.start("neo", __doc__.splitlines()[0])
    with ProcessPoolExecutor(2) as pool:
        lengths(made, pool)
        hosts(made, pool)
        loads(made, pool)
    made.finish(
        costs="roofline of the machines' data sheets; planned with fits to noisy samples of it",
        errors="deviation 0.03 of each step, one in 1000 steps five times as long",
        t4="54 blocks of 16 tokens, 832 tokens a sequence and 20 GB of swap: NEO's artefact",
        osc="synthetic: prompts of 128..512 and answers of 24..48 tokens",
    )


if __name__ == "__main__":
    main()
