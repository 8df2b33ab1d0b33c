"""Predicts decoding on CPUs with many cores, beside what others have published of llama.cpp.

    python benchmarks/many_cores.py [--out benchmarks/results/many_cores.json]

Nothing here ran on such a machine. A step is the roofline of ``cost/roofline.py`` for the memory
and the cores of a machine, its reads made longer by how unevenly products are cut, and the meetings
of the threads. Rates of one core and the time of a meeting of two are measured where this runs: on
a processor of the same kind as the first machine, if the table is to mean anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import report
from weft.cost.hardware import GB, Hardware, hardware
from weft.cost.model import step_time
from weft.cost.roofline import BYTES, Overhead, Roofline
from weft.cost.shape import ModelShape, model_shape
from weft.cost.work import Work
from weft.engine.machine import cpu_name
from weft.kernels import measure
from weft.kernels.cpu import _native, attention

HERE = Path(__file__).parent
CORES = (8, 16, 32, 64)
STREAMS = (1, 32)
CONTEXT = 256  # tokens of a sequence on average, as in the cells of the peers
DTYPES = ("bf16", "int8", "int4")
FORMATS = {"bf16": 1, "int8": 2, "int4": 3}  # as in panel.hpp

# Assumed: what of the published bandwidth plain reading reaches on all cores together, and what of
# the rates of reading and of multiply-adds the kernels reach on two cores here (results/README.md).
READ_SHARE, KERNEL_SHARE = 0.8, 0.9
HOST = Overhead(0.1e-3, 3e-6)  # of a step, and of each sequence in it: measured on two cores
GROUP = 8  # shares whose ends are counted together, as in pool.cpp
FAR = 4.0  # times as long a line may take between cores that share no cache; both are shown
PHASES = {"bf16": 7, "int8": 9, "int4": 9}  # of a layer of a dense model for one token
JOBS = 3  # of a layer: before attention, attention, after it


@dataclass(frozen=True)
class Machine:
    """A machine of which the cores and the published bandwidth are known.

    Attributes:
        cores: of all sockets.
        bandwidth: bytes a second of all memory channels together.
        isa: the instruction set whose rates hold for a core.
    """

    name: str
    cores: int
    bandwidth: float
    isa: str
    source: str


MACHINES = (
    Machine(
        "EPYC 9554", 64, 460.8 * GB, "avx512bf16", "12 x DDR5-4800, AMD's product page of the 9554"
    ),
    Machine(
        "Xeon Platinum 8462Y+",
        32,
        hardware("xeon-8462y").bandwidth,
        "avx512bf16",
        "cost/hardware.py",
    ),
    Machine(
        "2 x Xeon Platinum 8462Y+",
        64,
        2 * hardware("xeon-8462y").bandwidth,
        "avx512bf16",
        "cost/hardware.py; weights on both nodes in turns",
    ),
    Machine("EPYC 7763", 64, hardware("epyc-7763").bandwidth, "avx2", "cost/hardware.py"),
)

# Models A and B of the peers (peers/models.py), and one of the catalogue.
MODELS = {
    "A": ModelShape("A", 12, 768, 12, 4, 64, 2048, 32000, tied=True),
    "B": ModelShape("B", 28, 1024, 16, 8, 128, 3072, 32000, tied=True),
    "7B": model_shape("qwen2.5-7b"),
    "8B": model_shape("llama-3.1-8b"),
}

PUBLISHED: list[dict[str, Any]] = [
    {
        "machine": "EPYC 9554, 64 cores, 460.8 GB/s",
        "model": "Phi-4 14B Q8_0, 14.51 GiB",
        "tokens_per_s": 19.194,
        "read_gb_per_s": 19.194 * 14.51 * 2**30 / GB,
        "source": "https://ahelpme.com/?p=6685 (llama-bench)",
    },
    {
        "machine": "EPYC 9554, 64 cores, 460.8 GB/s",
        "model": "Phi-4 14B Q4_K_M, 8.43 GiB",
        "tokens_per_s": 28.74,
        "read_gb_per_s": 28.74 * 8.43 * 2**30 / GB,
        "source": "https://ahelpme.com/?p=6685 (llama-bench)",
    },
    {
        "machine": "2 x Xeon Gold 6154, 36 cores, 8 threads",
        "model": "Llama 7B Q4_0",
        "tokens_per_s": 1000 / 138.02,
        "source": "https://github.com/ggml-org/llama.cpp/pull/1556 (before that change)",
    },
    {
        "machine": "2 x Xeon Gold 6154, 36 cores, 12 threads",
        "model": "Llama 7B Q4_0",
        "tokens_per_s": 1000 / 87.62,
        "source": "https://github.com/ggml-org/llama.cpp/pull/1556 (before that change)",
    },
]


@dataclass(frozen=True)
class CoreRates:
    """What one core does, and two do together, measured here.

    Attributes:
        read: bytes a second of one core alone.
        products: operations a second by dtype.
        meeting_s: from the end of the work of two threads to the beginning of their next.
        job_s: more, where the threads find a new job.
    """

    read: float
    products: dict[str, float]
    meeting_s: float
    job_s: float


def rates_of(isa: str, meeting_s: float, job_s: float) -> CoreRates:
    """Measure one core of this machine with an instruction set."""
    attention.use_isa(isa)
    attention.set_threads(1)
    products = {}
    for dtype, code in FORMATS.items():
        run = partial(_native.multiply_adds, code, measure.ROUNDS)
        products[dtype] = run() / best_s(run, 400)
    words = np.ones(measure.LARGER_THAN_CACHES // 8, np.int64)
    read = words.nbytes / best_s(partial(_native.read_all, words.ctypes.data, len(words)), 40)
    return CoreRates(read, products, meeting_s, job_s)


def best_s(run: Callable[[], object], tries: int) -> float:
    """The best time of so many tries: other work on the machine disturbs only some."""
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def meetings(work: int = 1000, tries: int = 4000) -> tuple[float, float]:
    """Seconds that two threads need to meet, and beyond that for a new job: of the best times.

    Each thread of a phase has one item of work; one thread alone is timed with as many a thread.
    """

    def seconds(threads: int, phases: int, rounds: int = 20) -> float:
        attention.set_threads(threads)
        return best_s(partial(_native.meet, phases, rounds, work), tries) / rounds

    few, many = (seconds(2, phases) - seconds(1, phases) for phases in (1, 8))
    phase = (many - few) / 7
    return max(0.0, phase), max(0.0, few - phase)


def meeting_s(rates: CoreRates, cores: int, far: float) -> float:
    """Seconds of a meeting of so many threads.

    Two hand a line over twice. Within a group each adds to one line after the other, then each
    group does, and then all read the last line, as in a tree.
    """
    if cores == 1:
        return 0.0
    group, groups = min(cores, GROUP), -(-cores // GROUP)
    handovers = group + (groups if groups > 1 else 0) + 1
    return rates.meeting_s / 3 * handovers * (far if groups > 1 else 1.0)


def uneven(shape: ModelShape, cores: int, streams: int) -> float:
    """The time of all reads over that of evenly cut ones."""
    products = [
        (shape.attention_width + 2 * shape.kv_width, shape.hidden, False, shape.layers),
        (shape.hidden, shape.attention_width, False, shape.layers),
        (2 * shape.intermediate, shape.hidden, True, shape.layers),
        (shape.hidden, shape.intermediate, False, shape.layers),
        (shape.vocab, shape.hidden, False, 1),
    ]
    longest = total = 0.0
    for outputs, inputs, gated, times in products:
        items = _native.product_items(outputs, gated, streams, cores)
        bounds = [_native.share_begin(items, share, cores) for share in range(cores + 1)]
        most = max(end - begin for begin, end in pairwise(bounds))
        longest += times * outputs * inputs * most * cores / items
        total += times * outputs * inputs
    return longest / total


def predict(
    machine: Machine, rates: CoreRates, shape: ModelShape, dtype: str, cores: int, streams: int
) -> dict[str, Any]:
    """Tokens a second of all streams together, and what bounds a step."""
    reading = min(cores * rates.read, READ_SHARE * machine.bandwidth)
    cut = uneven(shape, cores, streams)
    sheet = Hardware(
        machine.name,
        {dtype: KERNEL_SHARE * cores * rates.products[dtype] / cut},
        KERNEL_SHARE * reading / cut,
        2**40,
    )
    work = Work()
    for _ in range(streams):
        work.add(CONTEXT - 1, 1)
    step_s = step_time(Roofline(shape, sheet, dtype, "bf16", overhead=HOST), [work])
    times = {}
    for name, far in (("near", 1.0), ("far", FAR)):
        each = meeting_s(rates, cores, far)
        times[name] = shape.layers * (PHASES[dtype] * each + JOBS * (each + rates.job_s))
    read_s = shape.active_parameters * BYTES[dtype] / (KERNEL_SHARE * reading)
    return {
        "machine": machine.name,
        "model": shape.name,
        "dtype": dtype,
        "cores": cores,
        "streams": streams,
        "tokens_per_s": round(streams / (step_s + times["near"]), 1),
        "tokens_per_s_far": round(streams / (step_s + times["far"]), 1),
        "step_ms": round(1e3 * step_s, 3),
        "meetings_ms": {name: round(1e3 * seconds, 3) for name, seconds in times.items()},
        "uneven": round(cut, 3),
        "weights_read_share": round(read_s / (step_s + times["near"]), 3),
    }


def table(rows: list[dict[str, Any]], streams: int) -> str:
    """Markdown: a row for each machine, model and dtype, a column for each number of cores."""
    lines = [
        "| machine | model | weights | " + " | ".join(f"{cores} cores" for cores in CORES) + " |",
        "|---" * (3 + len(CORES)) + "|",
    ]
    for machine in MACHINES:
        for model in MODELS:
            for dtype in DTYPES:
                cells = {
                    row["cores"]: f"{row['tokens_per_s']:.0f} ({row['tokens_per_s_far']:.0f})"
                    for row in rows
                    if (row["machine"], row["label"], row["dtype"], row["streams"])
                    == (machine.name, model, dtype, streams)
                }
                shown = " | ".join(cells.get(cores, "") for cores in CORES)
                lines.append(f"| {machine.name} | {model} | {dtype} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "many_cores.json")
    options = parser.parse_args()
    found = meetings()
    rates = {isa: rates_of(isa, *found) for isa in {machine.isa: 0 for machine in MACHINES}}
    rows = [
        {"label": label, **predict(machine, rates[machine.isa], shape, dtype, cores, streams)}
        for machine in MACHINES
        for label, shape in MODELS.items()
        for dtype in DTYPES
        for cores in CORES
        for streams in STREAMS
        if cores <= machine.cores
    ]
    report.save(
        options.out,
        what="predictions; none of these machines was there",
        measured_on=cpu_name(),
        rates={isa: asdict(one) for isa, one in rates.items()},
        machines=[asdict(machine) for machine in MACHINES],
        predicted=rows,
        published_llama_cpp=PUBLISHED,
    )
    for isa, one in rates.items():
        print(isa, one)
    for streams in STREAMS:
        print(f"\n{streams} streams\n\n{table(rows, streams)}")


if __name__ == "__main__":
    main()
