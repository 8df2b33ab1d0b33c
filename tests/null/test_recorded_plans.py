"""Schedulers still plan as in ``recorded_plans.json``, step for step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recorded
import scenarios
from recorded import STEPS, differences, record

from depth import deep

EXPECTED = recorded.read()
PAIRS = [
    pytest.param(scenario, name, marks=[deep] if scenario in scenarios.LONG else [])
    for scenario, rows in EXPECTED.items()
    for name in rows
]


@pytest.mark.parametrize(("scenario", "name"), PAIRS)
def test_plans_are_those_that_were_recorded(scenario, name):
    found = record(name, scenarios.ALL[scenario]())
    different = differences(EXPECTED[scenario][name], found)
    assert not different, (
        f"scheduler {name}, scenario {scenario}: {'; '.join(different)}. To see the plans, run "
        f"'python tests/null/recorded.py {scenario} --dump FOLDER' at both commits and diff them"
    )


def test_every_scenario_is_recorded_with_every_scheduler_that_it_is_for():
    assert set(EXPECTED) == set(scenarios.ALL)
    made = [name for name in scenarios.ALL if name not in scenarios.OF_TRACES]
    wanted = {name: set(scenarios.ALL[name]().schedulers) for name in made}
    assert {name: set(EXPECTED[name]) for name in made} == wanted


@pytest.mark.parametrize("change", [{"watermark_tokens": 24}, {"prefix_caching": False}])
@pytest.mark.parametrize("scenario", ["full-pool", "recovered"])
def test_a_small_change_is_found_and_placed(scenario, change):
    given, plans, changed_plans = scenarios.ALL[scenario](), [], []
    same = record("fcfs", given, plans.append)
    changed = record("fcfs", replace(given, **change), changed_plans.append)
    assert not differences(EXPECTED[scenario]["fcfs"], same)
    pairs = zip(plans, changed_plans, strict=False)
    first = next(step for step, (a, b) in enumerate(pairs, 1) if a != b)
    window = (first - 1) // STEPS * STEPS
    complaints = differences(same, changed)
    assert complaints[0] == f"plans first differ between steps {window + 1} and {window + STEPS}"
