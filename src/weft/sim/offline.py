"""Offline runs: an order in front of the real scheduler and KV cache, on the simulated executor."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from weft.blend.density import Floats
from weft.blend.order import Order
from weft.core.errors import InvariantError
from weft.core.plan import StepOutputs
from weft.core.ports import Lease
from weft.core.types import FinishReason, Request, SamplingParams
from weft.cost.model import CostModel
from weft.cost.work import Work
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.halves import Halves
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits
from weft.sim.blended import Blended
from weft.sim.clock import VirtualClock
from weft.sim.jobs import END_TOKEN
from weft.sim.overlap import Overlap, compute_s, memory_s
from weft.sim.record import StepLog
from weft.sim.simulated import Errors, SimulatedExecutor

SAMPLING = SamplingParams(temperature=0.0, seed=0, speculation=0).with_defaults({})


class OrderedInbox:
    """Implements ``weft.core.ports.Inbox``: submits what the order says, when it says so.

    Args:
        outputs: by prompt number, the length of each answer.
    """

    def __init__(self, trace: Blended, order: Order) -> None:
        self.ends: dict[int, int] = {}
        self.cached = 0  # prompt tokens that the prefix cache gave
        self._trace, self._order = trace, order
        self._tokens: dict[int, int] = {}

    def receive(self) -> tuple[Seq[Request], Seq[tuple[int, FinishReason]]]:
        requests = []
        while (number := self._order.next()) is not None:
            prompt = tuple(self._trace.prompts[number].tolist())
            self.ends[number] = len(prompt) + int(self._trace.outputs[number])
            self._tokens[number] = 0
            requests.append(Request(number, prompt, SAMPLING, (END_TOKEN,), "batch"))
        return requests, ()

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Nothing depends on when a request starts."""

    def lend(self, lease: Lease) -> None:
        """Nothing here goes on by itself."""
        lease.recall()

    def publish(self, outputs: StepOutputs) -> None:
        tokens = self._tokens
        for number, _ in outputs.tokens:
            tokens[number] += 1
        if outputs.tokens:
            oldest = outputs.tokens[0][0]
            self._order.progress(oldest, tokens[oldest])
        for update in outputs.updates:
            number = update.sequence_id
            if update.finish is None:
                tokens[number] += 1
                continue
            if update.finish is not FinishReason.STOP:
                raise InvariantError(f"request {number} ended by {update.finish}: {update.error}")
            self.cached += update.cached_tokens
            del tokens[number], self.ends[number]
            self._order.ended(number, int(self._trace.outputs[number]))

    def wait(self) -> None:
        raise InvariantError(f"{len(self._tokens)} requests are open, but nothing is planned")


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """The results of a run.

    Attributes:
        compute_s, memory_s, other_s: (steps,) seconds of each step alone: arithmetic, reads of
            KV, and what overlaps with neither.
        computed: tokens that ran through the layers, those computed again after preemption too.
        cached: prompt tokens that the prefix cache gave.
        preempted: how often a sequence was preempted.
        kv_use: (steps,) share of the KV memory in use.
        elapsed_s: seconds of the run as simulated: whole steps one part after the other, split ones
            as their halves take.
        split_steps: those in halves.
    """

    tokens: int
    compute_s: Floats
    memory_s: Floats
    other_s: Floats
    computed: int
    cached: int
    preempted: int
    kv_use: Floats
    elapsed_s: float = 0.0
    split_steps: int = 0

    def seconds(self, overlap: Overlap) -> float:
        """Seconds of the whole run, with an overlap that each step has by itself.

        The plans do not depend on the time that steps take, since no request comes by the clock.
        """
        return float((overlap(self.compute_s, self.memory_s) + self.other_s).sum())

    def throughput(self, overlap: Overlap) -> float:
        """Prompt and output tokens a second (BlendServe section 6.3)."""
        return self.tokens / self.seconds(overlap)


def run_offline(
    trace: Blended,
    order: Order,
    cost: CostModel,
    limits: Limits,
    kv_tokens: int,
    block: int = 16,
    halves: Halves | None = None,
) -> OfflineRun:
    """Serve a trace in the order's order through FCFS.

    Args:
        cost: what steps take, without errors; overlap is applied afterwards.
        halves: splits steps, as an engine does.

    Raises:
        InvariantError: the order or the scheduler lost something.
    """
    groups = (GroupSpec("full", block, kv_tokens // block),)
    scheduler = fcfs(KVCache(groups), limits)
    scheduler.halves = halves
    clock, log, inbox = VirtualClock(), StepLog(), OrderedInbox(trace, order)
    pool = scheduler.cache.pools[0]

    def gauges() -> tuple[float, float, float]:
        return pool.held / pool.num_blocks, 0.0, float(len(scheduler.sequences.waiting))

    exact = Errors(0.0, 0.0, 1.0)
    executor = SimulatedExecutor(
        cost, clock, inbox.ends, errors=exact, log=log, gauges=gauges, block_size=block,
        speeds=None if halves is None else halves.speeds,
    )  # fmt: skip
    EngineLoop(scheduler, executor, inbox, clock).run_until_idle()
    executor.close()
    if order.remaining or not scheduler.idle:
        raise InvariantError(f"{order.remaining} requests were never submitted")
    totals = scheduler.totals
    found = _result(trace, cost, log, inbox.cached, totals.preemptions)
    return replace(found, elapsed_s=clock.now(), split_steps=totals.split_steps)


def _result(
    trace: Blended, cost: CostModel, log: StepLog, cached: int, preempted: int
) -> OfflineRun:
    names = ("tokens", "sampled", "prefills", "prefill_area", "prefill_context", "decodes")
    columns = [log.column(name).tolist() for name in (*names, "decode_context")]
    parts = np.empty((len(log), 3))
    for step, values in enumerate(zip(*columns, strict=True)):
        parts[step] = split_of(cost, Work(*(int(value) for value in values)))
    computed = int(log.column("tokens").sum())
    used = log.column("device_kv").copy()
    compute, memory, other = parts.T
    return OfflineRun(trace.tokens, compute, memory, other, computed, cached, preempted, used)


def split_of(cost: CostModel, work: Work) -> tuple[float, float, float]:
    """Seconds of arithmetic, of reads of KV, and of the rest."""
    terms = cost.terms(work)
    compute, memory = compute_s(terms), memory_s(terms)
    return compute, memory, terms.total - compute - memory


def least_work(trace: Blended, shared: int) -> Work:
    """All the work of a trace in one tally, with so many prompt tokens computed only once."""
    prompts = np.array([len(prompt) for prompt in trace.prompts], np.int64)
    outputs = trace.outputs
    work = Work()
    work.tokens = int(prompts.sum() - shared + (outputs - 1).sum())
    work.sampled = int(outputs.sum())
    work.prefills = len(trace)
    work.prefill_area = float((prompts**2 / 2).sum()) * (1 - shared / prompts.sum())
    work.prefill_context = int(prompts.sum())
    work.decodes = int((outputs - 1).sum())
    work.decode_context = int(((outputs - 1) * prompts + (outputs - 1) * outputs // 2).sum())
    return work
