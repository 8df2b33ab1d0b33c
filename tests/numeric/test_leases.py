"""Steps that the resident loop computes give the tokens of steps that are planned one by one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILY_CASES, build, prompt, save_with_tokenizer
from lease_traffic import EDITED, assert_same_answers, traffic
from tight_kv import DRAWN, GREEDY, Traffic, least_kv_memory, run, settings_for

from weft.core.errors import ConfigError, ParameterError
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.build import build_engine
from weft.exec import lease
from weft.exec.lease import LeasedSteps
from weft.kernels.cpu import decode

# What a lease knows of, the last four by guests.
KNOWN: dict[str, dict[str, Any]] = {
    **EDITED,
    "restrictions": {
        "allowed_token_ids": tuple(range(40, 90)),
        "bad_token_sequences": ((41,), (50, 60), (70, 70)),
        "presence_penalty": 0.5,
    },
    "grammar": {"grammar": "start: /[a-z]{5}[0-9 ]{60}/", "ignore_eos": False},
    "logprobs": {"repetition_penalty": 1.3, "logprobs": 2},
    "named": {"logprob_token_ids": (4, 9), "allowed_token_ids": tuple(range(3, 60))},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: save_with_tokenizer(build(case), tmp_path_factory.mktemp(name))
        for name, case in FAMILY_CASES.items()
    }


@pytest.fixture
def leases(monkeypatch) -> list[decode.Decoded]:
    """What every lease gave."""
    given: list[decode.Decoded] = []
    original = decode.CpuDecodeLoop.run

    def noted(self, lease, terms):
        given.append(original(self, lease, terms))
        return given[-1]

    monkeypatch.setattr(decode.CpuDecodeLoop, "run", noted)
    return given


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_leased_steps_change_no_token(folders, family, monkeypatch, leases) -> None:
    """With ample KV, and with so little that sequences must give way."""
    folder = folders[family]
    for memory in (2**22, least_kv_memory(folder)):
        answers = {}
        for resident in ("off", "auto"):
            engine = build_engine(settings_for(folder, kv_memory=memory, resident=resident))
            given = traffic(1, KNOWN["restrictions"], KNOWN["logprobs"])
            answers[resident], plans = run(engine, given, monkeypatch)
            if resident == "off":
                assert not any(plan.lease for plan in plans)
                assert not leases
        steps = sum(len(found.given) - 1 for found in leases)
        assert engine.scheduler.totals.resident_steps == steps
        assert steps > 20 or memory < 2**22  # with little memory somebody waits most of the time
        leases.clear()
        assert_same_answers(answers["auto"], answers["off"])


@pytest.mark.parametrize("first", KNOWN)
@pytest.mark.parametrize("second", ["nothing", "grammar", "logprobs"])
def test_what_rows_ask_of_their_logits_is_done_under_a_lease(
    folders, first, second, monkeypatch, leases
) -> None:
    folder, answers = folders["llama"], {}
    for resident in ("off", "auto"):
        engine = build_engine(settings_for(folder, kv_memory=2**22, resident=resident))
        wishes = (KNOWN[first], KNOWN[second])
        arrivals = [
            Request(
                number,
                tuple(prompt(5 + number, number)),
                replace((GREEDY, DRAWN)[number % 2], max_tokens=50, seed=number, **wish),
            )
            for number, wish in enumerate((*wishes, *wishes[:1]))
        ]
        answers[resident], _ = run(engine, Traffic({0: arrivals}, {}), monkeypatch)
    assert answers["auto"] == answers["off"]
    assert sum(len(found.given) - 1 for found in leases) > 20


class Alone:
    """One engine, and a step of two rows that may be leased."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.engine = build_engine(settings_for(folder, **more))
        self.scheduler, self.executor = self.engine.scheduler, self.engine.executor

    def leased(self, sampling: SamplingParams):
        """Launch steps up to the first with a lease, and return its plan and ticket."""
        for number in range(2):
            self.scheduler.add(Request(number, tuple(prompt(9, number)), sampling))
        while (plan := self.scheduler.plan(0.0)) and not plan.lease:
            self.scheduler.commit(self.executor.launch(plan).result())
        assert plan is not None
        return plan, self.executor.launch(plan)


