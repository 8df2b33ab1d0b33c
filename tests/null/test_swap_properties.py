"""Random traffic through FCFS with swapping on the modelled executor: exact, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_load_aware_properties import tiered_worlds
from traffic import COMMON, assert_answers, ids, plans, run, traffic

from depth import searching
from weft.sched.registry import fcfs


@st.composite
def cases(draw):
    world = draw(tiered_worlds())
    return world, draw(traffic(world))


@searching(300, **COMMON)
@given(cases())
def test_random_traffic_is_answered_exactly(case):
    world, (arrivals, cancels) = case
    requests, inbox, _ = run(world, arrivals, cancels, make=fcfs)
    assert_answers(world, requests, inbox, ids(cancels), set())


@searching(100, **COMMON)
@given(cases(), st.sets(st.integers(0, 13), max_size=4), st.integers(1, 40))
def test_a_faulty_row_ends_alone(case, bad, at):
    world, (arrivals, cancels) = case

    def faulty(sequence, length):
        return sequence in bad and length >= at

    requests, inbox, _ = run(world, arrivals, cancels, faulty=faulty, make=fcfs)
    assert_answers(world, requests, inbox, ids(cancels), bad)


@searching(50, **COMMON)
@given(cases())
def test_nothing_is_computed_on_the_host_and_equal_inputs_give_equal_plans(case):
    world, (arrivals, cancels) = case
    made = plans(world, arrivals, cancels, fcfs)
    assert made == plans(world, arrivals, cancels, fcfs)
    for plan in made:
        assert plan.count("SubBatch(") == plan.count("tiers=()")
