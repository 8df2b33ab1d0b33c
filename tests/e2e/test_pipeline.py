"""Engines whose layers are split into stages: the tokens of one process, and steps that overlap."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from asked import GREEDY, KINDS, PROMPTS, SMALL, check_a_stream_outlives_rank_1, ranks
from live import command_of, serving
from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, EngineDeadError, NonFiniteLogitsError
from weft.core.plan import RowAdd, StepPlan, StepResult, SubBatch
from weft.engine.channel import Channel, RankTokens, Report, Step
from weft.engine.info import collect_info, format_info
from weft.engine.profiling import profiled_config
from weft.engine.rank_follower import Follower
from weft.engine.rank_leader import Followers
from weft.engine.rank_role import Role, plan_of_stage, role_of


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM.in_process(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM.in_process(**SMALL, pipeline_parallel=2, max_num_batched_tokens=16) as llm:
        yield llm
    assert not ranks()


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_give_what_one_process_gives(kind, alone, two):
    expected = alone.generate(PROMPTS, KINDS[kind], progress=False)
    found = two.generate(PROMPTS, KINDS[kind], progress=False)
    assert [result.error for result in found] == [None] * len(PROMPTS)
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == other.logprobs  # to the bit
        assert mine.prompt_logprobs == other.prompt_logprobs


def test_embeddings_are_those_of_one_process(alone, two):
    assert np.array_equal(alone.embed(PROMPTS), two.embed(PROMPTS))


def test_guesses_are_taken(two):
    before = two.engine.built.scheduler.totals.accepted_tokens
    two.generate(PROMPTS, KINDS["guessed"], progress=False)
    assert two.engine.built.scheduler.totals.accepted_tokens > before


def test_two_stages_of_two_ranks_give_the_tokens_of_one_process(alone):
    expected = alone.generate(PROMPTS, GREEDY, progress=False)
    with LLM.in_process(**SMALL, pipeline_parallel=2, tensor_parallel=2) as four:
        found = four.generate(PROMPTS, GREEDY, progress=False)
        stages = four.served.stages
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [line.partition(":")[0] for line in stages] == [
        "stage 0 (ranks 0 to 1)",
        "stage 1 (ranks 2 to 3)",
    ]


def test_each_stage_has_its_share(alone, two):
    whole, part = alone.served, two.served
    assert 0.5 < part.weight_bytes / whole.weight_bytes < 0.7  # the tied embedding is on both
    assert part.kv_blocks["full"] == pytest.approx(2 * whole.kv_blocks["full"], abs=1)
    assert part.kernels["stages"]["kernel"] == "gloo, through 2 stages"
    assert [line.split("; ")[0] for line in part.stages] == [
        "stage 0 (rank 0): embedding, layers 0 to 2",
        "stage 1 (rank 1): layers 3 to 5, output head",
    ]


def test_steps_of_different_sequences_are_in_flight_at_once(two, monkeypatch):
    """While one group of sequences is on its way, the next step is of another one."""
    executor = two.engine.built.executor
    launch, in_flight, seen = executor.launch, deque(), []

    def watched(plan: StepPlan):
        rows = {row for batch in plan.batches for row in batch.rows}
        seen.append((len(rows), [rows & other for other in in_flight]))
        ticket = launch(plan)
        collect = ticket.result
        in_flight.append(rows)

        def result() -> StepResult:
            in_flight.popleft()
            return collect()

        monkeypatch.setattr(ticket, "result", result, raising=False)
        return ticket

    monkeypatch.setattr(executor, "launch", watched)
    longer = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    two.generate([[5 + i, 7, 9] for i in range(8)], longer, progress=False)
    decodes = seen[len(seen) // 2 : -4]
    assert {count for count, _ in decodes} == {4}
    assert all(shared == [set()] for _, shared in decodes)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stage_that_dies_ends_the_engine(victim):
    before = set(ranks())
    with LLM.in_process(**SMALL, pipeline_parallel=3) as three:
        endless = SamplingParams(temperature=1, max_tokens=1900, ignore_eos=True, seed=1)
        stream = three.stream("x", endless)
        next(stream)
        named = {command_of(process)[0]: process for process in set(ranks()) - before}
        named[f"weft-rank{victim}"].kill()
        last = None
        for delta in stream:
            last = delta
        assert isinstance(last.result.error, EngineDeadError)
        assert last.result.error.message.startswith("Rank ")
        with pytest.raises(EngineDeadError, match="Rank"):
            three.generate("x", progress=False)


def test_a_server_goes_on_after_a_stage_has_died(tmp_path):
    arguments = ["--pipeline-parallel", "2", "--dtype", "float32"]
    with serving(tmp_path, *arguments) as server:
        check_a_stream_outlives_rank_1(server)
    assert "Rank 1 of the engine ended: signal SIGKILL" in server.errors.read_text()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host_kv_memory": "1MiB"}, "host_kv_memory does not work with pipeline_parallel 2"),
        ({"kv_disk": "/tmp"}, "kv_disk does not work with pipeline_parallel 2"),
        ({"resident": "on"}, "no stage goes on by itself"),
        ({"scheduler": "slo"}, "set scheduler to fcfs"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_mapping({"pipeline_parallel": 2, **settings})


def test_wrong_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"is 9, but this model has 6 layers; set it to 6 or"):
        collect_info(EngineConfig(pipeline_parallel=9))
    with pytest.raises(ConfigError, match="more than 1 is for the stages of pipeline_parallel"):
        EngineConfig(steps_in_flight=2)
    with pytest.raises(ConfigError, match="steps of a pipeline are not measured"):
        profiled_config({"pipeline_parallel": 2})


def test_info_says_what_each_stage_holds():
    told = format_info(collect_info(EngineConfig(pipeline_parallel=2)))
    assert "stage 1 (rank 1): layers 3 to 5, output head; weights" in told
    assert "the steps of stages overlap" in told


# -- what stages say to each other ----------------------------------------------------------------


def test_plans_of_earlier_stages_choose_no_tokens():
    sampling = SamplingParams(temperature=0, seed=1, prompt_logprobs=2, grammar="start: /x/")
    add = RowAdd(1, 7, (1, 2), 2, sampling, frozenset({4}), ((1,),), True)
    batch = SubBatch((0, 1), (5, 0), (1, 2), (True, True), drafts={0: (8, 9)})
    collected = (RankTokens(2, {5: (1, 2)}), RankTokens(3, {6: (3,)}))
    found = plan_of_stage(StepPlan(4, (batch,), drop=(3,), add=(add,)), collected)
    assert found.told == ((5, (1, 2)), (6, (3,)))
    assert found.batches == (replace(batch, samples=(False, False)),)
    assert found.drop == (3,)
    (mine,) = found.add
    assert (mine.embed, mine.stop_ids, mine.sampling.grammar) == (False, frozenset(), None)
    assert mine.sampling.prompt_logprobs is None
    assert (mine.tokens, mine.tables) == (add.tokens, add.tables)


def test_ranks_have_their_roles():
    config = EngineConfig(pipeline_parallel=3, tensor_parallel=2)
    assert [role_of(rank, config) for rank in range(1, 6)] == [
        *[Role.HEARS] * 3,
        Role.TELLS,
        Role.COMPARES,
    ]
    assert role_of(1, EngineConfig(tensor_parallel=2)) is Role.COMPARES


class Scripted:
    """An executor whose steps give one token each; as a ticket, its result."""

    depth = 1
    overlaps = False

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.collected = 0

    def launch(self, plan: StepPlan) -> Scripted:
        self.plans.append(plan)
        return self

    def result(self) -> StepResult:
        self.collected += 1
        fault = {8: NonFiniteLogitsError("no number")}
        return StepResult(self.plans[self.collected - 1].step_id, (7,), (3,), faults=fault)

    def close(self) -> None: ...


def test_the_last_stage_tells_results_as_soon_as_there_is_nothing_to_launch(monkeypatch):
    monkeypatch.setattr("weft.engine.rank_follower.os._exit", lambda _: None)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    executor = Scripted()
    for number in range(3):  # two may be launched at once
        ours.send(Step(StepPlan(number, ()), ()))
    follower = Follower(1, theirs, executor, Role.TELLS)
    assert theirs.has_more()
    for _ in range(3):
        step = follower._receive()
        assert step is not None
        follower._tickets.append(executor.launch(step.plan))
        assert executor.collected == 0
    assert not ours.has_more()
    running = threading.Thread(target=follower.run)
    running.start()
    told = Followers(channels=[ours])
    for number in range(3):
        result = told.result(1)
        assert (result.step_id, result.tokens) == (number, (3,))
        assert isinstance(result.faults[8], NonFiniteLogitsError)
        assert result.faults[8].message == "no number"
    ours._socket.shutdown(socket.SHUT_WR)
    running.join()
    theirs.close()
    with pytest.raises(EngineDeadError, match="Rank 1"):
        told.result(1)


def test_an_error_after_results_is_told():
    ours, theirs = socket.socketpair()
    other = Channel(theirs)
    other.send(Report(result=StepResult(1, (), ())))
    other.send(Report("RuntimeError", "RuntimeError: no more"))
    other.close()
    assert Followers(channels=[Channel(ours)])._last_words(1) == "RuntimeError: no more"


def test_a_stage_that_only_hears_collects_when_rank_0_has(monkeypatch):
    monkeypatch.setattr("weft.engine.rank_follower.os._exit", lambda _: None)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    executor = Scripted()
    batch = SubBatch((0,), (5,), (1,), (True,))
    ours.send(Step(StepPlan(1, (batch,)), ()))
    ours.send(Step(StepPlan(2, ()), ()))
    ours.send(Step(StepPlan(3, ()), (RankTokens(1, {7: (9,)}),)))
    ours.close()
    Follower(1, theirs, executor, Role.HEARS).run()
    assert executor.collected == 1
    assert executor.plans[0].batches[0].samples == (False,)
    assert [plan.told for plan in executor.plans] == [(), (), ((7, (9,)),)]
    theirs.close()
