"""Rows whose attention the host computes, in the lanes of captured steps: the tokens of an engine
that has room on the device.

The device is the host, and a captured function sees nothing but what was uploaded. Courier and host
worker are real threads, so that results arrive in the middle of steps, too.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import crowds
import pytest
from graphed import LANES, use_graphs
from test_piggybacked_rows import (
    FAMILIES,
    Dawdler,
    Idler,
    Sluggard,
    Steps,
    assert_same_as_ample,
    folders,  # noqa: F401
    host,  # noqa: F401
    piggybacking,
)

from depth import deep
from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.core.plan import StepPlan
from weft.engine.host_rules import check_attends_on_host
from weft.engine.model import find_model
from weft.exec import host_attention
from weft.exec.courier import Courier
from weft.exec.graphs import GraphExecutor
from weft.exec.lane_rows import LaneRows
from weft.exec.scored_rows import ScoredRows
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.models.decoder import Decoder

PARTS = {"embed", "pre", "post", "finish", "logits", "score"}
FEW = {
    ("llama-gqa", None),
    ("gemma3", Dawdler),
    ("qwen3-moe-mixed", None),
    ("gpt-oss", None),
    ("muse-glimmer", None),
}
CASES = [*((name, None) for name in FAMILIES), ("gemma3", Dawdler), ("llama-gqa", Sluggard)]


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    use_graphs(monkeypatch)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what steps carry, as they come."""
    found, carry = [], LaneRows._next

    def watched(self, limits):
        found.append(carry(self, limits))
        return found[-1]

    monkeypatch.setattr(LaneRows, "_next", watched)
    return found


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [case if case in FEW else pytest.param(*case, marks=deep) for case in CASES],
    indirect=["host"],
)
def test_attention_on_the_host_changes_no_token(folders, family, seed, monkeypatch) -> None:  # noqa: F811
    carried = watch(monkeypatch)
    assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)
    assert 0 < max(len(step.begun) for step in carried) <= LANES


@pytest.mark.parametrize("graphs", [True, False])
def test_sampling_parameters_of_rows_stay_on_the_device(folders, graphs, monkeypatch) -> None:  # noqa: F811
    """Penalties count what lanes sample; so do seeds, and biases that end at a length."""
    asked = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {70: 4.0}}
    for name in ("GREEDY", "DRAWN"):
        monkeypatch.setattr(crowds, name, replace(getattr(crowds, name), **asked))
    assert_same_as_ample(folders["llama-gqa"], {"graphs": graphs}, 1, monkeypatch)


# -- memory that runs out -------------------------------------------------------------------------


def starve(monkeypatch: pytest.MonkeyPatch, share: float, *, lanes_find_some: bool) -> Counter[str]:
    """Let parts of steps with lanes find no memory, at random, once rows are piggybacked.

    Args:
        lanes_find_some: if the lanes are alone in a step.
    """
    draw, ran_out, fed = random.Random(5), Counter[str](), [True]
    fits = GraphExecutor._fits

    def launched(self, batch, output, carried=None, ahead=0):
        fed[0] = carried is None or (lanes_find_some and not batch.rows)
        try:
            return fits(self, batch, output, carried, ahead)
        finally:
            fed[0] = True

    def starving(name: str, share: float) -> None:
        method = getattr(Decoder, name)

        def call(self, *given):
            if not fed[0] and draw.random() < share:
                ran_out[name] += 1
                raise MemoryError
            return method(self, *given)

        monkeypatch.setattr(Decoder, name, call)

    monkeypatch.setattr(GraphExecutor, "_fits", launched)
    for name in ("embed", "pre", "post", "finish", "logits"):
        starving(name, share / 4 if name in ("pre", "post") else share)  # one a layer
    score = ScoredRows.order

    def scoring(self, packed):
        if not fed[0] and draw.random() < share:
            ran_out["score"] += 1
            raise MemoryError
        return score(self, packed)

    monkeypatch.setattr(ScoredRows, "order", scoring)
    return ran_out


def test_a_step_that_runs_out_of_memory_loses_no_row(folders, monkeypatch) -> None:  # noqa: F811
    """Wherever it does: what it took is taken again, and counted once."""
    asked = {"presence_penalty": 0.7, "frequency_penalty": 0.3}
    monkeypatch.setattr(crowds, "DRAWN", replace(crowds.DRAWN, **asked))
    ran_out = starve(monkeypatch, 0.15, lanes_find_some=True)
    assert_same_as_ample(folders["gemma3"], FAMILIES["gemma3"], 1, monkeypatch)
    assert {name for name, times in ran_out.items() if times > 0} == PARTS


def test_lanes_that_find_no_memory_alone_end_their_rows(steps, monkeypatch) -> None:
    for row in (0, 1, 2):
        steps.start(row)
    steps.run(moves=steps.away(1, 2), piggybacked=(1,))
    steps.serve()
    starve(monkeypatch, 1.0, lanes_find_some=False)
    done = steps.run(steps.decode(0), piggybacked=(2,), piggyback_limits=steps.all)
    assert done.piggybacked_results == ((2, 0),), "row 1 was not taken yet"
    assert {row: error.code for row, error in done.faults.items()} == {2: "out_of_memory"}
    assert len(done.tokens) == 1
    assert done.piggyback_layers == (1, 0, 0)
    monkeypatch.undo()
    assert steps.run(drop=(2,), piggyback_limits=steps.all).piggyback_layers == (0, 1, 0)
    assert steps.mailbox.states()[2] == "empty"


