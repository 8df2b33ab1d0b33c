"""The thread that computes experts for a device: the bits of the native op, whoever asks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from weft.core.errors import HostWorkerError
from weft.kernels.arrays import numpy_dtype
from weft.kernels.cpu import expert_server, experts, matrix
from weft.kernels.cpu.expert_server import ExpertMemory, ExpertServer
from weft.kernels.hosted import GIVEN_UP, HostedExperts

EXPERTS, HIDDEN, SIZE, TOP_K, ROWS, LAYERS = 6, 64, 40, 3, 16, 3


@pytest.fixture(params=["float32", "bfloat16"])
def asked(request):
    """A server of three layers, and the memory by which it is asked."""
    draw, kind = np.random.default_rng(0), numpy_dtype(request.param)

    def packed(name: str, *shape: int):
        return matrix.pack(name, draw.standard_normal(shape, np.float32).astype(kind))

    layers = [
        HostedExperts(
            packed("expert_gate_up", EXPERTS, 2 * SIZE, HIDDEN),
            packed("expert_down", EXPERTS, HIDDEN, SIZE),
            "silu",
        )
        for _ in range(LAYERS)
    ]
    memory = ExpertMemory(
        np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros((ROWS, HIDDEN), kind),
        np.zeros((ROWS, TOP_K), np.float32), np.zeros((ROWS, TOP_K), np.int64),
        np.zeros(1, np.int64), np.zeros((ROWS, HIDDEN), kind),
    )  # fmt: skip
    server = ExpertServer(memory, layers)
    yield server, memory, layers
    server.close()


def answer(memory: ExpertMemory, ticket: int, tokens: int) -> int:
    memory.tokens[0] = tokens
    memory.asked[0] = ticket
    end = time.monotonic() + 20
    while memory.answered[0] < ticket:
        assert time.monotonic() < end
        time.sleep(0)
    return int(memory.answered[0])


def test_each_ticket_is_answered_with_the_bits_of_the_op(asked) -> None:
    """Any number of rows, in any layer; rows of padding are left as they were."""
    server, memory, layers = asked
    draw = np.random.default_rng(1)
    for ticket in range(LAYERS, 40):
        count = ticket % (ROWS + 1)
        memory.x[:] = draw.standard_normal((ROWS, HIDDEN)).astype(memory.x.dtype)
        memory.shares[:] = draw.random((ROWS, TOP_K))
        memory.experts[:] = draw.integers(0, EXPERTS, (ROWS, TOP_K))
        memory.out[:] = 7
        layer = layers[ticket % LAYERS]
        given = (part[:count].copy() for part in (memory.x, memory.shares, memory.experts))
        wanted = experts.moe(*given, layer.gate_up, layer.down, "silu")
        assert answer(memory, ticket, count) == ticket
        assert np.array_equal(memory.out[:count], wanted)
        assert (memory.out[count:] == 7).all()
    assert server.answers == 40 - LAYERS
    assert server.rows == sum(ticket % (ROWS + 1) for ticket in range(LAYERS, 40))
    assert server.busy_s > 0


@pytest.mark.parametrize("woken", [True, False])
def test_who_asks_late_is_answered(asked, woken) -> None:
    """Also without a word that a pass has been ordered."""
    server, memory, _ = asked
    time.sleep(0.4)  # it sleeps by now
    if woken:
        server.wake()
    assert answer(memory, 5, ROWS) == 5


def test_a_wild_number_of_tokens_reads_no_more_than_there_is(asked) -> None:
    _, memory, _ = asked
    for ticket, tokens in ((3, 10**9), (4, -5)):
        assert answer(memory, ticket, tokens) == ticket


def test_an_expert_that_is_none_ends_the_waits(asked) -> None:
    server, memory, _ = asked
    memory.experts[0, 1] = EXPERTS
    assert answer(memory, 3, 1) == GIVEN_UP
    assert isinstance(server.error, HostWorkerError)
    assert f"expert {EXPERTS} is none of {EXPERTS}" in server.error.message


def test_an_answer_after_giving_up_is_none(asked) -> None:
    """What the device may have overtaken is not shown as if in time."""
    server, memory, _ = asked
    memory.answered[0] = GIVEN_UP
    memory.asked[0] = 3
    server.wake()
    time.sleep(0.1)
    assert memory.answered[0] == GIVEN_UP
    assert server.answers == 0


def test_experts_that_do_not_fit_are_refused(asked) -> None:
    _, memory, layers = asked
    narrow = memory.x[:, :32].copy()
    with pytest.raises(HostWorkerError, match="experts of 64 do not fit rows of 32"):
        ExpertServer(ExpertMemory(**{**vars(memory), "x": narrow}), layers)
    with pytest.raises(HostWorkerError, match="without layers"):
        ExpertServer(memory, [])


def test_a_watch_gives_up_what_takes_too_long(monkeypatch) -> None:
    """A thread that computes nothing any more, but has not ended."""
    monkeypatch.setattr(expert_server, "ANSWER_S", 0.2)
    monkeypatch.setattr(expert_server, "CHECK_S", 0.02)
    monkeypatch.setattr(ExpertServer, "_serve", lambda self: self._closing.wait())
    pair = [
        matrix.pack(name, np.ones((EXPERTS, *shape), np.float32))
        for name, shape in (("expert_gate_up", (8, 8)), ("expert_down", (8, 4)))
    ]
    memory = ExpertMemory(
        np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros((1, 8), np.float32),
        np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64), np.zeros(1, np.int64),
        np.zeros((1, 8), np.float32),
    )  # fmt: skip
    server = ExpertServer(memory, [HostedExperts(*pair, "silu")])
    time.sleep(0.4)
    assert server.error is None
    assert answer(memory, 3, 1) == GIVEN_UP
    assert server.error.message == "The host has not computed experts within 0 s."
    server.close()
