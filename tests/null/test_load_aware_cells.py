"""Load-aware scheduling in simulation: not worse than FCFS, also with wrong predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import pytest

from weft.cost.model import CostModel, Terms
from weft.cost.work import Work
from weft.sched.choose import make_scheduler
from weft.sim.build import World, build
from weft.sim.options import SimOptions
from weft.sim.run import simulate

TOLERANCE = 1.02
REQUESTS = 40
# hardware, model, prompts, answers, requests a second (1000: all at once)
CELLS = [
    ("t4", "llama-2-7b", "300+-10%", "50+-10%", "1000"),
    ("t4", "llama-2-7b", "200+-10%", "40+-10%", "0.3"),
    ("g5.4xlarge", "llama-3.1-8b", "1000+-10%", "30+-10%", "1000"),
    ("g5.4xlarge", "llama-3.1-8b", "1000+-10%", "150+-10%", "1000"),
    ("g5.16xlarge", "llama-3.1-8b", "1000+-10%", "100+-10%", "1.5"),
    ("h100", "llama-3.1-8b", "500+-10%", "100+-10%", "1000"),
]
# what predictions of CPU attention and of the device are multiplied with
WRONG = [(1.0, 1.0), (0.9, 1.1), (1.1, 0.9)]


@dataclass(frozen=True)
class Wrong:
    """A cost model that errs."""

    cost: CostModel
    cpu: float
    device: float

    @property
    def layers(self) -> int:
        return self.cost.layers

    def terms(self, work: Work) -> Terms:
        terms = self.cost.terms(work)
        return terms._replace(
            dense=terms.dense * self.device,
            prefill_attention=terms.prefill_attention * self.device,
            decode_attention=terms.decode_attention * self.device,
            cpu_attention=terms.cpu_attention * self.cpu,
        )


@cache
def world_of(cell) -> World:
    machine, model, prompts, answers, rate = cell
    return build(
        SimOptions(
            model=model,
            hardware=machine,
            input_tokens=prompts,
            output_tokens=answers,
            rate=rate,
            requests=REQUESTS,
            scheduler="load-aware",
            error=0.1,
        )
    )


@cache
def served(cell, name: str, wrong: tuple[float, float]) -> tuple[float, float]:
    """Seconds until all have ended, and mean latency per output token."""
    world = world_of(cell)
    planned = replace(world.planned, cost=Wrong(world.planned.cost, *wrong))
    done = simulate(
        make_scheduler(name, planned), world.cost, world.traffic(float(cell[4])), world.errors()
    )
    record = done.record
    assert min(record.end_s) > 0
    spans = zip(record.arrival_s, record.end_s, record.output, strict=True)
    return done.seconds, fmean((end - start) / output for start, end, output in spans)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_never_worse_than_first_come_first_served_by_more_than_2_percent(cell, wrong):
    alone = served(cell, "fcfs", (1.0, 1.0))
    both = served(cell, "load-aware", wrong)
    assert both[0] <= alone[0] * TOLERANCE
    assert both[1] <= alone[1] * TOLERANCE


def test_where_device_memory_is_short_it_is_far_better():
    cell = CELLS[0]
    alone, both = served(cell, "fcfs", (1.0, 1.0)), served(cell, "load-aware", (1.0, 1.0))
    assert both[0] < alone[0] / 1.5
