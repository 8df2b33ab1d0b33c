"""Load-aware scheduling in simulation: not worse than FCFS, also with wrong predictions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean

import pytest

from weft.cost.model import CostModel, Terms
from weft.cost.work import Work
from weft.sched.registry import make_scheduler
from weft.sim.build import World, build
from weft.sim.options import SimOptions
from weft.sim.run import Simulated, simulate

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
SHORT_OF_MEMORY = ("t4", "llama-2-7b", "800+-10%", "200+-10%", "1000")
# what predictions of CPU attention, of the device and of moves are multiplied with
WRONG = [(1.0, 1.0, 1.0), (0.9, 1.1, 0.9), (1.1, 0.9, 1.1)]
RANDOM_CELLS = 12


@dataclass(frozen=True)
class Wrong:
    """A cost model that errs."""

    cost: CostModel
    cpu: float
    device: float = 1.0
    move: float = 1.0

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
            kv_move=terms.kv_move * self.move,
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
def served(cell, name: str, wrong: tuple[float, float, float]) -> tuple[float, float]:
    """Seconds until all have ended, and mean latency per output token."""
    world = world_of(cell)
    planned = replace(world.planned, cost=Wrong(world.planned.cost, *wrong))
    done = simulate(
        make_scheduler(name, planned), world.cost, world.traffic(float(cell[4])), world.errors()
    )
    return figures(done)


def figures(done: Simulated) -> tuple[float, float]:
    """Seconds until all have ended, and mean latency per output token."""
    record = done.record
    assert min(record.end_s) > 0
    spans = zip(record.arrival_s, record.end_s, record.output, strict=True)
    return done.seconds, fmean((end - start) / output for start, end, output in spans)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_never_worse_than_first_come_first_served_by_more_than_2_percent(cell, wrong):
    check(cell, wrong)


def check(cell, wrong: tuple[float, float, float]) -> None:
    alone = served(cell, "fcfs", WRONG[0])
    both = served(cell, "load-aware", wrong)
    assert both[0] <= alone[0] * TOLERANCE
    assert both[1] <= alone[1] * TOLERANCE


@pytest.mark.parametrize("seed", range(RANDOM_CELLS))
def test_nor_in_cells_that_nobody_chose(seed):
    """Any machine with a slow link, lengths over a decade, any load, every part wrong by 10%."""
    draw = random.Random(f"cell {seed}")
    machine = draw.choice(["t4", "g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge", "l40s"])
    model = "llama-2-7b" if machine == "t4" else draw.choice(["llama-2-7b", "qwen3-8b"])
    prompts, answers = int(150 * 10 ** draw.random()), int(10 * 30 ** draw.random())
    rate = draw.choice(["1000", f"{0.2 * 30 ** draw.random():.2f}"])
    wrong = (draw.choice((0.9, 1.1)), draw.choice((0.9, 1.1)), draw.choice((0.9, 1.1)))
    check((machine, model, f"{prompts}+-10%", f"{answers}+-10%", rate), wrong)


@pytest.mark.parametrize("slower", [10, 100])
@pytest.mark.parametrize("cell", [CELLS[0], CELLS[3], SHORT_OF_MEMORY], ids=str)
def test_nor_where_the_host_computes_far_too_slowly(cell, slower):
    """What has left the device is computed on the host only where that costs next to nothing."""
    world = world_of(cell)
    planned = replace(world.planned, cost=Wrong(world.planned.cost, slower))
    cost = Wrong(world.cost, slower)
    scheduler = make_scheduler("load-aware", planned)
    both = figures(simulate(scheduler, cost, world.traffic(float(cell[4])), world.errors()))
    alone = served(cell, "fcfs", WRONG[0])
    assert both[0] <= alone[0] * TOLERANCE
    assert both[1] <= alone[1] * TOLERANCE


def test_where_device_memory_is_short_it_is_far_better():
    cell = CELLS[0]
    alone, both = served(cell, "fcfs", WRONG[0]), served(cell, "load-aware", WRONG[0])
    assert both[0] < alone[0] / 1.5


@dataclass(frozen=True)
class Contended:
    """The truth where steps with decodes of the host share its cores: all of them is slower."""

    cost: CostModel
    by: float

    @property
    def layers(self) -> int:
        return self.cost.layers

    def terms(self, work: Work) -> Terms:
        terms = self.cost.terms(work)
        return Terms(*(term * self.by for term in terms)) if work.host_decodes else terms


@pytest.mark.parametrize("truth", [partial(Wrong, cpu=5), partial(Contended, by=2.5)], ids=str)
@pytest.mark.parametrize("cell", [CELLS[0], CELLS[3], SHORT_OF_MEMORY], ids=str)
def test_it_learns_that_steps_with_the_host_take_longer_than_predicted(cell, truth):
    """The host is tried now and then, and that costs little; by prediction it halves the time."""
    world = world_of(cell)
    scheduler = make_scheduler("load-aware", world.planned)
    traffic = world.traffic(float(cell[4]))
    seconds = figures(simulate(scheduler, truth(world.cost), traffic, world.errors()))
    alone = served(cell, "fcfs", WRONG[0])
    assert seconds[0] <= alone[0] * 1.05
    assert scheduler.totals.host_tokens < scheduler.totals.output_tokens / 10
    assert [part.slower.ratio > 1 for part in scheduler.parts] == [True]
