"""Leases with recurrent layers: the resident loop leaves the states that planned steps do."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import RECURRENT, build, prompt, save_with_tokenizer
from lease_traffic import assert_same_answers, traffic
from tight_kv import GREEDY, Traffic, least_kv_memory, run, settings_for

from weft.core.types import Request
from weft.engine.build import Engine, build_engine
from weft.exec import lease
from weft.kernels.cpu import decode
from weft.kv import states

KINDS = ["qwen3.5", "kimi-linear", "lfm2", "nemotron-h"]  # of recurrent layers
LONG = replace(GREEDY, max_tokens=60, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {n: save_with_tokenizer(build(n), tmp_path_factory.mktemp(n)) for n in RECURRENT}


@pytest.mark.parametrize("name", RECURRENT)
def test_leased_steps_change_no_token(folders, name, monkeypatch) -> None:
    """Drafts among them, which are never leased; then with so little KV that sequences give way."""
    folder = folders[name]
    for memory in (2**22, least_kv_memory(folder)):
        answers, steps = {}, {}
        for resident in ("off", "auto"):
            engine = build_engine(settings_for(folder, kv_memory=memory, resident=resident))
            answers[resident], plans = run(engine, traffic(2), monkeypatch)
            steps[resident] = engine.scheduler.totals.resident_steps
            engine.scheduler.check()
            assert engine.scheduler.cache.states.pool.held == 0
            assert not any(plan.lease for plan in plans for batch in plan.batches if batch.drafts)
        assert steps["off"] == 0
        assert steps["auto"] > 20 or memory < 2**22
        assert_same_answers(answers["auto"], answers["off"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_sequences_go_on_from_marks_of_leases(folders, name, depth, monkeypatch) -> None:
    """Slots are many and blocks few: who was preempted begins at a mark of its output."""
    folder, answers, computed = folders[name], {}, {}
    monkeypatch.setattr("weft.core.resolved.state_slots", lambda *_: 40)
    memory = least_kv_memory(folder)
    for resident in ("off", "auto"):
        settings = {"kv_memory": memory, "resident": resident, "steps_in_flight": depth}
        engine = build_engine(settings_for(folder, **settings))
        arrivals = [Request(n, tuple(prompt(40 + n, n)), replace(LONG, seed=n)) for n in range(6)]
        answers[resident], plans = run(engine, Traffic({0: arrivals}, {}), monkeypatch)
        assert engine.scheduler.totals.preemptions > 0
        computed[resident] = sum(plan.num_tokens for plan in plans)
        computed[resident] += engine.scheduler.totals.resident_steps  # one row is leased, or more
    assert answers["auto"] == answers["off"]
    assert computed["auto"] <= computed["off"]


def test_kernels_without_a_resident_loop_are_lent_no_slots(folders, monkeypatch) -> None:
    """They compute a step while the next one is planned: no lease may be among them."""
    answers = {}
    for resident in ("off", "auto"):
        settings = {"resident": resident, "kernels": "reference", "steps_in_flight": 1}
        engine = build_engine(settings_for(folders["qwen3.5"], **settings))
        answers[resident], plans = run(engine, traffic(2), monkeypatch)
        assert not any(plan.lease for plan in plans)
        engine.scheduler.check()
        assert engine.scheduler.cache.states.pool.held == 0
    assert_same_answers(answers["auto"], answers["off"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block", [4, 16])
def test_the_next_turn_begins_at_the_newest_boundary_of_a_lease(
    folders, name, block, monkeypatch
) -> None:
    """Also where a lease begins or ends at one, and where marks stay."""
    monkeypatch.setattr(states, "MARK_EVERY", 32)
    folder, hits, answers = folders[name], {}, {}
    for resident in ("off", "auto"):
        engine = build_engine(
            settings_for(folder, kv_memory=2**23, resident=resident, block_size=block)
        )
        text = tuple(prompt(13, 1))
        hits[resident], answers[resident] = [], []
        for number, more in enumerate(range(7, 12)):
            request = Request(number, text, replace(LONG, max_tokens=more))
            found, _ = run(engine, Traffic({0: [request]}, {}), monkeypatch)
            answers[resident].append(found[number].tokens)
            text = (*text, *found[number].tokens, *prompt(2, more))
            hits[resident].append(engine.scheduler.totals.cached_tokens)
        engine.scheduler.check()
        assert (engine.scheduler.totals.resident_steps > 10) == (resident == "auto")
    assert answers["auto"] == answers["off"]
    assert hits["auto"] == hits["off"]
    assert hits["auto"][-1] > 100


@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_fails_under_a_lease_is_computed_from_what_it_read(
    folders, name, monkeypatch
) -> None:
    original, calls = lease.sample, []

    def short(*words):
        calls.append(words)
        if len(calls) % 5 == 0:
            raise MemoryError
        return original(*words)

    monkeypatch.setattr(lease, "sample", short)
    answers = {}
    for resident in ("off", "auto"):
        engine = build_engine(settings_for(folders[name], resident=resident, block_size=4))
        wishes = ({"allowed_token_ids": tuple(range(40, 90))}, {})
        arrivals = [
            Request(number, tuple(prompt(9, number)), replace(LONG, **wish))
            for number, wish in enumerate(wishes)
        ]
        answers[resident], _ = run(engine, Traffic({0: arrivals}, {}), monkeypatch)
    assert answers["auto"] == answers["off"]
    assert len(calls) > 20


def _decode(folder: str, told) -> None:
    """A process whose engine decodes, and says how far it is, until it is killed."""
    engine = build_engine(settings_for(Path(folder), kv_memory=2**22))
    original = decode.CpuDecodeLoop.run

    def noted(self, granted, terms):
        told.value = -1  # from here on a lease
        return original(self, granted, terms)

    decode.CpuDecodeLoop.run = noted
    while True:
        engine.scheduler.add(Request(0, tuple(prompt(9, 1)), LONG))
        _serve(engine)


def _serve(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while (plan := engine.scheduler.plan(0.0)) is not None:
        ticket = engine.executor.launch(plan)
        if ticket.lease is not None:
            ticket.lease.grant(None)
        tokens += [token for _, token in engine.scheduler.commit(ticket.result()).tokens]
    return tokens


def test_an_engine_that_is_killed_amid_a_lease_is_followed_by_one_that_gives_the_same(
    folders,
) -> None:
    """What was published before is the prompt of the one that follows."""
    folder = folders["qwen3.5"]
    context = multiprocessing.get_context("spawn")
    told = context.Value(ctypes.c_int64, 0)
    victim = context.Process(target=_decode, args=(str(folder), told), daemon=True)
    victim.start()
    until = time.monotonic() + 120
    while told.value == 0:
        assert time.monotonic() < until
        time.sleep(0.001)
    victim.kill()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    engine = build_engine(settings_for(folder, kv_memory=2**22))
    engine.scheduler.add(Request(0, tuple(prompt(9, 1)), LONG))
    whole = _serve(engine)
    for said in (1, 7, 23, 40):
        after = build_engine(settings_for(folder, kv_memory=2**22))
        output = tuple(whole[:said])
        after.scheduler.add(Request(0, tuple(prompt(9, 1)), LONG, output=output))
        assert _serve(after) == whole[said:]


def test_slots_that_do_not_fit_are_refused(folders) -> None:
    engine = build_engine(settings_for(folders["qwen3.5"]))
    loop, slots = engine.executor._leases, engine.executor.store.states
    assert loop is not None
    few = decode.LeasedStates.of([0], [states.LentSlots((1,), False, 8)])
    beyond = decode.LeasedStates.of([0], [states.LentSlots((10**6,), False, 0)])
    table = engine.executor._table
    table.length[0], table.sequence_ids[0] = 5, 1
    for given in (None, few, beyond):
        terms = loop._terms(
            np.array([0]), lease.Guests(np.array([0]), table, loop._ops), given, [3], 2, 0.0
        )
        with pytest.raises(IndexError, match="without room"):
            loop._loop.run(lease.Lease(), terms)
    assert slots is not None
    engine.close()
