"""OmniServe: interactive targets beside best effort, on A100s and the CPUs of one to five hosts.

    python benchmarks/reproduce/omniserve.py [--out FOLDER] [--quick]

Attainment of interactive requests (both targets) and best-effort tokens/s over the request rate,
for Yi-34B on two devices and Llama-2-70B on four (section 5, figures 10 to 19); and what becomes of
best effort when one thing of the set-up is another.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from omniserve_cells import BE_MANY, BEST_EFFORT, BUDGETS, MODELS, PIGGYBACKING, Cell, Model, run
from reproduction import Reproduction

HOSTED = ("piggybacked", "load-aware")  # schedulers that use hosts
HOSTS_RATE = {"yi-34b": 4.0, "llama-2-70b": 3.0}  # sections 5.2.1 and 5.3
TIGHTER = {"yi-34b": (0.1, 0.125, 0.15, 0.2, 0.25), "llama-2-70b": (0.125, 0.15, 0.2, 0.25, 0.3)}
LABELS = {
    "alone": "interactive only",
    "fcfs": "FCFS with class priorities",
    "headroom": "memory headroom",
    "load-aware": "load-aware with a limit",
    "device": "slo, device alone",
    "piggybacked": "slo with piggybacked rows",
    "eager": "slo with piggybacked rows, the paper's order",
}
NAMES = tuple(LABELS)[:-1]
LONGER, FILLING = 3, 10  # times as long, where contexts have to grow and five hosts to be filled
HEADER = ["model", "req/s", "hosts", "scheduler", "both kept", "TTFT kept", "TPOT kept",
          "BE output tok/s", "BE prompt tok/s", "refused"]  # fmt: skip

Cells = dict[tuple[str, str, int], list[tuple[float, Cell]]]


@dataclass(frozen=True)
class Job:
    """A cell to be run; ``more`` are fields of ``Setting``."""

    name: str
    model: Model
    rate: float
    seconds: float
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def hosts(self) -> int:
        return int(self.more.get("hosts", 1))

    def row(self, cell: Cell, rate: object = None) -> list[object]:
        return [
            self.model.name, self.rate if rate is None else rate, self.hosts, LABELS[self.name],
            f"{cell.attainment:.1%}", f"{cell.ttft:.1%}", f"{cell.tpot:.1%}",
            round(cell.be_output, 1), round(cell.be_prompt), f"{cell.refused:.1%}",
        ]  # fmt: skip


def one(job: Job) -> Cell:
    return run(job.name, job.model, job.rate, job.seconds, **job.more)


class Runs:
    """Runs cells side by side, with what they have in common.

    Attributes:
        budgets: tokens of a step by model and scheduler, for the baselines that have a fixed one.
    """

    def __init__(self, pool: ProcessPoolExecutor, models: Sequence[Model], seconds: float) -> None:
        self._pool = pool
        self.models, self.seconds = models, seconds
        self.budgets = {
            f"{model.name} {name}": self._tuned(name, model)
            for model in models
            for name in ("fcfs", "headroom")
        }

    def _tuned(self, name: str, model: Model) -> int:
        """The token budget with which a baseline attains most at its middle rate."""
        rate = statistics.median(model.rates)
        jobs = [Job(name, model, rate, self.seconds / 3, {"budget": each}) for each in BUDGETS]
        found = dict(zip(BUDGETS, self.all(jobs), strict=True))
        return max(BUDGETS, key=lambda budget: (round(found[budget].attainment, 3), budget))

    def job(self, name: str, model: Model, rate: float, hosts: int = 1, **more: Any) -> Job:
        budget = self.budgets.get(f"{model.name} {name}", 2048)
        return Job(name, model, rate, self.seconds, {"hosts": hosts, "budget": budget, **more})

    def all(self, jobs: Iterable[Job]) -> list[Cell]:
        return list(self._pool.map(one, jobs))

    def everybody(self, model: Model, rates: Sequence[float], **more: Any) -> list[Job]:
        """Every scheduler at every rate, with one host and with five where it uses hosts."""
        return [
            self.job(name, model, rate, hosts, **more)
            for name in NAMES
            for hosts in ((1, 5) if name in HOSTED else (1,))
            for rate in rates
        ]


def main() -> None:
    made = Reproduction.start("omniserve", __doc__.splitlines()[0])
    seconds = 20.0 if made.quick else 60.0
    models = [replace(m, rates=m.rates[1::2]) for m in MODELS] if made.quick else MODELS
    with ProcessPoolExecutor(2) as pool:
        runs = Runs(pool, models, seconds)
        over_rates(made, runs)
        short_contexts(made, runs)
        tighter(made, runs)
        bursty(made, runs)
        admission(made, runs)
        number_of_hosts(made, runs)
        reasons(made, runs)
    made.finish(budgets=runs.budgets, seconds=seconds)


def over_rates(made: Reproduction, runs: Runs) -> None:
    """Figures 10, 11, 15 and 16."""
    cells: Cells = {}
    rows = []
    for model in runs.models:
        jobs = runs.everybody(model, model.rates)
        for job, cell in zip(jobs, runs.all(jobs), strict=True):
            cells.setdefault((model.name, job.name, job.hosts), []).append((job.rate, cell))
            rows.append(job.row(cell))
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
    compare(made, runs.models, cells)


def compare(made: Reproduction, models: Sequence[Model], cells: Cells) -> None:
    """The paper's claims in words beside weft's figures; its curves are not given as numbers."""
    for model in models:
        alone, piggybacked, five, headroom, neo = (
            [cell for _, cell in cells[model.name, name, hosts]]
            for name, hosts in (
                ("alone", 1), ("piggybacked", 1), ("piggybacked", 5), ("headroom", 1),
                ("load-aware", 5),
            )
        )  # fmt: skip
        loss = max(a.attainment - b.attainment for a, b in zip(alone, five, strict=True))
        made.compare(
            f"{model.name}: attainment lost to best effort, at most, 5 hosts",
            0.6, 100 * loss, "points", "5.2.1",
        )  # fmt: skip
        loss = max(a.attainment - b.attainment for a, b in zip(alone, piggybacked, strict=True))
        made.compare(f"{model.name}: the same, one host", 0.6, 100 * loss, "points", "5.2.1")
        best = max(
            a.attainment / max(b.attainment, 0.01) for a, b in zip(five, headroom, strict=True)
        )
        made.compare(f"{model.name}: attainment over memory headroom, at most", None, best, "x")
        gain = max(a.be_output / max(b.be_output, 0.1) for a, b in zip(five, neo, strict=True))
        made.compare(
            f"{model.name}: best-effort output over load-aware, at most", 9.85, gain, "x", "1"
        )


def short_contexts(made: Reproduction, runs: Runs) -> None:
    """Figures 12 and 17."""
    rows = []
    for model in runs.models:
        jobs = runs.everybody(model, model.rates[1::2], best_effort="DailyMails")
        rows += [job.row(cell) for job, cell in zip(jobs, runs.all(jobs), strict=True)]
    made.table("Best effort with shorter contexts: DailyMails (figures 12, 17)", HEADER, rows)


def tighter(made: Reproduction, runs: Runs) -> None:
    """Figure 13: attainment over the target between tokens; budgets stay those of the default."""
    names, rows = [name for name in NAMES if name != "device"], []
    for model in runs.models:
        targets = TIGHTER[model.name][:: 2 if made.quick else 1]
        jobs = [
            runs.job(name, replace(model, tpot_s=target), HOSTS_RATE[model.name], 5)
            for name in names
            for target in targets
        ]
        found = runs.all(jobs)
        rows += [
            [f"{job.model.tpot_s:g} s", *job.row(cell)]
            for job, cell in zip(jobs, found, strict=True)
        ]
        count, kept = len(targets), [cell.attainment for cell in found]
        curves = {
            LABELS[name]: (targets, kept[at * count :][:count]) for at, name in enumerate(names)
        }
        made.curves(
            f"{model.name}-targets", f"{model.name}: attainment over the target between tokens",
            "target, s", "attainment", curves,
        )  # fmt: skip
        if model.name == "llama-2-70b":
            pairs = zip(
                targets,
                curves[LABELS["piggybacked"]][1],
                curves[LABELS["headroom"]][1],
                strict=True,
            )
            at, ours, theirs = next(pair for pair in pairs if pair[2] >= 0.01)
            made.compare(
                f"{model.name}: attainment over memory headroom, {at:g} s a token",
                1.48, ours / theirs, "x", "5.2.1, fig. 13 at 0.15 s",
            )  # fmt: skip
    made.table("Tighter targets (figure 13)", ["TPOT", *HEADER], rows)


def bursty(made: Reproduction, runs: Runs) -> None:
    """Figure 14."""
    rows = []
    for model in runs.models:
        for every_s in (5.0, 10.0):
            jobs = [runs.job(name, model, 0.0, 5, burst_s=every_s) for name in NAMES]
            rows += [
                job.row(cell, f"every {every_s:g} s")
                for job, cell in zip(jobs, runs.all(jobs), strict=True)
            ]
    made.table("Rates drawn anew every few seconds (figure 14)", HEADER, rows)


def admission(made: Reproduction, runs: Runs) -> None:
    """Figure 19b."""
    ways = ("off", "reject", "demote")
    rows = []
    for model in runs.models:
        jobs = [
            runs.job("piggybacked", model, times * max(model.rates), 5, admission=way)
            for times in (1, 1.5, 2)
            for way in ways
        ]
        cells = runs.all(jobs)
        rows += [
            [job.more["admission"], *job.row(cell)] for job, cell in zip(jobs, cells, strict=True)
        ]
        if model.name == "yi-34b":
            off, reject = cells[-3], cells[-2]
            made.compare(
                f"{model.name}: TTFT kept with admission at twice the load",
                94.1, 100 * reject.ttft, "%", "5.4.2",
            )  # fmt: skip
            gained = 100 * (reject.ttft - off.ttft)
            made.compare(f"{model.name}: gained by admission", 43.3, gained, "points", "5.4.2")
    made.table("Admission control (figure 19b)", ["admission", *HEADER], rows)


def number_of_hosts(made: Reproduction, runs: Runs) -> None:
    """Figure 18, in weft's order of moves and in the paper's."""
    rows, curves = [], {}
    counts, model = (1, 5), runs.models[0]
    jobs = [
        replace(
            runs.job(name, model, HOSTS_RATE[model.name], hosts, be_open=BE_MANY),
            seconds=(1 if made.quick else FILLING) * runs.seconds,
        )
        for name in PIGGYBACKING
        for hosts in counts
    ]
    cells = runs.all(jobs)
    for at, name in enumerate(PIGGYBACKING):
        found = cells[at * len(counts) :][: len(counts)]
        rows += [
            [*job.row(cell), round(cell.be_hosts, 1), round(cell.itl, 1)]
            for job, cell in zip(jobs[at * len(counts) :], found, strict=False)
        ]
        curves[LABELS[name]] = (counts, [c.be_hosts for c in found])
        gain = found[-1].be_hosts / max(0.1, found[0].be_hosts)
        made.compare(
            f"{model.name}, {LABELS[name]}: tokens of the hosts, five over one",
            None, gain, "x", "5.3: near-linear",
        )  # fmt: skip
    made.table("Number of hosts (figure 18)", [*HEADER, "of it by hosts", "ITL p50 ms"], rows)
    title = f"{model.name}: best-effort tokens that hosts attend to"
    made.curves("hosts", title, "hosts", "tok/s", curves)


def reasons(made: Reproduction, runs: Runs) -> None:
    """What keeps the CPUs from mattering: the same with one thing changed, on device and hosts."""
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "links as fast as NVLink": {"machine": "a100"},
        "CPU attention takes no time": {"free_attention": True},
        "a quarter of the device's KV": {"device_kv": 0.25},
        "best effort of long answers": {"best_effort": "long answers", "be_open": 2 * BE_MANY},
    }
    ways = (("device", 1), ("piggybacked", 5), ("eager", 5))
    model, rows = runs.models[0], []
    for what, change in list(changes.items())[:: 2 if made.quick else 1]:
        more = {"be_open": BE_MANY, **change}
        jobs = [
            replace(
                runs.job(name, model, HOSTS_RATE[model.name], hosts, **more),
                seconds=LONGER * runs.seconds,
            )
            for name, hosts in ways
        ]
        given, asked = BEST_EFFORT[more.get("best_effort", "LongBench-v2")]
        for job, cell in zip(jobs, runs.all(jobs), strict=True):
            fed = cell.be_prompt * asked / given
            rows.append([
                what, model.name, job.hosts, LABELS[job.name], f"{cell.attainment:.1%}",
                round(cell.be_output, 1), round(cell.be_hosts, 1), round(fed, 1),
            ])  # fmt: skip
    header = ["changed", "model", "hosts", "scheduler", "both kept", "BE output tok/s",
              "of it by hosts", "output that the prompts feed"]  # fmt: skip
    made.table("Why CPUs hardly matter: one thing changed", header, rows)


if __name__ == "__main__":
    main()
