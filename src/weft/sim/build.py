"""Builds costs, scheduler and traffic from the settings of ``weft sim``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from heapq import merge
from itertools import count, islice, repeat
from pathlib import Path

from weft.core.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from weft.core.kv_split import LEAST_SLOTS
from weft.core.schedulers import SCHEDULERS
from weft.core.types import ServiceClass
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.hardware import Hardware, hardware
from weft.cost.interference import ridge_of
from weft.cost.model import CostModel, step_time
from weft.cost.roofline import CPU_DRIVEN, NO_OVERHEAD, Roofline
from weft.cost.shape import ModelShape, model_shape
from weft.cost.work import Work
from weft.kv.cache import GroupSpec
from weft.sched.halves import HALF_SIZES, Halves, Measured
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.jobs import SimulatedRequest, trace_jobs
from weft.sim.learn import learn
from weft.sim.options import DEFAULT_REQUESTS, SYNTHETIC, SimOptions
from weft.sim.overlap import published
from weft.sim.run import Traffic
from weft.sim.simulated import Errors
from weft.sim.workload_file import Workload, conversations, is_workload, read_workload
from weft.workload.arrivals import gamma_times
from weft.workload.lengths import parse_lengths
from weft.workload.trace import Arrival, read_requests, read_text

BEST_EFFORT_TEXTS = 2**33  # texts of best-effort prompts are numbered from here


@dataclass(frozen=True, slots=True)
class World:
    """The shared parts of every run of a simulation.

    Attributes:
        cost: what steps really take.
        sheet: what the hardware sheet says, for memory and for the use of the machine.
        planned: what schedulers are made of, with the costs that they plan with.
        main, best_effort: who asks; the second one may be None.
    """

    options: SimOptions
    shape: ModelShape
    hardware: Hardware
    cost: CostModel
    sheet: Roofline
    planned: Resources
    main: TrafficSource
    best_effort: TrafficSource | None

    def scheduler(self) -> Scheduler:
        """A new scheduler."""
        return make_scheduler(self.options.scheduler, self.planned)

    def errors(self) -> Errors:
        """The errors of a run, from their start."""
        given = self.options
        return Errors(given.error, given.long_steps, given.long_factor, given.seed)

    def traffic(self, rate: float | None) -> Traffic:
        """The requests of a run, from their start."""
        options, best_effort = self.options, self.best_effort
        arrivals = self.main.jobs(rate)
        if best_effort is None:
            return Traffic(arrivals)
        if options.be_rate is not None:
            others = best_effort.jobs(options.be_rate)
            return Traffic(merge(arrivals, others, key=lambda job: job.at_s))
        return Traffic(arrivals, best_effort.backlog(), options.be_open)


@dataclass(frozen=True, slots=True)
class TrafficSource:
    """Requests of one kind.

    Attributes:
        arrivals: of a trace; None where lengths are drawn.
        requests: how many; None without end.
        lengths: draws a prompt's and an answer's length.
    """

    service_class: str
    requests: int | None
    seed: int
    burstiness: float
    first_text: int
    arrivals: Seq[Arrival] | None = None
    lengths: tuple[Callable[[random.Random], int], Callable[[random.Random], int]] | None = None
    workload: Workload | None = None

    @property
    def timed(self) -> bool:
        """Whether the trace says when its requests come."""
        return self.arrivals is not None and not math.isnan(self.arrivals[0].at_s)

    @property
    def rate(self) -> float:
        """Requests a second as recorded."""
        assert self.arrivals is not None
        return len(self.arrivals) / max(self.arrivals[-1].at_s, 1e-3)

    def jobs(self, rate: float | None) -> Iterator[SimulatedRequest]:
        """Jobs in order of time, at a rate or as recorded."""
        if self.workload is not None:
            assert rate is not None
            assert self.requests is not None
            times = gamma_times(rate, self.burstiness, self.seed)
            yield from self._conversations(times, self.requests)
        elif self.timed:
            speed = 1.0 if rate is None else rate / self.rate
            assert self.arrivals is not None
            yield from trace_jobs(
                self.arrivals, self.service_class, speed=speed, first=self.first_text
            )
        else:
            assert rate is not None
            times = gamma_times(rate, self.burstiness, self.seed)
            yield from islice(self._untimed(times), self.requests)

    def backlog(self) -> Iterator[SimulatedRequest]:
        """Jobs that have no times; a trace is repeated until there are enough."""
        if self.workload is not None:
            return self._conversations(repeat(0.0), self.requests or DEFAULT_REQUESTS)
        return islice(self._untimed(repeat(0.0)), self.requests)

    def _conversations(self, times: Iterator[float], total: int) -> Iterator[SimulatedRequest]:
        assert self.workload is not None
        texts = range(self.first_text, self.first_text + total)
        return conversations(self.workload, times, texts, self.service_class, self.seed)

    def _untimed(self, times: Iterator[float]) -> Iterator[SimulatedRequest]:
        draw = random.Random(f"lengths {self.seed} {self.service_class}")
        index = count(self.first_text)
        while True:
            if self.arrivals is None:
                assert self.lengths is not None
                given, asked = (each(draw) for each in self.lengths)
                batch: Seq[Arrival] = [Arrival(0.0, given, asked)]
            else:  # in another order each time, so that no two passes are alike
                batch = draw.sample(self.arrivals, len(self.arrivals))
            for arrival in batch:
                number = next(index)
                yield from trace_jobs([arrival], self.service_class, times, first=number)


def build(options: SimOptions) -> World:
    """Make everything that the runs share.

    Raises:
        ConfigError: an unknown name, a missing rate, or a target that no load can meet.
        OutOfMemoryError: the model does not fit the hardware; says by how many bytes.
        ParameterError: a trace is wrong; says in which line.
    """
    shape, machine = find_shape(options.model), hardware(options.hardware)
    _check_recurrent(options, shape)
    cost, sheet = _costs(options, shape, machine)
    groups = _groups(options, sheet)
    room = groups[0].num_blocks * options.block_size
    longest = min(options.max_model_len or room, room)
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, longest)
    main = _source(options, "trace", options.service_class, options.requests, 0)
    best_effort = None
    if options.be_trace is not None:
        best_effort = _source(
            options, "be_trace", options.be_class, options.be_requests, BEST_EFFORT_TEXTS
        )
    if options.rate is None and not main.timed:
        raise ConfigError("The trace has no times; give a rate, as in --rate 4.", param="rate")
    bounds = {}
    if main.workload is not None:
        bounds["ttft_ms"] = main.workload.bound_ms("ttft")
        bounds["tpot_ms"] = main.workload.bound_ms("tpot", "itl")
    classes = options.service_classes(**bounds)
    resources = Resources(
        groups,
        limits,
        classes,
        options.prefix_caching,
        _host_blocks(options, sheet, machine),
    )
    world = World(options, shape, machine, cost, sheet, resources, main, best_effort)
    check_targets(world, [options.service_class])
    planned_cost: CostModel = cost
    if SCHEDULERS[options.scheduler].needs_cost:
        key = ProfileKey(machine.name, shape.name, sheet.dtype, f"tp{options.tp}", "simulated")
        noise = Errors(options.error, 0.0, 1.0, options.seed)
        planned_cost = learn(cost, key, limits, noise, host=machine.host is not None)
        world = replace(world, planned=replace(resources, cost=planned_cost))
    halves = _halves(options, planned_cost)
    return replace(world, planned=replace(world.planned, halves=halves))


def _halves(options: SimOptions, cost: CostModel) -> Halves | None:
    """What splits steps; None where they run whole.

    Raises:
        ConfigError: the scheduler has sub-batches of its own, or the profile has no interference.
        ProfileError: there is no such profile.
    """
    if options.overlap == "off":
        return None
    if SCHEDULERS[options.scheduler].has_part:
        raise ConfigError(
            f"Scheduler {options.scheduler} has sub-batches of its own, for the host's attention; "
            "leave overlap off.",
            param="overlap",
        )
    interference = published()
    if options.overlap != "published":
        fitted = Fitted.load(Path(options.overlap))
        if fitted.interference is None:
            raise ConfigError(
                f"The profile {options.overlap} has nothing of halves; measure them on a GPU with "
                "weft profile, or set overlap to published.",
                param="overlap",
            )
        interference = fitted.interference
    most = options.max_num_batched_tokens
    ridge = ridge_of(cost, most)
    if ridge is None:
        return None
    return Halves(HALF_SIZES, max(2 * HALF_SIZES[0], ridge), Measured(cost, interference.chosen))


def find_shape(model: str) -> ModelShape:
    """The shape of a known model, or of a ``config.json``.

    Raises:
        ConfigError, ParameterError, UnsupportedModelError: there is none, or it is not understood.
    """
    path = Path(model)
    if path.suffix != ".json" and not path.is_dir():
        return model_shape(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        return ModelShape.from_config(json.loads(read_text(str(file), "model")), str(path))
    except (ValueError, AttributeError):
        raise UnsupportedModelError(f"'{file}' is no model's config.", param="model") from None


def check_targets(world: World, served: Seq[str]) -> None:
    """Raise ConfigError if a target of the served classes would be missed without any load."""
    main, cost = world.main, world.cost
    shortest = 1 if main.arrivals is None else min(each.input_tokens for each in main.arrivals)
    decode, prompt = Work(), Work()
    decode.add(shortest, 1)
    prompt.add(0, shortest)
    for row in world.planned.classes:
        if row.name not in served:
            continue
        for name, target, work in _targets(row, prompt, decode):
            least = step_time(cost, [work])
            if target is not None and target < least:
                raise ConfigError(
                    f"No load can meet the {name} target of {target * 1e3:g} ms of class "
                    f"'{row.name}': {world.shape.name} on {world.hardware.name} takes "
                    f"{least * 1e3:.2f} ms for the shortest such step with nothing else to do.",
                    param=f"slo_{name}_ms",
                )


def _targets(
    row: ServiceClass, prompt: Work, decode: Work
) -> tuple[tuple[str, float | None, Work], ...]:
    return (("ttft", row.ttft_s, prompt), ("tpot", row.tpot_s, decode))


def _costs(options: SimOptions, shape: ModelShape, machine: Hardware) -> tuple[CostModel, Roofline]:
    overhead = CPU_DRIVEN if options.host_overhead == "cpu-driven" else NO_OVERHEAD
    dtype, kv_dtype, tp = options.dtype or machine.dtype, options.kv_dtype, options.tp
    sheet = Roofline(shape, machine, dtype, kv_dtype, tp, overhead)
    if options.step_times == "roofline":
        return sheet, sheet
    from weft.cost.table import MeasuredCosts  # reads tables of an extra

    return MeasuredCosts(shape, machine, dtype, kv_dtype, tp, overhead), sheet


def _check_recurrent(options: SimOptions, shape: ModelShape) -> None:
    """Raise ConfigError where engines keep no states, or nobody has measured their costs."""
    if shape.recurrent is None:
        return
    if SCHEDULERS[options.scheduler].has_part:
        raise ConfigError(
            f"{shape.name} has recurrent layers, beside which no host attends; set scheduler to "
            "fcfs or slo.",
            param="scheduler",
        )
    if options.step_times != "roofline":
        raise ConfigError(
            f"{shape.name} has recurrent layers, whose kernels are not among the measured ones; "
            "leave step_times at roofline.",
            param="step_times",
        )


def _groups(options: SimOptions, sheet: Roofline) -> tuple[GroupSpec, ...]:
    """The KV memory: blocks, and where there are recurrent layers half of it as slots of state.

    Raises:
        OutOfMemoryError: the weights, or the fewest slots, do not fit.
    """
    room, size, state = (
        sheet.kv_room(options.memory_share),
        options.block_size,
        sheet.shape.state_bytes,
    )
    if not state:
        return (GroupSpec("full", size, room // size),)
    budget = room * sheet.kv_token_bytes
    slots = int(min(budget // 2 // state, room // size))  # a mark is of no use without a block
    if slots < LEAST_SLOTS:
        raise OutOfMemoryError(
            f"A slot of recurrent state of {sheet.shape.name} needs {state} bytes, and "
            f"{LEAST_SLOTS} of them at most half of the {budget:.0f} for KV."
        )
    blocks = int((budget - slots * state) // (size * sheet.kv_token_bytes))
    recurrent = GroupSpec("state", size, slots, window=1, recurrent=True)
    return GroupSpec("full", size, blocks), recurrent


def _host_blocks(options: SimOptions, sheet: Roofline, machine: Hardware) -> tuple[int, ...]:
    if machine.host is None:
        return ()
    given = machine.host.memory // 2 if options.host_kv is None else options.host_kv
    block, state = options.block_size * sheet.kv_token_bytes, sheet.shape.state_bytes
    if not state:
        return (int(given // block),)
    return int(given // 2 // block), int(given // 2 // state)


def _source(
    options: SimOptions, param: str, service_class: str, requests: int | None, first_text: int
) -> TrafficSource:
    """The requests that a setting names; ``param`` is ``trace`` or ``be_trace``."""
    words = getattr(options, param)
    seed = options.seed * 2 + (first_text > 0)
    bursts = options.burstiness
    if words == SYNTHETIC:
        prefix = param.removesuffix("trace")
        lengths = tuple(
            parse_lengths(getattr(options, prefix + name), prefix + name)
            for name in ("input_tokens", "output_tokens")
        )
        asked = requests or (DEFAULT_REQUESTS if not prefix else None)
        return TrafficSource(
            service_class, asked, seed, bursts, first_text, lengths=(lengths[0], lengths[1])
        )
    if is_workload(words):
        workload = read_workload(words, param)
        asked = requests or DEFAULT_REQUESTS
        return TrafficSource(service_class, asked, seed, bursts, first_text, workload=workload)
    arrivals = read_requests(words, param)
    if not math.isnan(arrivals[0].at_s):
        arrivals = arrivals[:requests]
    elif requests is None and param == "trace":
        requests = len(arrivals)
    return TrafficSource(service_class, requests, seed, bursts, first_text, arrivals=arrivals)
