"""Two sub-batches that overlap with attention on the host: the tokens of the device alone."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CASES, build, prompt, save_with_tokenizer
from test_piggybacked_rows import SHARED_KV, Dawdler, Idler, Steps, assert_alike
from tight_kv import DRAWN, GREEDY, GUESSED, Traffic, least_kv_memory, run, settings_for

from depth import deep
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.core.plan import RowAdd, StepPlan, SubBatch, Tier
from weft.core.types import Request
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.cost.work import Work
from weft.engine.build import build_engine
from weft.engine.costs import assumed_host, profile_key
from weft.engine.model import find_model
from weft.exec import host_attention
from weft.exec.overlap import OverlappedForward, _Lane
from weft.models.decoder import Decoder
from weft.sched.balance import Balance, HostShare, HostWork

FAMILIES = {
    "llama-gqa": {},
    "mistral-window": {"steps_in_flight": 0},
    "gemma3": {"kv_dtype": "int8"},
    "qwen3-moe-mixed": {"dtype": "bfloat16"},
    "gemma4": {"prefix_caching": False},
    "gemma4-shared-kv-alone": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "gemma4-shared-kv-alone", SHARED_KV)
        return {
            name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name))
            for name in FAMILIES
        }


def overlapping(folder: Path, **more: Any) -> EngineConfig:
    """Settings of an engine whose host attends, with made-up costs by which that pays."""
    path = folder / "profile.json"
    more = {"host_kv_memory": 2**22, "profile": str(path), **more}
    config = settings_for(folder, scheduler="load-aware", **more)
    model = find_model(config)
    key, layers = profile_key(config, model), model.spec.num_layers
    coefficients = {**dict.fromkeys(FEATURES, 0.0), "decode_row": 0.0005}
    Fitted(key, layers, Curve((1, 64), (0.002, 0.064)), coefficients).save(path)
    return config


def crowd(seed: int, *, cancels: bool) -> Traffic:
    """Requests with long answers in three bursts; some share a prefix or all of their prompt."""
    draw, ends = random.Random(seed), random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancelled: dict[int, list[int]] = {}
    common = prompt(30, seed)
    tokens = common
    for number in range(36):
        step = 30 * draw.randrange(2) + draw.randrange(8)
        if draw.random() < 0.8:  # else the one before, as of a request for several choices
            tokens = prompt(draw.randint(1, 40), 100 * seed + number)
            if draw.random() < 0.4:
                tokens = common[: draw.randint(8, 30)] + tokens
        sampling = draw.choice((GREEDY, DRAWN, GUESSED))
        sampling = replace(sampling, max_tokens=draw.randint(10, 40), seed=number)
        request = Request(number, tuple(tokens), sampling)
        arrivals.setdefault(step, []).append(request)
        if cancels and ends.random() < 0.25:
            cancelled.setdefault(step + ends.randint(5, 60), []).append(number)
    return Traffic(arrivals, cancelled)


def whimsical(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the host's share of each step be any that fits, in one sub-batch or two."""
    draw = random.Random(seed)

    def choose(_: Balance, base: Work, host: HostWork, least: tuple[int, int] = (0, 0)):
        decodes = draw.sample(range(len(host.contexts)), len(host.contexts))
        decodes = decodes[: draw.randint(least[0], min(len(decodes), host.budget))]
        rest = min(host.budget - len(decodes), sum(count for _, count in host.pieces))
        cut = draw.randint(0, len(decodes)) if draw.random() < 0.7 else len(decodes)
        first, second = tuple(decodes[:cut]), tuple(decodes[cut:])
        return HostShare(draw.randint(0, rest), first, second, 0.01 * (base.tokens > 0), 1.0)

    monkeypatch.setattr(Balance, "choose", choose)
    monkeypatch.setattr(Balance, "cpu_seconds", lambda *_: 0.0)


class Dawdling(Dawdler):
    """A worker that serves for moments only."""

    serve_s, pause_s = 0.002, 0.004


class Late(Dawdler):
    """One that serves what has waited for long, and then goes again."""

    serve_s, pause_s = 0.0, 0.008


@pytest.fixture
def host(request, monkeypatch) -> None:
    """The worker that engines have; none: the real one."""
    if request.param is not None:
        monkeypatch.setattr(host_attention, "HostWorker", request.param)


