"""One cell of OmniServe's reproduction: chats with targets beside best effort on a setting.

ShareGPT and LongBench-v2 are replaced by lengths with the means that are published of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from reproduction import chat_spreads
from rivals import eager_piggyback, headroom, timed_load_aware

from weft.core.types import ServiceClass
from weft.cost.fit import Fitted, ProfileKey
from weft.cost.hardware import hardware
from weft.cost.model import CostModel, Terms
from weft.cost.roofline import BYTES, Roofline
from weft.cost.shape import model_shape
from weft.cost.work import Work
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.tiers import TieredCache
from weft.sched.registry import fcfs, slo, slo_piggyback
from weft.sched.resources import TargetPolicy
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.jobs import SimulatedRequest, own_text
from weft.sim.learn import learn
from weft.sim.piggyback import Piggyback, Piggybacked
from weft.sim.run import Simulated, Traffic, simulate
from weft.sim.simulated import Errors
from weft.workload.arrivals import gamma_times

BLOCK = 16
ROWS = 1024
LONGEST = 12_288 + 512  # "a maximum length of 12K tokens" (section 5.1.1), and an answer
# ShareGPT's mean prompt and answer (vLLM, SOSP 2023, figure 11); their spread is that of the file,
# whose prompts have whole conversations and are 14 times as long.
CHAT_INPUT, CHAT_OUTPUT = 161.31, 337.99
# Mean prompt and answer of best effort (section 5.1.1).
BEST_EFFORT = {
    "LongBench-v2": (8952, 136),
    "DailyMails": (1964, 397),
    "as long as asked": (2048, 2048),  # of no data set
    "long answers": (128, 2048),  # of no data set: so that decodes are all of the work
}
BE_SPREAD = 0.25  # deviation over mean: with a maximum of 12K little more is possible
BE_OPEN = 192  # best-effort requests with the engine: the paper's 182.6 a minute are more than fit
BE_MANY = 448  # the same where the memory of five hosts has to be filled
HOST_SHARE = 0.5  # of a host's memory for KV, as weft sim has it
NETWORK = 100e9 / 8  # bytes/s between hosts (section 5.1.1)
BUDGETS = (512, 1024, 2048)  # tokens of a step, tried for the baselines that have a fixed one


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


@dataclass(frozen=True)
class Setting:
    """What a run is beside its model, scheduler and rate; the defaults are those of section 5.1.

    Attributes:
        budget: tokens of a step at most.
        burst_s: seconds after which the rate is drawn anew; 0 keeps it.
        be_open: best-effort requests that are with the engine.
        device_kv: share of the device's memory for KV that is used.
        free_attention: hosts attend in no time.
        elsewhere: prompts are computed on other machines (section 5.4.4), and cost nothing here.
    """

    hosts: int = 1
    budget: int = 2048
    admission: str = "off"
    burst_s: float = 0.0
    best_effort: str = "LongBench-v2"
    be_open: int = BE_OPEN
    machine: str = "omniserve-a100"
    device_kv: float = 1.0
    free_attention: bool = False
    elsewhere: bool = False


@cache
def true_cost(name: str, tp: int, machine: str) -> Roofline:
    """What steps take: the roofline of the paper's machine with a CPU-driven engine's overhead."""
    return Roofline(model_shape(name), hardware(machine), "bf16", tp=tp)


@cache
def planned_cost(name: str, tp: int, machine: str) -> Fitted:
    """What schedulers plan with: fits to noisy measurements of it."""
    limits = Limits(ROWS, max(BUDGETS), LONGEST)
    key = ProfileKey(machine, name, "bf16", f"tp{tp}", "simulated")
    return learn(true_cost(name, tp, machine), key, limits, Errors(long_share=0.0), host=True)


class Elsewhere:
    """The costs of steps whose prompts are computed on other machines: of their decodes alone."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.layers = cost.layers

    def terms(self, work: Work) -> Terms:
        """Seconds of each part; a step that only takes in prompts is one of a single token."""
        tokens = max(1, work.decodes + work.host_decodes) if work.tokens else 0
        decodes = Work(
            tokens=tokens,
            sampled=min(work.sampled, tokens),
            decodes=work.decodes,
            decode_context=work.decode_context,
            host_decodes=work.host_decodes,
            host_context=work.host_context,
            out_tokens=min(work.out_tokens, work.host_decodes),
            piggyback_layers=work.piggyback_layers,
        )
        return self._cost.terms(decodes)


def costs(model: Model, setting: Setting) -> tuple[CostModel, CostModel]:
    """What steps take, and what schedulers plan with."""
    place = (model.name, model.tp, setting.machine)
    true, planned = true_cost(*place), planned_cost(*place)
    return (Elsewhere(true), Elsewhere(planned)) if setting.elsewhere else (true, planned)


def host_tokens(model: Model, setting: Setting) -> int:
    """Tokens whose KV one host keeps. With less than four devices it is shared (section 4)."""
    cost, host = true_cost(model.name, model.tp, setting.machine), hardware(setting.machine).host
    assert host is not None
    token = cost.shape.kv_values_per_token * BYTES[cost.kv_dtype]
    return int(HOST_SHARE * model.tp / 4 * host.memory / token)


