"""Steps that a device replays under a lease give the tokens of steps that are planned."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILY_CASES, build, prompt, save_with_tokenizer
from graphed import use_graphs
from lease_traffic import EDITED, NOT_LEASED, assert_same_answers, traffic
from tight_kv import DRAWN, GREEDY, Traffic, least_kv_memory, run, settings_for

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, InvariantError
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.build import build_engine
from weft.exec import replayed
from weft.exec.collect import StepOutput
from weft.exec.functions import StepFunctions
from weft.exec.replayed import LeasedRun, ReplayedSteps
from weft.kernels.advance import BLOCKS
from weft.kernels.cpu import _native

FAMILIES = ["llama", "gemma4-shared-kv", "qwen3-moe-mixed"]
# What steps are planned for one by one.
PLANNED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "grammar": {"grammar": "start: /[a-z]{5}[0-9 ]{60}/", "ignore_eos": False},
    "restrictions": {"allowed_token_ids": tuple(range(40, 90))},
    "many stop ids": {"stop_token_ids": tuple(range(1000, 1040))},
    "drafts": NOT_LEASED,
}
LONG = replace(GREEDY, max_tokens=90, seed=1)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """Leases do not end by their time, so that a busy machine gets the same ones."""
    monkeypatch.setattr(replayed, "UNPUBLISHED_S", 60.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: save_with_tokenizer(
            build(FAMILY_CASES.get(name, name)), tmp_path_factory.mktemp(name)
        )
        for name in FAMILIES
    }


@pytest.fixture
def leases(monkeypatch) -> list[list[list[int]]]:
    """Tokens of each step that every lease gave, the planned one's first."""
    given: list[list[list[int]]] = []
    go_on = StepOutput.go_on

    def noted(self, batch, decoded, guests):
        given.append(decoded.given)
        go_on(self, batch, decoded, guests)

    monkeypatch.setattr(StepOutput, "go_on", noted)
    return given


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", [{}, {"steps_in_flight": 0, "graphs": False}])
def test_replayed_steps_change_no_token(folders, family, more, monkeypatch, leases) -> None:
    """Beside the eager executor; with ample KV, and with so little that sequences give way."""
    folder = folders[family]
    for memory in (2**22, least_kv_memory(folder)):
        config = settings_for(folder, kv_memory=memory, resident="off")
        wanted, _ = run(build_engine(config), traffic(1), monkeypatch)
        assert not leases
        with monkeypatch.context() as patch:
            use_graphs(patch)
            engine = build_engine(replace(config, resident="on", **more))
            found, _ = run(engine, traffic(1), monkeypatch)
        steps = sum(len(given) - 1 for given in leases)
        assert engine.scheduler.totals.resident_steps == steps
        assert steps > 20 or memory < 2**22  # with little memory somebody waits most of the time
        leases.clear()
        assert_same_answers(found, wanted)


@pytest.mark.parametrize("wish", [*EDITED, *PLANNED])
def test_what_rows_ask_for_is_done_under_a_lease_or_planned(
    folders, wish, monkeypatch, leases
) -> None:
    folder, answers = folders["llama"], {}
    asked = {**EDITED, **PLANNED}[wish]
    for resident in ("off", "on"):
        if resident == "on":
            use_graphs(monkeypatch)
        engine = build_engine(settings_for(folder, kv_memory=2**22, resident=resident))
        arrivals = [
            Request(
                number,
                tuple(prompt(5 + number, number)),
                replace((GREEDY, DRAWN)[number % 2], max_tokens=50, seed=number, **asked),
            )
            for number in range(3)
        ]
        answers[resident], _ = run(engine, Traffic({0: arrivals}, {}), monkeypatch)
    assert answers["on"] == answers["off"]
    steps = sum(len(given) - 1 for given in leases)
    assert steps == 0 if wish in PLANNED else steps > 20


