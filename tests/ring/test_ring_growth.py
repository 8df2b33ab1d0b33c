"""Outputs that grow: tokens and ends wait for room, and nothing that waits outlives its request."""

from __future__ import annotations

import dataclasses
import mmap
import struct

import pytest
from modelled import info

from weft.core.errors import EngineDeadError, OutOfMemoryError
from weft.core.plan import StepOutputs, Update
from weft.core.types import FinishReason, Request, SamplingParams, TokenLogprob
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.layout import SIZES, State
from weft.ring.segment import create_ring

SLOTS, CONTEXT, FIRST = 4, 8192, 256
SAMPLING = SamplingParams(ignore_eos=True)


class Pair:
    """A small ring, whose engine may be far ahead of its client."""

    def __init__(self, arena_bytes: int = 1 << 20) -> None:
        self.fds = create_ring(SLOTS, min(arena_bytes, 1 << 18), arena_bytes)
        self.inbox = RingInbox([self.fds], spin_s=0)
        self.inbox.write_info(dataclasses.replace(info(), max_model_len=CONTEXT))
        self.client = RingClient(self.fds)
        self.updates: dict[int, list[Update]] = {}

    def open(self, number: int, sampling: SamplingParams = SAMPLING) -> Request:
        self.client.submit([Request(number, (1, 2, 3), sampling)], self.sink)
        ((request,), _) = self.inbox.receive()
        return request

    def sink(self, updates) -> None:
        for update in updates:
            self.updates.setdefault(update.sequence_id, []).append(update)

    def say(self, request: Request, tokens: range) -> None:
        self.inbox.publish(StepOutputs([(request.id, token) for token in tokens], []))

    def finish(self, request: Request, reason: FinishReason, token: int | None = None) -> None:
        self.inbox.publish(StepOutputs([], [Update(request.id, token, finish=reason)]))

    def go_on(self) -> list[tuple[int, FinishReason]]:
        """Both sides look around until neither has news; what the engine is to end."""
        ends: list[tuple[int, FinishReason]] = []
        while self.client.poll():
            ends += self.inbox.receive()[1]
        return ends

    def tokens(self, number: int) -> list[int | None]:
        return [update.token for update in self.updates[number]]

    def states(self) -> list[int | None]:
        return _native.Page(self.fds.memory).states()

    def close(self) -> None:
        self.inbox.close()
        self.client.close()
        self.fds.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def all_is_free(pair: Pair, client: RingClient | None = None) -> bool:
    ring = (client or pair.client)._ring
    return (ring.free_slots, ring.free_memory, ring.free_bytes) == (SLOTS, 1 << 18, 1 << 20)


@pytest.mark.parametrize("tokens", [FIRST, FIRST + 1, 2 * FIRST, 5000, CONTEXT - 3])
def test_an_engine_that_is_ahead_waits_with_its_tokens_and_its_end(pair, tokens):
    request = pair.open(1)
    pair.say(request, range(tokens - 1))
    pair.finish(request, FinishReason.LENGTH, tokens - 1)
    assert (pair.inbox.in_flight == 1) == (tokens > FIRST)
    pair.go_on()
    assert pair.tokens(1) == list(range(tokens))
    assert [update.finish for update in pair.updates[1][-2:]] == [None, FinishReason.LENGTH]
    assert pair.inbox.in_flight == 0
    assert all_is_free(pair)


def test_an_end_without_a_token_waits_for_those_before_it(pair):
    request = pair.open(1)
    pair.say(request, range(1000))
    pair.finish(request, FinishReason.STOP)
    pair.go_on()
    assert pair.tokens(1) == [*range(1000), None]
    assert pair.updates[1][-1].finish is FinishReason.STOP


