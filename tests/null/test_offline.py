"""Offline runs through the real scheduler: synthetic traces, overlap in a step, gains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.blend.density import Rates
from weft.blend.order import ORDERS, Jobs, Room, make_order
from weft.blend.tree import build_tree
from weft.core.errors import ParameterError
from weft.cost.hardware import hardware
from weft.cost.model import Terms, step_time
from weft.cost.roofline import NO_OVERHEAD, Roofline
from weft.cost.shape import model_shape
from weft.cost.work import Work
from weft.sched.scheduler import Limits
from weft.sim.blended import BURSTGPT, MMLU, OPENVID, TRACES, counts, shortened, synthesise
from weft.sim.offline import least_work, run_offline, split_of
from weft.sim.overlap import OVERLAPS, Overlapped, ideal, in_a_row, interfering

SHAPE, A100 = model_shape("llama-3.1-8b"), hardware("a100")
RATES = Rates.of(SHAPE, A100)
COST = Roofline(SHAPE, A100, overhead=NO_OVERHEAD)
KINDS = (BURSTGPT, shortened(OPENVID, 0.2), MMLU)


class Linear:
    """Costs without a floor for small batches, so that a small memory behaves as a large one."""

    layers = 1

    def terms(self, work: Work) -> Terms:
        return Terms(
            dense=work.tokens * SLOW.token_s, decode_attention=work.decode_context * SLOW.read_s
        )


SLOW = Rates(1e-4, 0.0, 1e-6)  # outputs of hundreds of tokens are memory-heavy already
SHORT = (BURSTGPT, shortened(OPENVID, 0.1), MMLU)
KV = 12_000


# -- overlap --------------------------------------------------------------------------------------


def test_equal_parts_overlap_as_measured():
    """Dense layers at 0.6 of their speed, decode attention at 0.6 of its own."""
    assert interfering(1.0, 1.0) == pytest.approx(1 / 0.6)
    assert in_a_row(1.0, 1.0) == 2
    assert ideal(1.0, 1.0) == 1
    assert interfering(3.0, 0.0) == 3
    assert interfering(0.0, 2.0) == 2


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 100))
def test_interference_lies_between_none_and_ideal(compute, memory, factor):
    found = interfering(compute, memory)
    assert ideal(compute, memory) <= found * (1 + 1e-9) + 1e-12
    assert found <= in_a_row(compute, memory) + 1e-12
    assert interfering(compute * factor, memory * factor) == pytest.approx(found * factor)
    both = interfering(np.array([compute, 1.0]), np.array([memory, 1.0]))
    assert both[0] == pytest.approx(found)


def test_overlap_is_a_property_of_a_steps_time():
    work = Work()
    work.add(0, 700)
    for _ in range(200):
        work.add(2000, 1)
    alone = COST.terms(work)
    compute, memory, other = split_of(COST, work)
    assert compute + memory + other == pytest.approx(alone.total)
    assert memory == alone.decode_attention > 0
    for overlap in OVERLAPS.values():
        seconds = step_time(Overlapped(COST, overlap), [work])
        assert seconds == pytest.approx(overlap(compute, memory) + other)


# -- synthetic traces -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BURSTGPT, OPENVID, MMLU])
def test_kinds_have_the_density_and_sharing_that_the_paper_quotes(kind):
    trace = synthesise([3000], [kind], RATES, seed=1)
    lengths = np.array([len(prompt) for prompt in trace.prompts])
    compute = RATES.token_s * (lengths + trace.outputs).sum()  # the paper leaves squares out
    memory = RATES.memory_s(lengths, trace.outputs).sum()
    assert compute / memory == pytest.approx(kind.density, rel=0.1)
    saved = RATES.token_s * build_tree(trace.prompts).shared.sum() / compute
    quoted = {"burstgpt": 0.02, "openvid": 0.0, "mmlu": 0.86}[kind.name]
    assert saved == pytest.approx(quoted, abs=0.02)


@pytest.mark.parametrize("number", TRACES)
def test_traces_meet_their_targets(number):
    density, sharing = TRACES[number]
    trace = synthesise(counts(density, sharing, 300, KINDS, RATES), KINDS, RATES)
    lengths = np.array([len(prompt) for prompt in trace.prompts])
    compute = RATES.compute_s(lengths, trace.outputs).sum()
    saved = RATES.token_s * build_tree(trace.prompts).shared.sum()
    memory = RATES.memory_s(lengths, trace.outputs).sum()
    assert (compute - saved) / memory == pytest.approx(density, rel=0.1)
    assert saved / compute == pytest.approx(sharing, abs=0.01)
    assert len(trace) == len(trace.outputs) == len(trace.kinds)


def test_traces_are_the_same_for_the_same_seed():
    one, same, other = (synthesise((30, 4, 20), KINDS, RATES, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one.prompts, same.prompts, strict=True))
    assert (one.outputs == same.outputs).all()
    assert (one.outputs != other.outputs).any()


def test_targets_that_no_mix_has_are_refused():
    with pytest.raises(ParameterError, match=r"No mix of burstgpt, openvid, mmlu has density 1\.4"):
        counts(1.4, 0.9, 100, KINDS, RATES)


# -- runs -----------------------------------------------------------------------------------------


def small_run(kind: str, overlap=in_a_row):
    trace = synthesise(counts(1.4, 0.35, 200, SHORT, SLOW), SHORT, SLOW, 3)
    order = make_order(kind, Jobs(trace.prompts), Room(KV, 256), SLOW)
    cost = Overlapped(Linear(), overlap)
    return trace, run_offline(trace, order, cost, Limits(256, 256, KV), KV)


@pytest.fixture(scope="module")
def runs():
    return {kind: small_run(kind) for kind in ORDERS}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_run_computes_what_it_must_and_no_less(runs, kind):
    trace, run = runs[kind]
    asked = sum(map(len, trace.prompts))
    shared = int(build_tree(trace.prompts).shared.sum())
    needed = asked + int((trace.outputs - 1).sum())
    assert run.tokens == trace.tokens
    assert run.cached <= shared
    assert run.computed >= needed - run.cached
    if not run.preempted:  # the step after a last token is planned before that is known
        assert run.computed <= needed - run.cached + len(trace)
    least = split_of(Linear(), least_work(trace, shared))
    assert run.memory_s.sum() >= least[1] * 0.999
    for overlap in OVERLAPS.values():
        assert run.seconds(overlap) > float(overlap(*least[:2]))
    assert run.seconds(ideal) <= run.seconds(interfering) <= run.seconds(in_a_row)


def test_the_plans_do_not_depend_on_the_time_that_steps_take(runs):
    run, again = runs["blend"][1], small_run("blend", interfering)[1]
    assert (again.kv_use == run.kv_use).all()
    assert again.seconds(in_a_row) == pytest.approx(run.seconds(interfering))


def test_blending_overlaps_and_shares(runs):
    """Depth first shares as much and overlaps less; random order overlaps and shares less."""
    blend, dfs, random = (runs[kind][1] for kind in ("blend", "dfs", "random"))
    assert blend.cached > 0.97 * dfs.cached
    assert blend.cached > 1.05 * random.cached
    assert blend.throughput(ideal) > 1.05 * dfs.throughput(ideal)
    assert blend.throughput(interfering) > max(
        dfs.throughput(interfering), random.throughput(interfering)
    )
