"""Random traffic through the load-aware scheduler on the modelled executor: exact, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st
from traffic import COMMON, assert_answers, ids, plans, run, run_with_deaths, traffic, worlds

from depth import searching
from weft.sched.registry import load_aware


@st.composite
def tiered_worlds(draw):
    """Worlds with a host that is smaller or larger than the device."""
    world = draw(worlds(tight=draw(st.booleans())))
    share = draw(st.sampled_from([0.3, 1, 4]))
    return replace(
        world, host_blocks=tuple(max(1, int(share * group.num_blocks)) for group in world.groups)
    )


@st.composite
def makers(draw):
    """Schedulers on machines whose host is fast or slow, near or far."""
    cost = LinearCost(
        draw(st.sampled_from([0.0, 1.0])),
        draw(st.sampled_from([0.001, 0.1, 1.0])),
        draw(st.sampled_from([0.0, 0.01])),
        host_context_s=draw(st.sampled_from([0.0, 0.01, 1.0])),
        move_s=draw(st.sampled_from([0.0, 0.01, 10.0])),
    )
    host_only = draw(st.integers(0, 5)) == 0
    return partial(load_aware, cost=cost, host_only=host_only), host_only


@st.composite
def cases(draw):
    """A world, its traffic and a scheduler; all must fit the host where all must lie there."""
    make, host_only = draw(makers())
    world = draw(tiered_worlds())
    if host_only:
        world = replace(world, host_blocks=tuple(group.num_blocks for group in world.groups))
    return world, draw(traffic(world)), make


@searching(600, **COMMON)
@given(cases())
def test_random_traffic_is_answered_exactly(case):
    world, (arrivals, cancels), make = case
    requests, inbox, _ = run(world, arrivals, cancels, make=make)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(600, **COMMON)
@given(cases(), st.dictionaries(st.integers(5, 60), st.integers(0, 3), min_size=2, max_size=9))
def test_engines_that_die_leave_kv_that_is_true(case, deaths):
    """A sequence may go on on the host, and leave what the device had of it behind."""
    world, (arrivals, cancels), make = case
    world = replace(world, prefix_caching=True)
    requests, inbox, _ = run_with_deaths(world, arrivals, cancels, deaths, make=make)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(200, **COMMON)
@given(cases(), st.sets(st.integers(0, 13), max_size=4), st.integers(1, 40))
def test_a_faulty_row_ends_alone(case, bad, at):
    world, (arrivals, cancels), make = case
    requests, inbox, _ = run(
        world,
        arrivals,
        cancels,
        faulty=lambda sequence, length: sequence in bad and length >= at,
        make=make,
    )
    assert_answers(world, requests, inbox, ids(cancels), bad)


@searching(100, **COMMON)
@given(cases())
def test_equal_inputs_give_equal_plans(case):
    world, (arrivals, cancels), make = case
    assert plans(world, arrivals, cancels, make) == plans(world, arrivals, cancels, make)