class Alone:
    """One engine of captured steps, and a step of two rows that may be leased."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        use_graphs(monkeypatch)
        self.engine = build_engine(settings_for(folder, resident="on", **more))
        self.scheduler, self.executor = self.engine.scheduler, self.engine.executor

    def leased(self, sampling: SamplingParams = LONG):
        """Launch steps up to the first with a lease, and return its plan and ticket."""
        for number in range(2):
            self.scheduler.add(Request(number, tuple(prompt(9, number)), sampling))
        while (plan := self.scheduler.plan(0.0)) and not plan.lease:
            self.scheduler.commit(self.executor.launch(plan).result())
        assert plan is not None
        return plan, self.executor.launch(plan)


def test_a_lease_that_is_recalled_or_never_granted_is_over(folders, monkeypatch) -> None:
    for recalled in (True, False):
        alone = Alone(folders["llama"], monkeypatch)
        _, ticket = alone.leased()
        if recalled:
            ticket.lease.recall()
            ticket.lease.grant(None)
        result = ticket.result()
        assert result.leased is None
        alone.scheduler.commit(result)
        assert alone.scheduler.plan(0.0).batches
        alone.engine.close()


def test_what_is_ordered_when_a_lease_is_recalled_counts(folders, monkeypatch, leases) -> None:
    alone = Alone(folders["llama"], monkeypatch)
    plan, ticket = alone.leased()
    original, ordered = ReplayedSteps._order, []

    def counted(self, *given):
        ordered.append(None)
        if len(ordered) == 6:
            ticket.lease.recall()
        return original(self, *given)

    monkeypatch.setattr(ReplayedSteps, "_order", counted)
    ticket.lease.grant(None)
    result = ticket.result()
    assert len(result.leased.steps) == 6 == len(leases[0]) - 1
    assert plan.lease > 6
    outputs = alone.scheduler.commit(result)
    assert len(outputs.tokens) == 2 * 7
    alone.scheduler.check()
    alone.engine.close()


def test_a_lease_ends_with_its_time(folders, monkeypatch) -> None:
    alone = Alone(folders["llama"], monkeypatch)
    _, ticket = alone.leased()
    monkeypatch.setattr(replayed, "UNPUBLISHED_S", 1e-9)
    ticket.lease.grant(None)
    leased = ticket.result().leased
    assert leased is not None
    assert len(leased.steps) == 1, "one is computed, so that its time is known"
    alone.engine.close()


@pytest.mark.parametrize("at", [2, 5])
def test_nothing_counts_behind_the_end_of_a_row(folders, at, monkeypatch, leases) -> None:
    """Also where a step behind it was ordered: penalties of the other row count no such token."""
    wish = EDITED["penalties"]
    sampling = replace(LONG, **wish)
    _, ticket = (alone := Alone(folders["llama"], monkeypatch)).leased(sampling)
    ticket.lease.grant(None)
    steps = ticket.result().leased.steps
    before = {step[1] for step in steps[:at]}
    at = next(i for i, step in enumerate(steps) if i >= at and step[1] not in before)
    alone.engine.close()
    _, ticket = (alone := Alone(folders["llama"], monkeypatch)).leased(
        replace(sampling, stop_token_ids=(steps[at][1],))
    )
    replays = alone.executor._device.replays
    ticket.lease.grant(None)
    result = ticket.result()
    assert result.tokens == steps[at]
    assert len(leases[-1]) == at + 1
    assert alone.executor._device.replays > replays + at
    counts = alone.executor._rows.state.counts
    known = [alone.scheduler.sequences.by_id[i] for i in range(2)]
    outputs = alone.scheduler.commit(result)
    assert [(u.sequence_id, u.finish) for u in outputs.updates] == [(1, FinishReason.STOP)]
    output = known[0].tokens[known[0].num_prompt :]
    wanted = np.bincount(output, minlength=counts.shape[1])
    assert (counts[0].numpy() % 2**30 == wanted).all()
    alone.engine.close()


def test_logits_that_mean_nothing_end_a_lease(folders, monkeypatch, leases) -> None:
    """The row ends with an error, the other one goes on, and no such token is given out."""
    alone = Alone(folders["llama"], monkeypatch)
    _, ticket = alone.leased()
    logits, calls = alone.executor._decoder.logits, []

    def spoiled(hidden):
        calls.append(None)
        found = logits(hidden)
        found[1] = np.nan if len(calls) == 3 else found[1]
        return found

    monkeypatch.setattr(alone.executor._decoder, "logits", spoiled)
    ticket.lease.grant(None)
    result = ticket.result()
    assert len(leases[0]) == 1 + 3
    outputs = alone.scheduler.commit(result)
    ends = [(update.sequence_id, update.finish) for update in outputs.updates]
    assert ends == [(1, FinishReason.ERROR)]
    assert [sequence_id for sequence_id, _ in outputs.tokens] == [0, 1, 0, 1, 0, 1, 0]
    alone.scheduler.check()
    alone.engine.close()


def test_tokens_are_published_as_soon_as_another_step_follows(folders, monkeypatch) -> None:
    """Only those of the last step, which may end a sequence, are the host's to publish."""
    monkeypatch.setattr(replayed, "LIMIT_S", 60.0)
    alone = Alone(folders["llama"], monkeypatch)
    stamps = _native.Stamps()
    _, ticket = alone.leased()
    ids = list(alone.scheduler.sequences.by_id)
    ticket.lease.grant(stamps.outlet)
    result = ticket.result()
    steps = result.leased.steps
    published = stamps.take()
    assert [list(of) for _, of in published] == [ids] * len(steps)
    assert len({at for at, _ in published}) > len(steps) // 2  # one by one
    assert result.leased.published == set(ids)
    outputs = alone.scheduler.commit(result)
    assert outputs.tokens == list(zip(ids, result.tokens, strict=True))
    alone.engine.close()


