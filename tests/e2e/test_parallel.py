"""Engines whose model is cut over processes: the tokens of one, and the end of all with one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from queue import SimpleQueue

import numpy as np
import psutil
import pytest

from asked import GREEDY, KINDS, PROMPTS, SMALL, check_a_stream_outlives_rank_1, ranks
from live import START_S, command_of, eventually, lives, serving
from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, EngineDeadError, InvariantError, OutOfMemoryError
from weft.core.plan import (
    KVMove,
    PlaceSession,
    RowAdd,
    RowExtend,
    StepPlan,
    StepResult,
    SubBatch,
    Tier,
)
from weft.engine.channel import Channel, RankTokens, Report, Step
from weft.engine.info import collect_info, format_info
from weft.engine.rank_follower import Follower
from weft.engine.rank_leader import Followers, ParallelExecutor
from weft.engine.rank_meeting import Ways
from weft.kernels import ops
from weft.kernels.collectives import ALONE, ONE_STAGE
from weft.kernels.cpu import matrix


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM.in_process(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM.in_process(**SMALL, tensor_parallel=2, max_num_batched_tokens=16) as llm:
        yield llm
    assert not ranks()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(kind, alone, two):
    expected = alone.generate(PROMPTS, KINDS[kind], progress=False)
    found = two.generate(PROMPTS, KINDS[kind], progress=False)
    assert [result.error for result in found] == [None] * len(PROMPTS)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    for mine, other in zip(found, expected, strict=True):
        scored = zip(mine.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
        assert all(
            a is b is None or a.logprob == pytest.approx(b.logprob, abs=1e-3) for a, b in scored
        )


def test_embeddings_are_those_of_one(alone, two):
    pairs = zip(alone.embed(PROMPTS), two.embed(PROMPTS), strict=True)
    assert all(np.abs(mine - other).max() < 1e-4 for mine, other in pairs)


def test_each_rank_has_its_share(alone, two):
    assert two.served.weight_bytes == pytest.approx(alone.served.weight_bytes / 2, rel=0.01)
    # The same memory holds twice the tokens, as each rank keeps one of the two KV heads.
    assert two.served.kv_blocks["full"] == pytest.approx(2 * alone.served.kv_blocks["full"], abs=1)
    assert two.served.kernels["sums"]["kernel"] == "gloo, over 2 ranks in their order"
    assert two.served.kernels["layers"]["kernel"].startswith("op by op")


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, seen by its parent or not yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_engine_ends_with_its_rank_though_it_has_nothing_to_do(alone):
    expected = alone.generate(PROMPTS, GREEDY, progress=False)
    with LLM(**SMALL, tensor_parallel=2) as two:
        found = two.generate(PROMPTS, GREEDY, progress=False)
        (engine,) = [c for c in psutil.Process().children() if command_of(c)[:1] == ["weft-engine"]]
        (rank,) = ranks(engine)
        rank.kill()
        eventually(lambda: has_ended(engine), START_S)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]


def test_a_rank_that_dies_ends_the_engine(two):
    endless = SamplingParams(temperature=1, max_tokens=1900, ignore_eos=True, seed=1)
    stream = two.stream("x", endless)
    next(stream)
    (rank,) = ranks()
    rank.kill()
    last = None
    for delta in stream:
        last = delta
    assert isinstance(last.result.error, EngineDeadError)
    assert last.result.error.message == "Rank 1 of the engine ended: signal SIGKILL."
    with pytest.raises(EngineDeadError, match="Rank 1"):
        two.generate("x", progress=False)


def test_a_rank_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match=r"Rank 1 ended while .*exit code 1"):
        LLM.in_process(**SMALL, tensor_parallel=2)
    assert not ranks()


BROKEN_RANK = """#!{python}
import runpy, sys
import torch
import weft.engine.build as build

def broken(*_, **__):
    raise {error}

