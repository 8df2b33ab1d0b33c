"""Targets derived from costs: reachable, no laxer than asked for, and those of the user kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from costs import LinearCost
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.class_table import class_table, with_targets
from weft.core.types import DEFAULT_CLASSES
from weft.sched.resources import DEFAULT_POLICY
from weft.sched.scheduler import Limits
from weft.sched.targets import check_targets, derived_targets, rounded_up, slowdown

LIMITS = Limits(32, 512, 4096)
COST = LinearCost(step_s=2e-3, token_s=2e-5, context_s=1e-8)


def derived(interactivity: float = 0.5, changes=None, cost=COST, limits=LIMITS):
    changes = changes or {}
    return {
        row.name: row
        for row in derived_targets(
            class_table(changes), with_targets(changes), cost, limits, interactivity, 0.1
        )
    }


@searching(60)
@given(
    st.floats(1e-5, 1),
    st.floats(1e-7, 1e-2),
    st.floats(0, 1e-6),
    st.integers(1, 512),
    st.integers(16, 100_000),
    st.floats(0, 1),
)
def test_every_machine_can_keep_them(step_s, token_s, context_s, rows, longest, interactivity):
    cost = LinearCost(step_s, token_s, context_s)
    limits = Limits(rows, max(rows, 64), longest)
    table = derived(interactivity, cost=cost, limits=limits)
    check_targets(tuple(table.values()), cost, DEFAULT_POLICY)
    for name in ("priority", "interactive"):
        assert 0 < table[name].tpot_s < table[name].ttft_s


def test_stricter_is_never_laxer():
    tables = [derived(i / 10) for i in range(11)]
    for lax, strict in pairwise(tables):
        for name in ("priority", "interactive"):
            assert strict[name].tpot_s <= lax[name].tpot_s
            assert strict[name].ttft_s <= lax[name].ttft_s
    assert [slowdown(i) for i in (1, 0.5, 0)] == pytest.approx([1, 2, 4])


def test_what_the_user_sets_is_kept_and_best_effort_has_none():
    table = derived(changes={"interactive": {"ttft_s": 9.0}, "gold": {"priority": 0, "tpot_s": 1}})
    assert (table["interactive"].ttft_s, table["interactive"].tpot_s) == (9.0, 0.2)
    assert (table["gold"].ttft_s, table["gold"].tpot_s) == (None, 1)
    assert table["batch"].ttft_s is table["flex"].tpot_s is None
    assert table["priority"].ttft_s != DEFAULT_CLASSES[0].ttft_s
    # Another priority is no target.
    assert derived(changes={"interactive": {"priority": 5}})["interactive"].ttft_s < 1


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0123, 0.013), (1.0, 1.0), (0.999, 1.0), (123.4, 130), (2e-5, 2e-5)]
)
def test_targets_have_two_digits(seconds, shown):
    assert rounded_up(seconds) == pytest.approx(shown, rel=1e-9)
