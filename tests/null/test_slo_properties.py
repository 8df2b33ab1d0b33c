"""Random traffic through the SLO policy with each memory on the modelled executor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st
from traffic import COMMON, World, assert_answers, ids, plans, run, traffic, worlds

from depth import searching
from weft.core.types import ServiceClass
from weft.sched.registry import slo
from weft.sched.resources import TargetPolicy

CLASSES = [
    ServiceClass("priority", 0, ttft_s=0.5, tpot_s=0.05),
    ServiceClass("interactive", 1, ttft_s=2.0, tpot_s=0.2),
    ServiceClass("batch", 3),
]


@st.composite
def makers(draw):
    """Schedulers with fast and slow machines, patience and impatience, and all admissions."""
    cost = LinearCost(
        draw(st.sampled_from([0.001, 0.01, 0.03])), draw(st.sampled_from([1e-5, 1e-3, 0.01]))
    )
    targets = TargetPolicy(
        draw(st.sampled_from(["demote", "off"])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.sampled_from([0.0, 0.05, 1e9])),
    )
    step_s = draw(st.sampled_from([0.0, 0.001, 0.3]))
    return partial(slo, cost=cost, classes=CLASSES, targets=targets), step_s


def drawn(data, memory: str) -> World:
    """A world whose KV gives way to the host, or is computed again."""
    world = data.draw(worlds(tight=data.draw(st.booleans())))
    if memory == "device":
        return world
    share = data.draw(st.sampled_from([0.5, 2.0]))
    blocks = tuple(max(1, int(share * group.num_blocks)) for group in world.groups)
    return replace(world, host_blocks=blocks)


@pytest.mark.parametrize("memory", ["device", "host"])
@searching(400, **COMMON)
@given(data=st.data())
def test_random_traffic_is_answered_exactly(data, memory):
    world = drawn(data, memory)
    arrivals, cancels = data.draw(traffic(world))
    make, step_s = data.draw(makers())
    requests, inbox, _ = run(world, arrivals, cancels, make=make, step_s=step_s)
    assert_answers(world, requests, inbox, ids(cancels), set())


@pytest.mark.parametrize("memory", ["device", "host"])
@searching(120, **COMMON)
@given(data=st.data())
def test_a_faulty_row_ends_alone(data, memory):
    world = drawn(data, memory)
    arrivals, cancels = data.draw(traffic(world))
    make, step_s = data.draw(makers())
    bad = data.draw(st.sets(st.integers(0, 13), max_size=4))
    at = data.draw(st.integers(1, 40))
    requests, inbox, _ = run(
        world,
        arrivals,
        cancels,
        faulty=lambda sequence, length: sequence in bad and length >= at,
        make=make,
        step_s=step_s,
    )
    assert_answers(world, requests, inbox, ids(cancels), bad)


@pytest.mark.parametrize("memory", ["device", "host"])
@searching(100, **COMMON)
@given(data=st.data())
def test_equal_inputs_give_equal_plans(data, memory):
    world = drawn(data, memory)
    arrivals, cancels = data.draw(traffic(world))
    make, step_s = data.draw(makers())
    first = plans(world, arrivals, cancels, make, step_s)
    assert first == plans(world, arrivals, cancels, make, step_s)
