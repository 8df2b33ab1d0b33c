"""OmniServe: interactive targets beside best effort, on A100s and the CPUs of one to five hosts.

    python benchmarks/reproduce/omniserve.py [--out FOLDER] [--quick]

Attainment of interactive requests (both targets) and best-effort tokens/s over the request rate,
for Yi-34B on two devices and Llama-2-70B on four (section 5, figures 10, 11, 14 to 16, 18, 19).
ShareGPT and LongBench-v2 are replaced by lengths with the means that are published of them.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from reproduction import SHARED, Reproduction

from weft.core.types import ServiceClass
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.hardware import hardware
from weft.cost.roofline import BYTES, Roofline
from weft.cost.shape import model_shape
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.fcfs import FCFSScheduler
from weft.sched.load_aware import LoadAwareScheduler
from weft.sched.planner import Limits, Planner
from weft.sched.riders import RidingScheduler
from weft.sched.slo import Policy, SLOScheduler
from weft.sched.step import OpenStep
from weft.sim.arrivals import gamma_times
from weft.sim.jobs import Job, own_text
from weft.sim.learn import learn
from weft.sim.piggyback import on_hosts
from weft.sim.run import Simulated, Traffic, simulate
from weft.sim.simulated import Errors

BLOCK = 16
ROWS = 512
LONGEST = 12_288 + 512  # "a maximum length of 12K tokens" (section 5.1.1), and an answer
LENGTHS = SHARED / "lengths" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
# ShareGPT's mean prompt and answer (vLLM, SOSP 2023, figure 11); their spread is that of the file,
# whose prompts have whole conversations and are 14 times as long.
CHAT_INPUT, CHAT_OUTPUT = 161.31, 337.99
# Mean prompt and answer of best effort (section 5.1.1).
BEST_EFFORT = {"LongBench-v2": (8952, 136), "DailyMails": (1964, 397)}
BE_SPREAD = 0.25  # deviation over mean: with a maximum of 12K little more is possible
BE_OPEN = 192  # best-effort requests with the engine: the paper's 182.6 a minute are more than fit
HOST_SHARE = 0.5  # of a host's memory for KV, as weft sim has it
NETWORK = 100e9 / 8  # bytes/s between hosts (section 5.1.1)
BUDGETS = (512, 1024, 2048)  # tokens of a step, tried for the baselines that have a fixed one
HEADROOM = 0.8  # share of KV memory that Llumnix keeps for interactive requests (section 2.3.1)


@dataclass(frozen=True)
class Model:
    """A model of section 5.1 with its targets and rates."""

    name: str
    tp: int
    ttft_s: float
    tpot_s: float
    rates: tuple[float, ...]

    @property
    def classes(self) -> tuple[ServiceClass, ...]:
        return (
            ServiceClass("interactive", 1, self.ttft_s, self.tpot_s),
            ServiceClass("batch", 3),
        )


MODELS = (
    Model("yi-34b", 2, 2.0, 0.2, (2, 4, 6, 8)),
    Model("llama-2-70b", 4, 3.0, 0.25, (1, 2, 3, 4, 5)),
)


class HeadroomScheduler(FCFSScheduler):
    """Class ranks with memory kept free: best effort holds at most what the headroom leaves."""

    def _admit(self, step: OpenStep, rank: int) -> None:
        best_effort = [s for s in self.running if s.order[0] == self._ranks["batch"]]
        if rank == self._ranks["batch"]:
            pool = self.cache.pools[0]
            held = sum(self.cache.held(s.id)[0] for s in best_effort)
            first = next(self.waiting.of_rank(rank), None)
            if first is None or held + first.end / BLOCK > (1 - HEADROOM) * pool.num_blocks:
                return
        super()._admit(step, rank)


@cache
def true_cost(model: Model) -> Roofline:
    """What steps take: the roofline of the paper's machine with a CPU-driven engine's overhead."""
    return Roofline(model_shape(model.name), hardware("omniserve-a100"), "bf16", tp=model.tp)


@cache
def planned_cost(model: Model) -> Fitted:
    """What schedulers plan with: fits to noisy measurements of it."""
    limits = Limits(ROWS, max(BUDGETS), LONGEST)
    key = ProfileKey("omniserve-a100", model.name, "bf16", f"tp{model.tp}", "simulated")
    return learn(true_cost(model), key, limits, Errors(long_share=0.0), host=True)


def scheduler(name: str, model: Model, hosts: int, budget: int, admission: str) -> Planner:
    cost, classes = true_cost(model), model.classes
    blocks = cost.kv_room() // BLOCK
    groups = (GroupSpec("full", BLOCK, blocks),)
    limits = Limits(ROWS, budget, min(LONGEST, blocks * BLOCK))
    if name in ("fcfs", "headroom"):
        kind = FCFSScheduler if name == "fcfs" else HeadroomScheduler
        return kind(KVCache(groups, prefix_caching=False), limits, classes)
    planned, policy = planned_cost(model), Policy(admission)
    if name in ("alone", "device"):
        return SLOScheduler(KVCache(groups, prefix_caching=False), limits, planned, classes, policy)
    host = hardware("omniserve-a100").host
    assert host is not None
    token = cost.shape.kv_values_per_token * BYTES[cost.kv_dtype] * BLOCK
    # With less than four devices in use a host's memory and cores are shared (section 4).
    share = HOST_SHARE * model.tp / 4
    tiers = TieredCache(groups, [int(hosts * share * host.memory / token)], prefix_caching=False)
    if name == "load-aware":
        return LoadAwareScheduler(tiers, limits, planned, classes)
    return RidingScheduler(tiers, limits, planned, classes, policy)


@cache
def spreads() -> tuple[float, float]:
    """Deviation over mean of prompts and answers of chats."""
    with LENGTHS.open() as file:
        rows = list(csv.DictReader(file))
    columns = [[int(row[f"num_{part}_tokens"]) for row in rows] for part in ("prefill", "decode")]
    given, asked = (statistics.pstdev(each) / statistics.fmean(each) for each in columns)
    return given, asked


def length(draw: random.Random, mean: float, spread: float) -> int:
    """Of a log-normal distribution, cut at 2048 as vLLM does with ShareGPT."""
    variance = math.log(1 + spread**2)
    drawn = draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return min(2048, max(1, round(drawn)))


def interactive(times: Iterator[float], seconds: float, seed: int) -> Iterator[Job]:
    draw = random.Random(f"chats {seed}")
    for number, at_s in enumerate(times):
        if at_s > seconds:
            return
        parts = zip((CHAT_INPUT, CHAT_OUTPUT), spreads(), strict=True)
        given, asked = (length(draw, mean, spread) for mean, spread in parts)
        yield Job(at_s, (own_text(number, given),), asked, "interactive")


def backlog(name: str, seed: int) -> Iterator[Job]:
    draw = random.Random(f"backlog {seed}")
    mean_input, mean_output = BEST_EFFORT[name]
    number = 2**33
    while True:
        number += 1
        given = round(min(12_288, max(64, draw.gauss(mean_input, BE_SPREAD * mean_input))))
        asked = max(1, round(draw.gauss(mean_output, BE_SPREAD * mean_output)))
        yield Job(0.0, (own_text(number, given),), asked, "batch")


def bursts(rates: Sequence[float], every_s: float, seed: int) -> Iterator[float]:
    """Arrivals whose rate is drawn anew every so many seconds (section 5.2.1, figure 14)."""
    draw, at_s, until, rate = random.Random(f"bursts {seed}"), 0.0, 0.0, 1.0
    while True:
        if at_s >= until:
            until, rate = until + every_s, draw.uniform(min(rates), max(rates))
        gap = draw.expovariate(rate)
        at_s = at_s + gap if at_s + gap < until else until
        if at_s < until:
            yield at_s


@dataclass(frozen=True)
class Cell:
    """What came of a run.

    Attributes:
        attainment: share of interactive requests that kept both targets, of those not refused.
        be_output, be_prompt: best-effort tokens/s, generated and of prompts.
        refused: share of interactive requests.
        itl: median time between interactive tokens, in ms.
    """

    attainment: float
    ttft: float
    tpot: float
    be_output: float
    be_prompt: float
    refused: float
    itl: float


def measure(result: Simulated, model: Model) -> Cell:
    record, log = result.record, result.log
    own = np.asarray(record.kind) == record.classes.index("interactive")
    arrival, first = np.asarray(record.arrival_s)[own], np.asarray(record.first_s)[own]
    end, output = np.asarray(record.end_s)[own], np.asarray(record.output)[own]
    served = first >= 0
    ttft_ok = first[served] - arrival[served] <= model.ttft_s
    gaps = np.maximum(output[served] - 1, 1)
    tpot_ok = (end[served] - first[served]) / gaps <= model.tpot_s
    prompts = int(np.asarray(record.input)[own][served].sum())
    tokens, decodes = (np.asarray(log.column(name)).sum() for name in ("tokens", "decodes"))
    host = np.asarray(log.column("host_decodes")).sum()
    gap_s, counts = (np.asarray(x) for x in (record.by_class[0].gaps, record.by_class[0].counts))
    return Cell(
        float((ttft_ok & tpot_ok).mean()),
        float(ttft_ok.mean()),
        float(tpot_ok.mean()),
        max(0.0, result.totals.output_tokens - float((output[served] + 1).sum())) / result.seconds,
        max(0.0, float(tokens - decodes - host - prompts) / result.seconds),
        float(1 - served.mean()),
        float(np.median(np.repeat(gap_s, counts.astype(int)))) * 1e3 if len(gap_s) else 0.0,
    )


def run(
    name: str,
    model: Model,
    rate: float,
    seconds: float,
    *,
    hosts: int = 1,
    budget: int = 2048,
    admission: str = "off",
    burst_s: float = 0.0,
    best_effort: str = "LongBench-v2",
) -> Cell:
    times = bursts(model.rates, burst_s, 1) if burst_s else gamma_times(rate, 1.0, 1)
    given = interactive(times, seconds, 1)
    traffic = (
        Traffic(given) if name == "alone" else Traffic(given, backlog(best_effort, 1), BE_OPEN)
    )
    cost = true_cost(model)
    riding = None
    if name == "riders":
        # The share of cores that serves these devices; remote hosts are behind the network.
        passed = 2 * BYTES["bf16"] * (model_shape(model.name).hidden)
        riding = on_hosts(cost, hosts, passed / NETWORK if hosts > 1 else 0.0)
    planner = scheduler(name, model, hosts, budget, admission)
    result = simulate(planner, cost, traffic, Errors(seed=1), model.classes, piggyback=riding)
    return measure(result, model)


LABELS = {
    "alone": "interactive only",
    "fcfs": "FCFS with ranks",
    "headroom": "memory headroom",
    "load-aware": "load-aware with ranks",
    "device": "slo, device alone",
    "riders": "slo with riders",
}


def tuned(name: str, model: Model, seconds: float) -> int:
    """The token budget with which a baseline attains most at its middle rate."""
    rate = statistics.median(model.rates)
    found = {budget: run(name, model, rate, seconds, budget=budget) for budget in BUDGETS}
    return max(BUDGETS, key=lambda budget: (round(found[budget].attainment, 3), budget))


def row(name: str, model: Model, rate: object, hosts: int, cell: Cell) -> list[object]:
    return [
        model.name, rate, hosts, LABELS[name], f"{cell.attainment:.1%}", f"{cell.ttft:.1%}",
        f"{cell.tpot:.1%}", round(cell.be_output, 1), round(cell.be_prompt), f"{cell.refused:.1%}",
    ]  # fmt: skip


HEADER = ["model", "req/s", "hosts", "scheduler", "both kept", "TTFT kept", "TPOT kept",
          "BE output tok/s", "BE prompt tok/s", "refused"]  # fmt: skip


def main() -> None:
    made = Reproduction.start("omniserve", __doc__.splitlines()[0])
    seconds = 20.0 if made.quick else 60.0
    models = [replace(m, rates=m.rates[1::2]) for m in MODELS] if made.quick else MODELS
    budgets: dict[str, int] = {}
    cells: dict[tuple[str, str, int], list[tuple[float, Cell]]] = {}
    rows = []
    for model in models:
        for name in ("fcfs", "headroom", "load-aware"):
            budgets[f"{model.name} {name}"] = tuned(name, model, seconds / 3)
        for name in LABELS:
            for hosts in (1, 5) if name in ("riders", "load-aware") else (1,):
                budget = budgets.get(f"{model.name} {name}", 2048)
                found = [
                    (rate, run(name, model, rate, seconds, hosts=hosts, budget=budget))
                    for rate in model.rates
                ]
                cells[model.name, name, hosts] = found
                rows += [row(name, model, rate, hosts, cell) for rate, cell in found]
                print(rows[-1], flush=True)
        for what, pick in (("attainment", "attainment"), ("best-effort output tok/s", "be_output")):
            made.curves(
                f"{model.name}-{pick}",
                f"{model.name}: {what}",
                "interactive requests a second",
                what,
                {
                    f"{LABELS[name]}{', 5 hosts' if hosts > 1 else ''}": (
                        [rate for rate, _ in found],
                        [getattr(cell, pick) for _, cell in found],
                    )
                    for (of, name, hosts), found in cells.items()
                    if of == model.name and not (name == "alone" and pick != "attainment")
                },
            )
    made.table("Over the request rate", HEADER, rows)
    compare(made, models, cells)
    short_contexts(made, models, budgets, seconds)
    bursty(made, models, budgets, seconds)
    ablations(made, models, seconds)
    made.finish(budgets=budgets, seconds=seconds)


Cells = dict[tuple[str, str, int], list[tuple[float, Cell]]]


def compare(made: Reproduction, models: Sequence[Model], cells: Cells) -> None:
    """The paper's claims in words beside weft's figures; its curves are not given as numbers."""
    for model in models:
        alone, riders, five, headroom, neo = (
            [cell for _, cell in cells[model.name, name, hosts]]
            for name, hosts in (
                ("alone", 1), ("riders", 1), ("riders", 5), ("headroom", 1), ("load-aware", 5),
            )
        )  # fmt: skip
        loss = max(a.attainment - b.attainment for a, b in zip(alone, five, strict=True))
        made.compare(
            f"{model.name}: attainment lost to best effort, at most, 5 hosts",
            0.6, 100 * loss, "points", "5.2.1",
        )  # fmt: skip
        loss = max(a.attainment - b.attainment for a, b in zip(alone, riders, strict=True))
        made.compare(f"{model.name}: the same, one host", 0.6, 100 * loss, "points", "5.2.1")
        best = max(
            a.attainment / max(b.attainment, 0.01) for a, b in zip(five, headroom, strict=True)
        )
        made.compare(
            f"{model.name}: attainment over memory headroom, at most", 1.48, best, "x", "1, 5.2.1"
        )
        gain = max(a.be_output / max(b.be_output, 0.1) for a, b in zip(five, neo, strict=True))
        made.compare(
            f"{model.name}: best-effort output over load-aware, at most", 9.85, gain, "x", "1"
        )


def short_contexts(
    made: Reproduction, models: Sequence[Model], budgets: dict[str, int], seconds: float
) -> None:
    rows = []
    for model in models:
        for name in LABELS:
            for hosts in (1, 5) if name in ("riders", "load-aware") else (1,):
                budget = budgets.get(f"{model.name} {name}", 2048)
                for rate in model.rates[1::2]:
                    cell = run(
                        name, model, rate, seconds, hosts=hosts, budget=budget,
                        best_effort="DailyMails",
                    )  # fmt: skip
                    rows.append(row(name, model, rate, hosts, cell))
    made.table("Best effort with shorter contexts: DailyMails (figures 12, 17)", HEADER, rows)


def bursty(
    made: Reproduction, models: Sequence[Model], budgets: dict[str, int], seconds: float
) -> None:
    rows = []
    for model in models:
        for every_s in (5.0, 10.0):
            for name in LABELS:
                budget = budgets.get(f"{model.name} {name}", 2048)
                cell = run(name, model, 0.0, seconds, hosts=5, budget=budget, burst_s=every_s)
                rows.append(row(name, model, f"every {every_s:g} s", 5, cell))
    made.table("Rates drawn anew every few seconds (figure 14)", HEADER, rows)


def ablations(made: Reproduction, models: Sequence[Model], seconds: float) -> None:
    rows = []
    for model in models:
        for rate in (max(model.rates), 1.5 * max(model.rates), 2 * max(model.rates)):
            for admission in ("off", "reject", "demote"):
                cell = run("riders", model, rate, seconds, hosts=5, admission=admission)
                rows.append([admission, *row("riders", model, rate, 5, cell)])
    made.table("Admission control (figure 19b)", ["admission", *HEADER], rows)
    rows, curves = [], {}
    for model in models:
        rate = {"yi-34b": 4.0, "llama-2-70b": 3.0}[model.name]  # section 5.3
        found = [run("riders", model, rate, seconds, hosts=hosts) for hosts in range(1, 6)]
        for hosts, cell in enumerate(found, 1):
            rows.append([*row("riders", model, rate, hosts, cell), round(cell.itl, 1)])
        curves[model.name] = (list(range(1, 6)), [cell.be_output for cell in found])
    made.table("Number of hosts (figure 18)", [*HEADER, "ITL p50 ms"], rows)
    made.curves("hosts", "Best effort over hosts", "hosts", "best-effort output tok/s", curves)


if __name__ == "__main__":
    main()
