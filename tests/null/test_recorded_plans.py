"""Schedulers plan what they planned when ``recorded_plans.json`` was written, step for step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recorded
import scenarios
from recorded import differences, record

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
    made = {name for name in scenarios.ALL if name not in scenarios.OF_TRACES}
    wanted = {name: set(scenarios.ALL[name]().schedulers) for name in made}
    assert {name: set(EXPECTED[name]) for name in made} == wanted
    assert set(EXPECTED) == set(scenarios.ALL)


def test_a_small_change_of_a_scheduler_is_found():
    given, expected = scenarios.ALL["recovered"](), EXPECTED["recovered"]["fcfs"]
    for change in ({"ahead_tokens": 31}, {"prefix_caching": False}):
        found = differences(expected, record("fcfs", replace(given, **change)))
        assert found
        assert found[0].startswith("plans first differ between steps ")
