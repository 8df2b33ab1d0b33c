"""Targets that change while sequences are there, and what an engine's successor keeps."""

from __future__ import annotations

import os

import pytest
from costs import LinearCost

from weft.core.class_table import class_table
from weft.core.errors import ConfigError, NoTargetsError
from weft.core.types import Request, SamplingParams
from weft.engine.live_targets import LiveTargets
from weft.kv.cache import GroupSpec
from weft.ring.target_board import TargetBoard, TargetChange, create_target_board
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits
from weft.sched.targets import TargetSettings

COST = LinearCost(0.01, 0.001)  # 10 ms a step and 1 ms a token
LIMITS = Limits(16, 256, 1024)


@pytest.fixture
def board():
    memory = create_target_board()
    yield TargetBoard(memory)
    os.close(memory)


def engine(board: TargetBoard, policy: str = "slo", cost: LinearCost = COST, **classes):
    """A scheduler, and the targets of its engine."""
    settings = TargetSettings(classes, 0.5)
    groups = (GroupSpec("full", 16, 512),)
    resources = Resources(groups, LIMITS, class_table(classes))
    scheduler = make_scheduler(policy, settings.applied(resources, cost))
    return scheduler, LiveTargets(board, settings, resources, None, scheduler)


def propose(board, live, scheduler, change: TargetChange) -> None:
    proposal = board.propose(change)
    live.look(scheduler)
    assert board.outcome(proposal)


def targets_of(scheduler, name: str = "interactive"):
    (row,) = [row for row in scheduler.policy.classes if row.name == name]
    return row.ttft_s, row.tpot_s


def test_new_targets_hold_from_the_next_step_on_for_sequences_that_are_there(board):
    scheduler, live = engine(board, interactive={"ttft_s": 1.0, "tpot_s": 0.1})
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    scheduler.add(Request(1, tuple(range(8)), sampling, service_class="interactive"))
    scheduler.add(Request(2, tuple(range(900)), sampling, service_class="batch"))
    before = scheduler.plan(1.0).num_tokens
    propose(board, live, scheduler, TargetChange({"interactive": {"tpot_s": 0.025}}))
    assert targets_of(scheduler) == (1.0, 0.025)
    tight, _ = engine(board)  # the successor keeps them from its start
    assert targets_of(tight) == (3.0, 0.025)
    tight.add(Request(1, tuple(range(8)), sampling, service_class="interactive"))
    tight.add(Request(2, tuple(range(900)), sampling, service_class="batch"))
    assert tight.plan(1.0).num_tokens < before


def test_targets_that_nobody_sets_are_derived_again(board):
    scheduler, live = engine(board)
    derived = targets_of(scheduler)
    propose(board, live, scheduler, TargetChange(interactivity=1.0))
    strict = targets_of(scheduler)
    assert strict[0] < derived[0]
    propose(board, live, scheduler, TargetChange({"interactive": {"ttft_s": 9.0, "tpot_s": 0.9}}))
    assert targets_of(scheduler) == (9.0, 0.9)
    propose(board, live, scheduler, TargetChange())
    assert targets_of(scheduler) == derived


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"interactive": {"tpot_s": 0.001}}, r"no load can meet it. Raise it to 0\.0122"),
        ({"flex": {"ttft_s": 5.0}}, "'flex' is best effort"),
        ({"nosuch": {"ttft_s": 5.0}}, "'nosuch' needs a priority"),
    ],
)
def test_a_change_that_cannot_be_kept_changes_nothing(board, change, words):
    scheduler, live = engine(board)
    propose(board, live, scheduler, TargetChange({"interactive": {"ttft_s": 2.0, "tpot_s": 0.5}}))
    before = scheduler.policy.classes
    proposal = board.propose(TargetChange(change))
    live.look(scheduler)
    with pytest.raises(ConfigError, match=words):
        board.outcome(proposal)
    assert scheduler.policy.classes == before
    assert targets_of(engine(board)[0]) == (2.0, 0.5)


def test_a_policy_without_targets_says_so(board):
    scheduler, live = engine(board, "fcfs")
    proposal = board.propose(TargetChange(interactivity=1.0))
    live.look(scheduler)
    with pytest.raises(NoTargetsError, match="scheduling is by fcfs now, as is set"):
        board.outcome(proposal)


def test_a_successor_for_which_they_are_out_of_reach_starts_all_the_same(board):
    scheduler, live = engine(board)
    propose(board, live, scheduler, TargetChange({"interactive": {"ttft_s": 2.0, "tpot_s": 0.02}}))
    slower, _ = engine(board, cost=LinearCost(0.1, 0.001))
    assert targets_of(slower)[1] > 0.1