# -- plans made by hand ---------------------------------------------------------------------------


@pytest.fixture
def steps(folders):  # noqa: F811
    """Steps of an engine whose host serves when it is told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_attention, "HostWorker", Idler)
        opened = Steps(piggybacking(folders["llama-gqa"]))
    with opened as steps:
        yield steps


def test_tokens_for_which_a_step_has_no_lane_begin_in_the_next_one(steps) -> None:
    for row in range(4):
        steps.start(row)
    begun = steps.run(moves=steps.away(0, 1, 2, 3), piggybacked=(3, 1, 0, 2))
    assert begun.piggyback_layers == (4, 0, 0)
    assert steps.mailbox.native.slots >= 4
    steps.executor._lanes.courier.pump()
    assert steps.mailbox.states().count("submitted") == LANES
    assert steps.run(abort=(2,)).piggyback_layers == (3, 0, 0), "also before it has begun"
    steps.serve()
    assert steps.run(piggyback_limits=steps.all).piggyback_layers == (0, 3, 0)


def test_a_result_of_a_dropped_token_is_not_that_of_the_next_one(steps) -> None:
    """Though it lies on the device when the row begins anew."""
    first = steps.start(0)
    for _ in range(2):
        steps.run(moves=steps.away(0), piggybacked=(0,))
        steps.serve()
        steps.run(abort=(0,), drop=(0,))
        assert steps.start(0) == first
    state = steps.executor._functions.lanes.state
    steps.run(moves=steps.away(0), piggybacked=(0,))
    assert int(state.arrived[0]) > 0
    assert int(state.jobs[0]) > int(state.arrived[0])
    assert steps.run(piggyback_limits=steps.all).piggyback_layers == (1, 0, 0)
    steps.serve()
    assert steps.run(piggyback_limits=steps.all).piggyback_layers == (0, 1, 0)


def test_steps_without_results_have_no_lanes(steps, monkeypatch) -> None:
    carried = watch(monkeypatch)
    steps.start(0)
    steps.start(1)
    steps.run(moves=steps.away(1), piggybacked=(1,))
    steps.run(steps.decode(0), piggyback_limits=steps.all)
    assert len(carried) == 1
    steps.serve()
    steps.run(steps.decode(0, at=21), piggyback_limits=steps.all)
    assert len(carried) == 2


def test_a_graph_without_lanes_in_the_place_of_one_with_them_is_found(steps, monkeypatch) -> None:
    steps.start(0)
    graphs = steps.executor._steps.forward_graphs
    monkeypatch.setitem(graphs, (1, 1, True), graphs[1, 1, False])
    with pytest.raises(InvariantError, match="were read as if by"):
        steps.run(moves=steps.away(0), piggybacked=(0,))


def test_what_lanes_need_is_known_before(steps) -> None:
    """What lies on the device all the time is counted."""
    executor, spec = steps.executor, steps.engine.model.spec
    lanes, staging = executor._functions.lanes, executor._lanes.courier._staging
    held = [*vars(lanes.state).values(), *lanes._sampled.values(), *lanes._lanes]
    held += [lanes.ended, staging._results, staging._places]
    plain = StepSizes(48, len(steps.executor._table.length), 8, [14])
    with_lanes, without = (
        workspace_bytes(spec, 4, sizes, graphs=False)
        for sizes in (replace(plain, lanes=LANES), plain)
    )
    assert sum(tensor.nbytes for tensor in held) <= with_lanes - without


def test_a_courier_that_fails_ends_the_engine_with_a_typed_error(steps, monkeypatch) -> None:
    def failing(*_: object) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    steps.start(0)
    monkeypatch.setattr(Courier, "pump", failing)
    steps.run(moves=steps.away(0), piggybacked=(0,))
    assert steps.executor._lanes.courier.news.wait(60), "it fails as soon as it looks for the job"
    with pytest.raises(HostWorkerError, match="The courier has ended: an illegal memory"):
        steps.run(piggyback_limits=steps.all)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host_process": True}, "not pinned for a GPU yet; turn host_process off"),
        ({"max_num_seqs": 5000, "max_num_batched_tokens": 5000}, "look through 4096 sequences"),
    ],
)
def test_what_steps_of_a_gpu_cannot_carry_is_refused(folders, given, words) -> None:  # noqa: F811
    config = piggybacking(folders["llama-gqa"])
    model = find_model(config)
    named = replace(model.ops, names={**model.ops.names, "paged_attention": "triton"})
    check_attends_on_host(config, model.spec, named)
    with pytest.raises(ConfigError, match=words):
        check_attends_on_host(replace(config, **given), model.spec, named)


def test_a_plan_is_refused_where_nobody_attends(folders) -> None:  # noqa: F811
    config = replace(piggybacking(folders["llama-gqa"]), scheduler="slo")
    with Steps(config) as steps, pytest.raises(InvariantError, match="needs attention of a host"):
        steps.executor.launch(StepPlan(1, (), piggybacked=(0,)))
