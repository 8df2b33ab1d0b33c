"""Steps in two halves give what whole ones give, in any order in which the device runs branches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from graphed import use_graphs
from halved import ALL_HIDDEN, use_halves
from test_graphs import PROMPTS, SHORT, everything, expected, packaged  # noqa: F401

from weft import LLM
from weft.core.errors import InvariantError, NonFiniteLogitsError
from weft.exec.device import _HostBranch
from weft.exec.graphs import GraphExecutor
from weft.exec.halves_pass import _Half
from weft.exec.step_layout import Buffer
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.sched.batch import BatchBuilder
from weft.sched.halves import Halves


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (None, {}),
        (1, {"steps_in_flight": 0}),
        (2, {"graphs": False}),
        (3, {"max_num_batched_tokens": 17, "speculation": 2}),
        (4, {"kv_memory": "1800KiB", "prefix_caching": False}),
    ],
)
def test_requests_of_every_kind_get_what_whole_steps_give(expected, seed, settings, monkeypatch):  # noqa: F811
    counts = use_halves(monkeypatch, seed)
    with packaged(**settings) as llm:
        assert llm.engine.served.overlaps
        assert everything(llm) == expected
        totals = llm.engine.built.scheduler.totals
        assert totals.drafted_tokens > totals.accepted_tokens > 0
        assert (totals.preemptions > 0) == ("kv_memory" in settings)
        assert totals.split_steps == counts["captured"] + counts["uncaptured"]
    assert (counts["captured"] > 20) == settings.get("graphs", True)
    assert counts["mixed"] > 2
    assert counts["uncaptured"] > 2 or "max_num_batched_tokens" in settings


def test_halves_with_prompts_on_both_sides_give_it_too(expected, monkeypatch):  # noqa: F811
    """As they are split where a profile says what gains most."""
    sides: set[tuple[bool, bool]] = set()
    split = Halves.split

    def watched(self: Halves, step: BatchBuilder) -> int:
        cut = split(self, step)
        if cut < len(step.rows):
            sides.add((max(step.counts[:cut]) > 1, max(step.counts[cut:]) > 1))
        return cut

    monkeypatch.setattr(Halves, "split", watched)
    use_halves(monkeypatch, 6, measured=ALL_HIDDEN)
    with packaged() as llm:
        assert everything(llm) == expected
    assert sides > {(True, True), (True, False)}


# -- what the device that stands in finds ---------------------------------------------------------


def greedy(llm: LLM) -> list[Any]:
    """The tokens, or else the errors, of a few requests that decode together."""
    prompts = [PROMPTS[i] for i in (1, 3, 4, 1)]
    done = llm.generate(prompts, SHORT, progress=False)
    return [r.token_ids if r.error is None else r.error for r in done]


def leave_at_once(half: _Half, layer: int) -> None:
    """Go on before attention is known to have ended."""
    branch = half._attended
    assert isinstance(branch, _HostBranch)
    half._lane.leave(layer, branch._result)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_half_that_does_not_wait_for_its_attention_is_found(seed, monkeypatch):
    """In any order in which not every branch comes first."""
    use_halves(monkeypatch, seed)
    monkeypatch.setattr(_Half, "leave", leave_at_once)
    with packaged(resident="off") as llm:
        assert NonFiniteLogitsError in map(type, greedy(llm))


def test_a_half_that_overwrites_what_its_attention_reads_is_found(monkeypatch):
    """As memory would be that is given to others too early."""
    enter = _Half.enter

    def overwriting(half: _Half, layer: int) -> None:
        enter(half, layer)
        branch = half._attended
        assert isinstance(branch, _HostBranch)
        branch._body.args[1].mul_(2)  # the queries

    use_halves(monkeypatch)
    monkeypatch.setattr(_Half, "enter", overwriting)
    with packaged(resident="off") as llm:
        assert all("what a branch reads has changed" in str(error) for error in greedy(llm))


# -- memory that runs out -------------------------------------------------------------------------


def test_halves_that_run_out_of_memory_lose_no_row(monkeypatch):
    """Anywhere between the layers: their rows are computed one by one then."""
    with packaged(resident="off") as llm:
        whole = greedy(llm)
    use_halves(monkeypatch, 1)
    draw, ran_out = random.Random(7), [0]
    enter, together = _Half.enter, GraphExecutor._run_overlapped
    serving = [False]

    def starving(half: _Half, layer: int) -> None:
        enter(half, layer)
        if serving[0] and draw.random() < 0.1:
            ran_out[0] += 1
            raise MemoryError

    def running(self: GraphExecutor, *given: Any) -> Any:
        serving[0] = True
        try:
            return together(self, *given)
        finally:
            serving[0] = False

    monkeypatch.setattr(_Half, "enter", starving)
    monkeypatch.setattr(GraphExecutor, "_run_overlapped", running)
    with packaged(resident="off") as llm:
        assert greedy(llm) == whole
    assert ran_out[0] > 3


def test_what_halves_need_is_known_before(monkeypatch):
    """Buffers are larger by the padding of a second half, and captured activations double."""
    use_halves(monkeypatch)
    with packaged(resident="off") as llm:
        built = llm.engine.built
        functions, spec = built.executor._functions, built.model.spec
        plain = StepSizes(96, 8, 8, [32])
        halved = replace(plain, halves=True)
        more = workspace_bytes(spec, 2, halved, graphs=True) - workspace_bytes(
            spec, 2, plain, graphs=True
        )
        hidden = functions.hidden.shape[0] * spec.hidden_size * 2
        assert more > hidden / 2
        assert functions.uploaded.numel() == Buffer.for_steps(128, 8, [32], overlaps=True).words


# -- attention that is limited --------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
def test_a_limit_of_attention_reaches_every_half(graphs, monkeypatch):
    """Of captured ones as well, which are captured anew."""
    use_halves(monkeypatch)
    seen: list[int | None] = []
    with packaged(graphs=graphs, resident="off") as llm:
        executor = llm.engine.built.executor
        ops = executor._decoder.ops
        attention = ops.paged_attention

        def watching(*given: Any, **more: Any) -> Any:
            seen.append(given[5].programs)
            return attention(*given, **more)

        monkeypatch.setattr(executor._decoder, "ops", replace(ops, paged_attention=watching))
        before = executor.captured
        executor.limit_attention(3)
        assert executor.captured == before
        assert set(seen) == ({3} if graphs else set())
        seen.clear()
        greedy(llm)
        assert set(seen) >= {3}


def test_whole_steps_cannot_be_limited(monkeypatch):
    use_graphs(monkeypatch)
    with packaged(resident="off") as llm, pytest.raises(InvariantError, match="without halves"):
        llm.engine.built.executor.limit_attention(3)