def test_log_probabilities_wait_with_their_tokens(pair):
    request = pair.open(1, dataclasses.replace(SAMPLING, logprobs=3))
    said = [TokenLogprob(i, -i / 4, 1, ((i, -i / 4), (7, -9.0))[: i % 3]) for i in range(900)]
    updates = [Update(request.id, entry.token, entry, 2) for entry in said]
    pair.inbox.publish(StepOutputs([], updates))
    pair.go_on()
    assert [update.logprob for update in pair.updates[1]] == said


def test_what_waits_does_not_pass_what_has_room(pair):
    first, second = pair.open(1), pair.open(2)
    pair.say(first, range(600))
    pair.say(second, range(10))
    pair.go_on()
    pair.say(first, range(600, 1500))
    pair.go_on()
    assert pair.tokens(1) == list(range(1500))
    assert pair.tokens(2) == list(range(10))


def test_an_output_never_gets_longer_than_was_asked_for(pair):
    request = pair.open(1, dataclasses.replace(SAMPLING, max_tokens=300))
    pair.say(request, range(300))  # most of them wait
    with pytest.raises(ValueError, match="outgrown"):
        pair.say(request, range(1))


def test_tokens_that_waited_when_their_engine_died_are_computed_again(pair):
    request = pair.open(1)
    pair.say(request, range(600))
    pair.go_on()
    pair.say(request, range(600, 5000))
    successor = RingInbox([pair.fds], spin_s=0)
    ((again,), _) = successor.receive()
    kept = len(again.output)
    assert list(again.output) == list(range(kept))
    assert 600 < kept < 5000
    successor.publish(StepOutputs([(again.id, token) for token in range(kept, 5000)], []))
    while pair.client.poll():
        successor.receive()
    assert pair.tokens(1) == list(range(5000))
    successor.close()


def test_a_request_that_is_cancelled_while_its_end_waits_ends_at_once(pair):
    request = pair.open(1)
    pair.say(request, range(1000))
    pair.finish(request, FinishReason.LENGTH)
    pair.client.cancel(1)
    assert pair.inbox.receive() == ((), ())  # the engine has nothing more to do
    assert pair.inbox.in_flight == 0
    pair.client.poll()
    assert pair.updates[1][-1].finish is FinishReason.CANCELLED
    assert all_is_free(pair)


def test_a_request_that_is_cancelled_while_its_tokens_wait_ends_at_once(pair):
    request = pair.open(1)
    pair.say(request, range(1000))
    pair.client.cancel(1, FinishReason.STOP)
    assert pair.inbox.receive()[1] == [(request.id, FinishReason.STOP)]
    pair.finish(request, FinishReason.STOP)
    assert pair.inbox.in_flight == 0
    pair.client.poll()
    assert pair.updates[1][-1].finish is FinishReason.STOP


def test_an_engine_that_is_closed_waits_for_nobody(pair):
    ended, going_on = pair.open(1), pair.open(2)
    for request in (ended, going_on):
        pair.say(request, range(1000))
    pair.finish(ended, FinishReason.LENGTH)
    pair.inbox.close()
    pair.client.poll()
    for number in (1, 2):
        assert isinstance(pair.updates[number][-1].error, EngineDeadError)
    assert all_is_free(pair)


def test_nothing_waits_for_a_request_plane_that_is_gone(pair):
    ended, going_on = pair.open(1), pair.open(2)
    for request in (ended, going_on):
        pair.say(request, range(1000))
    pair.finish(ended, FinishReason.LENGTH)
    pair.client.close()
    assert pair.inbox.receive()[1] == [(going_on.id, FinishReason.CANCELLED)]
    pair.finish(going_on, FinishReason.CANCELLED)
    assert pair.states() == [State.EMPTY] * SLOTS


def test_an_end_that_comes_after_its_request_plane_has_gone_waits_for_nobody(pair):
    """The next one is there by then, and asks for the end that the engine was asked for before."""
    request = pair.open(1)
    pair.say(request, range(1000))
    pair.client.close()
    assert pair.inbox.receive()[1] == [(request.id, FinishReason.CANCELLED)]
    successor = RingClient(pair.fds)
    pair.finish(request, FinishReason.CANCELLED)
    pair.inbox.receive()
    successor.poll()
    assert pair.inbox.in_flight == 0
    assert all_is_free(pair, successor)
    successor.close()