def scheduler(name: str, model: Model, setting: Setting) -> Scheduler:
    place = (model.name, model.tp, setting.machine)
    classes, policy = model.classes, TargetPolicy(setting.admission)
    blocks = int(true_cost(*place).kv_room() * setting.device_kv) // BLOCK
    groups = (GroupSpec("full", BLOCK, blocks),)
    limits = Limits(ROWS, setting.budget, min(LONGEST, blocks * BLOCK))
    if name in ("fcfs", "headroom"):
        kind = fcfs if name == "fcfs" else headroom
        return kind(KVCache(groups, prefix_caching=False), limits, classes)
    planned = costs(model, setting)[1]
    if name in ("alone", "device"):
        return slo(KVCache(groups, prefix_caching=False), limits, planned, classes, policy)
    on_hosts = setting.hosts * host_tokens(model, setting) // BLOCK
    tiers = TieredCache(groups, [on_hosts], prefix_caching=False)
    if name in ("load-aware", "host-only"):
        more = {"tpot_s": model.tpot_s, "host_only": name == "host-only"}
        return timed_load_aware(tiers, limits, planned, classes, **more)
    if name == "piggybacked":
        return slo_piggyback(tiers, limits, planned, classes, policy)
    return eager_piggyback(tiers, limits, planned, classes, policy, roomy=name == "roomy")


class CountedPiggybacked(Piggyback):
    """Counts the tokens that have come to their end."""

    finished = 0

    def piggyback(self, start_s: float, seconds: float, caps: Sequence[int]) -> Piggybacked:
        piggybacked_results = super().piggyback(start_s, seconds, caps)
        self.finished += len(piggybacked_results.finished)
        return piggybacked_results


def piggybacked(name: str, model: Model, setting: Setting) -> CountedPiggybacked | None:
    """The hosts of a scheduler that has piggybacked rows; remote ones are behind the network."""
    if name not in (*PIGGYBACKING, "roomy"):
        return None
    cost = true_cost(model.name, model.tp, setting.machine)
    latency_s = 2 * BYTES["bf16"] * cost.shape.hidden / NETWORK
    room, token_s = host_tokens(model, setting), 0.0
    if not setting.free_attention:
        probe = Work(tokens=1, host_decodes=1, host_context=LONGEST)
        token_s = cost.terms(probe).cpu_attention / cost.layers / LONGEST
    return CountedPiggybacked(cost.layers, token_s.__mul__, setting.hosts, latency_s, room)


def length(draw: random.Random, mean: float, spread: float) -> int:
    """Of a log-normal distribution, cut at 2048 as vLLM does with ShareGPT."""
    variance = math.log(1 + spread**2)
    drawn = draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return min(2048, max(1, round(drawn)))


def interactive(times: Iterator[float], seconds: float, seed: int) -> Iterator[SimulatedRequest]:
    draw = random.Random(f"chats {seed}")
    for number, at_s in enumerate(times):
        if at_s > seconds:
            return
        parts = zip((CHAT_INPUT, CHAT_OUTPUT), chat_spreads(), strict=True)
        given, asked = (length(draw, mean, spread) for mean, spread in parts)
        yield SimulatedRequest(at_s, (own_text(number, given),), asked, "interactive")


def backlog(name: str, seed: int) -> Iterator[SimulatedRequest]:
    draw = random.Random(f"backlog {seed}")
    mean_input, mean_output = BEST_EFFORT[name]
    number = 2**33
    while True:
        number += 1
        given = round(min(12_288, max(64, draw.gauss(mean_input, BE_SPREAD * mean_input))))
        asked = max(1, round(draw.gauss(mean_output, BE_SPREAD * mean_output)))
        yield SimulatedRequest(0.0, (own_text(number, given),), asked, "batch")


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
        be_hosts: best-effort tokens/s that hosts have attended to.
    """

    attainment: float
    ttft: float
    tpot: float
    be_output: float
    be_prompt: float
    refused: float
    itl: float
    be_hosts: float


def measure(result: Simulated, model: Model, piggybacked_results: int) -> Cell:
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
    hosted = float(host + piggybacked_results)
    gap_s, counts = (np.asarray(x) for x in (record.by_class[0].gaps, record.by_class[0].counts))
    return Cell(
        float((ttft_ok & tpot_ok).mean()),
        float(ttft_ok.mean()),
        float(tpot_ok.mean()),
        max(0.0, result.totals.output_tokens - float((output[served] + 1).sum())) / result.seconds,
        max(0.0, float(tokens - decodes - host - prompts) / result.seconds),
        float(1 - served.mean()),
        float(np.median(np.repeat(gap_s, counts.astype(int)))) * 1e3 if len(gap_s) else 0.0,
        hosted / result.seconds,
    )


def run(name: str, model: Model, rate: float, seconds: float, **given: Any) -> Cell:
    """Serve chats, and best effort beside them. ``given`` are fields of ``Setting``."""
    setting = Setting(**given)
    piggybacking = piggybacked(name, model, setting)
    times = (
        bursts(model.rates, setting.burst_s, 1) if setting.burst_s else gamma_times(rate, 1.0, 1)
    )
    asked = interactive(times, seconds, 1)
    beside = None if name == "alone" else backlog(setting.best_effort, 1)
    result = simulate(
        scheduler(name, model, setting),
        costs(model, setting)[0],
        Traffic(asked, beside, setting.be_open if beside else 0),
        Errors(seed=1),
        model.classes,
        piggyback=piggybacking,
    )
    return measure(result, model, 0 if piggybacking is None else piggybacking.finished)


PIGGYBACKING = ("piggybacked", "eager")
