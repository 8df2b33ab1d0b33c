"""Where a host's memory and CPUs would win, by the cost model: machines, contexts and memories.

    python benchmarks/where_offload_wins.py [--out benchmarks/results/where_offload_wins.json]
        [--machine NAME] [--requests 16]

Interactive requests take a tenth of the machine, and best effort with contexts of 1k, 8k and 32k
tokens wants all the rest. Simulated: ``fcfs`` and ``slo``, and the schedulers that use the memory
of a host (``fcfs-swap``) and its CPUs, too (``load-aware``, ``slo-piggyback``). A CPU-only machine
is split: the last quarter of its cores, with a quarter of its memory bandwidth, is the host of the
rest; ``fcfs`` and ``slo`` have all cores and both memories there. *Short*: the device keeps the KV
of two sequences and a reserve of two steps, as on a card that weights fill; *rich*: of all that are
asked for. The host keeps all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from heapq import merge
from pathlib import Path

import numpy as np

import report
from weft.core.types import ServiceClass
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.hardware import Hardware, HostSheet, hardware
from weft.cost.model import step_time
from weft.cost.roofline import Roofline
from weft.cost.shape import model_shape
from weft.cost.work import Work
from weft.kv.cache import GroupSpec
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources, TargetPolicy
from weft.sched.scheduler import Limits
from weft.sim.jobs import SimulatedRequest, own_text
from weft.sim.learn import learn
from weft.sim.run import Simulated, Traffic, simulate
from weft.sim.simulated import Errors
from weft.workload.arrivals import gamma_times

BLOCK = 16
CHAT_INPUT, CHAT_OUTPUT = 256, 64
CONTEXTS = (1024, 8192, 32768)  # of best effort, its answer included
LONGEST_ANSWER = 1024  # of best effort; half of the context, if that is less
BUDGET, ROWS = 512, 256
CHAT_SHARE = 0.1  # of the machine's time
GHZ, OPERATIONS = 2.45e9, 32  # of EPYC 7763, as in weft.cost.hardware
BANDWIDTH = 204.8e9 / 64  # of one of its cores
HOST_CORES = 1 / 4
SCHEDULERS = ("fcfs", "fcfs-swap", "slo", "load-aware", "slo-piggyback")


@dataclass(frozen=True, eq=False)
class Machine:
    """A machine and its model; ``whole`` is what ``fcfs`` computes with."""

    name: str
    model: str
    whole: Hardware
    split: Hardware


def cpu(cores: int) -> Machine:
    """A CPU whose last quarter of cores is the host of the rest; copies take half its bandwidth."""

    def sheet(share: float) -> tuple[float, float]:
        return share * cores * GHZ * OPERATIONS, share * cores * BANDWIDTH

    flops, bandwidth = sheet(1.0)
    whole = Hardware(f"{cores} cores", {"bf16": flops}, bandwidth, 2**40)
    flops, bandwidth = sheet(HOST_CORES)
    host = HostSheet("host", round(HOST_CORES * cores), bandwidth, flops, 2**40)
    flops, bandwidth = sheet(1 - HOST_CORES)
    split = replace(
        whole, flops={"bf16": flops}, bandwidth=bandwidth, link=bandwidth / 2, host=host
    )
    return Machine(whole.name, "llama-3.2-1b", whole, split)


def gpu(name: str, sheet: str, model: str) -> Machine:
    return Machine(name, model, hardware(sheet), hardware(sheet))


MACHINES = (
    cpu(16),
    cpu(64),
    gpu("T4", "g4dn.4xlarge", "llama-3.2-1b"),
    gpu("A10G", "g5.16xlarge", "llama-3.1-8b"),
    gpu("H100", "h100", "llama-3.1-8b"),
)


@dataclass(frozen=True)
class Cell:
    """A run of one scheduler; ``gain`` is its output over that of ``fcfs`` with all the machine.

    Attributes:
        kept: share of interactive requests that kept both targets.
        output: best-effort tokens a second until the last one has ended.
        hosted: share of decode tokens whose attention was the host's.
    """

    machine: str
    context: int
    memory: str
    scheduler: str
    output: float
    kept: float
    hosted: float
    gain: float = 1.0


@cache
def costs(machine: Machine, *, whole: bool) -> tuple[Roofline, Fitted]:
    """What steps take, and what schedulers plan with."""
    sheet = machine.whole if whole else machine.split
    true = Roofline(model_shape(machine.model), sheet, sheet.dtype)
    key = ProfileKey(sheet.name, machine.model, sheet.dtype, "tp1", "simulated")
    limits = Limits(ROWS, BUDGET, CONTEXTS[-1] + BLOCK)
    return true, learn(true, key, limits, Errors(long_share=0.0), host=sheet.host is not None)


def chat_class(machine: Machine) -> tuple[ServiceClass, float]:
    """Interactive requests with targets of a few steps, and their rate."""
    true, _ = costs(machine, whole=True)
    prompt_s = step_time(true, [Work(CHAT_INPUT, 1, 1, CHAT_INPUT**2 / 2, CHAT_INPUT)])
    token_s = step_time(true, [Work(1, 1, decodes=1, decode_context=CHAT_INPUT)])
    chat = ServiceClass("interactive", 1, ttft_s=10 * prompt_s + 1.0, tpot_s=2 * prompt_s + token_s)
    return chat, CHAT_SHARE / (prompt_s + CHAT_OUTPUT * token_s / 4)


def answer(context: int) -> int:
    """Tokens of best effort's answers."""
    return min(context // 2, LONGEST_ANSWER)


def best_effort(context: int, count: int) -> Iterator[SimulatedRequest]:
    for number in range(count):
        prompt = (own_text(2**33 + number, context - answer(context)),)
        yield SimulatedRequest(0.0, prompt, answer(context), "batch")


def chats(rate: float, until_s: float) -> Iterator[SimulatedRequest]:
    for number, at_s in enumerate(gamma_times(rate, 1.0, 1)):
        if at_s > until_s:
            return
        yield SimulatedRequest(at_s, (own_text(number, CHAT_INPUT),), CHAT_OUTPUT, "interactive")


def lasts_s(machine: Machine, context: int, count: int) -> float:
    """Seconds for which best effort keeps the machine busy at least: its prompts' work alone."""
    true, _ = costs(machine, whole=True)
    chunk = Work(BUDGET, 0, 1, BUDGET * context / 2, context // 2)
    return step_time(true, [chunk]) * count * (context - answer(context)) / BUDGET


def run(machine: Machine, context: int, memory: str, scheduler: str, count: int) -> Cell:
    whole = scheduler in ("fcfs", "slo")
    true, planned = costs(machine, whole=whole)
    chat, rate = chat_class(machine)
    classes = (chat, ServiceClass("batch", 3))
    everything = (count + 8) * context // BLOCK
    on_device = everything
    if memory == "short":
        on_device = (2 * context + 2 * BUDGET + 16 * (CHAT_INPUT + CHAT_OUTPUT)) // BLOCK
    both = whole and machine.whole.host is None
    groups = (GroupSpec("full", BLOCK, everything if both else on_device),)
    host = [everything] if scheduler not in ("fcfs", "slo") else []
    limits = Limits(ROWS, BUDGET, context + BLOCK)
    given = Resources(groups, limits, classes, False, host, planned, TargetPolicy("off"))
    asked = chats(rate, lasts_s(machine, context, count))
    work = merge(asked, best_effort(context, count), key=lambda job: job.at_s)
    made = make_scheduler(scheduler, given)
    done = simulate(made, true, Traffic(work), Errors(seed=1), classes)
    return measured(machine, context, memory, scheduler, done, chat)


def measured(
    machine: Machine, context: int, memory: str, scheduler: str, done: Simulated, chat: ServiceClass
) -> Cell:
    record, log = done.record, done.log
    own = np.asarray(record.kind) == record.classes.index("interactive")
    arrival, first, end = (np.asarray(x) for x in (record.arrival_s, record.first_s, record.end_s))
    output = np.asarray(record.output)
    kept = first[own] - arrival[own] <= chat.ttft_s
    kept &= (end[own] - first[own]) / np.maximum(output[own] - 1, 1) <= chat.tpot_s
    hosted = float(log.column("host_decodes").sum()) + done.totals.host_tokens
    return Cell(
        machine.name, context, memory, scheduler, float(output[~own].sum() / end[~own].max()),
        float(kept.mean()), hosted / max(1.0, float(output.sum())),
    )  # fmt: skip


def table(cells: list[Cell]) -> str:
    """A line for each machine, memory and context; in brackets the attainment."""
    lines = [
        f"{'machine':9} {'memory':6} {'context':>7} " + " ".join(f"{s:>19}" for s in SCHEDULERS)
    ]
    rows: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.machine, cell.memory, cell.context), []).append(cell)
    for (machine, memory, context), found in rows.items():
        figures = " ".join(f"{f'{c.gain:.2f} ({c.kept:.0%}, {c.hosted:.0%})':>19}" for c in found)
        lines.append(f"{machine:9} {memory:6} {context:7} {figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machine", help="only this one", choices=[m.name for m in MACHINES])
    parser.add_argument("--requests", type=int, default=16, help="of best effort")
    given = parser.parse_args()
    cells: list[Cell] = []
    for machine in MACHINES:
        if given.machine not in (None, machine.name):
            continue
        for memory in ("short", "rich"):
            for context in CONTEXTS:
                run_of = (machine, context, memory)
                found = [run(*run_of, name, given.requests) for name in SCHEDULERS]
                found = [replace(cell, gain=cell.output / found[0].output) for cell in found]
                cells += found
                print(table(found).splitlines()[-1], flush=True)
    print(table(cells))
    if given.out is not None:
        report.save(given.out, requests=given.requests, cells=[asdict(cell) for cell in cells])


if __name__ == "__main__":
    main()
