"""Prefixes that come back from disk: the tokens of an engine that computes all of them."""

from __future__ import annotations

import math
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import build, prompt, save_with_tokenizer
from tight_kv import GREEDY, Traffic, least_kv_memory, run, settings_for, traffic

from depth import deep
from weft.core.errors import ConfigError, InvariantError
from weft.core.plan import StepPlan
from weft.core.types import FinishReason, Request
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.model import resolve_settings
from weft.engine.prefix_disk import open_prefix_disk
from weft.engine.process import _measured
from weft.exec.disk_blocks import block_sizes
from weft.kv import disk_cache

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "mistral-window": {},
    "gemma3": {"kv_dtype": "int8"},
    "gemma4-shared-kv": {},
    "qwen3-moe-mixed": {"steps_in_flight": 0},
    "gemma2": {"kv_dtype": "fp8"},
    "qwen2-window": {"kernels": "reference"},
    "qwen3.5": {},
    "qwen3-next": {"steps_in_flight": 0},
}
WAIT_S = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    return {
        name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name)) for name in FAMILIES
    }


def with_disk(folder: Path, disk: Path, **more: Any) -> Engine:
    """An engine whose prefixes on disk are known already."""
    engine = build_engine(settings_for(folder, kv_disk=str(disk), **more))
    engine.start_disk(lambda: None)
    found = engine.resources.disk
    assert found is not None
    assert found._scanned.wait(WAIT_S)
    return engine


def loaded(engine: Engine) -> int:
    """Tokens that came from disk."""
    assert engine.scheduler.cache.lower is not None
    return engine.scheduler.cache.lower.loaded_tokens


def finish(engine: Engine) -> None:
    engine.save_prefixes()
    engine.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_on_disk_change_no_token(folders, family, seed, tmp_path, monkeypatch) -> None:
    """Traffic twice on hardly enough KV, with a restart between: bit for bit what ample KV gives.

    Prefixes are evicted and come back while others run, end and are cancelled.
    """
    folder, more = folders[family], FAMILIES[family]
    ample = build_engine(settings_for(folder, **more, prefix_caching=False))
    wanted, _ = run(ample, traffic(seed, cancels=False), monkeypatch)
    tight = least_kv_memory(folder, **more)
    for turn in range(2):
        engine = with_disk(folder, tmp_path, **{**more, "kv_memory": tight})
        only_waiting_sequences_fetch(engine, monkeypatch)
        found, plans = run(engine, traffic(seed, cancels=True), monkeypatch)
        for number, answer in found.items():
            told = wanted[number].tokens
            cut = answer.finish is FinishReason.CANCELLED
            assert answer.tokens == (told[: len(answer.tokens)] if cut else told), number
        assert any(plan.saves for plan in plans) or turn
        assert sum(len(plan.loads) for plan in plans) > 0 or not turn
        assert loaded(engine) > 0 or not turn
        totals = engine.scheduler.cache.lower.disk.totals
        assert (totals.lost, totals.missing) == (0, 0)
        engine.save_prefixes()


def only_waiting_sequences_fetch(engine: Engine, monkeypatch) -> None:
    """Have ``check`` find what was fetched for a sequence that has started, and not let go."""
    scheduler, check = engine.scheduler, engine.scheduler.check
    prefixes = scheduler.cache.lower

    def also() -> None:
        check()
        assert prefixes._fetches.keys() <= {waiting.id for waiting in scheduler.sequences.waiting}
        if scheduler.idle:
            assert prefixes.disk.room == prefixes.disk._staged_bytes

    monkeypatch.setattr(scheduler, "check", also)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_without_memory_to_read_ahead_prefixes_are_computed(folders, blocks, tmp_path, monkeypatch):
    """Nobody waits until others have used theirs: they may wait for KV that he has."""
    folder = folders["llama-gqa"]
    wanted, _ = run(build_engine(settings_for(folder)), traffic(5, cancels=False), monkeypatch)
    tight = least_kv_memory(folder)
    for _ in range(2):
        engine = with_disk(folder, tmp_path, kv_memory=tight, host_kv_memory=2**20)
        disk = engine.resources.disk
        disk._staged_bytes = blocks * disk.block_bytes(0)
        only_waiting_sequences_fetch(engine, monkeypatch)
        found, _ = run(engine, traffic(5, cancels=False), monkeypatch)
        assert {n: a.tokens for n, a in found.items()} == {n: a.tokens for n, a in wanted.items()}
        assert disk.room == blocks * disk.block_bytes(0)
        engine.save_prefixes()
    assert blocks == 0 or loaded(engine) > 0


def held_up(engine: Engine, monkeypatch) -> threading.Event:
    """Have the disk of an engine not answer before an event."""
    answers, files = threading.Event(), engine.resources.disk.files
    read = files.read

    def hang(*given: Any) -> memoryview | None:
        assert answers.wait(WAIT_S)
        return read(*given)

    monkeypatch.setattr(files, "read", hang)
    return answers


