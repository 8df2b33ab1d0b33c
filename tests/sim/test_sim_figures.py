"""Figures of simulations by hand: targets, use of the machine over time, timelines, workloads."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from shareddata import need
from weft.core.errors import ConfigError, OutOfMemoryError, ParameterError
from weft.core.plan import KVMove, Tier
from weft.core.types import ServiceClass
from weft.cost.fit import ProfileKey
from weft.cost.hardware import hardware
from weft.cost.model import step_time
from weft.cost.roofline import Roofline
from weft.cost.shape import model_shape
from weft.cost.work import Work
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits
from weft.sim.build import build
from weft.sim.chrome import write_timeline
from weft.sim.clock import VirtualClock
from weft.sim.figures import summarise
from weft.sim.jobs import SimulatedRequest, own_text
from weft.sim.learn import learn
from weft.sim.options import SimOptions
from weft.sim.record import STEP_COLUMNS, StepLog
from weft.sim.run import Simulated, Traffic, simulate
from weft.sim.simulated import Errors, SimulatedExecutor
from weft.sim.usage import Machine, spread, timeline, usage
from weft.sim.workload_file import Target, conversations, distribution, read_workload

SHAPE, A100 = model_shape("llama-3.1-8b"), hardware("a100")
KEY = ProfileKey("a100", "llama-3.1-8b", "bf16", "tp1", "simulated")
MACHINE = Machine(SHAPE, A100, "bf16", "bf16")
CLASSES = (ServiceClass("interactive", 1, 0.5, 0.02), ServiceClass("batch", 3))


def run(jobs: list[SimulatedRequest], blocks: int = 1000) -> Simulated:
    cache = KVCache([GroupSpec("full", 16, blocks)])
    scheduler = fcfs(cache, Limits(64, 512, cache.max_tokens()), CLASSES)
    return simulate(
        scheduler, Roofline(SHAPE, A100), Traffic(iter(jobs)), Errors(0.0, 0.0), CLASSES
    )


def job(
    at_s: float, given: int, asked: int, index: int, name: str = "interactive"
) -> SimulatedRequest:
    return SimulatedRequest(at_s, (own_text(index, given),), asked, name)


def test_targets_are_counted_by_class():
    jobs = [job(0.0, 100, 8, 0), job(0.0, 20000, 8, 1), job(0.1, 100, 8, 2, "batch")]
    figures = summarise(run(jobs), CLASSES, MACHINE, [Target("ttft", 99, 1e6)])
    assert figures["requests"] == 3
    assert figures["failed"] == 1  # the second one never fits
    interactive = figures["classes"]["interactive"]
    assert interactive["attainment"] == figures["attainment"] == 0.5
    assert interactive["goodput_per_s"] == pytest.approx(1 / figures["seconds"])
    assert "attainment" not in figures["classes"]["batch"]
    assert figures["output_tokens"] == 16
    assert figures["targets"][0]["kept"]
    late = summarise(run(jobs), (replace(CLASSES[0], ttft_s=1e-4), CLASSES[1]), MACHINE)
    assert late["attainment"] == 0.0


def test_use_follows_from_the_work():
    result = run([job(0.0, 400, 50, i) for i in range(4)])
    log, seconds = result.log, result.seconds
    use = usage(MACHINE, log, seconds)
    # 1600 prompt tokens and, with the one beyond its end, 50 decodes of each of 4 sequences
    tokens = 4 * (400 + 50)
    pairs = 4 * (400 * 400 / 2 + sum(range(401, 451)))
    flops = 2 * SHAPE.layers * SHAPE.active_layer_parameters * tokens
    flops += 2 * SHAPE.head_parameters * 4 * 51 + 4 * SHAPE.layers * 4096 * pairs
    assert use["compute"] * 312e12 * seconds == pytest.approx(flops)
    weights = SHAPE.layers * SHAPE.layer_parameters * 2 * len(log)
    assert use["bandwidth"] * 2039e9 * seconds == pytest.approx(weights, rel=0.1)
    assert use["device"] == pytest.approx(1.0)
    assert use["cpu"] == use["link"] == 0.0
    # 450 tokens are 29 blocks; who got its prompt computed first is gone by then
    assert use["device_kv_most"] == pytest.approx(4 * 29 / 1000, abs=0.002)


def test_spans_of_time_add_up_to_the_whole():
    log, draw = StepLog(), np.random.default_rng(0)
    starts = np.cumsum(draw.exponential(1.0, 50))
    for start, following in zip(starts, [*starts[1:], starts[-1] + 1], strict=True):
        values = dict.fromkeys(STEP_COLUMNS, 1.0) | {
            "start_s": start, "seconds": (following - start) * draw.uniform(0.2, 1.0)
        }  # fmt: skip
        log.add(values.values())
    amounts = draw.uniform(0, 5, 50)
    for edges in (np.linspace(0, 100, 7), np.linspace(0, 100, 1000)):
        assert spread(log, amounts, edges).sum() == pytest.approx(amounts.sum())
    line = timeline(MACHINE, log, 60.0, bins=6)
    assert len(line["seconds"]) == len(line["running"]) == 6
    assert line["seconds"][1] == 10.0
    first = [min(10.0, s + t) - s for s, t in zip(starts, log.column("seconds"), strict=True)]
    assert line["device"][0] == pytest.approx(sum(t for t in first if t > 0) / 10.0)


def test_timelines_have_every_step_and_request(tmp_path):
    result = run([job(0.3 * i, 100, 5, i) for i in range(3)])
    write_timeline(tmp_path / "t.json", result)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == len(result.log)
    assert sum(event["args"]["tokens"] for event in steps) == result.log.column("tokens").sum()
    begun = [event for event in events if event["ph"] == "b"]
    assert len(begun) == len([event for event in events if event["ph"] == "e"]) == 3 * 4
    assert begun[0]["ts"] == 0.0
    assert begun[4]["ts"] == pytest.approx(0.3e6)


# -- what schedulers plan with ------------------------------------------------------------------


def test_learnt_costs_are_near_the_true_ones_but_not_them():
    cost = Roofline(SHAPE, A100)
    options = SimOptions(hardware="a100", rate="1")
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, 20000)
    world = build(options)
    fitted = learn(cost, KEY, limits, world.errors(), host=True)
    draw, off = random.Random(0), []
    for _ in range(200):
        work = Work()
        for _ in range(draw.randint(1, 128)):
            work.add(draw.randint(1, 4000), 1)
        if draw.random() < 0.5:
            work.add(draw.choice((0, 512, 1024)), draw.randint(1, 1024))
        off.append(abs(step_time(fitted, [work]) / step_time(cost, [work]) - 1))
    assert 0.0 < statistics.fmean(off) < 0.1
    host = Work(tokens=32, sampled=32, host_decodes=32, host_context=32 * 1000, out_tokens=32)
    found, true = fitted.terms(host), cost.terms(host)
    assert found.cpu_attention == pytest.approx(true.cpu_attention, rel=0.2)
    assert found.kv_move > 0


# -- workloads ----------------------------------------------------------------------------------

GIVEN = {"min": 10, "max": 1000, "mean": 300, "standard_deviation": 150}


@pytest.mark.parametrize("kind", ["normal", "uniform", "log_normal", "bimodal", "exponential"])
def test_distributions_have_their_mean(kind):
    draw = distribution({**GIVEN, "distribution_type": kind})
    source = random.Random(2)
    drawn = [draw(source) for _ in range(20000)]
    assert 10 <= min(drawn) <= max(drawn) <= 1000
    mean = {"uniform": 505.0, "exponential": 290.0}.get(kind, 300.0)  # what the bounds leave of it
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    if kind in ("normal", "bimodal"):
        assert statistics.pstdev(drawn) == pytest.approx(150, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number_of_turns": {}}, "number_of_turns: missing 'min'"),
        ({"system_prompt": {**GIVEN, "distribution_type": "odd"}}, "unknown distribution 'odd'"),
        ({"system_prompt": {**GIVEN, "mean": 5000, "distribution_type": "normal"}}, "must rise"),
        ({"system_prompt": 7}, "system_prompt: "),
        ({"system_prompt": GIVEN}, "missing 'distribution_type'"),
    ],
)
def test_a_wrong_workload_is_refused_by_its_field(tmp_path, changes, words):
    names = ("input_sequence_length", "output_sequence_length", "number_of_turns")
    names += ("time_between_turns", "system_prompt", "input_sequence_length_per_turn")
    field = {**GIVEN, "distribution_type": "normal"}
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, field) | changes))
    with pytest.raises(ParameterError, match=words):
        read_workload(str(tmp_path))


def test_every_workload_with_distributions_can_be_drawn():
    folder = need("workloads")
    for name in sorted(path.parent.name for path in folder.glob("*/config.json")):
        if name == "agentic-trace-replay":  # tells of a recorded corpus; nothing to draw from
            with pytest.raises(ParameterError, match="missing 'distribution_type'"):
                read_workload(str(folder / name))
            continue
        workload = read_workload(str(folder / name))
        assert workload.name == name
        assert workload.targets
        assert all(target.bound_ms >= 50 for target in workload.targets)
        jobs = list(conversations(workload, iter(range(50)), range(50), "interactive", 0))
        assert all(job.input_tokens > 0 < job.output_tokens for job in jobs)
        assert len({job.prompt[0] for job in jobs}) == 1  # the system prompt


# -- building -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"model": "llama-9"},
            ConfigError,
            "Unknown model 'llama-9'. Did you mean 'llama-.*Known: .*llama-3.1-8b",
        ),
        (
            {"hardware": "h1000"},
            ConfigError,
            "Unknown hardware 'h1000'. Did you mean 'h100'.* Known: .*a100",
        ),
        ({"scheduler": "best"}, ConfigError, "one of fcfs, fcfs-swap, slo, slo-swap, "),
        ({"model": "llama-3.1-70b"}, OutOfMemoryError, r"[0-9]{9,} bytes short"),
        ({"rate": None}, ConfigError, "give a rate"),
        ({"slo_tpot_ms": 1.0}, ConfigError, "No load can meet the tpot target of 1 ms"),
        ({"slo_ttft_ms": 1.0}, ConfigError, "No load can meet the ttft target of 1 ms"),
        ({"model": "/nowhere/config.json"}, ParameterError, "/nowhere/config.json"),
        ({"trace": "/nowhere.csv"}, ParameterError, "Cannot read '/nowhere.csv'"),
    ],
)
def test_what_cannot_be_simulated_is_said_before(settings, error, words):
    with pytest.raises(error, match=words):
        build(SimOptions(**({"rate": "1"} | settings)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": "0"}, "rate must be numbers above 0"),
        ({"be_output_tokens": "x"}, "be_output_tokens must be a length"),
        ({"service_class": "vip"}, "service_class must be one of"),
        ({"max_num_batched_tokens": 8}, "is below max_num_seqs"),
        ({"classes": {"vip": {}}}, "needs a priority"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        SimOptions(**settings)


def test_models_come_from_configs_as_well(tmp_path):
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    world = build(SimOptions(model=str(tmp_path), rate="1"))
    assert (world.shape.layers, world.shape.kv_heads) == (2, 2)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Exception, match="no model's config"):
        build(SimOptions(model=str(tmp_path), rate="1"))


def test_half_of_the_memory_is_slots_of_recurrent_state():
    """And everybody is answered, with prefixes that hit where there is a state."""
    options = SimOptions(model="qwen3.6-27b", hardware="h100", rate="4", requests=60)
    world = build(options)
    blocks, slots = world.planned.groups
    state = world.shape.state_bytes
    room = world.sheet.kv_room(options.memory_share) * world.sheet.kv_token_bytes
    assert slots.recurrent
    assert slots.num_blocks * state == pytest.approx(room / 2, abs=state)
    used = slots.num_blocks * state
    used += blocks.num_blocks * options.block_size * world.sheet.kv_token_bytes
    assert room - 2**20 < used <= room
    found = simulate(
        world.scheduler(), world.cost, world.traffic(4.0), world.errors(),
        state_tokens=world.sheet.state_tokens,
    )  # fmt: skip
    assert found.totals.finished == 60
    machine = Machine(world.shape, world.hardware, world.sheet.dtype, world.sheet.kv_dtype)
    rows = found.log.column("prefills") + found.log.column("decodes")
    attending = replace(world.shape, recurrent=None, layers=world.shape.attention_layers)
    more = machine.bytes(found.log) - replace(machine, shape=attending).bytes(found.log)
    weights = 2.0 * (world.shape.parameters - attending.parameters)
    assert np.allclose(more, weights + 2 * state * rows)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduler": "load-aware"}, "no host attends"),
        ({"step_times": "measured"}, "leave step_times at roofline"),
        ({"tp": 2}, "not split"),
    ],
)
def test_what_engines_do_not_do_with_recurrent_layers_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        build(SimOptions(model="qwen3.6-27b", hardware="h100", rate="1", **settings))


def test_moves_take_the_bytes_of_states_along():
    """A block of KV, and a state as large as the KV of 300 tokens, each way."""
    cost = Roofline(model_shape("qwen3.6-27b"), hardware("h100"))
    executor = SimulatedExecutor(
        cost, VirtualClock(), {}, errors=Errors(0.0, 0.0, 1.0, 0), log=StepLog(),
        gauges=lambda: (0.0, 0.0, 0.0), state_tokens=300,
    )  # fmt: skip
    move = KVMove(0, Tier.HOST, ((1, 2),), ((3, 4),), state=(5, 6))
    assert executor._moved([move], Tier.HOST) == 2 * 16 + 300
    assert executor._moved([move], Tier.DEVICE) == 0
    assert executor._copied([(0, 1, 2), (1, 1, 2)]) == 16 + 300
