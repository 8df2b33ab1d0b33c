"""Piggybacked rows of a model that is cut: every rank takes the same ones, whatever hosts do."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import build, prompt, save_with_tokenizer
from ranks import load, on_ranks
from test_piggybacked_rows import (
    Dawdler,
    Idler,
    Steps,
    assert_alike,
    crowd,
    piggybacking,
)
from tight_kv import GREEDY, LENGTH, least_kv_memory, run, settings_for

from depth import deep
from live import command_of, eventually, lives
from weft.core.errors import EngineDeadError, HostWorkerError, OutOfMemoryError
from weft.core.plan import KVMove, RowAdd, StepPlan, StepResult, SubBatch, Tier
from weft.engine.build import build_engine
from weft.exec import host_attention
from weft.exec.eager import EagerExecutor
from weft.exec.host_attention import HostAttention, WorkerThreads
from weft.exec.input_batch import InputBatch
from weft.exec.piggyback import PiggybackedRows
from weft.exec.store import KVStore, host_memory
from weft.exec.tiers import HostTier
from weft.kernels.collectives import ALONE, Alone, Collectives
from weft.kernels.cpu.blocks import copy_blocks
from weft.kernels.cpu.host import HostWorker

DEEP = ("llama-gqa", "qwen3-moe-mixed")
BLOCK_SIZE, BLOCKS = 8, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    names = ("gemma3", *DEEP)
    return {name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name)) for name in names}


# -- engines with a process for the other rank ----------------------------------------------------


def weft_processes(title: str, of: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes below one, by how their title begins."""
    children = (of or psutil.Process()).children(recursive=True)
    return [child for child in children if "".join(command_of(child)[:1]).startswith(title)]


def rank_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[int, Any]:
    """Answers of a model with ample KV for all sequences."""
    engine = build_engine(settings_for(folder, max_num_seqs=16, **more))
    return run(engine, crowd(1, cancels=False), monkeypatch)[0]


def piggybacked_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> dict[int, Any]:
    """Answers of two ranks with KV for two sequences, some of whose rows have been piggybacked."""
    given = {"max_num_seqs": 16, "tensor_parallel": 2}
    tight = 2 * least_kv_memory(folder, **given)
    engine = build_engine(piggybacking(folder, **given, kv_memory=tight, **more))
    found, plans = run(engine, crowd(1, cancels=True), monkeypatch)
    assert sum(len(plan.piggybacked) for plan in plans) > 0
    assert engine.scheduler.totals.host_tokens > 0
    assert engine.host_attention()["host_jobs"] > 0
    return found


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(f, marks=deep) for f in DEEP)])
def test_two_ranks_give_the_tokens_that_they_give_without_a_host(
    folders, family, monkeypatch
) -> None:
    wanted = rank_tokens(folders[family], monkeypatch, tensor_parallel=2)
    assert_alike(piggybacked_answers(folders[family], monkeypatch), wanted)


def test_nor_does_a_slow_worker_of_rank_0_change_them(folders, monkeypatch) -> None:
    wanted = rank_tokens(folders["llama-gqa"], monkeypatch)  # in float32 also those of one rank
    monkeypatch.setattr(host_attention, "HostWorker", Dawdler)
    assert_alike(piggybacked_answers(folders["llama-gqa"], monkeypatch), wanted)


def test_the_worker_process_of_a_rank_may_be_stopped_and_killed(folders, monkeypatch) -> None:
    """Each worker of rank 1 is stopped for 20 steps, and then killed, the third one let go on."""
    steps, before = Counter[int](), PiggybackedRows.before

    def harassing(rows: PiggybackedRows, plan: StepPlan) -> None:
        if len(rows) and (len(steps) < 3 or min(steps.values()) < 20):
            for rank in weft_processes("weft-rank1"):
                for worker in weft_processes("weft-host", rank):
                    with suppress(psutil.NoSuchProcess):
                        steps[worker.pid] += 1
                        if steps[worker.pid] == 1:
                            worker.suspend()
                        elif steps[worker.pid] >= 20:
                            worker.resume() if len(steps) > 2 else worker.kill()
        before(rows, plan)

    wanted = rank_tokens(folders["llama-gqa"], monkeypatch)
    monkeypatch.setattr(PiggybackedRows, "before", harassing)
    found = piggybacked_answers(folders["llama-gqa"], monkeypatch, host_process=True)
    assert_alike(found, wanted)
    assert len(steps) >= 3


