"""The host's own time of decode steps on a device: planned one by one, and replayed under leases.

    python benchmarks/replayed.py [--sequences 1,8,32] [--tokens 600] [--pairs 7]
        [--out benchmarks/results/replayed.json]

The device stands in for a GPU and computes nothing: each step gives the same tokens at once. So
this measures planning, packing, ordering, collecting and publishing, without the time of a driver.
Two engines in one process take turns; ``ratio`` is the median over the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from torch import Tensor

import report
from resident import Answers
from weft.core.config import EngineConfig
from weft.core.ports import Lease
from weft.core.types import Request, SamplingParams
from weft.engine import build
from weft.engine.devices import is_resident
from weft.engine.driven import DrivenEngine
from weft.engine.machine import cpu_name
from weft.exec import graphs
from weft.exec.device import HostDevice
from weft.exec.functions import StepFunctions
from weft.exec.graphs import GraphExecutor, Steps
from weft.exec.step_layout import Layout
from weft.kernels.cpu import _native

TOKEN = 5  # of every step


class NoDevice(HostDevice):
    """Copies at once, and is never behind."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)


class NoFunctions(StepFunctions):
    """Steps without arithmetic."""

    def forward(self, *_: Any, **__: Any) -> None:
        self.results[0].copy_(self._packer.layout.hashes(self.uploaded))

    def sample(self, layout: Layout, *_: Any) -> None:
        self.results[1 : 1 + layout.size].fill_(TOKEN)

    def go_on(self, *_: Any) -> None:
        self.forward()


class Published(Answers):
    """An inbox to which steps under a lease publish."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self._stamps = _native.Stamps()

    def lend(self, lease: Lease) -> None:
        lease.grant(self._stamps.outlet)


def executor_of(config: Any, resolved: Any, decoder: Any, store: Any, table: Any, _: Any) -> Any:
    """Stands in for ``make_executor``."""
    steps = Steps(
        resolved.max_num_batched_tokens,
        resolved.max_num_seqs,
        config.steps_in_flight,
        leases=is_resident(config, decoder.device),
    )
    return GraphExecutor(decoder, store, table, NoDevice(), steps)


def microseconds(engine: DrivenEngine, count: int, tokens: int) -> float:
    """CPU time of a step of so many sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    requests = [Request(i, (1, 2), params.with_defaults({})) for i in range(count)]
    before, started = engine.totals.steps, time.process_time()
    engine.run(Published(requests))
    return 1e6 * (time.process_time() - started) / (engine.totals.steps - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    build.make_executor = executor_of
    graphs.StepFunctions = NoFunctions
    settings: dict[str, Any] = {"kernels": "reference", "device": "cpu", "threads": 1}
    settings |= {"max_num_seqs": 32, "max_model_len": 1024, "kv_memory": "1GiB"}
    settings |= {"prefix_caching": False, "dtype": "float32"}
    engines = {way: DrivenEngine(EngineConfig(resident=way, **settings)) for way in ("off", "on")}
    print(f"{'seqs':>5} {'planned us':>11} {'replayed us':>12} {'ratio':>6}")
    rows = []
    for count in map(int, options.sequences.split(",")):
        pairs = [
            {way: microseconds(engines[way], count, options.tokens) for way in order}
            for order in (("off", "on"), ("on", "off")) * -(-(options.pairs + 1) // 2)
        ][1 : options.pairs + 1]  # the first pair warms up
        planned, replayed = (statistics.median(p[way] for p in pairs) for way in ("off", "on"))
        ratio = statistics.median(pair["off"] / pair["on"] for pair in pairs)
        print(f"{count:>5} {planned:>11.0f} {replayed:>12.0f} {ratio:>6.2f}")
        rows.append({"sequences": count, "ratio": ratio, "pairs": pairs})
    totals = engines["on"].totals
    print(f"{totals.resident_steps} of {totals.steps} steps were replayed")
    for engine in engines.values():
        engine.close()
    if options.out:
        report.save(options.out, processor=f"{cpu_name()}, {os.cpu_count()} cores", rows=rows)


if __name__ == "__main__":
    main()
