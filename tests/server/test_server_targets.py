"""Targets of service classes on ``/metrics``: kept, missed, and not counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedClient
from serving import serving

from live import eventually
from weft.core.errors import TargetError
from weft.core.plan import Update
from weft.core.types import (
    DEFAULT_CLASSES,
    FinishReason,
    Request,
    SamplingParams,
    ServiceClass,
)
from weft.server import timer as module
from weft.server.metrics import Metrics
from weft.server.probe import NoProbe
from weft.server.timer import JobTimer

CLASSES = (
    ServiceClass("urgent", 0, ttft_s=1.0, tpot_s=0.1),
    ServiceClass("first", 1, ttft_s=2.0),
    ServiceClass("batch", 2),
)
REFUSED = TargetError("too late", retry_after_s=1)


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def counted(page: bytes | str) -> dict[tuple[str, str, str], float]:
    """What is above 0, by class, target and outcome."""
    text = page if isinstance(page, str) else page.decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {
        (s.labels["service_class"], s.labels["target"], s.labels["outcome"]): s.value
        for s in samples
        if s.name == "weft:slo_targets_total" and s.value
    }


def outcome(clock: Clock, name: str, first_s: float, gap_s: float, *more: Update) -> dict:
    """What is counted of a sequence with a first token and 10 more, and then these updates."""
    metrics = Metrics("m", NoProbe(), classes=CLASSES)
    timer = JobTimer(metrics, [Request(1, (5,), SamplingParams(), service_class=name)], 1)
    clock.now += first_s
    timer.saw([Update(1, 7)])
    clock.now += 10 * gap_s
    timer.saw([Update(1, 7)] * 10)
    for update in more or (Update(1, None, finish=FinishReason.LENGTH),):
        timer.saw([update])
    return counted(metrics.render())


@pytest.mark.parametrize(
    ("name", "first_s", "gap_s", "wanted"),
    [
        ("urgent", 0.9, 0.09, {"ttft kept", "tpot kept", "all kept"}),
        ("urgent", 1.1, 0.09, {"ttft missed", "tpot kept", "all missed"}),
        ("urgent", 0.9, 0.11, {"ttft kept", "tpot missed", "all missed"}),
        ("first", 1.9, 9.0, {"ttft kept", "all kept"}),
        ("batch", 90.0, 9.0, set()),
        ("unheard of", 90.0, 9.0, set()),
    ],
)
def test_each_target_is_judged_by_itself_and_all_together(clock, name, first_s, gap_s, wanted):
    found = outcome(clock, name, first_s, gap_s)
    assert found == {(name, *words.split()): 1.0 for words in wanted}


def test_failures_have_missed_and_who_left_is_not_counted(clock):
    failed = Update(1, None, finish=FinishReason.ERROR, error=REFUSED)
    missed = {("urgent", name, "missed"): 1.0 for name in ("ttft", "tpot", "all")}
    assert outcome(clock, "urgent", 0.1, 0.01, failed) == missed
    left = Update(1, None, finish=FinishReason.CANCELLED)
    assert outcome(clock, "urgent", 0.1, 0.01, left) == {}


def test_one_that_is_refused_at_once_has_missed_as_well():
    metrics = Metrics("m", NoProbe(), classes=CLASSES)
    timer = JobTimer(metrics, [Request(1, (5,), SamplingParams(), service_class="first")], 1)
    timer.saw([Update(1, None, finish=FinishReason.ERROR, error=REFUSED)])
    assert counted(metrics.render()) == {
        ("first", "ttft", "missed"): 1.0, ("first", "all", "missed"): 1.0,
    }  # fmt: skip


def test_over_http_by_the_class_of_the_service_tier(text):
    tokenizer, template, card = text
    table = (
        ServiceClass("priority", 0, ttft_s=1e4, tpot_s=1e4),
        ServiceClass("interactive", 1, ttft_s=1e-9),
        ServiceClass("flex", 2),
    )
    texts = tokenizer, template, replace(card, classes=table)
    with serving(ScriptedClient([65, 66, 67]), texts) as running, running.http() as http:
        for tier in ("priority", "priority", "default", "flex"):
            body = {"model": "builtin", "prompt": [9], "service_tier": tier}
            assert http.post("/v1/completions", json=body).status_code == 200
        wanted = {
            ("priority", "ttft", "kept"): 2.0,
            ("priority", "tpot", "kept"): 2.0,
            ("priority", "all", "kept"): 2.0,
            ("interactive", "ttft", "missed"): 1.0,
            ("interactive", "all", "missed"): 1.0,
        }
        eventually(lambda: counted(http.get("/metrics").text) == wanted)


class Deriving(NoProbe):
    """An engine that has derived targets meanwhile."""

    ttft_s = 0.5

    def classes(self):
        return [ServiceClass("interactive", 1, ttft_s=self.ttft_s, tpot_s=0.01)]

    def policy(self):
        return "slo"


def test_targets_are_judged_by_what_the_engine_keeps_now():
    probe = Deriving()
    metrics = Metrics("m", probe)
    metrics.show()
    metrics.judge("interactive", 0.4, 0.005)
    probe.ttft_s = 0.3
    metrics.show()
    metrics.judge("interactive", 0.4, 0.005)
    page = metrics.render().decode()
    labels = 'model_name="m",outcome="{}",service_class="interactive",target="ttft"'
    for outcome in ("kept", "missed"):
        assert f"weft:slo_targets_total{{{labels.format(outcome)}}} 1.0" in page
    labels = 'model_name="m",service_class="interactive",target="ttft"'
    assert f"weft:slo_target_seconds{{{labels}}} 0.3" in page
    assert 'weft:scheduler_policy{model_name="m",policy="slo"} 1.0' in page


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"interactivity": 1}, 409, "takes no other targets"),
        ({"interactivity": 1.5}, 400, "interactivity"),
        ({"classes": {"interactive": {"tpot_s": 0}}}, 400, "tpot_s"),
        ({"classes": {"interactive": {"tpot": 1}}}, 400, "tpot"),
        ([], 400, "object"),
    ],
)
def test_changes_of_targets_that_make_no_sense_are_refused(text, body, status, words):
    with serving(ScriptedClient(), text) as running, running.http() as http:
        shown = http.get("/v1/targets").json()
        assert [row["name"] for row in shown["classes"]] == [c.name for c in DEFAULT_CLASSES]
        answer = http.put("/v1/targets", json=body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert http.get("/v1/targets").json() == shown