def test_a_rank_that_dies_with_rows_on_their_way_ends_the_engine_and_all_workers(folders) -> None:
    config = piggybacking(folders["llama-gqa"], tensor_parallel=2, host_process=True)
    engine = build_engine(config)
    try:
        eventually(lambda: len(weft_processes("weft-host")) == 2)  # a fork has its parent's title
        (rank,), workers = weft_processes("weft-rank1"), weft_processes("weft-host")
        tables = ((0, 1, 2, 3),) * len(engine.resources.groups)
        add = RowAdd(0, 0, tuple(prompt(20)), 20, replace(GREEDY, seed=0), frozenset(), tables)
        first = SubBatch((0,), (0,), (20,), (True,))
        engine.executor.launch(StepPlan(1, (first,), add=(add,))).result()
        rank.kill()
        away = StepPlan(2, (), moves=(KVMove(0, Tier.HOST, tables, tables),), piggybacked=(0,))
        with pytest.raises(EngineDeadError, match="Rank 1 of the engine ended: signal SIGKILL"):
            engine.executor.launch(away).result()
    finally:
        engine.close()
    eventually(lambda: not any(lives(worker) for worker in workers))


# -- ranks on threads, with plans made by hand ----------------------------------------------------


class Rank:
    """The executor of a rank on this thread; sequence n is in row n, with four blocks of its own.

    Its worker serves when it is told to.
    """

    def __init__(self, folder: Path, group: Collectives) -> None:
        decoder = load(folder, group, max_model_len=LENGTH)
        groups = decoder.spec.kv_groups
        store = KVStore(groups, [BLOCKS] * len(groups), BLOCK_SIZE, decoder.dtype, host_memory)
        host = store.like([BLOCKS] * len(groups))
        table = InputBatch(4, LENGTH, [LENGTH // BLOCK_SIZE] * len(groups), None)
        self.attention = HostAttention(decoder, host, table, WorkerThreads())
        tier = HostTier(store, host, copy_blocks, self.attention)
        self.executor = EagerExecutor(decoder, store, table, 0, tier)
        self.layers, self.groups, self.table = decoder.spec.num_layers, len(groups), table
        self._count = 0

    def run(self, *batches: SubBatch, **plan: Any) -> StepResult:
        self._count += 1
        return self.executor.launch(StepPlan(self._count, batches, **plan)).result()

    def start(self, *rows: int) -> list[int]:
        """Prompts of 20 tokens on the device; their first tokens."""
        sampling = replace(GREEDY, seed=0)
        add = tuple(
            RowAdd(row, row, tuple(prompt(20, row)), 20, sampling, frozenset(), self._tables(row))
            for row in rows
        )
        count = len(rows)
        batch = SubBatch(rows, (0,) * count, (20,) * count, (True,) * count)
        return list(self.run(batch, add=add).tokens)

    def away(self, *rows: int) -> tuple[KVMove, ...]:
        return tuple(KVMove(row, Tier.HOST, *(self._tables(row),) * 2) for row in rows)

    def carry(self, *batches: SubBatch, **plan: Any) -> StepResult:
        """A step that may carry any number of rows."""
        return self.run(*batches, piggyback_limits=(9,) * self.layers, **plan)

    def serve(self) -> None:
        """Let all waiting jobs be done."""
        with HostWorker(self.attention.mailbox):
            while {"submitted", "running"} & set(self.attention.mailbox.states()):
                threading.Event().wait(0.001)

    def _tables(self, row: int) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(4 * row, 4 * row + 4)),) * self.groups


def decode(*rows: int, at: int = 20) -> SubBatch:
    count = len(rows)
    return SubBatch(rows, (at,) * count, (1,) * count, (True,) * count)


@pytest.fixture
def ranks(folders, tmp_path, monkeypatch):
    """Calls a function on two ranks of a model at once."""
    monkeypatch.setattr("weft.kernels.process_group.TIMEOUT_S", 60)
    monkeypatch.setattr(host_attention, "HostWorker", Idler)

    def on_both(work: Any) -> list[Any]:
        def closing(group: Collectives) -> Any:
            rank = Rank(folders["llama-gqa"], group)
            try:
                return work(group.rank, rank)
            finally:
                rank.executor.close()

        return on_ranks(2, tmp_path, closing)

    return on_both


@pytest.fixture
def second_tokens(folders) -> list[int]:
    """The second token of each row, computed by one rank on its device."""
    alone = Rank(folders["llama-gqa"], ALONE)
    alone.start(0, 1, 2, 3)
    tokens = list(alone.run(decode(0, 1, 2, 3)).tokens)
    alone.executor.close()
    return tokens


