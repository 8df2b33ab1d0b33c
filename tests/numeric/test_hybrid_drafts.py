"""Drafts and moves to the host with recurrent layers: tokens and states are those without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from checkpoints import RECURRENT, build, prompt, save_with_tokenizer
from test_hybrid_engine import answers, llm, scheduler_of
from tight_kv import GREEDY as FEW
from tight_kv import Traffic, least_kv_memory, run, settings_for, traffic

from weft import LLM, SamplingParams
from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.plan import Tier
from weft.core.types import FinishReason, Request
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.cost.host_steps import HostStage
from weft.engine.build import build_engine
from weft.engine.costs import profile_key, with_host
from weft.engine.host_rules import check_attends_on_host
from weft.engine.model import find_model, resolve_settings
from weft.engine.timer import Timer, room_of
from weft.exec.states import StateStore
from weft.kernels.arrays import to_numpy
from weft.kernels.delta import LayerStates
from weft.kernels.ops import select_ops
from weft.models.spec_reader import read_spec

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
ROUND = replace(GREEDY, logit_bias={100: 14.0, 101: 9.0}, temperature=0.7, seed=4)
REPEATING = [prompt(12, 1) * 4, prompt(40, 2), prompt(9, 3) * 3, prompt(5, 4) * 9 + prompt(20, 5)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {n: save_with_tokenizer(build(n), tmp_path_factory.mktemp(n)) for n in RECURRENT}


@pytest.mark.parametrize(
    ("name", "kernels", "depth"),
    [
        *((name, "cpu", depth) for name in RECURRENT for depth in (0, 1)),
        *((name, "reference", 1) for name in ("qwen3.5-layers", "qwen3-next")),
    ],
)
def test_tokens_and_log_probabilities_are_those_without_drafts(folders, name, kernels, depth):
    with llm(folders[name], kernels=kernels, steps_in_flight=depth, block_size=8) as engine:
        for params in (GREEDY, ROUND):
            plain = engine.generate(REPEATING, params, progress=False)
            drafted = engine.generate(REPEATING, replace(params, speculation=6), progress=False)
            for found, wanted in zip(drafted, plain, strict=True):
                assert found.token_ids == wanted.token_ids
                if kernels == "cpu":  # bit for bit
                    assert found.logprobs == wanted.logprobs
        totals = scheduler_of(engine).totals
        assert totals.drafted_tokens >= totals.accepted_tokens > 0
        scheduler_of(engine).check()
        assert scheduler_of(engine).cache.states.pool.held == 0


class Oracle:
    """Drafts of known texts: of each number of guesses each number is right, in turns."""

    texts: Sequence[list[int]] = ()
    seen: ClassVar[Counter[tuple[int, int]]] = Counter()  # guesses, and how many were right

    def __init__(self, most: int, _start: int = 0) -> None:
        self._cases = cycle([(d, right) for d in range(1, most + 1) for right in range(d + 1)])

    def promising(self, _tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        drafts, right = next(self._cases)
        text = next(text for text in self.texts if text[: len(tokens)] == list(tokens))
        true = text[len(tokens) : len(tokens) + min(drafts, most)]
        return tuple(t if i < right else (t + 1) % 199 for i, t in enumerate(true))

    def searched_in_vain(self) -> int:
        return 0

    def learn(self, drafted: int, accepted: int) -> int:
        self.seen[drafted, accepted] += 1
        return 0


def marks(engine: LLM) -> dict[bytes, list[np.ndarray]]:
    """The states that can be found, by hash."""
    states = engine.engine.built.executor.store.states
    pool = scheduler_of(engine).cache.states.pool
    return {
        digest: [to_numpy(part)[slot].copy() for part in layer]
        for slot, digest in pool.cached()
        for layer in [[part for parts in states.layers.values() for part in parts]]
    }


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_may_fail_at_every_place(folders, monkeypatch, block_size, depth):
    """Across boundaries of blocks; then the text goes on from the prefix cache, right and wrong."""
    folder, start = folders["qwen3.5"], prompt(37, 8)
    params = replace(GREEDY, max_tokens=180)
    settings = {"block_size": block_size, "steps_in_flight": depth, "max_num_batched_tokens": 64}
    with llm(folder, **settings) as engine:
        wanted = answers(engine, [start], params)
        truth = marks(engine)
    monkeypatch.setattr("weft.sched.requests.NgramDrafter", Oracle)
    monkeypatch.setattr(Oracle, "texts", [[*start, *wanted[0][0]]])
    monkeypatch.setattr(Oracle, "seen", Counter())
    with llm(folder, **settings) as engine:
        assert answers(engine, [start], replace(params, speculation=6)) == wanted
        full = {(d, right) for d in range(1, 7) for right in range(d + 1)}
        assert full <= Oracle.seen.keys()
        found = marks(engine)
        common = found.keys() & truth.keys()
        assert len(common) >= 2  # that of the prompt, and the newest of the output
        for digest in common:
            for a, b in zip(found[digest], truth[digest], strict=True):
                np.testing.assert_array_equal(a, b)
        text = [*start, *wanted[0][0]]
        turns = [[*text, *prompt(9, 20)], [*text[:100], *prompt(30, 21)], [*text, 3]]
        before = scheduler_of(engine).totals.cached_tokens
        turned = answers(engine, turns, replace(GREEDY, max_tokens=9))
        assert scheduler_of(engine).totals.cached_tokens - before >= 2 * 192
        scheduler_of(engine).check()
    with llm(folder, prefix_caching=False) as cold:
        assert answers(cold, turns, replace(GREEDY, max_tokens=9)) == turned


def test_a_step_with_drafts_without_memory_is_computed_again_without_them(folders, monkeypatch):
    with llm(folders["qwen3.5"]) as engine:
        wanted = answers(engine, REPEATING)
    monkeypatch.setattr("weft.sched.requests.NgramDrafter", Oracle)
    monkeypatch.setattr(Oracle, "texts", [[*REPEATING[0], *wanted[0][0]]])
    params = [replace(GREEDY, max_tokens=20, speculation=5 * (i == 0)) for i in range(4)]
    with llm(folders["qwen3.5"]) as engine:
        executor, failed = engine.engine.built.executor, []
        recur = executor._recur

        def starving(ids, *more):
            result = recur(ids, *more)
            if executor.latest.drafts:
                failed.append(len(ids))
                raise MemoryError
            return result

        forward = executor._forward

        def watched(batch, output):
            executor.latest = batch
            forward(batch, output)

        monkeypatch.setattr(executor, "_forward", watched)
        monkeypatch.setattr(executor, "_recur", starving)
        assert answers(engine, REPEATING, params) == wanted
        assert len(failed) > 5
        scheduler_of(engine).check()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "slots", "host", "depth"),
    [
        ("qwen3.5", 3, False, 0),
        ("qwen3.5", 12, False, 1),
        ("qwen3.5", 12, True, 0),
        ("qwen3.5", 40, True, 1),
        ("qwen3-next", 12, True, 1),
        ("qwen3.5-moe-layers", 20, True, 1),
    ],
)
def test_drafts_moves_and_preemption_change_no_token(
    folders, monkeypatch, seed, name, slots, host, depth
):
    """Arrivals, shared prefixes, classes, drafts, cancels, with hardly enough KV."""
    folder, more = folders[name], {"host_kv_memory": 2**22} if host else {}
    ample = build_engine(settings_for(folder, prefix_caching=False))
    given = traffic(seed, cancels=False)
    prompts = {r.id: list(r.prompt) for requests in given._arrivals.values() for r in requests}
    wanted, _ = run(ample, given, monkeypatch)
    monkeypatch.setattr("weft.sched.requests.NgramDrafter", Oracle)
    monkeypatch.setattr(Oracle, "texts", [[*prompts[i], *wanted[i].tokens] for i in prompts])
    monkeypatch.setattr("weft.core.resolved.state_slots", lambda *_: slots)
    facts = ample.model.facts  # 14 blocks hold the longest sequence
    memory = slots * facts.state_bytes + 16 * 8 * facts.groups[0].bytes_per_token
    engine = build_engine(settings_for(folder, kv_memory=memory, steps_in_flight=depth, **more))
    found, plans = run(engine, traffic(seed, cancels=True), monkeypatch)
    ends = Counter(answer.finish for answer in found.values())
    assert ends[FinishReason.LENGTH] > 8
    for number, answer in found.items():
        told = wanted[number].tokens
        cut = answer.finish is FinishReason.CANCELLED
        assert answer.tokens == (told[: len(answer.tokens)] if cut else told), number
    totals = engine.scheduler.totals
    assert totals.drafted_tokens > totals.accepted_tokens > 0 or slots == 3
    moves = [move for plan in plans for move in plan.moves]
    assert {move.to for move in moves} == (set(Tier) if host else set())
    assert all(move.state is not None for move in moves)
    caches = (engine.scheduler.memory.kv.device, engine.scheduler.memory.kv.host) if host else ()
    assert all(pool.held == 0 for cache in caches for pool in cache.all_pools)


def test_states_of_layers_of_different_sizes_are_copied_by_size(folders):
    store = StateStore(read_spec(folders["qwen3.5"]), 3)
    layers = dict(store.layers)
    number = max(layers)
    layers[number] = LayerStates(np.zeros((3, 0), np.float32), np.zeros((3, 2, 5), np.float32))
    store.layers = layers
    sizes = [{array.shape for array in arrays} for arrays in store.arrays()]
    assert all(len(shapes) == 1 for shapes in sizes)
    assert sum(map(len, store.arrays())) == 2 * len(layers) - 1
    other = store.like(7)
    assert [a[0].shape[1:] for a in other.arrays()] == [a[0].shape[1:] for a in store.arrays()]
    assert all(len(array) == 7 for arrays in other.arrays() for array in arrays)


def test_half_the_memory_of_the_host_is_slots(folders):
    folder = folders["qwen3.5"]
    model, resolved = resolve_settings(settings_for(folder, host_kv_memory=2**17))
    state = model.facts.state_bytes
    assert resolved.host_slots == 2**16 // state
    taken = resolved.host_slots * state + sum(
        blocks * 8 * group.bytes_per_token
        for blocks, group in zip(resolved.host_blocks, model.facts.groups, strict=True)
    )
    assert taken <= 2**17
    with pytest.raises(ConfigError, match=r"not even one recurrent state of 30\.75 KiB; raise it"):
        resolve_settings(settings_for(folder, host_kv_memory=2**15))
    with pytest.raises(OutOfMemoryError, match=r"host_kv_memory is 1024\.00 TiB"):
        build_engine(settings_for(folder, host_kv_memory=2**50))


def test_moves_that_nobody_has_measured_take_the_time_of_a_state_too(folders):
    config = settings_for(folders["qwen3.5"], host_kv_memory=2**20)
    model = find_model(config)
    unmeasured = Fitted(
        profile_key(config, model), 3, Curve((1, 64), (0.1, 0.2)), dict.fromkeys(FEATURES, 0.0)
    )
    costs = with_host(config, model, unmeasured)
    assert costs.host.out.step_s == pytest.approx(2e-5 + model.facts.state_bytes / 5e9)


@pytest.mark.parametrize("scheduler", ["load-aware", "slo-piggyback"])
def test_attention_on_the_host_is_refused(folders, scheduler):
    config = settings_for(folders["qwen3.5"], host_kv_memory=2**20, scheduler=scheduler)
    ops, spec = select_ops("cpu", "float32"), read_spec(folders["qwen3.5"])
    with pytest.raises(ConfigError, match="states of its recurrent layers") as caught:
        check_attends_on_host(config, spec, ops)
    assert caught.value.param == "scheduler"
    assert "Choose scheduler" in caught.value.message


def test_measured_moves_take_states_along(folders, monkeypatch):
    config = settings_for(folders["qwen3.5"], host_kv_memory=2**22)
    engine = build_engine(config)
    room = room_of(config, engine.model, engine.resolved)
    moved, copy = [], engine.executor.tier.move

    def noted(move):
        moved.append(move)
        copy(move)

    monkeypatch.setattr(engine.executor.tier, "move", noted)
    stage = HostStage(Timer(engine.executor).run, room)
    times = stage.shuttle((), 20, 2, both=True)
    stage.close()
    engine.close()
    assert len(times.out) == len(times.back) == 2
    last = room.rows - 1
    there = {(2 * last, 0), (2 * (last - 1), 1)}
    assert {move.state for move in moved if move.to is Tier.HOST} == there
    assert {move.state[::-1] for move in moved if move.to is Tier.DEVICE} == there


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_a_prefix_that_others_have_pushed_out_comes_back_with_its_state(
    folders, monkeypatch, name
) -> None:
    """From the host, bit for bit, with only what is new computed."""
    folder = folders[name]
    arrivals = {
        step: [Request(step, tuple(prompt(70, seed)), replace(FEW, seed=1))]
        for step, seed in {0: 1, 30: 2, 60: 3, 90: 1}.items()
    }
    config = settings_for(folder, kv_memory=least_kv_memory(folder), host_kv_memory=2**22)
    engine = build_engine(config)
    found, plans = run(engine, Traffic(arrivals, {}), monkeypatch)
    assert found[90].tokens == found[0].tokens
    last = next(index for index, plan in enumerate(plans) if plan.fills)
    assert sum(plan.num_tokens for plan in plans[last:]) < 30
    assert {group for plan in plans for group, *_ in plan.fills} == {0, 1}
    assert engine.scheduler.totals.cached_tokens >= 56
