"""Waiting for experts of the host in Triton: the very words of the reference."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import where
from weft.kernels.hosted import GIVEN_UP, MOST_LOOKS, HostWord, await_answer
from weft.kernels.triton import hosted

pytestmark = pytest.mark.parametrize("wait", [await_answer, hosted.await_answer])


def word(number: int) -> HostWord:
    memory = torch.tensor([number], device="cpu")
    memory = memory.pin_memory() if where.ON_GPU else memory
    return HostWord(memory, torch.tensor([memory.data_ptr()], device=where.NAME))


def waits(wait, answered: HostWord, ticket: int, gave_up: int = 0, looks: int = 20) -> int:
    """Whether it has given up."""
    told = word(gave_up)
    wait(answered, torch.tensor([ticket], device=where.NAME), told, looks)
    if where.ON_GPU:
        torch.cuda.synchronize()
    return int(told.memory[0])


@pytest.mark.parametrize(
    ("answer", "gave_up"), [(6, 1), (7, 0), (8, 0), (2**40, 0), (0, 1), (GIVEN_UP, 1)]
)
def test_an_answer_ends_the_wait_and_its_lack_is_told(wait, answer, gave_up) -> None:
    assert waits(wait, word(answer), 7) == gave_up


def test_who_has_given_up_waits_for_nothing(wait) -> None:
    start = time.monotonic()
    assert waits(wait, word(0), 7, gave_up=1, looks=MOST_LOOKS) == 1
    assert time.monotonic() - start < 5


def test_an_answer_that_comes_late_is_seen(wait) -> None:
    answered = word(0)
    timer = threading.Timer(0.1, answered.memory.fill_, (7,))
    timer.start()
    assert waits(wait, answered, 7, looks=MOST_LOOKS) == 0
    timer.join()