def test_a_disk_that_does_not_answer_delays_a_request_and_no_more(folders, tmp_path, monkeypatch):
    tokens = prompt(70, 1)
    first = with_disk(folders["llama-gqa"], tmp_path)
    told, _ = answer(first, one(tokens), monkeypatch)
    finish(first)
    again = with_disk(folders["llama-gqa"], tmp_path)
    answers = held_up(again, monkeypatch)
    monkeypatch.setattr(disk_cache, "LATE_S", 0.2)
    found, plans = answer(again, one(tokens), monkeypatch)
    assert (found, computed(plans), loaded(again)) == (told, 70, 0)
    answers.set()
    finish(again)


def test_nothing_is_measured_while_a_request_waits_for_its_prefix(folders, tmp_path, monkeypatch):
    """No step is in flight then, but blocks are reserved, and another scheduler knows nothing."""
    tokens = prompt(70, 1)
    first = with_disk(folders["llama-gqa"], tmp_path)
    told, _ = answer(first, one(tokens), monkeypatch)
    finish(first)
    again = with_disk(folders["llama-gqa"], tmp_path)
    answers, given = held_up(again, monkeypatch), one(tokens)
    loop = EngineLoop(again.scheduler, again.executor, given, given)
    assert not loop.step()
    assert not again.scheduler.idle

    class Choice:
        policy = "fcfs"

        def idle(self, *_: object) -> None:
            raise AssertionError("a request is open")

    again.has_unsaved_prefixes = lambda: False
    assert not _measured(Choice(), again, loop)
    answers.set()
    end = time.monotonic() + WAIT_S
    while loop.step() or not again.scheduler.idle:
        assert time.monotonic() < end
    assert given.answers[0].tokens == told
    assert loaded(again) == 64
    finish(again)


def test_a_step_looks_up_few_prefixes_on_disk(folders, tmp_path, monkeypatch):
    prompts = [prompt(40, number) for number in range(20)]
    first = with_disk(folders["llama-gqa"], tmp_path)
    run(first, Traffic({0: requests(prompts)}, {}), monkeypatch)
    finish(first)
    again = with_disk(folders["llama-gqa"], tmp_path)
    answers, given = held_up(again, monkeypatch), Traffic({0: requests(prompts)}, {})
    loop = EngineLoop(again.scheduler, again.executor, given, given)
    for expected in (8, 16, 20, 20):
        loop.step()
        assert len(again.scheduler.cache.lower._fetches) == expected
    answers.set()
    end = time.monotonic() + WAIT_S
    while loop.step() or not again.scheduler.idle:
        assert time.monotonic() < end
    assert loaded(again) == 20 * 32
    finish(again)


def requests(prompts: list[list[int]]) -> list[Request]:
    sampling = replace(GREEDY, seed=1)
    return [Request(number, tuple(tokens), sampling) for number, tokens in enumerate(prompts)]