LONG = replace(GREEDY, max_tokens=90, seed=1)


def test_a_lease_that_is_recalled_ends_within_a_step(folders) -> None:
    alone = Alone(folders["llama"])
    _, ticket = alone.leased(LONG)
    ticket.lease.recall()
    ticket.lease.grant(None)
    assert ticket.result().leased is None
    alone.engine.close()


def test_nothing_goes_on_before_the_host_says_so(folders, leases) -> None:
    alone = Alone(folders["llama"])
    _, ticket = alone.leased(LONG)
    time.sleep(0.2)
    assert not leases
    ticket.lease.grant(None)
    assert ticket.result().leased.steps
    alone.engine.close()


def test_a_recall_comes_from_any_thread(folders, leases, monkeypatch) -> None:
    monkeypatch.setattr(decode, "UNPUBLISHED_S", 60.0)
    alone = Alone(folders["llama"], max_model_len=500, kv_memory=2**26)
    monkeypatch.setattr(alone.scheduler, "limits", replace(alone.scheduler.limits, lease_steps=400))
    _, ticket = alone.leased(replace(LONG, max_tokens=450))
    timer = threading.Timer(0.01, ticket.lease.recall)
    ticket.lease.grant(None)
    timer.start()
    result = ticket.result()
    timer.join()
    assert leases[0].end in ("asked", "steps")
    steps = len(result.leased.steps)
    outputs = alone.scheduler.commit(result)
    assert len(outputs.tokens) == 2 * (steps + 1)
    assert alone.scheduler.totals.resident_steps == steps
    alone.scheduler.check()
    alone.engine.close()


def test_a_lease_ends_with_the_first_row_that_a_token_ends(folders, leases) -> None:
    folder = folders["llama"]
    _, ticket = (alone := Alone(folder)).leased(LONG)
    ticket.lease.grant(None)
    steps = ticket.result().leased.steps
    at = next(i for i, step in enumerate(steps) if i > 1 and step[1] not in np.array(steps[:i]))
    alone.engine.close()
    _, ticket = (alone := Alone(folder)).leased(replace(LONG, stop_token_ids=(steps[at][1],)))
    ticket.lease.grant(None)
    result = ticket.result()
    assert leases[-1].end == "row"
    assert result.tokens == steps[at]
    outputs = alone.scheduler.commit(result)
    assert [(u.sequence_id, u.finish) for u in outputs.updates] == [(1, FinishReason.STOP)]
    assert len(outputs.tokens) == 2 * at + 1
    alone.engine.close()


def test_what_is_published_is_not_published_again(folders) -> None:
    """Only the tokens of the last step, which may end a sequence, are the host's to publish."""
    alone = Alone(folders["llama"])
    _, ticket = alone.leased(LONG)
    ticket.lease.grant(None)
    result = ticket.result()
    steps = result.leased.steps
    assert len(steps) > 2
    told = replace(result, leased=replace(result.leased, published=frozenset({0, 1})))
    outputs = alone.scheduler.commit(told)
    assert outputs.tokens == list(zip((0, 1), result.tokens, strict=True))
    assert alone.scheduler.sequences.by_id[1].tokens[-len(steps) - 1 :] == [
        step[1] for step in (*steps, result.tokens)
    ]
    alone.engine.close()


def test_logits_that_mean_nothing_end_a_lease(folders, monkeypatch, leases) -> None:
    """The row ends with an error, the other one goes on, and no such token is given out."""
    alone = Alone(folders["llama"])
    plan, ticket = alone.leased(LONG)
    group = alone.executor.store.keys[0][0]
    block = alone.executor._table.tables[0][plan.batches[0].rows[1]][0]
    run_lease = LeasedSteps.run

    def spoiled(self, *words):
        group[block] = np.nan
        run_lease(self, *words)

    monkeypatch.setattr(LeasedSteps, "run", spoiled)
    ticket.lease.grant(None)
    result = ticket.result()
    assert leases[0].end == "numbers"
    assert len(leases[0].given) == 2
    outputs = alone.scheduler.commit(result)
    assert [update.finish for update in outputs.updates] == [FinishReason.ERROR]
    assert outputs.updates[0].sequence_id == result.sequence_ids[1]
    alone.scheduler.check()
    alone.engine.close()


