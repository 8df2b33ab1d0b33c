"""Rows whose attention the host computes: the tokens of an engine that has room on the device."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CASES, Case, build, prompt, save_with_tokenizer
from crowds import assert_alike, crowd, piggybacking
from graphed import use_graphs
from tight_kv import (
    GREEDY,
    least_kv_memory,
    run,
    settings_for,
)

from depth import deep
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.core.plan import KVMove, RowAdd, StepPlan, StepResult, SubBatch, Tier
from weft.engine.build import Engine, build_engine
from weft.exec import host_attention, layerwise
from weft.exec.eager import EagerExecutor
from weft.exec.layerwise import LayerwiseForward
from weft.exec.piggyback import PiggybackedRows
from weft.kernels.cpu.host import HostMailbox, HostWorker
from weft.kernels.cpu.stack import CpuStack
from weft.models.decoder import Decoder
from weft.sched.batch import Totals
from weft.sim.executor import ModelledExecutor
from weft.sim.piggyback import Piggyback

FAMILIES = {
    "llama-gqa": {},
    "mistral-window": {"steps_in_flight": 0},
    "gemma3": {"kv_dtype": "int8"},
    "qwen3-moe-mixed": {"dtype": "bfloat16"},
    "gemma4-moe-key-is-value": {"prefix_caching": False},
    "gemma4-shared-kv-alone": {},
    "gpt-oss": {},
    "muse-glimmer": {},
}
# Layers that read other layers' KV, without the per-layer inputs of real models with such layers.
SHARED_KV = Case(
    CASES["gemma4-shared-kv"].architecture,
    lambda: edited(CASES["gemma4-shared-kv"].config(), hidden_size_per_layer_input=0),
)


def edited(config: Any, **changes: Any) -> Any:
    """A configuration of transformers with other values."""
    config.update(changes)
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "gemma4-shared-kv-alone", SHARED_KV)
        return {
            name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name))
            for name in FAMILIES
        }


class Dawdler:
    """A worker that serves for some moments and then does not, over and over."""

    serve_s, pause_s = 0.002, 0.02

    def __init__(self, mailbox: HostMailbox, *, threads: int = 1, cpus: Any = ()) -> None:
        self.error = None
        self._draw, self._closing = random.Random(3), threading.Event()
        self._given = mailbox, threads, cpus
        self._thread = threading.Thread(target=self._dawdle)
        self._thread.start()

    def _dawdle(self) -> None:
        mailbox, threads, cpus = self._given
        while not self._closing.wait(self._draw.uniform(0, self.pause_s)):
            with HostWorker(mailbox, threads=threads, cpus=cpus):
                self._closing.wait(self._draw.uniform(0, self.serve_s))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


class Sluggard(Dawdler):
    """One that hardly ever serves."""

    serve_s, pause_s = 0.0, 0.1


class Idler(Dawdler):
    """One that serves only when it is told to."""

    def _dawdle(self) -> None:
        """Do nothing."""


@pytest.fixture
def host(request, monkeypatch) -> None:
    """The worker that engines have; none: the real one."""
    if request.param is not None:
        monkeypatch.setattr(host_attention, "HostWorker", request.param)


@pytest.fixture
def layer_by_layer(monkeypatch) -> None:
    """Passes that carry rows call the parts of each layer, as ranks of a model do."""
    monkeypatch.setattr(layerwise, "CpuStack", type(None))


def assert_same_as_ample(
    folder: Path, more: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch, **host: Any
) -> Totals:
    """Random traffic gets the very tokens of an engine with ample KV; what else it got."""
    more = {"max_num_seqs": 16, **more}
    ample = build_engine(settings_for(folder, **more))
    wanted, _ = run(ample, crowd(seed, cancels=False), monkeypatch)
    tight = 2 * least_kv_memory(folder, **more)
    engine = build_engine(piggybacking(folder, **more, kv_memory=tight, **host))
    found, plans = run(engine, crowd(seed, cancels=True), monkeypatch)
    assert_alike(found, wanted)
    begun = sum(len(plan.piggybacked) for plan in plans)
    assert begun >= engine.scheduler.totals.host_tokens > 0
    assert set(engine.executor.tier.attention.mailbox.states()) == {"empty"}
    return engine.scheduler.totals


SLOW = [pytest.param(name, host, marks=deep) for name in FAMILIES for host in (Dawdler, Sluggard)]
EVERYTHING = (
    *("cached_tokens", "preemptions", "cancelled", "accepted_tokens"),
    *("host_tokens", "blocks_to_host", "blocks_to_device"),
)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [*((name, None) for name in FAMILIES if name != "gemma3"), ("llama-gqa", Sluggard), *SLOW],
    indirect=["host"],
)
def test_attention_on_the_host_changes_no_token(folders, family, seed, monkeypatch) -> None:
    """Prefixes, classes, drafts, cancels, and hosts of any speed: bit for bit what ample KV
    gives.
    """
    assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    "host", [None, Dawdler, pytest.param(Sluggard, marks=deep)], indirect=["host"]
)
def test_nor_does_it_while_everything_else_happens(folders, host, monkeypatch) -> None:  # noqa: ARG001
    """Windows and int8 KV, and as many seeds as it takes until all of ``EVERYTHING`` was seen."""
    seen = Counter[str]()
    for seed in range(1, 9):
        totals = assert_same_as_ample(folders["gemma3"], FAMILIES["gemma3"], seed, monkeypatch)
        seen.update({name: getattr(totals, name) for name in EVERYTHING})
        if all(seen[name] for name in EVERYTHING):
            break
    assert min(seen[name] for name in EVERYTHING) > 0, seen


@pytest.mark.usefixtures("layer_by_layer")
@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe-mixed", "gemma4-shared-kv-alone"])
def test_nor_does_it_layer_by_layer(folders, family, monkeypatch) -> None:
    assert_same_as_ample(folders[family], FAMILIES[family], 1, monkeypatch)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_host_may_be_a_process_that_is_killed_again_and_again(
    folders, threads, monkeypatch
) -> None:
    killed = []
    before = PiggybackedRows.before

    def killing(rows: PiggybackedRows, plan: StepPlan) -> None:
        pid = rows.host.mailbox.native.worker
        if len(rows) and pid not in (0, *killed[-1:]) and len(killed) < 3:
            rows.host.interrupt()
            killed.append(pid)
        before(rows, plan)

    monkeypatch.setattr(PiggybackedRows, "before", killing)
    given = {"host_process": True, "host_threads": threads}
    assert_same_as_ample(folders["gemma3"], {}, 1, monkeypatch, **given)
    assert len(killed) == len(set(killed)) == 3


# -- memory that runs out -------------------------------------------------------------------------


def starve(monkeypatch: pytest.MonkeyPatch, share: float) -> Counter[str]:
    """Let parts of passes of several rows find no memory, at random; return how often they do."""
    draw, ran_out = random.Random(5), Counter[str]()

    def starving(owner: type, name: str, rows_of: int) -> None:
        method = getattr(owner, name)

        def call(self, *given, **named):
            if len(given[rows_of]) > 1 and draw.random() < share:
                ran_out[name] += 1
                raise MemoryError
            return method(self, *given, **named)

        monkeypatch.setattr(owner, name, call)

    for name, rows_of in (("pre", 1), ("post", 1), ("finish", 0), ("logits", 0), ("embed", 0)):
        starving(Decoder, name, rows_of)
    starving(PiggybackedRows, "submit", 0)
    return ran_out


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_native_pass_that_runs_out_of_memory_loses_no_row(folders, family, monkeypatch) -> None:
    """Before it has done anything, or after all layers: with their rows taken, not handed on."""
    draw, ran_out, run_carrying = random.Random(7), Counter[str](), CpuStack.run_carrying

    def starving(self, *given):
        when = draw.choice(("before", "after", *["never"] * 8))
        ran_out[when] += 1
        if when == "before":
            raise MemoryError
        hidden, came = run_carrying(self, *given)
        if when == "after" and len(hidden) > 1:
            ran_out["taken"] += came
            raise MemoryError
        return hidden, came

    monkeypatch.setattr(CpuStack, "run_carrying", starving)
    alone = EagerExecutor._carry_alone

    def fed(self, *given):
        """Rows find memory when they are alone."""
        with monkeypatch.context() as patch:
            patch.setattr(CpuStack, "run_carrying", run_carrying)
            alone(self, *given)

    monkeypatch.setattr(EagerExecutor, "_carry_alone", fed)
    assert_same_as_ample(folders[family], FAMILIES[family], 1, monkeypatch)
    assert min(ran_out[name] for name in ("before", "after", "taken")) > 0


@pytest.mark.usefixtures("layer_by_layer")
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_step_that_runs_out_of_memory_loses_no_row(folders, family, monkeypatch) -> None:
    ran_out = starve(monkeypatch, 0.15)
    assert_same_as_ample(folders[family], FAMILIES[family], 1, monkeypatch)
    assert min(ran_out["pre"], ran_out["post"], ran_out["logits"]) > 0


# -- plans made by hand ---------------------------------------------------------------------------


class Steps:
    """Steps of an engine; sequence n is in row n, with blocks ``BLOCKS[n]`` of either tier."""

    BLOCKS = tuple(tuple(range(4 * row, 4 * row + 4)) for row in range(4))

    def __init__(self, config: EngineConfig) -> None:
        self.engine: Engine = build_engine(config)
        self.executor, self._count = self.engine.executor, 0
        self.layers = self.engine.model.spec.num_layers
        self._groups = len(self.engine.resources.groups)
        self.all = (9,) * self.layers

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def mailbox(self) -> HostMailbox:
        return self.executor.tier.attention.mailbox

    def run(self, *batches: SubBatch, **plan: Any):
        self._count += 1
        return self.executor.launch(StepPlan(self._count, batches, **plan)).result()

    def start(self, row: int) -> int:
        """A prompt of 20 tokens on the device; its first token."""
        tables = (self.BLOCKS[row],) * self._groups
        sampling = replace(GREEDY, seed=0)
        add = RowAdd(row, row, tuple(prompt(20, row)), 20, sampling, frozenset(), tables)
        return self.run(SubBatch((row,), (0,), (20,), (True,)), add=(add,)).tokens[0]

    def decode(self, *rows: int, at: int = 20) -> SubBatch:
        count = len(rows)
        return SubBatch(rows, (at,) * count, (1,) * count, (True,) * count)

    def away(self, *rows: int, to: Tier = Tier.HOST) -> tuple[KVMove, ...]:
        tables = ((self.BLOCKS[row],) * self._groups for row in rows)
        return tuple(KVMove(row, to, table, table) for row, table in zip(rows, tables, strict=True))

    def serve(self) -> None:
        """Let all waiting jobs be done, and their results be where steps find them."""
        lanes = getattr(self.executor, "_lanes", None)  # of captured steps
        carry = (lambda: None) if lanes is None else lanes.courier.pump
        carry()
        with HostWorker(self.mailbox):
            while {"submitted", "running"} & set(self.mailbox.states()):
                threading.Event().wait(0.001)
        carry()


class Both:
    """A real executor, and a modelled one that must carry the same rows in each step."""

    def __init__(self, real: EagerExecutor, modelled: ModelledExecutor) -> None:
        self._real, self._modelled = real, modelled
        self.tier = real.tier

    def launch(self, plan: StepPlan) -> Both:
        self._launched = self._real.launch(plan), self._modelled.launch(plan)
        return self

    def result(self) -> StepResult:
        found, modelled = (ticket.result() for ticket in self._launched)
        ended = [row for row, _ in found.piggybacked_results]
        assert ended == [row for row, _ in modelled.piggybacked_results]
        if found.piggyback_layers:
            assert found.piggyback_layers == modelled.piggyback_layers
        return found


@pytest.fixture
def steps(request, folders, monkeypatch):
    """Steps of an engine whose host serves when it is told to."""
    monkeypatch.setattr(host_attention, "HostWorker", Idler)
    if getattr(request, "param", "eager") == "graphs":
        use_graphs(monkeypatch)
    with Steps(piggybacking(folders["llama-gqa"])) as steps:
        yield steps


of_both_executors = pytest.mark.parametrize("steps", ["eager", "graphs"], indirect=True)


@pytest.fixture
def second_tokens(folders) -> list[int]:
    """The second token of each row, computed on the device alone."""
    with Steps(settings_for(folders["llama-gqa"])) as plain:
        for row in range(4):
            plain.start(row)
        return list(plain.run(plain.decode(0, 1, 2, 3)).tokens)


@of_both_executors
def test_rows_come_a_layer_further_where_their_results_are_there(steps, second_tokens) -> None:
    for row in range(4):
        steps.start(row)
    begun = steps.run(moves=steps.away(1, 2, 3), piggybacked=(2, 1))
    assert begun.piggyback_layers == (2, 0, 0)
    assert begun.piggybacked_results == ()
    steps.serve()
    limited = steps.run(steps.decode(0), piggybacked=(3,), piggyback_limits=(1, 9, 9))
    assert limited.tokens == (second_tokens[0],)
    assert limited.piggyback_layers == (2, 1, 0), "row 3 has begun, and row 2 was the first"
    steps.serve()
    assert steps.run(piggyback_limits=steps.all).piggyback_layers == (0, 2, 1)
    steps.serve()
    ended = steps.run(piggyback_limits=steps.all)
    assert ended.piggybacked_results == ((2, second_tokens[2]),)
    assert ended.piggyback_layers == (0, 0, 2)
    steps.serve()
    ended = steps.run(steps.decode(0, at=21), piggyback_limits=steps.all)
    assert ended.sequence_ids == (0,)
    assert sorted(ended.piggybacked_results) == [(1, second_tokens[1]), (3, second_tokens[3])]
    assert ended.piggyback_layers == (0, 0, 0)
    back = steps.run(steps.decode(0, at=22), moves=steps.away(1, to=Tier.DEVICE))
    assert back.piggyback_layers == ()


@pytest.mark.usefixtures("layer_by_layer")
def test_a_limit_of_none_leaves_the_results_of_a_layer_where_they_are(steps) -> None:
    steps.start(0)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    steps.serve()
    assert steps.run(piggyback_limits=(0, 9, 9)).piggyback_layers == (1, 0, 0)
    assert steps.run(piggyback_limits=(1, 9, 9)).piggyback_layers == (0, 1, 0)


@pytest.mark.usefixtures("layer_by_layer")
def test_a_row_crosses_several_layers_in_a_step_if_the_host_is_fast(
    folders, second_tokens, monkeypatch
) -> None:
    take = PiggybackedRows.done_counts

    def patient(rows: PiggybackedRows):
        """Wait until the host is done with all that it was given."""
        while {"submitted", "running"} & set(rows.host.mailbox.states()):
            threading.Event().wait(0.001)
        return take(rows)

    monkeypatch.setattr(PiggybackedRows, "done_counts", patient)
    with Steps(piggybacking(folders["llama-gqa"])) as steps:
        steps.start(0)
        steps.start(1)
        done = steps.run(
            steps.decode(0), moves=steps.away(1), piggybacked=(1,), piggyback_limits=steps.all
        )
    assert done.tokens == (second_tokens[0],)
    assert done.piggybacked_results == ((1, second_tokens[1]),)


@pytest.mark.parametrize("seed", range(3))
def test_the_simulated_executor_carries_the_same_rows_through_the_same_layers(steps, seed) -> None:
    """Of the same plans, where each job is done between its step and the next one."""
    dice, groups = random.Random(seed), steps.engine.resources.groups
    blocks = [group.num_blocks for group in groups]
    later = Piggyback(steps.layers, lambda _: 0.0, hosts=2, latency_s=0.9, room=0.0)
    modelled = ModelledExecutor(groups, 64, host_blocks=blocks, piggyback=later)
    waiting, lengths = set(range(4)), dict.fromkeys(range(4), 21)
    steps.executor = Both(steps.executor, modelled)
    for row in waiting:
        steps.start(row)
    steps.run(moves=steps.away(*waiting))
    ended = 0
    while ended < 30:
        able = sorted(row for row in waiting if lengths[row] <= 32)
        begun = dice.sample(able, dice.randint(0, len(able)))
        busy = sorted(set(range(4)) - waiting)
        aborted = dice.sample(busy, len(busy) and dice.random() < 0.1)
        limits = tuple(dice.randint(0, 2) for _ in range(steps.layers))
        found = steps.run(piggybacked=tuple(begun), abort=tuple(aborted), piggyback_limits=limits)
        waiting = waiting.difference(begun).union(aborted)
        for row, _ in found.piggybacked_results:
            waiting.add(row)
            lengths[row] += 1
        ended += len(found.piggybacked_results)
        steps.serve()


@of_both_executors
def test_a_step_without_results_waits_for_no_longer_than_new_requests_may(steps) -> None:
    steps.start(0)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    waiting = steps.run(piggyback_limits=steps.all)
    assert waiting.piggyback_layers == (1, 0, 0)
    assert waiting.piggybacked_results == ()


@of_both_executors
def test_an_aborted_token_leaves_the_row_to_be_dropped_and_its_slot_to_others(
    steps, second_tokens
) -> None:
    for row in (0, 1):
        steps.start(row)
    steps.run(moves=steps.away(0, 1), piggybacked=(0, 1))
    done = steps.run(abort=(0,), piggyback_limits=steps.all)
    assert done.piggyback_layers == (1, 0, 0)
    assert steps.run(abort=(0,), drop=(0,)).piggyback_layers == (1, 0, 0), "ignored"
    steps.start(0)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    ended = []
    for _ in range(steps.layers):
        steps.serve()
        ended += steps.run(piggyback_limits=steps.all).piggybacked_results
    assert sorted(ended) == [(0, second_tokens[0]), (1, second_tokens[1])]


@of_both_executors
def test_a_row_whose_token_is_on_its_way_stays(steps) -> None:
    steps.start(0)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    for plan in ({"drop": (0,)}, {"moves": steps.away(0, to=Tier.DEVICE)}):
        with pytest.raises(InvariantError, match="row 0 leaves the host while its token is on"):
            steps.run(**plan)
    with pytest.raises(InvariantError, match="has a token on its way already"):
        steps.run(piggybacked=(0,))
    with pytest.raises(InvariantError, match="no limit for each of 3 layers"):
        steps.run(piggyback_limits=(9, 9))


@of_both_executors
def test_a_job_that_fails_ends_its_row_alone(steps, second_tokens) -> None:
    for row in (0, 1):
        steps.start(row)
    steps.run(moves=steps.away(0, 1))
    steps.executor._table.tables[0][0, 2] = 10**6
    steps.run(piggybacked=(0, 1))
    ended, faults = [], {}
    for _ in range(steps.layers):
        steps.serve()
        done = steps.run(piggyback_limits=steps.all)
        ended += done.piggybacked_results
        faults |= done.faults
    assert ended == [(0, 0), (1, second_tokens[1])]
    assert isinstance(faults.pop(0), HostWorkerError)
    assert not faults


@pytest.mark.usefixtures("layer_by_layer")
@pytest.mark.parametrize("part", ["pre", "post", "logits"])
def test_a_row_that_finds_no_memory_alone_ends_alone(
    steps, second_tokens, part, monkeypatch
) -> None:
    """Row 1 finds none, neither with others nor alone; row 2 and the device do not notice."""
    for row in (0, 1, 2):
        steps.start(row)
    method, hungry = getattr(Decoder, part), []

    def starving(self, *given):
        rows = steps.executor._rows
        if any(row in hungry for row in rows._taken.tolist()):
            raise MemoryError
        return method(self, *given)

    monkeypatch.setattr(Decoder, part, starving)
    steps.run(moves=steps.away(1, 2), piggybacked=(1, 2))
    hungry.append(1)
    ended, faults, own = [], {}, []
    for at in range(20, 20 + 2 * steps.layers):
        steps.serve()
        done = steps.run(steps.decode(0, at=at), piggyback_limits=steps.all)
        ended, own = [*ended, *done.piggybacked_results], [*own, *done.tokens]
        faults |= done.faults
    assert sorted(ended) == [(1, 0), (2, second_tokens[2])]
    assert [(row, error.code) for row, error in faults.items()] == [(1, "out_of_memory")]
    assert own[0] == second_tokens[0]
    assert len(own) == 2 * steps.layers
    assert set(steps.mailbox.states()) == {"empty"}


def test_a_row_that_cannot_begin_for_want_of_memory_ends_alone(
    steps, second_tokens, monkeypatch
) -> None:
    for row in (0, 1, 2):
        steps.start(row)
    begin = PiggybackedRows.begin

    def starving(self, rows):
        if 1 in rows:
            raise MemoryError
        return begin(self, rows)

    monkeypatch.setattr(PiggybackedRows, "begin", starving)
    done = steps.run(steps.decode(0), moves=steps.away(1, 2), piggybacked=(1, 2))
    assert done.tokens == (second_tokens[0],)
    assert done.piggybacked_results == ((1, 0),)
    assert done.faults[1].code == "out_of_memory"
    assert done.piggyback_layers == (1, 0, 0)


@of_both_executors
def test_a_host_without_worker_ends_the_engine_with_a_typed_error(steps) -> None:
    steps.start(0)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    steps.executor.tier.attention._worker.error = HostWorkerError("The host worker has ended.")
    with pytest.raises(HostWorkerError, match="has ended"):
        steps.run(piggyback_limits=steps.all)


@of_both_executors
def test_blocks_of_an_aborted_row_wait_for_the_worker(steps, monkeypatch) -> None:
    """It may still write to them, so a step that moves KV there waits until it does not."""
    states = ["aborting", "aborting", "empty"]
    steps.start(0)
    steps.start(1)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    mailbox = steps.mailbox
    abort = mailbox.abort
    monkeypatch.setattr(mailbox, "abort", lambda rows: [abort(rows), 0][1:])
    monkeypatch.setattr(mailbox, "states", lambda: [states.pop(0)])
    steps.run(abort=(0,))
    steps.run(steps.decode(1))
    assert len(states) == 3, "who touches no KV of the host waits for nothing"
    steps.run(drop=(0,), moves=steps.away(1))
    assert states == []


@of_both_executors
def test_a_worker_that_hangs_over_an_aborted_row_is_killed(steps, monkeypatch) -> None:
    """Else whoever sends KV to the host would wait as long as it is stopped."""
    attention, interrupted = steps.executor.tier.attention, []
    steps.start(0)
    steps.start(1)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    abort = steps.mailbox.abort
    monkeypatch.setattr(host_attention, "ABORT_S", 0.01)
    monkeypatch.setattr(attention, "interrupt", lambda: interrupted.append(True))
    monkeypatch.setattr(steps.mailbox, "abort", lambda rows: [abort(rows), 0][1:])
    monkeypatch.setattr(
        steps.mailbox, "states", lambda: ["empty" if interrupted else "aborting", "empty"]
    )
    steps.run(abort=(0,), zero_host=((0, 30),))
    assert interrupted == [True]


def test_a_stopped_process_that_may_write_for_an_aborted_row_is_killed_at_once(
    folders, monkeypatch
) -> None:
    """Else interactive rows, whose step sends KV to the host, would wait as long as it hangs."""
    monkeypatch.setattr(host_attention, "ABORT_S", 10**6)
    with Steps(piggybacking(folders["llama-gqa"], host_process=True)) as steps:
        attention, states = steps.executor.tier.attention, steps.mailbox.states
        steps.start(0)
        steps.start(1)
        steps.run(moves=steps.away(0), piggybacked=(0,))
        abort = steps.mailbox.abort
        monkeypatch.setattr(steps.mailbox, "abort", lambda rows: [abort(rows), 0][1:])
        monkeypatch.setattr(
            steps.mailbox, "states", lambda: states() if attention.restarts else ["aborting"]
        )
        os.kill(steps.mailbox.native.worker, signal.SIGSTOP)
        steps.run(abort=(0,))
        sending = threading.Thread(
            target=steps.run, args=(steps.decode(1),), kwargs={"zero_host": ((0, 30),)}, daemon=True
        )
        sending.start()
        sending.join(60)
        assert not sending.is_alive()
        assert attention.restarts == 1


def test_steps_without_results_of_the_host_are_one_native_call(steps, monkeypatch) -> None:
    def layerwise(*_: object) -> None:
        raise AssertionError

    steps.start(0)
    steps.start(1)
    steps.run(moves=steps.away(1), piggybacked=(1,))
    monkeypatch.setattr(LayerwiseForward, "run", layerwise)
    waiting = steps.run(steps.decode(0), piggyback_limits=steps.all)
    assert waiting.piggyback_layers == (1, 0, 0)
    assert steps.run(abort=(1,)).piggyback_layers == (0, 0, 0)
    steps.run(steps.decode(0, at=21), piggyback_limits=steps.all)


@pytest.mark.parametrize("natively", [True, False])
def test_what_one_pass_carries_has_the_bits_of_rows_of_the_device(
    folders, natively, monkeypatch
) -> None:
    """With rows beside them the hidden states of a step are the same."""
    if not natively:
        monkeypatch.setattr(layerwise, "CpuStack", type(None))
    folder = folders["gemma3"]
    hidden = {}
    run = LayerwiseForward.run

    def watched(self, *given):
        hidden["carrying"], came = run(self, *given)
        return hidden["carrying"], came

    monkeypatch.setattr(LayerwiseForward, "run", watched)
    monkeypatch.setattr(host_attention, "HostWorker", Idler)
    with Steps(piggybacking(folder)) as steps:
        for row in (0, 1, 2):
            steps.start(row)
        steps.run(steps.decode(0, 1), moves=steps.away(2), piggybacked=(2,))
    with Steps(settings_for(folder)) as plain:
        for row in (0, 1):
            plain.start(row)
        compute = plain.executor._compute
        plain.executor._compute = lambda *given: hidden.setdefault("plain", compute(*given))
        plain.run(plain.decode(0, 1))
    np.testing.assert_array_equal(hidden["carrying"], hidden["plain"])


# -- what is refused ------------------------------------------------------------------------------


def test_models_and_kernels_that_cannot_piggyback_are_refused(folders, tmp_path) -> None:
    shared = save_with_tokenizer(build("gemma4"), tmp_path)
    given = {"scheduler": "slo-piggyback", "host_kv_memory": 2**22}
    with pytest.raises(ConfigError, match="its per-layer inputs belong to the step"):
        build_engine(settings_for(shared, **given))
    with pytest.raises(ConfigError, match="computed by kernels reference, that of the host by"):
        build_engine(settings_for(folders["llama-gqa"], kernels="reference", **given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scheduler": "slo-piggyback"}, "keeps KV on the host; set host_kv_memory"),
        ({"host_threads": 2}, "host_threads is for attention on the host, which scheduler 'auto'"),
        ({"scheduler": "slo", "host_process": True}, "host_process is for attention on the host"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(device="cpu", **given)