def test_all_is_saved_at_the_end_though_little_may_wait(folders, tmp_path, monkeypatch):
    engine = with_disk(folders["llama-gqa"], tmp_path)
    run(engine, one(prompt(100, 1)), monkeypatch)
    disk = engine.resources.disk
    disk._writing_bytes = 2 * disk.block_bytes(0)
    finish(engine)
    assert (disk.totals.saved, disk.totals.lost) == (107 // 8, 0)


def one(tokens: list[int], sampling: dict[str, Any] | None = None, **more: Any) -> Traffic:
    """One request."""
    sampling = replace(GREEDY, seed=1, **(sampling or {}))
    return Traffic({0: [Request(0, tuple(tokens), sampling, **more)]}, {})


def answer(engine: Engine, given: Traffic, monkeypatch) -> tuple[list[int], list[StepPlan]]:
    answers, plans = run(engine, given, monkeypatch)
    [found] = answers.values()
    return found.tokens, plans


def computed(plans: list[StepPlan]) -> int:
    """Tokens that were computed up to the first one that was sampled."""
    return next(
        sum(plan.num_tokens for plan in plans[: index + 1])
        for index, plan in enumerate(plans)
        if any(any(batch.samples) for batch in plan.batches)
    )


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_restarted_engine_computes_only_what_is_new(folders, family, tmp_path, monkeypatch):
    tokens = prompt(70, 1)
    first = with_disk(folders[family], tmp_path)
    told, plans = answer(first, one(tokens), monkeypatch)
    assert computed(plans) == 70
    finish(first)
    again = with_disk(folders[family], tmp_path)
    found, plans = answer(again, one(tokens), monkeypatch)
    assert found == told
    assert computed(plans) == 70 - 64
    assert again.scheduler.totals.cached_tokens == 64
    finish(again)


def test_salts_do_not_share(folders, tmp_path, monkeypatch):
    tokens = prompt(70, 1)
    for number, salt in enumerate([b"mine", b"yours", b"mine"]):
        engine = with_disk(folders["llama-gqa"], tmp_path)
        _, plans = answer(engine, one(tokens, cache_salt=salt), monkeypatch)
        assert (loaded(engine), computed(plans)) == ((0, 70), (0, 70), (64, 6))[number]
        finish(engine)


def test_another_model_or_setting_finds_nothing(folders, tmp_path, monkeypatch):
    tokens, name = prompt(40, 1), "llama-gqa"
    copy = shutil.copytree(folders[name], tmp_path / "copy")
    disk = tmp_path / "disk"
    for folder, more in [
        (folders[name], {}),
        (folders[name], {"kv_dtype": "int8"}),
        (folders[name], {"block_size": 4}),
        (copy, {}),
    ]:
        engine = with_disk(folder, disk, **more)
        _, plans = answer(engine, one(tokens), monkeypatch)
        assert (loaded(engine), computed(plans)) == (0, 40)
        finish(engine)
    assert len(list(disk.iterdir())) == 4


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("broken", [0, 3, 7])
def test_torn_files_are_misses(folders, family, broken, tmp_path, monkeypatch):
    """What lies before the first one that is torn is used, in full groups; no token changes."""
    tokens = prompt(70, 1)
    first = with_disk(folders[family], tmp_path)
    told, _ = answer(first, one(tokens), monkeypatch)
    hashes = first_hashes(first, tokens)
    finish(first)
    for path in tmp_path.rglob(f"{hashes[broken].hex()}-*.kv"):
        path.write_bytes(path.read_bytes()[:-1])
    again = with_disk(folders[family], tmp_path)
    found, plans = answer(again, one(tokens), monkeypatch)
    assert found == told
    assert computed(plans) >= 70 - 8 * broken
    assert again.scheduler.cache.lower.disk.totals.missing == 1
    finish(again)


def first_hashes(engine: Engine, tokens: list[int]) -> list[bytes]:
    cache = engine.scheduler.cache
    cache.register(99, b"")
    hashes = cache.block_hashes(99, 0, tokens, len(tokens) // 8)
    cache.forget(99)
    return hashes


def test_what_is_computed_faster_is_not_read(folders, tmp_path, monkeypatch):
    tokens = prompt(70, 1)
    for compute_s, expected in ((math.inf, 0), (0.0, 0), (math.inf, 64)):
        engine = with_disk(folders["llama-gqa"], tmp_path)
        engine.scheduler.cache.lower.compute_s = lambda *_, s=compute_s: s
        answer(engine, one(tokens), monkeypatch)
        assert loaded(engine) == expected
        finish(engine)


def test_blocks_that_are_scored_are_computed(folders, tmp_path, monkeypatch):
    tokens = prompt(70, 1)
    for _ in range(2):
        engine = with_disk(folders["llama-gqa"], tmp_path)
        _, plans = answer(engine, one(tokens, {"prompt_logprobs": 1}), monkeypatch)
        assert (loaded(engine), computed(plans)) == (0, 70)
        finish(engine)


def test_the_sizes_of_blocks_are_those_of_the_store(folders, tmp_path):
    for family, more in FAMILIES.items():
        engine = with_disk(folders[family], tmp_path, **more)
        disk, sizes = engine.resources.disk, block_sizes(engine.executor.store)
        assert [disk.block_bytes(group) for group in range(len(sizes))] == sizes
        finish(engine)


def test_settings_that_exclude_it_are_typed_errors(folders, tmp_path):
    folder, disk = folders["llama-gqa"], str(tmp_path)
    with pytest.raises(ConfigError, match="prefix_caching is off"):
        settings_for(folder, kv_disk=disk, prefix_caching=False)
    with pytest.raises(ConfigError, match="tensor_parallel is 2"):
        settings_for(folder, kv_disk=disk, tensor_parallel=2)
    with pytest.raises(ConfigError, match="kv_disk_size"):
        settings_for(folder, kv_disk=disk, kv_disk_size=1000)
    with pytest.raises(ConfigError, match="name its folder with kv_disk") as info:
        settings_for(folder, kv_disk_size=2**30)
    assert info.value.param == "kv_disk_size"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        build_engine(settings_for(folder, kv_disk=str(tmp_path / "file")))


def test_a_size_that_holds_no_block_is_a_typed_error(folders, tmp_path):
    """Else every block would be written and given up again."""
    config = settings_for(folders["llama-gqa"], kv_disk=str(tmp_path), kv_disk_size=2**20)
    model, resolved = resolve_settings(config)
    assert open_prefix_disk(config, resolved, model) is not None
    with pytest.raises(
        ConfigError, match=r"kv_disk_size is 1.* a block of this model takes"
    ) as info:
        open_prefix_disk(config, replace(resolved, block_size=2**16), model)
    assert info.value.param == "kv_disk_size"


def test_an_executor_without_a_disk_refuses_what_needs_one(folders):
    engine = build_engine(settings_for(folders["llama-gqa"]))
    plan = StepPlan(1, (), loads=((0, 0, bytes(16)),))
    with pytest.raises(InvariantError, match="needs a disk"):
        engine.executor.launch(plan).result()
    engine.close()