def test_a_row_that_cannot_go_on_ends_a_lease_with_its_own_error(folders, leases) -> None:
    alone = Alone(folders["llama"])
    few = replace(LONG, allowed_token_ids=(45,), bad_token_sequences=((45,) * 30,))
    _, ticket = alone.leased(few)
    ticket.lease.grant(None)
    result = ticket.result()
    assert leases[0].end == "numbers"
    alone.scheduler.commit(result)
    assert [type(error) for error in result.faults.values()] == [ParameterError] * 2
    assert "No token is left to sample" in next(iter(result.faults.values())).message
    assert sum(map(len, leases[0].given)) == 2 * 30 - 2 * 1
    alone.scheduler.check()
    alone.engine.close()


def test_what_the_choice_of_a_guest_raises_is_raised(folders, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no choice")

    alone = Alone(folders["llama"])
    _, ticket = alone.leased(replace(LONG, allowed_token_ids=tuple(range(40, 90))))
    monkeypatch.setattr("weft.exec.lease.sample", fail)
    ticket.lease.grant(None)
    with pytest.raises(RuntimeError, match="no choice"):
        ticket.result()
    alone.engine.close()


def test_a_choice_without_memory_for_it_is_made_by_a_planned_step(
    folders, monkeypatch, leases
) -> None:
    """The grammar has not advanced, and nobody is to blame."""
    original, calls = lease.sample, []

    def short(*words: Any) -> Any:
        calls.append(words)
        if len(calls) % 3 == 0:
            raise MemoryError
        return original(*words)

    monkeypatch.setattr(lease, "sample", short)
    answers = {}
    for resident in ("off", "auto"):
        engine = build_engine(settings_for(folders["llama"], kv_memory=2**22, resident=resident))
        arrivals = [
            Request(number, tuple(prompt(9, number)), replace(LONG, max_tokens=50, **wish))
            for number, wish in enumerate((KNOWN["grammar"], KNOWN["nothing"]))
        ]
        answers[resident], _ = run(engine, Traffic({0: arrivals}, {}), monkeypatch)
    assert answers["auto"] == answers["off"]
    assert {"failed"} <= {found.end for found in leases}
    assert len(calls) > 10


def test_who_is_charged_with_a_crash_has_log_probabilities_by_planned_steps(folders) -> None:
    """Blame is found by what was published, and that is late under a lease."""
    scheduler = build_engine(settings_for(folders["llama"])).scheduler
    sampling = replace(LONG, logprobs=1)
    for number, crashes in enumerate((0, 1)):
        scheduler.add(Request(number, tuple(prompt(9)), sampling, crashes=crashes))
    found = [scheduler.sequences.by_id[number].leasable for number in range(2)]
    assert found == [True, False]


def test_tokens_that_come_with_the_end_of_a_lease_wait_for_no_long_step(
    folders, monkeypatch, leases
) -> None:
    monkeypatch.setattr(decode, "UNPUBLISHED_S", 1e-6)  # any step is longer
    alone = Alone(folders["llama"])
    _, ticket = alone.leased(LONG)
    ticket.lease.grant(None)
    assert ticket.result().leased is None
    assert leases[0].end == "late"
    alone.engine.close()


@pytest.mark.parametrize("settings", [{"resident": "off"}, {"kernels": "reference"}])
def test_an_executor_without_the_loop_grants_nothing(folders, settings) -> None:
    alone = Alone(folders["llama"], **settings)
    alone.scheduler.add(Request(1, (1, 2, 3), LONG))
    for _ in range(5):
        ticket = alone.executor.launch(alone.scheduler.plan(0.0))
        assert ticket.lease is None
        alone.scheduler.commit(ticket.result())
    alone.engine.close()


def test_a_loop_that_is_asked_for_and_not_there_is_an_error(folders) -> None:
    with pytest.raises(ConfigError, match=r"runs with torch.*; leave it at 'auto'"):
        Alone(folders["llama"], kernels="reference", resident="on")