def kinds_of(plans: list[StepPlan]) -> Counter[str]:
    """How many plans there are of each kind that the executor tells apart."""
    kinds = Counter[str]()
    for plan in plans:
        kinds["two"] += len(plan.batches) == 2
        kinds["comes back"] += any(move.to is Tier.DEVICE for move in plan.moves)
        for batch in plan.batches:
            rows = list(zip(batch.row_tiers, batch.counts, strict=True))
            kinds["mixed"] += len(set(batch.row_tiers)) == 2
            kinds["prompt"] += any(tier is Tier.HOST and count > 1 for tier, count in rows)
            kinds["one"] += len(plan.batches) == 1 and (Tier.HOST, 1) in rows
    return kinds


def assert_same_as_ample(
    folder: Path, more: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch, **host: Any
) -> Counter[str]:
    """Random traffic gets the very tokens of an engine with ample KV; the kinds of its steps."""
    more = {"max_num_seqs": 16, **more}
    ample = build_engine(settings_for(folder, **more))
    wanted, _ = run(ample, crowd(seed, cancels=False), monkeypatch)
    tight = 2 * least_kv_memory(folder, **more)
    engine = build_engine(overlapping(folder, **more, kv_memory=tight, **host))
    whimsical(monkeypatch, seed)
    found, plans = run(engine, crowd(seed, cancels=True), monkeypatch)
    assert_alike(found, wanted)
    assert engine.scheduler.totals.host_tokens > 50
    assert set(engine.executor.tier.attention.mailbox.states()) == {"empty"}
    return kinds_of(plans)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [*((name, None) for name in FAMILIES), ("gemma3", Dawdling), ("llama-gqa", Late)],
    indirect=["host"],
)
def test_overlap_changes_no_token(folders, family, seed, monkeypatch) -> None:
    """Prefixes, equal prompts, drafts, cancels, and hosts of any speed: bit for bit what ample KV
    gives.
    """
    kinds = assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)
    assert min(kinds[kind] for kind in ("one", "two", "mixed", "prompt", "comes back")) > 5


def test_the_host_may_be_a_process_that_is_killed_again_and_again(folders, monkeypatch) -> None:
    """Within steps, while it has jobs of both sub-batches."""
    killed: list[int] = []
    enter = _Lane.enter

    def killing(lane: _Lane, layer: int) -> None:
        enter(lane, layer)
        attention = lane._attention
        pid = attention.mailbox.native.worker
        if layer == 1 and lane.with_host and pid not in (0, *killed[-1:]) and len(killed) < 3:
            attention.interrupt()
            killed.append(pid)

    monkeypatch.setattr(_Lane, "enter", killing)
    given = {"host_process": True, "host_threads": 2}
    assert_same_as_ample(folders["gemma3"], {}, 1, monkeypatch, **given)
    assert len(killed) == len(set(killed)) == 3


# -- memory that runs out -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_step_that_runs_out_of_memory_loses_no_row(folders, family, monkeypatch) -> None:
    """Anywhere between the layers: rows of either tier are computed one by one then."""
    draw, ran_out = random.Random(5), Counter[str]()

    run, together = OverlappedForward.run, [0]

    def counting(overlapped: OverlappedForward, batches: Any) -> Any:
        together[0] = sum(len(batch.rows) for batch in batches)
        return run(overlapped, batches)

    monkeypatch.setattr(OverlappedForward, "run", counting)

    def starving(name: str, share: float) -> None:
        method = getattr(_Lane, name)

        def call(lane: _Lane, *given: Any) -> Any:
            done = method(lane, *given)
            if together[0] > 1 and draw.random() < share:
                ran_out[name] += 1
                raise MemoryError
            return done

        monkeypatch.setattr(_Lane, name, call)

    for name, share in {"begin": 0.05, "enter": 0.03, "leave": 0.03, "end": 0.1}.items():
        starving(name, share)
    logits = Decoder.logits

    def hungry(decoder: Decoder, hidden: Any) -> Any:
        if len(hidden) > 1 and draw.random() < 0.05:
            ran_out["logits"] += 1
            raise MemoryError
        return logits(decoder, hidden)

    monkeypatch.setattr(Decoder, "logits", hungry)
    assert_same_as_ample(folders[family], FAMILIES[family], 1, monkeypatch)
    assert min(ran_out[name] for name in ("begin", "enter", "leave", "end", "logits")) > 0


# -- plans made by hand ---------------------------------------------------------------------------

DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.fixture
def steps(folders):
    """Steps of an engine whose host attends, with rows 2 and 3 there after their prompts."""
    with Steps(overlapping(folders["llama-gqa"])) as steps:
        for row in range(4):
            steps.start(row)
        steps.run(moves=steps.away(2, 3))
        yield steps