build.KVStore = broken
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (
            'torch.OutOfMemoryError("CUDA out of memory.")',
            OutOfMemoryError,
            r"memory for KV \(31.97 MiB\) of rank 1; set kv_mem",
        ),
        ('ValueError("no such luck")', EngineDeadError, "^Rank 1 could not start: ValueError: no "),
    ],
)
def test_a_rank_that_cannot_be_built_says_why(error, kind, says, tmp_path, monkeypatch):
    before, python = ranks(), tmp_path / "python"
    python.write_text(BROKEN_RANK.format(python=sys.executable, error=error))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(kind, match=says):
        LLM.in_process(**SMALL, tensor_parallel=2)
    assert ranks() == before


KILLED_RANK = """#!{python}
import os, runpy, signal, sys, time
rank = sys.argv[sys.argv.index("--rank") + 1]
if rank == "{victim}":
    import weft.{module} as module
    before = module.{function}

    def dying(*arguments):
        if "{when}" == "after":
            before(*arguments)
        with open("{note}", "w") as note:
            note.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    module.{function} = dying
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TASK = ("engine.rank_follower", "Channel.receive")  # between its first report and its task


@pytest.mark.parametrize(
    ("settings", "victim", "place", "when"),
    [
        ({"tensor_parallel": 2}, 1, TASK, "before"),
        ({"tensor_parallel": 2}, 1, ("engine.build", "meet"), "before"),
        ({"tensor_parallel": 2}, 1, ("engine.build", "meet"), "after"),
        ({"pipeline_parallel": 3}, 2, ("engine.build", "meet"), "before"),
        # The ranks of its stage have met, and those of all stages meet.
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            3,
            ("kernels.process_group", "Pipe.__init__"),
            "before",
        ),
    ],
)
def test_a_rank_that_is_killed_before_all_have_met_is_noticed_at_once(
    settings, victim, place, when, tmp_path, monkeypatch
):
    before, python, note = ranks(), tmp_path / "python", tmp_path / "note"
    module, function = place
    where = {"victim": victim, "module": module, "function": function, "when": when, "note": note}
    python.write_text(KILLED_RANK.format(python=sys.executable, **where))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(EngineDeadError) as death:
        LLM.in_process(**SMALL, **settings)
    noticed_s = time.monotonic() - float(note.read_text())
    assert death.value.message == f"Rank {victim} ended while it was starting (signal SIGKILL)."
    assert noticed_s < 5  # some 0.1 s on an idle machine; without a look at ranks 300
    assert ranks() == before


def test_a_rank_that_ends_while_rank_0_loads_is_noticed_before_all_is_loaded(tmp_path, monkeypatch):
    python, note = tmp_path / "python", tmp_path / "note"
    where = {"victim": 1, "module": "engine.build", "function": "meet", "when": "after"}
    python.write_text(KILLED_RANK.format(python=sys.executable, note=note, **where))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    packed: list[str] = []

    def slow(parameter: str, tensor: object) -> object:
        packed.append(parameter)
        time.sleep(0.2)
        return matrix.pack(parameter, tensor)

    select = ops.select_ops
    monkeypatch.setattr(
        "weft.engine.model.select_ops", lambda *given: replace(select(*given), pack=slow)
    )
    with pytest.raises(EngineDeadError, match=r"^Rank 1 ended while it was starting \(signal SIG"):
        LLM.in_process(**SMALL, tensor_parallel=2, packed_cache="off")
    assert time.monotonic() - float(note.read_text()) < 5
    assert len(packed) < 25  # of some 50


def test_a_failure_at_the_start_is_that_of_the_rank_that_ended():
    ends = [socket.socketpair() for _ in range(3)]
    Channel(ends[1][1]).send(Report("EngineDeadError", "a rank is gone"))
    Channel(ends[2][1]).send(Report("OutOfMemoryError", "not enough memory"))
    processes = [subprocess.Popen(command) for command in (["sleep", "100"], ["false"], ["false"])]
    followers = Followers(processes, [Channel(ours) for ours, _ in ends])
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        followers.explain()
    followers.kill()
    followers.close()
    for _, theirs in ends:
        theirs.close()


def test_a_server_goes_on_after_a_rank_has_died(tmp_path):
    arguments = ["--tensor-parallel", "2", "--dtype", "float32"]
    with serving(tmp_path, *arguments) as server:
        check_a_stream_outlives_rank_1(server)
        (rank,) = ranks(psutil.Process(server.process.pid))
        server.children()["weft-engine"].kill()
        eventually(lambda: not lives(rank), START_S)
    assert "Rank 1 of the engine ended: signal SIGKILL" in server.errors.read_text()


def test_what_does_not_go_together_is_refused_and_info_says_what_runs():
    with pytest.raises(ConfigError, match=r"it has 4 heads\. Sizes that do: 1, 2, 4\."):
        collect_info(EngineConfig(tensor_parallel=3))
    info = collect_info(EngineConfig(tensor_parallel=4))
    assert info["kernels"]["layers"]["kernel"].startswith("op by op")
    assert "on each of 4 ranks" in format_info(info)


# -- what ranks say to each other ------------------------------------------------------------------


class Scripted:
    """An executor that gets one token a step; as a ticket, its result."""

    depth = 1
    overlaps = False

    def __init__(self, token: int) -> None:
        self._token = token
        self._steps: SimpleQueue[int] = SimpleQueue()

    def launch(self, plan: StepPlan) -> Scripted:
        self._steps.put(plan.step_id)
        return self

    def result(self) -> StepResult:
        return StepResult(self._steps.get(), (7,), (self._token,))

    def close(self) -> None: ...


def test_results_are_compared_with_those_of_rank_0():
    ours, theirs = socket.socketpair()
    executor = ParallelExecutor(Scripted(3), Followers(channels=[Channel(ours)]))
    other = Channel(theirs)
    for number in range(3):
        ticket = executor.launch(StepPlan(number, ()))
        step = other.receive(Step)
        assert step.plan == StepPlan(number, ())
        assert step.collected == ((RankTokens(number - 1, {7: (3,)}),) if number else ())
        ticket.result()
    follower = Follower(1, other, Scripted(3))
    follower._compare(RankTokens(2, {7: (3,)}), StepResult(2, (8, 7), (1, 3)))
    carried = StepResult(2, (), (), piggybacked_results=((7, 3),))
    follower._compare(RankTokens.of(carried), carried)
    others = [StepResult(2, (7,), (4,)), StepResult(2, (), ()), StepResult(3, (7,), (3,))]
    for mine in (*others, replace(carried, piggybacked_results=((7, 4),))):
        with pytest.raises(InvariantError, match="in step 2 rank 1 got other tokens"):
            follower._compare(RankTokens(2, {7: (3,)}), mine)
    executor.close()
    assert other.receive(Step) is None
    other.close()


class Full(Scripted):
    """An executor that has no memory for a step, which it notices at once."""

    def launch(self, plan: StepPlan) -> Scripted:
        raise OutOfMemoryError(f"no memory for step {plan.step_id}")


def test_rank_0_ends_the_others_when_it_has_no_memory_for_a_step():
    ours, theirs = socket.socketpair()
    followers = Followers([subprocess.Popen(["sleep", "100"])], [Channel(ours)])
    executor = ParallelExecutor(Full(3), followers)
    with pytest.raises(OutOfMemoryError, match="no memory for step 1"):
        executor.launch(StepPlan(1, ()))
    assert [process.poll() for process in followers.processes] == [-signal.SIGKILL]
    followers.close()
    theirs.close()


def test_each_rank_moves_the_kv_of_its_heads_to_the_host_and_back(alone):
    prompts = [[number, 7, 9] * 13 for number in range(8)]
    longer = replace(GREEDY, max_tokens=60, ignore_eos=True)
    wanted = alone.generate(prompts, longer, progress=False)
    tight = {"kv_memory": "700KiB", "max_model_len": 128, "host_kv_memory": "8MiB"}
    with LLM.in_process(**{**SMALL, **tight}, tensor_parallel=2) as two:
        found = two.generate(prompts, longer, progress=False)
        totals = two.engine.built.scheduler.totals
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
    assert min(totals.blocks_to_host, totals.blocks_to_device) > 0


def test_plans_arrive_as_they_were_sent():
    sampling = SamplingParams(temperature=1, top_k=-1, seed=2**40, logit_bias={3: 1.5}, grammar="é")
    add = RowAdd(1, 7, (1, 2), 2, sampling, frozenset({4}), ((1, -1), ()), True, Tier.HOST)
    batch = SubBatch((0, 1), (5, 0), (1, 2), (True, False), (Tier.DEVICE, Tier.HOST), {0: (8, 9)})
    plan = StepPlan(
        *(3, (batch,), (2,), (add,), (RowExtend(0, 1, (6,)),), ((0, 5),)),
        moves=(KVMove(1, Tier.HOST, ((1, -1), ()), ((4, -1), ()), after_layer=True),),
        zero_host=((1, 2),),
        zero_places=((PlaceSession(1, 2), 0, 3),),
        piggybacked=(1,),
        piggyback_limits=(0, 2),
        abort=(1,),
        saves=((0, 2, bytes(range(16))),),
        loads=((1, 3, bytes(range(240, 256))),),
        spills=((0, 1, 2),),
        fills=((1, 4, 0),),
        lease=3,
        told=((7, (5, 6)),),
    )
    fields_left_out = [f.name for f in fields(StepPlan) if not getattr(plan, f.name)]
    assert not fields_left_out
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.send(Step(plan, ()))
    assert theirs.receive(Step) == Step(plan, ())
    for channel in (ours, theirs):
        channel.close()


def test_what_a_rank_said_before_it_ended_is_told():
    ours, theirs = socket.socketpair()
    Channel(theirs).send(Report("RuntimeError", "RuntimeError: no more"))
    followers = Followers([subprocess.Popen(["false"])], [Channel(ours)])
    with pytest.raises(EngineDeadError, match="Rank 1 of the engine ended: RuntimeError: no more"):
        followers.check(within_s=10)
    followers.close()
    theirs.close()


def test_a_rank_that_waits_for_one_that_has_ended_is_not_waited_for():
    """As one that waits in NCCL: it neither answers nor ends."""
    ends = [socket.socketpair() for _ in range(2)]
    commands = (["sleep", "100"], ["sh", "-c", "sleep 0.2; exit 3"])
    processes = [subprocess.Popen(command) for command in commands]
    ends[1][1].close()  # as the process does that has it
    followers = Followers(processes, [Channel(ours) for ours, _ in ends])
    aborted = threading.Event()
    ways = Ways(ALONE, ONE_STAGE, aborted.set)
    threading.Thread(target=followers._watch, args=(ways,), daemon=True).start()
    with pytest.raises(EngineDeadError):
        followers.result(1)
    assert aborted.wait(10)
    with pytest.raises(EngineDeadError, match=r"Rank 2 ended while it was starting .*3"):
        followers.wait()
    with pytest.raises(EngineDeadError, match=r"Rank 2 of the engine ended: .*3"):
        followers.fail(RuntimeError("nobody answers"))
    assert processes[0].poll() == -signal.SIGKILL
    followers.close()
    ends[0][1].close()


def test_both_sides_may_send_long_messages_at_once():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    long = RankTokens(1, {1: tuple(range(500_000))})
    got: list[RankTokens | None] = []

    def answer() -> None:
        ours.send(long)
        got.append(ours.receive(RankTokens))

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    theirs.send(long)
    assert theirs.receive(RankTokens) == long
    answering.join(60)
    assert got == [long]
    theirs.close()
    with pytest.raises(OSError, match=r"."):
        ours.send(long)
    ours.close()


def test_long_messages_cross_and_half_ones_do_not():
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sender.send(RankTokens(1, {1: tuple(range(20_000))}))
    assert receiver.receive(RankTokens) == RankTokens(1, {1: tuple(range(20_000))})
    ours.sendall((100).to_bytes(8, "little") + b"half")
    sender.close()
    assert receiver.receive(RankTokens) is None
    receiver.close()
