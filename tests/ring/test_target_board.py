"""The board of targets: proposals, verdicts, and processes that die while they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from weft.core.errors import ConfigError, EngineBusyError, EngineDeadError, ParameterError
from weft.ring import target_board
from weft.ring.target_board import TargetBoard, TargetChange, create_target_board

CHANGE = TargetChange({"interactive": {"tpot_s": 0.05}}, 0.7)


@pytest.fixture
def memory():
    memory = create_target_board()
    yield memory
    os.close(memory)


@pytest.fixture
def board(memory):
    board = TargetBoard(memory)
    yield board
    board.close()


def test_a_verdict_answers_its_proposal_and_is_kept_for_the_next_engine(memory, board):
    engine = TargetBoard(memory)
    assert engine.proposal() is None
    assert engine.kept() == TargetChange()
    proposal = board.propose(CHANGE)
    assert not board.outcome(proposal)
    assert engine.proposal() == proposal
    engine.answer(proposal, CHANGE, None)
    assert board.outcome(proposal)
    assert engine.proposal() is None
    engine.close()
    assert TargetBoard(memory).kept() == CHANGE


def test_a_refusal_comes_as_the_error_that_the_engine_had(board):
    board.answer(board.propose(CHANGE), CHANGE, None)
    proposal = board.propose(TargetChange({"interactive": {"tpot_s": 1e-6}}))
    board.answer(proposal, CHANGE, ConfigError("Raise it to 0.01.", param="classes"))
    with pytest.raises(ConfigError, match=r"Raise it to 0\.01") as caught:
        board.outcome(proposal)
    assert caught.value.param == "classes"
    assert board.kept() == CHANGE


def test_nobody_waits_for_an_engine_that_is_silent_and_it_does_not_look_later(board, monkeypatch):
    monkeypatch.setattr(target_board, "ANSWER_S", 0.0)
    proposal = board.propose(CHANGE)
    time.sleep(0.001)
    assert board.proposal() is None
    with pytest.raises(EngineDeadError, match="as before"):
        board.outcome(proposal)


def test_one_proposes_at_a_time_until_it_dies(memory, board):
    code = (
        "import sys; from weft.ring.target_board import TargetBoard\n"
        "board = TargetBoard(int(sys.argv[1]))\n"
        "with board.proposing():\n"
        "    print('has it', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(memory)]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory]
    )
    try:
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(EngineBusyError), board.proposing():
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    with board.proposing():
        pass


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_half_written_counts_as_not_there(memory, board, place):
    """The verdict before it is still valid."""
    for tpot_s in (0.05, 0.06):
        change = TargetChange({"interactive": {"tpot_s": tpot_s}})
        board.answer(board.propose(change), change, None)
    board.propose(CHANGE)
    os.pwrite(memory, b"torn", place * target_board.PLACE_BYTES + 40)
    other = TargetBoard(memory)
    left = {0: 0.06, 1: 0.05, 2: 0.06}  # the second verdict stands in place 1
    assert other.kept().classes["interactive"]["tpot_s"] == left[place]
    assert (other.proposal() is None) == (place == 0)
    proposal = other.propose(CHANGE)
    other.answer(proposal, CHANGE, None)
    assert other.outcome(proposal)
    assert other.kept() == CHANGE


def test_a_change_that_does_not_fit_is_refused(board):
    with pytest.raises(ParameterError, match="so many classes"):
        board.propose(TargetChange({f"class-{i}": {"tpot_s": 0.1} for i in range(500)}))
    assert board.proposal() is None