@pytest.fixture(scope="module")
def tokens(folders) -> list[list[int]]:
    """The second and third token of each row, computed on the device alone."""
    with Steps(settings_for(folders["llama-gqa"])) as plain:
        for row in range(4):
            plain.start(row)
        return [list(plain.run(plain.decode(0, 1, 2, 3, at=at)).tokens) for at in (20, 21)]


def of(batch: SubBatch, *tiers: Tier) -> SubBatch:
    return replace(batch, tiers=tiers)


def test_tokens_come_in_the_order_of_the_plan_whatever_the_tiers(steps, tokens) -> None:
    first = of(steps.decode(2, 0), HOST, DEVICE)
    second = of(steps.decode(1, 3), DEVICE, HOST)
    done = steps.run(first, second)
    assert done.sequence_ids == (2, 0, 1, 3)
    assert [tokens[0][row] for row in done.sequence_ids] == list(done.tokens)
    done = steps.run(of(steps.decode(3, 2, 1, at=21), HOST, HOST, DEVICE))
    assert [tokens[1][row] for row in (3, 2, 1)] == list(done.tokens)


def test_hidden_states_have_the_bits_of_one_pass_on_the_device(folders, monkeypatch) -> None:
    """In two sub-batches, with the host between the layers of one."""
    folder, hidden = folders["gemma3"], {}
    end = _Lane.end

    def watched(lane: _Lane) -> Any:
        result = end(lane)
        hidden.update(zip(lane.batch.rows, result.hidden, strict=True))
        return result

    monkeypatch.setattr(_Lane, "end", watched)
    with Steps(overlapping(folder)) as steps:
        for row in range(4):
            steps.start(row)
        steps.run(of(steps.decode(3, 0), HOST, DEVICE), steps.decode(1), moves=steps.away(3))
    with Steps(settings_for(folder)) as plain:
        for row in range(4):
            plain.start(row)
        compute, rows = plain.executor._compute, []
        plain.executor._compute = lambda *given: rows.append(compute(*given)) or rows[-1]
        plain.run(plain.decode(0, 1, 3))
    np.testing.assert_array_equal(np.stack([hidden[row] for row in (0, 1, 3)]), rows[-1])


def test_a_prompt_on_the_host_is_scored_like_one_on_the_device(folders) -> None:
    """In two chunks, beside a row of the device; log probabilities come from either tier."""
    sampling = replace(GREEDY, seed=0, logprobs=2, prompt_logprobs=2)
    given = tuple(prompt(20, 7))

    def scored(config: EngineConfig, tier: Tier) -> list[Any]:
        tiers = (DEVICE, HOST) if tier is HOST else ()
        with Steps(config) as steps:
            steps.start(0)
            tables = (steps.BLOCKS[1],) * steps._groups
            add = RowAdd(1, 1, given, 20, sampling, frozenset(), tables, tier=tier)
            first = SubBatch((0, 1), (20, 0), (1, 12), (True, False), tiers)
            rest = SubBatch((0, 1), (21, 12), (1, 8), (True, True), tiers)
            done = [steps.run(first, add=(add,)), steps.run(rest)]
            done.append(steps.run(SubBatch((1,), (20,), (1,), (True,), tiers[1:])))
        return [(d.sequence_ids, d.tokens, d.logprobs, d.prompt_logprobs) for d in done]

    folder = folders["llama-gqa"]
    on_host = scored(overlapping(folder), HOST)
    assert on_host == scored(settings_for(folder), DEVICE)
    assert [bool(prompt) for *_, prompt in on_host] == [True, True, False]
    assert 1 in on_host[2][2]


def test_a_row_leaves_for_the_host_with_the_token_of_its_last_step_there(steps, tokens) -> None:
    """Layer-wise moves take place where a step overlaps, too."""
    (move,) = steps.away(1)
    moves = (move._replace(after_layer=True),)
    steps.run(steps.decode(0, 1), of(steps.decode(2, 3), HOST, HOST), moves=moves)
    done = steps.run(steps.decode(0, at=21), of(steps.decode(1, 2, 3, at=21), HOST, HOST, HOST))
    assert list(done.tokens) == tokens[1]


def test_more_than_two_sub_batches_are_refused(steps) -> None:
    batches = [of(steps.decode(row), HOST) for row in (2, 3)]
    with pytest.raises(InvariantError, match="3 sub-batches cannot overlap"):
        steps.run(steps.decode(0), *batches)


