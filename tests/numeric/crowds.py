"""Engines that piggyback, and random traffic of which much best effort gives way."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import prompt
from tight_kv import DRAWN, GREEDY, GUESSED, Answer, Traffic, settings_for

from weft.core.config import EngineConfig
from weft.core.types import FinishReason, Request
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.costs import profile_key
from weft.engine.model import find_model


def piggybacking(folder: Path, **more: Any) -> EngineConfig:
    """Settings of an engine that piggybacks, with made-up costs of which few rows fit a step."""
    path = folder / "profile.json"
    more = {"host_kv_memory": 2**22, "slo_admission": "off", "profile": str(path), **more}
    more |= {"classes": {"interactive": {"ttft_s": 0.008, "tpot_s": 0.003}}}
    config = settings_for(folder, scheduler="slo-piggyback", **more)
    model = find_model(config)
    curve = Curve((1, 64), (0.001, 0.01))
    key, layers = profile_key(config, model), model.spec.num_layers
    Fitted(key, layers, curve, dict.fromkeys(FEATURES, 0.0)).save(path)
    return config


def crowd(seed: int, *, cancels: bool) -> Traffic:
    """Long answers of best effort, then interactive requests that fill the steps for a while."""
    draw, ends = random.Random(seed), random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancelled: dict[int, list[int]] = {}
    common = prompt(30, seed)
    for number in range(56):
        batch = number < 16
        step = draw.randrange(20) if batch else 8 + draw.randrange(160)
        tokens = prompt(draw.randint(1, 40), 100 * seed + number)
        if draw.random() < 0.4:
            tokens = common[: draw.randint(8, 30)] + tokens
        most = draw.randint(20, 42) if batch else draw.randint(1, 20)
        sampling = draw.choice((GREEDY, DRAWN) if batch else (GREEDY, DRAWN, GUESSED))
        sampling = replace(sampling, max_tokens=most, seed=seed)
        kind = "batch" if batch else "interactive"
        request = Request(number, tuple(tokens), sampling, service_class=kind)
        arrivals.setdefault(step, []).append(request)
        if cancels and ends.random() < (0.3 if batch else 0.2):
            cancelled.setdefault(step + ends.randint(5, 100), []).append(number)
    return Traffic(arrivals, cancelled)


def assert_alike(found: dict[int, Answer], wanted: dict[int, Answer]) -> None:
    """The same tokens, up to where a request was cancelled."""
    ends = Counter(answer.finish for answer in found.values())
    assert ends[FinishReason.LENGTH] > 8
    for number, answer in found.items():
        told = wanted[number].tokens
        cut = answer.finish is FinishReason.CANCELLED
        assert answer.tokens == (told[: len(answer.tokens)] if cut else told), number
