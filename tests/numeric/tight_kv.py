"""Traffic on an engine with hardly enough KV, for tests of what becomes of KV that gives way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompt

from weft.core.config import EngineConfig
from weft.core.errors import OutOfMemoryError
from weft.core.plan import StepOutputs, StepPlan, Update
from weft.core.ports import Lease
from weft.core.types import FinishReason, Request, SamplingParams, TokenLogprob
from weft.engine.build import Engine
from weft.engine.loop import EngineLoop
from weft.engine.model import resolve_settings

LENGTH = 112  # tokens of the longest sequence that is served
GREEDY = SamplingParams(temperature=0, ignore_eos=True).with_defaults({"max_tokens": 8})
DRAWN = replace(GREEDY, temperature=0.9)
GUESSED = replace(GREEDY, speculation=3)


@dataclass
class Answer:
    """What came of a request."""

    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


class Traffic:
    """An inbox of requests that come and are cancelled at given steps."""

    def __init__(self, arrivals: dict[int, list[Request]], cancels: dict[int, list[int]]) -> None:
        self._arrivals, self._cancels, self._step = arrivals, cancels, 0
        self.answers: dict[int, Answer] = {}

    @property
    def over(self) -> bool:
        return self._step > max((*self._arrivals, *self._cancels))

    def receive(self) -> tuple[list[Request], list[tuple[int, FinishReason]]]:
        requests = self._arrivals.get(self._step, [])
        self.answers |= {request.id: Answer([]) for request in requests}
        cancelled = [
            (number, FinishReason.CANCELLED)
            for number in self._cancels.get(self._step, [])
            if number in self.answers and self.answers[number].finish is None
        ]
        self._step += 1
        return requests, cancelled

    def computing(self, sequence_ids) -> None:
        """Nothing outlives the test."""

    def lend(self, lease: Lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        for update in (*(Update(*pair) for pair in outputs.tokens), *outputs.updates):
            answer = self.answers[update.sequence_id]
            assert update.error is None
            if update.token is not None:
                answer.tokens.append(update.token)
                answer.logprobs.append(update.logprob)
            answer.finish = update.finish

    def wait(self) -> None:
        """Steps without work pass at once."""

    def now(self) -> float:
        """A clock that stands, so that plans do not depend on the machine."""
        return 0.0


def traffic(seed: int, *, cancels: bool) -> Traffic:
    """Requests of two classes, some with a common prefix, within 60 steps."""
    draw, ends = random.Random(seed), random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancelled: dict[int, list[int]] = {}
    common = prompt(30, seed)
    for number in range(16):
        step = draw.randrange(60)
        tokens = prompt(draw.randint(1, 45), 100 * seed + number)
        if draw.random() < 0.4:
            tokens = common[: draw.randint(8, 30)] + tokens
        sampling = replace(
            draw.choice((GREEDY, DRAWN, GUESSED)), max_tokens=draw.randint(1, 36), seed=seed
        )
        kind = draw.choice(("interactive", "interactive", "batch"))
        request = Request(number, tuple(tokens), sampling, service_class=kind)
        arrivals.setdefault(step, []).append(request)
        if cancels and ends.random() < 0.3:
            cancelled.setdefault(step + ends.randint(1, 30), []).append(number)
    return Traffic(arrivals, cancelled)


def settings_for(folder: Path, **more: Any) -> EngineConfig:
    common = {"dtype": "float32", "threads": 1, "kv_memory": 2**22, "max_num_seqs": 8}
    common |= {"max_num_batched_tokens": 48, "max_model_len": LENGTH, "block_size": 8}
    return EngineConfig(**{**common, "model": str(folder), "device": "cpu", **more})


def least_kv_memory(folder: Path, **more: Any) -> int:
    """The least KV memory that holds one longest sequence, so that others give way."""
    memory = 2**12
    while True:
        try:
            resolve_settings(settings_for(folder, **{**more, "kv_memory": memory}))
        except OutOfMemoryError:
            memory = memory * 17 // 16
        else:
            return memory


def run(
    engine: Engine, given: Traffic, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, Answer], list[StepPlan]]:
    """Answer all requests; return the answers and the plans. ``check()`` holds now and then."""
    plans: list[StepPlan] = []
    launch, scheduler = engine.executor.launch, engine.scheduler

    def watched(plan: StepPlan):
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(engine.executor, "launch", watched)
    scheduler.memory.watermark_tokens = 0  # who fits now may begin, so many must give way
    loop = EngineLoop(scheduler, engine.executor, given, given)
    while loop.step() or not given.over or not scheduler.idle:
        scheduler.check()
    scheduler.check()
    tiers = scheduler.memory.kv
    for cache in (tiers.device, tiers.host) if engine.resources.host_blocks else (tiers,):
        assert all(pool.held == 0 for pool in cache.pools)
    engine.close()
    return given.answers, plans