def layers_of(found: list[list[StepResult]]) -> list[tuple[int, ...]]:
    """How many rows wait for each layer after each step, which no two ranks tell differently."""
    told = [[result.piggyback_layers for result in results] for results in found]
    assert told[0] == told[1]
    return told[0]


def test_rows_go_on_where_all_ranks_have_their_results(ranks, second_tokens) -> None:
    def work(number: int, rank: Rank) -> list[StepResult]:
        rank.start(0, 1, 2)
        results = [rank.run(moves=rank.away(1, 2), piggybacked=(1, 2))]
        if number == 0:
            rank.serve()
        results.append(rank.carry(decode(0)))
        if number == 1:
            rank.serve()
        results.append(rank.carry(decode(0, at=21), abort=(1,)))
        for at in range(22, 22 + rank.layers - 1):
            rank.serve()
            results.append(rank.carry(decode(0, at=at)))
        return results

    found = ranks(work)
    assert layers_of(found) == [(2, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    for results in found:
        assert results[1].tokens == (second_tokens[0],), "a step waits for no worker"
        assert results[-1].piggybacked_results == ((2, second_tokens[2]),)


def test_caps_take_the_rows_that_all_ranks_have_in_the_order_of_their_submission(ranks) -> None:
    def work(number: int, rank: Rank) -> list[StepResult]:
        rank.start(0, 1, 2, 3)
        rank.run(moves=rank.away(0, 1, 2, 3), piggybacked=(3, 1))
        if number == 0:  # it has row 0 done, too, which the other one has not
            rank.run(piggybacked=(0, 2))
            rank.serve()
        else:
            rank.serve()
            rank.run(piggybacked=(0, 2))
        return [rank.run(piggyback_limits=(most,) + (0,) * (rank.layers - 1)) for most in (1, 9)]

    assert layers_of(ranks(work)) == [(3, 1, 0), (2, 2, 0)]


def test_a_row_that_one_worker_cannot_serve_ends_on_every_rank(ranks, second_tokens) -> None:
    def work(number: int, rank: Rank) -> list[StepResult]:
        rank.start(0, 1)
        rank.run(moves=rank.away(0, 1))
        if number == 1:
            rank.table.tables[0][0, 2] = 10**6
        results = [rank.run(piggybacked=(0, 1))]
        for _ in range(rank.layers):
            rank.serve()
            results.append(rank.carry())
        assert set(rank.attention.mailbox.states()) == {"empty"}
        return results

    found = ranks(work)
    layers_of(found)
    for results in found:
        faults = [error for result in results for error in result.faults.items()]
        assert [(row, type(error)) for row, error in faults] == [(0, HostWorkerError)]
        assert faults[0][1].message.endswith("attend for this request: a block does not exist.")
        ended = [pair for result in results for pair in result.piggybacked_results]
        assert ended == [(0, 0), (1, second_tokens[1])]


def test_a_step_of_piggybacked_rows_alone_waits_for_the_slower_rank(ranks, monkeypatch) -> None:
    monkeypatch.setattr("weft.exec.piggyback.PIGGYBACK_WAIT_S", 60.0)

    def work(number: int, rank: Rank) -> list[StepResult]:
        rank.start(0, 1)
        rank.run(moves=rank.away(0, 1), piggybacked=(1,))
        if number == 0:
            rank.serve()
        rank.run(piggybacked=(0,))
        later = threading.Timer(0.1 * number, rank.serve if number else lambda: None)
        later.start()
        waited = rank.carry()
        later.join()
        return [waited]

    assert layers_of(ranks(work)) == [(1, 1, 0)], "row 1 was the first, and row 0 only with one"


class TwoRanks(Alone):
    """A rank that believes that there is another one."""

    size = 2


def test_no_rank_goes_on_alone_when_a_step_with_rows_runs_out_of_memory(
    folders, monkeypatch
) -> None:
    monkeypatch.setattr(host_attention, "HostWorker", Idler)
    with Steps(piggybacking(folders["llama-gqa"])) as steps:
        steps.start(0)
        steps.start(1)
        decoder = steps.executor._decoder
        monkeypatch.setattr(decoder, "ops", replace(decoder.ops, ranks=TwoRanks()))

        def starving(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(PiggybackedRows, "begin", starving)
        with pytest.raises(OutOfMemoryError, match="no rank can go on without the others"):
            steps.run(steps.decode(0), moves=steps.away(1), piggybacked=(1,))
