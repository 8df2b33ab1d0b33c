"""One row makes a policy known: to settings, help, engines and simulations."""

from __future__ import annotations

from pathlib import Path

import pytest
from costs import LinearCost
from test_slo import CLASSES

import weft.sched
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.schedulers import POLICIES, SCHEDULERS, SERVED, scheduler_name
from weft.core.settings import settings_of
from weft.kv.cache import GroupSpec
from weft.sched.registry import WITH_PART, make_policy, make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits, Policy
from weft.sim.options import SimOptions

GIVEN = Resources(
    (GroupSpec("full", 16, 96),),
    Limits(8, 64, 256),
    CLASSES,
    host_blocks=(200,),
    cost=LinearCost(0.001, 0.0001),
)


def test_every_policy_has_a_row_and_every_row_a_policy():
    folder = Path(weft.sched.__path__[0])
    files = {path.stem.removeprefix("policy_") for path in folder.glob("policy_*.py")}
    rows = {name.replace("-", "_") for name in POLICIES}
    assert files == rows, "POLICIES in core/schedulers.py and the files of weft/sched differ"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_makes_schedulers_over_one_tier_and_over_two(name):
    promised = {field for field in vars(Policy) if not field.startswith("_")}
    assert promised | set(Policy.__annotations__) <= set(dir(make_policy(name, GIVEN)))
    for host in (False, True):
        entry = SCHEDULERS[scheduler_name(name, host)]
        assert (entry.policy, entry.needs_host) == (name, host)
        make_scheduler(scheduler_name(name, host), GIVEN).check()


def test_those_that_have_a_part_are_made_with_one():
    assert {name for name, entry in SCHEDULERS.items() if entry.has_part} == set(WITH_PART)
    for name in WITH_PART:
        scheduler = make_scheduler(name, GIVEN)
        assert scheduler.parts
        assert type(scheduler.policy) is type(make_policy(SCHEDULERS[name].policy, GIVEN))


def test_settings_offer_what_there_is():
    served, simulated = settings_of(EngineConfig)["scheduler"], settings_of(SimOptions)["scheduler"]
    assert served.choices == ("auto", *SERVED)
    assert set(SERVED) == {*POLICIES, *WITH_PART}
    assert simulated.choices == tuple(SCHEDULERS)
    assert all(f"{name} {row.comes_first}" in served.help for name, row in POLICIES.items())
    assert all(f"{name} {SCHEDULERS[name].served}" in served.help for name in WITH_PART)
    with pytest.raises(ConfigError, match="no costs"):
        make_scheduler("slo", Resources(GIVEN.groups, GIVEN.limits))