def test_a_job_that_fails_ends_its_row_alone(steps, tokens) -> None:
    good = steps.executor._table.tables[0][2, 1]
    steps.executor._table.tables[0][2, 1] = 10**6
    done = steps.run(of(steps.decode(0, 2), DEVICE, HOST), of(steps.decode(3), HOST))
    assert done.sequence_ids == (0, 2, 3)
    assert [done.tokens[0], done.tokens[2]] == [tokens[0][0], tokens[0][3]]
    assert isinstance(done.faults[2], HostWorkerError)
    assert set(done.faults) == {2}
    steps.executor._table.tables[0][2, 1] = good
    done = steps.run(of(steps.decode(3, at=21), HOST))
    assert list(done.tokens) == [tokens[1][3]]
    assert set(steps.mailbox.states()) == {"empty"}


def test_a_row_that_finds_no_memory_alone_ends_alone(steps, tokens, monkeypatch) -> None:
    enter = _Lane.enter

    def starving(lane: _Lane, layer: int) -> None:
        enter(lane, layer)
        if layer == 1 and 2 in lane.with_host:
            raise MemoryError

    monkeypatch.setattr(_Lane, "enter", starving)
    done = steps.run(of(steps.decode(0, 2), DEVICE, HOST), of(steps.decode(3), HOST))
    assert [done.tokens[0], done.tokens[2]] == [tokens[0][0], tokens[0][3]]
    assert [(row, error.code) for row, error in done.faults.items()] == [(2, "out_of_memory")]
    assert set(steps.mailbox.states()) == {"empty"}


def test_a_process_that_hangs_is_killed_and_the_next_one_goes_on(
    folders, tokens, monkeypatch
) -> None:
    monkeypatch.setattr(host_attention, "CALL_S", 0.2)
    monkeypatch.setattr(host_attention, "CHECK_S", 0.05)
    with Steps(overlapping(folders["llama-gqa"], host_process=True)) as steps:
        for row in range(4):
            steps.start(row)
        steps.run(moves=steps.away(2, 3))
        os.kill(steps.mailbox.native.worker, signal.SIGSTOP)
        done = steps.run(steps.decode(0, 1), of(steps.decode(2, 3), HOST, HOST))
        assert list(done.tokens) == tokens[0]
        assert steps.executor.tier.attention.restarts >= 1


def test_a_host_without_worker_ends_the_engine_with_a_typed_error(folders, monkeypatch) -> None:
    monkeypatch.setattr(host_attention, "HostWorker", Idler)
    with Steps(overlapping(folders["llama-gqa"])) as steps:
        steps.start(0)
        steps.run(moves=steps.away(0))
        steps.executor.tier.attention._worker.error = HostWorkerError("The host worker has ended.")
        with pytest.raises(HostWorkerError, match="has ended"):
            steps.run(of(steps.decode(0), HOST))


# -- costs and refusals ---------------------------------------------------------------------------


def test_attention_on_the_host_is_assumed_to_take_what_the_device_takes(folders) -> None:
    config = overlapping(folders["llama-gqa"], host_threads=1)
    model = find_model(config)
    plain = Fitted.load(Path(config.profile))
    slow = replace(plain, coefficients={**plain.coefficients, "decode_context": 1e-3})

    def cpu_s(fitted: Fitted, decodes: int, context: int, **more: Any) -> float:
        known = fitted.planned_with(assumed_host(replace(config, **more), model, fitted))
        work = Work(tokens=decodes, host_decodes=decodes, host_context=context)
        return known.terms(work).cpu_attention

    assert cpu_s(slow, 2, 300) - cpu_s(slow, 2, 100) == pytest.approx(0.2)
    assert cpu_s(slow, 2, 300) > 1.9 * cpu_s(slow, 2, 300, host_threads=2)
    assert cpu_s(slow, 2, 300, threads=2) == pytest.approx(2 * cpu_s(slow, 2, 300), rel=0.1)
    assert cpu_s(plain, 1, 1000) > cpu_s(plain, 1, 0) > 0, "at least memory is read"


def test_kernels_and_settings_that_cannot_overlap_are_refused(folders) -> None:
    given = {"scheduler": "load-aware", "host_kv_memory": 2**22}
    with pytest.raises(ConfigError, match=r"kernels reference, .* Choose scheduler fcfs"):
        build_engine(settings_for(folders["llama-gqa"], kernels="reference", **given))
    with pytest.raises(ConfigError, match="is for one process, and tensor_parallel is 2"):
        EngineConfig(device="cpu", tensor_parallel=2, **given)
    with pytest.raises(ConfigError, match="keeps KV on the host; set host_kv_memory"):
        EngineConfig(device="cpu", scheduler="load-aware")
