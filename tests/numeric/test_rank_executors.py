"""Steps of a model that is cut: the tokens of a whole one, KV on the host, memory that runs out."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import replace

import pytest
from checkpoints import prompt
from graphed import around_forward, graph_executor, load_on_tensors, use_graphs
from ranks import load, on_ranks, on_stages
from torch import Tensor

from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import OutOfMemoryError
from weft.core.plan import StepPlan, StepResult, Tier
from weft.core.ports import Executor
from weft.core.resolved import ResolvedConfig
from weft.engine.build import _grammar_tokenizer
from weft.engine.channel import Channel, RankTokens
from weft.engine.executors import make_executor
from weft.engine.model import find_model
from weft.engine.rank_follower import Follower
from weft.engine.rank_leader import Followers, ParallelExecutor
from weft.engine.rank_role import plan_of_stage
from weft.exec.device import tensor_memory
from weft.exec.grammar import GrammarRows, Grammars
from weft.exec.graphs import GraphExecutor
from weft.exec.input_batch import MOST_EDITS, InputBatch
from weft.exec.logprobs import SCORED_TOKENS_AT_ONCE
from weft.exec.store import KVStore
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.kernels.collectives import ONE_STAGE, Alone, Collectives, Link
from weft.kernels.process_group import Group, Pipe
from weft.kernels.sampling import state_bytes
from weft.models.hub import resolve_model
from weft.models.stages import stage_spec

SETTINGS = {
    "dtype": "float32",
    "threads": 1,
    "kv_memory": "16MiB",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "steps_in_flight": 1,
    "resident": "off",  # ranks lease nothing
}
KINDS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_p=0.8, max_tokens=30),
    SamplingParams(temperature=0, speculation=4, max_tokens=30),
    SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=20),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20),
]


class Recorder:
    """An executor that remembers its plans and results, in their order."""

    def __init__(self, inner: Executor) -> None:
        self.depth = inner.depth
        self.overlaps = inner.overlaps
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.known: list[int] = []  # results before each plan
        self.close = inner.close
        self._inner = inner

    def launch(self, plan: StepPlan):
        self.plans.append(plan)
        self.known.append(len(self.results))
        ticket = self._inner.launch(plan)
        collect = ticket.result

        def result() -> StepResult:
            self.results.append(collect())
            return self.results[-1]

        ticket.result = result
        return ticket


def run(executor: GraphExecutor, plans: list[StepPlan]) -> list[StepResult]:
    """Run plans as the engine's loop does."""
    tickets, results = deque(), []
    for plan in plans:
        tickets.append(executor.launch(plan))
        if len(tickets) > executor.depth:
            results.append(tickets.popleft().result())
    return results + [ticket.result() for ticket in tickets]


def recorded(monkeypatch, make, settings, prompts, kinds) -> tuple[Recorder, ResolvedConfig]:
    """What a whole model plans and gives for requests, with the executor that ``make`` makes."""
    monkeypatch.setattr("weft.engine.build.make_executor", lambda *given: Recorder(make(*given)))
    if make is graph_executor:
        monkeypatch.setattr("weft.engine.build.load_model", load_on_tensors)
    with LLM.in_process("builtin", **settings) as llm:
        results = llm.generate(prompts, kinds, progress=False)
        built = llm.engine.built
    assert all(result.error is None for result in results)
    return built.executor, built.resolved