def test_an_outlet_is_that_of_a_ring_and_takes_a_token_of_each_sequence() -> None:
    with pytest.raises(TypeError):
        _native.Outlet(object())
    outlet, one = _native.Outlet(_native.Stamps().outlet), np.zeros(1, np.int64)
    assert not outlet.asked()
    with pytest.raises(ValueError, match="each token has one sequence"):
        outlet.publish(np.zeros(2, np.uint64), one)


def test_a_row_without_a_block_is_an_error_before_it_is_computed(folders, monkeypatch) -> None:
    alone = Alone(folders["llama"], monkeypatch)
    pack = alone.executor._packer.pack

    def short(batch, carried=None, ahead=0):
        packed = pack(batch, carried, ahead)
        if ahead:
            tables = alone.executor._packer.buffers[packed.buffer].numpy()
            tables[packed.words.stop - 3 : packed.words.stop] = -1
        return packed

    monkeypatch.setattr(alone.executor._packer, "pack", short)
    _, ticket = alone.leased()
    ticket.lease.grant(None)
    with pytest.raises(InvariantError, match=rf"was computed as \(0, {BLOCKS}\)"):
        ticket.result()
    alone.engine.close()


@pytest.mark.parametrize("every", [4, 1])  # 1: no lease has a step
def test_a_step_without_memory_for_it_is_planned(folders, every, monkeypatch, leases) -> None:
    folder, answers, calls = folders["llama"], {}, []
    go_on = StepFunctions.go_on

    def short(self, *given):
        calls.append(None)
        if len(calls) % every == 0:
            raise torch.OutOfMemoryError("none is left")
        go_on(self, *given)

    monkeypatch.setattr(StepFunctions, "go_on", short)
    for resident in ("off", "on"):
        if resident == "on":
            use_graphs(monkeypatch)
        config = settings_for(folder, kv_memory=2**22, resident=resident)
        engine = build_engine(replace(config, graphs=False))
        asked = [Request(i, tuple(prompt(9, i)), replace(LONG, max_tokens=200)) for i in (0, 1)]
        answers[resident], _ = run(engine, Traffic({0: asked}, {}), monkeypatch)
    assert answers["on"] == answers["off"]
    assert len(calls) > 10
    steps = sum(len(given) - 1 for given in leases)
    assert steps > 10 if every > 1 else steps == 0


def test_a_host_that_comes_late_holds_up_no_device(folders, monkeypatch) -> None:
    """So many steps are ordered that the device has some to compute meanwhile."""
    alone = Alone(folders["llama"], monkeypatch)
    _, ticket = alone.leased()
    seen: list[int] = []
    wait = ReplayedSteps._wait

    def late(self, step, *, ends):
        seen.append(alone.executor._device.replays)
        time.sleep(0.001)
        return wait(self, step, ends=ends)

    monkeypatch.setattr(ReplayedSteps, "_wait", late)
    ticket.lease.grant(None)
    steps = len(ticket.result().leased.steps)
    behind = [replays - at for at, replays in enumerate(seen[: steps - replayed.AHEAD], seen[0])]
    assert set(behind) == {0}
    alone.engine.close()


def test_ranks_lease_nothing() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 2"):
        EngineConfig(resident="on", tensor_parallel=2)


def given_of(clock: list[float], steps: int, step_s: float, known_s: float) -> tuple[int, float]:
    """How many of so many steps a lease gave whose steps take so long, and what is known then."""
    lease, stops = SimpleNamespace(outlet=None, asked=False), SimpleNamespace(ids=())
    run = LeasedRun(lease, lambda number: number, steps, stops, known_s)
    run.order()
    run.begin()
    count = 0
    while run.next() is not None:
        clock[0] += step_s
        count += 1
    return count, run.step_s


def test_slow_steps_do_not_end_leases_for_good(monkeypatch):
    """What a step takes is known by those of leases alone, so each lease has one."""
    clock = [0.0]
    monkeypatch.setattr(replayed, "UNPUBLISHED_S", 0.05)
    monkeypatch.setattr(replayed, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow, known_s = given_of(clock, 50, 0.1, 0.0)
    assert 1 <= slow <= 4
    assert known_s >= 0.1
    quick, known_s = given_of(clock, 50, 0.0001, known_s)
    assert quick == 1, "a slow step more would be too late for the tokens before it"
    assert known_s < 0.001
    assert given_of(clock, 50, 0.0001, known_s)[0] == 50