def test_an_engine_that_frees_the_slot_of_a_dead_request_plane_late_does_no_harm(pair):
    """By then the next request plane has another request there."""
    pair.client.submit([Request(1, (1, 2, 3), SAMPLING)], pair.sink)
    offsets = _native.offsets(SLOTS)
    with mmap.mmap(pair.fds.memory, 0) as memory:
        (asked,) = struct.unpack_from("Q", memory, offsets["asked"])
        generation = (asked >> 24) - 1 & 0xFFFFFF
        struct.pack_into("Q", memory, offsets["given"], 1 << 48 | generation << 24 | State.EMPTY)
    assert not pair.client.poll()
    ((request,), _) = pair.inbox.receive()
    pair.finish(request, FinishReason.LENGTH, 9)
    pair.client.poll()
    assert pair.tokens(1) == [9]
    assert all_is_free(pair)


def test_a_new_request_plane_frees_all_pieces_of_what_is_left(pair):
    request = pair.open(1)
    pair.say(request, range(200))
    pair.go_on()
    pair.say(request, range(200, 3000))
    pair.client.poll()
    successor = RingClient(pair.fds)
    assert not all_is_free(pair, successor)
    (end,) = pair.inbox.receive()[1]
    assert end == (request.id, FinishReason.CANCELLED)
    pair.finish(request, FinishReason.CANCELLED)  # though its tokens still wait
    successor.poll()
    assert all_is_free(pair, successor)
    successor.close()


def test_a_request_that_finds_no_room_to_grow_fails_alone():
    pair = Pair(arena_bytes=3 << 13)
    requests = [pair.open(number, dataclasses.replace(SAMPLING, max_tokens=4000))
                for number in (1, 2)]  # fmt: skip
    ends = []
    for start in range(0, 4000, 100):
        for request in requests:
            if request.id not in {sequence_id for sequence_id, _ in ends}:
                pair.say(request, range(start, start + 100))
        ends += pair.go_on() + list(pair.inbox.receive()[1])
    assert len(ends) == 1
    lost = [request.id for request in requests].index(ends[0][0])
    failed, whole = 1 + lost, 2 - lost
    pair.finish(requests[lost], FinishReason.ERROR)
    pair.client.poll()
    error = pair.updates[failed][-1].error
    assert isinstance(error, OutOfMemoryError)
    assert "ring_memory" in error.message
    said = pair.tokens(failed)[:-1]
    assert said == list(range(len(said)))
    assert pair.tokens(whole) == list(range(4000))
    pair.finish(requests[1 - lost], FinishReason.LENGTH)
    pair.client.poll()
    assert pair.client._ring.free_bytes == 3 << 13
    pair.close()


@pytest.mark.parametrize("tokens", [FIRST - 1, 1000])
@pytest.mark.parametrize("offset", [0, 7, 1 << 40, (1 << 64) - 64])
def test_a_piece_that_cannot_be_right_is_not_written_to(pair, offset, tokens):
    """It lies in the request itself, between units, or outside."""
    request = pair.open(1)
    pair.say(request, range(tokens))
    pair.client.poll()  # which gives the output its next pieces
    at = _native.offsets(SLOTS)["slots"] + SIZES["more_offset"]
    with mmap.mmap(pair.fds.memory, 0) as memory:
        struct.pack_into("Q", memory, at, offset)
    assert pair.inbox.receive()[1] == [(request.id, FinishReason.ERROR)]
    pair.finish(request, FinishReason.ERROR)
    pair.client.poll()
    assert pair.updates[1][-1].error.code == "ring_corrupt"
    assert pair.tokens(1)[:-1] == list(range(min(tokens, FIRST)))