def rank_executor(
    group: Collectives, settings, resolved: ResolvedConfig, link: Link = ONE_STAGE
) -> GraphExecutor:
    """The executor of a rank's part, on the stand-in device."""
    length = resolved.max_model_len
    decoder = load(resolve_model("builtin"), group, link=link, max_model_len=length)
    groups, size = decoder.spec.kv_groups, resolved.block_size
    memory = tensor_memory("cpu")
    store = KVStore(groups, resolved.group_blocks, size, decoder.dtype, memory)
    blocks = [-(-resolved.max_model_len // size)] * len(groups)
    config = EngineConfig.from_mapping(settings)
    grammars = GrammarRows(
        Grammars(lambda: _grammar_tokenizer(config, find_model(config))), clock=lambda: 0.0
    )
    table = InputBatch(resolved.max_num_seqs, resolved.max_model_len, blocks, grammars)
    return graph_executor(config, resolved, decoder, store, table)


def test_ranks_run_captured_steps(tmp_path, monkeypatch) -> None:
    prompts = [prompt(12, 1) * 4, prompt(7, 2), prompt(9, 3) * 3, prompt(150, 4), [5]]
    recorder, resolved = recorded(monkeypatch, make_executor, SETTINGS, prompts, KINDS)

    def work(group: Group) -> list[StepResult]:
        executor = rank_executor(group, SETTINGS, resolved)
        assert executor.captured > 10
        return run(executor, recorder.plans)

    expected = [RankTokens.of(result) for result in recorder.results]
    assert sum(len(step.tokens) for step in expected) > 80
    for found in on_ranks(2, tmp_path, work):
        assert [RankTokens.of(result) for result in found] == expected


@pytest.mark.parametrize("width", [1, 2])
def test_stages_run_captured_steps(width, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("weft.kernels.process_group.TIMEOUT_S", 60)
    monkeypatch.setattr("weft.engine.build.pipelined_steps", lambda _: 2)
    prompts = [prompt(12, 1) * 4, prompt(7, 2), prompt(9, 3) * 3, prompt(150, 4), [5]]
    recorder, resolved = recorded(monkeypatch, make_executor, SETTINGS, prompts, KINDS)
    expected = [RankTokens.of(result) for result in recorder.results]
    assert len(recorder.known) > len(set(recorder.known)) > 10  # two were in flight at once
    bounds = zip((0, *recorder.known), recorder.known, strict=False)
    earlier = [
        plan_of_stage(plan, expected[first:last])
        for plan, (first, last) in zip(recorder.plans, bounds, strict=True)
    ]

    def work(ranks: Collectives, pipe: Pipe) -> list[StepResult]:
        executor = rank_executor(ranks, SETTINGS, resolved, pipe)
        last = pipe.stage == pipe.stages - 1
        assert executor.captured > 10
        assert bool(executor._steps.sample_graphs) == last
        assert bool(executor._rows.state.counts.numel()) == last
        return run(executor, recorder.plans if last else earlier)

    found = on_stages(2, width, tmp_path, work)
    for results in found[:width]:
        assert not any(result.sequence_ids for result in results)
    for results in found[width:]:
        assert [RankTokens.of(result) for result in results] == expected


def test_no_stage_waits_for_room_to_pack_a_step(monkeypatch) -> None:
    """As many steps as four stages have in flight are packed before one has ended."""
    prompts = [prompt(40 + i, i) for i in range(8)]
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM.in_process("builtin", **SETTINGS) as llm:
        expected = [r.token_ids for r in llm.generate(prompts, long, progress=False)]
    use_graphs(monkeypatch)
    monkeypatch.setattr("graphed.steps_in_flight", lambda *_: 4)
    monkeypatch.setattr("weft.engine.build.pipelined_steps", lambda _: 4)
    with LLM.in_process("builtin", **SETTINGS) as llm:
        executor, flight = llm.engine.built.executor, []
        assert executor.depth == 4
        launch = executor.launch

        def watched(plan: StepPlan):
            ticket = launch(plan)
            flight.append(len({id(part.output) for part in executor._launched}))
            return ticket

        monkeypatch.setattr(executor, "launch", watched)
        found = [r.token_ids for r in llm.generate(prompts, long, progress=False)]
    assert found == expected
    assert max(flight) == 4 + 1


@pytest.mark.parametrize("stages", [2, 3])
def test_only_the_last_stage_has_room_for_what_tokens_are_chosen_from(stages) -> None:
    config = EngineConfig(**SETTINGS | {"steps_in_flight": None, "pipeline_parallel": stages})
    model = find_model(config)
    sizes = StepSizes(64, 8, 8, [32], depth=stages)
    parts = [stage_spec(model.spec, *of) for of in enumerated(model.layers)]
    for part in parts:
        small = replace(part, vocab_size=part.vocab_size - 100)
        given, less = (workspace_bytes(one, 4, sizes, graphs=True) for one in (part, small))
        states = state_bytes(8, MOST_EDITS, part.vocab_size) - state_bytes(
            8, MOST_EDITS, small.vocab_size
        )
        logits = 2 * 2 * 4 * 100 * SCORED_TOKENS_AT_ONCE  # of captured steps and of others
        assert given - less == (states + logits) * part.stage.ends


def enumerated(layers: tuple[range, ...]) -> list[tuple[int, int, range]]:
    return [(number, len(layers), part) for number, part in enumerate(layers)]


def test_each_rank_moves_the_kv_of_its_heads_to_the_host_and_back(tmp_path, monkeypatch) -> None:
    tight = {"kv_memory": "900KiB", "max_model_len": 128, "host_kv_memory": "8MiB"}
    settings = SETTINGS | tight
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [prompt(40 + i % 5, i) for i in range(8)]
    recorder, resolved = recorded(monkeypatch, graph_executor, settings, prompts, long)
    moves = [move for plan in recorder.plans for move in plan.moves]
    assert {move.to for move in moves} == set(Tier)

    def work(group: Group) -> list[StepResult]:
        return run(rank_executor(group, settings, resolved), recorder.plans)

    expected = [RankTokens.of(result) for result in recorder.results]
    for found in on_ranks(2, tmp_path, work):
        assert [RankTokens.of(result) for result in found] == expected


class Beside(Followers):
    """The other rank, which is a thread."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channels = [channel]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1),
        SamplingParams(temperature=0, grammar="start: /[0-9]{4}/", max_tokens=9),
        SamplingParams(temperature=0, logprobs=1, max_tokens=4, ignore_eos=True),
    ],
    ids=["prompt", "grammar", "logprobs"],
)
def test_ranks_meet_for_what_a_last_step_needs_of_the_host(params, tmp_path, monkeypatch) -> None:
    """Rank 0 collects it with no further step to tell the other one."""
    monkeypatch.setattr("weft.kernels.process_group.TIMEOUT_S", 30)
    monkeypatch.setattr("weft.engine.rank_follower.os._exit", lambda code: ended.append(code))
    settings = SETTINGS
    recorder, resolved = recorded(monkeypatch, make_executor, settings, [prompt(12, 1)], params)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ended: list[int] = []

    def work(group: Group) -> list[StepResult]:
        executor = rank_executor(group, settings, resolved)
        if group.rank:
            follower = Follower(group.rank, theirs, executor)
            follower.run()
            for ticket in follower._tickets:  # with which a process would have ended
                ticket.result()
            return []
        try:
            return run(ParallelExecutor(executor, Beside(ours)), recorder.plans)
        finally:
            ours.close()

    found, _ = on_ranks(2, tmp_path, work)
    expected = [RankTokens.of(result) for result in recorder.results]
    assert [RankTokens.of(result) for result in found] == expected
    assert ended == [0]


# -- memory that runs out -------------------------------------------------------------------------


class TwoRanks(Alone):
    """A rank that believes that there is another one, of whose sums and logits it needs nothing."""

    size = 2


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("kind", ["forward", "logits", "prompt"])
def test_no_rank_goes_on_alone_when_memory_runs_out(kind, monkeypatch) -> None:
    """Wherever it runs out: a rank that tried again would meet the others in other sums."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    if kind != "forward":
        more = {"logprobs": 1} if kind == "logits" else {"prompt_logprobs": 1}
        params = replace(params, **more)
    with LLM.in_process("builtin", **SETTINGS) as llm:
        assert llm.generate([[5, 6]], params, progress=False)[0].error is None
        inner = llm.engine.built.executor
        decoder = inner._decoder
        monkeypatch.setattr(decoder, "ops", replace(decoder.ops, ranks=TwoRanks()))

        def starving(*_: object) -> Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

        if kind == "forward":
            around_forward(monkeypatch, inner, starving)
        else:
            monkeypatch.setattr(decoder, "logits", starving)
        error = llm.generate([[7, 8, 9]], params, progress=False)[0].error
    assert isinstance(error, OutOfMemoryError)
    assert "no rank can go on without the others" in error.message
