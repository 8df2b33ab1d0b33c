"""One client and one inbox in one process: transfers, refusals, invariants."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
import threading

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from modelled import info

from depth import searching
from weft.core.errors import (
    EngineBusyError,
    EngineDeadError,
    InvariantError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    ParameterError,
    WeftError,
)
from weft.core.plan import PromptLogprobs, StepOutputs, Update
from weft.core.types import NUMBERS, FinishReason, Request, SamplingParams, TokenLogprob
from weft.ring import _native
from weft.ring.client import RingClient
from weft.ring.codec import (
    HEAD,
    PACKED,
    SAMPLING,
    STAY,
    pack_sampling,
    unpack_numbers,
    unpack_token_lists,
)
from weft.ring.inbox import RingInbox
from weft.ring.layout import SIZES, Bell, EngineInfo, Side, State
from weft.ring.recover import SHARED
from weft.ring.segment import ARENA_PER_MEMORY, RingFds, create_ring

NEUTRAL = SamplingParams(max_tokens=8).with_defaults({})


class Pair:
    """A ring with both of its sides, driven by hand."""

    def __init__(self, slots: int = 8, arena_bytes: int = 1 << 16, **options) -> None:
        self.fds = create_ring(slots, arena_bytes)
        self.inbox = RingInbox([self.fds], spin_s=0, **options)
        self.inbox.write_info(info())
        self.client = RingClient(self.fds)
        self.updates: dict[int, list[Update]] = {}

    def sink(self, updates) -> None:
        for update in updates:
            self.updates.setdefault(update.sequence_id, []).append(update)

    def submit(self, *requests: Request) -> None:
        self.client.submit(requests, self.sink)

    def receive(self) -> list[Request]:
        return list(self.inbox.receive()[0])

    def publish(self, *updates: Update) -> None:
        self.inbox.publish(StepOutputs([], list(updates)))
        self.client.poll()

    def end(self, sequence_id: int) -> None:
        self.publish(Update(sequence_id, None, finish=FinishReason.CANCELLED))

    def close(self) -> None:
        self.inbox.close()
        self.client.close()
        self.fds.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def request(number: int, tokens: int = 3, sampling: SamplingParams = NEUTRAL) -> Request:
    return Request(number, tuple(range(1, tokens + 1)), sampling)


# -- what crosses ---------------------------------------------------------------------------------


def sampling_params():
    """A grammar does not go with ``ignore_eos``."""
    ends = {"ignore_eos": st.booleans()}, {"grammar": st.text(min_size=1, max_size=40)}
    return st.one_of(*(params_with(**end) for end in ends))


def params_with(**more):
    token = st.integers(0, 996)
    numbers = {name: values_of(NUMBERS[name]) for name in (*PACKED, *HEAD)}
    chosen = {
        "max_tokens": st.integers(100, 2**31 - 1),
        "min_tokens": st.integers(0, 100),
        "ignore_eos": st.just(False),
        "logit_bias": st.dictionaries(token, st.floats(-100, 100), max_size=20),
        "stop_token_ids": st.lists(token, max_size=20).map(tuple),
        "allowed_token_ids": st.lists(token, max_size=20).map(tuple),
        "bad_token_sequences": st.lists(
            st.lists(token, min_size=1, max_size=5).map(tuple), max_size=5
        ).map(tuple),
        "logprob_token_ids": st.lists(token, max_size=20).map(tuple),
    }
    return st.builds(SamplingParams, **{**numbers, **chosen, **more})


def values_of(declared):
    """All values of a number or switch, None among them where that is allowed."""
    if declared.kind == "bool":
        values = st.booleans()
    elif declared.kind == "int":
        values = st.integers(declared.low, declared.high)
    else:
        values = st.floats(declared.low, declared.high, exclude_min=declared.above)
    return st.none() | values if declared.optional else values


@given(
    params=sampling_params(),
    prompt=st.lists(st.integers(0, 996), min_size=1, max_size=50).map(tuple),
    eos=st.lists(st.integers(0, 996), max_size=5).map(tuple),
    name=st.sampled_from(["interactive", "batch", "größer"]),
    salt=st.binary(max_size=40),
    embed=st.booleans(),
)
@searching(60)
def test_every_field_of_a_request_crosses(params, prompt, eos, name, salt, embed):
    pair = Pair(slots=1, arena_bytes=1 << 20, vocab_size=997)
    sent = Request(5, prompt, params, eos, name, salt, embed)
    pair.submit(sent)
    (got,) = pair.receive()
    assert dataclasses.replace(got, id=5) == sent
    assert list(got.sampling.logit_bias) == list(params.logit_bias)
    pair.close()


@pytest.mark.parametrize("words", [[1], [1, 5], [0, 0, 2, 4], [3, 1, 2], [2**32 - 1, 1], [1, 5, 1]])
def test_lists_of_token_ids_that_are_cut_off_are_refused(words):
    with pytest.raises(ParameterError):
        unpack_token_lists(words)


def test_a_slot_whose_token_ids_cannot_be_right_is_refused_alone():
    pair = Pair(slots=4, arena_bytes=1 << 20, vocab_size=997)
    for number, wrong in enumerate(({"allowed_token_ids": (997,)}, {"logit_bias": {1000: 1.0}})):
        pair.submit(request(number, sampling=SamplingParams(max_tokens=8, **wrong)))
    pair.submit(request(5, sampling=SamplingParams(max_tokens=8, allowed_token_ids=(996,))))
    (got,) = pair.receive()
    assert got.sampling.allowed_token_ids == (996,)
    pair.client.poll()
    params = [pair.updates[number][0].error.param for number in range(2)]
    assert params == ["allowed_token_ids", "logit_bias"]
    pair.close()


def test_every_sampling_parameter_crosses_or_stays():
    """A new parameter must be given a place: in the block, in a section, or in ``STAY``."""
    sections = {"logit_bias", "stop_token_ids", "grammar"}
    sections |= {"allowed_token_ids", "bad_token_sequences", "logprob_token_ids"}
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == sections | set(PACKED) | HEAD | STAY


@pytest.mark.parametrize("name", [*PACKED, *sorted(HEAD)])
def test_each_number_crosses_alone(name):
    pair = Pair(slots=1, arena_bytes=1 << 20)
    declared = NUMBERS[name]
    value = declared.high if declared.kind != "bool" else not declared.default
    neutral = SamplingParams()
    pair.submit(request(1, sampling=dataclasses.replace(neutral, **{name: value})))
    (got,) = pair.receive()
    changed = {n for n in NUMBERS if getattr(got.sampling, n) != getattr(neutral, n)}
    assert (changed, getattr(got.sampling, name)) == ({name}, value)
    pair.close()


def test_builds_with_other_sampling_parameters_refuse_each_other(pair, monkeypatch):
    """Whichever side is the other one; those who read none of them do not mind."""
    for side, attach in (("port", RingClient), ("inbox", lambda fds: RingInbox([fds]))):
        monkeypatch.setattr(f"weft.ring.{side}.SAMPLING", SAMPLING ^ 1)
        with pytest.raises(ParameterError, match="other sampling parameters"):
            attach(pair.fds)
    assert _native.Page(pair.fds.memory).info()
    pair.submit(request(1))
    assert len(pair.receive()) == 1  # nothing was disturbed


@pytest.mark.parametrize("size", [-8, -1, 1, 8])
def test_a_block_of_another_size_is_refused(size):
    packed = pack_sampling(request(1))
    with pytest.raises(InvariantError):
        unpack_numbers((packed + bytes(8))[: len(packed) + size])


def scored(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -1.5, 3, tuple((i, -i / 4) for i in range(top)))


def test_every_kind_of_update_crosses(pair):
    params = SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=1)
    pair.submit(request(1), request(2, 4, params), request(3), request(4))
    plain, full, failed, cancelled = (r.id for r in pair.receive())
    error = NonFiniteLogitsError("Row 3 is not finite. ü", param="prompt")
    pair.inbox.publish(
        StepOutputs(
            [(plain, 11)],
            [
                Update(full, None, prompt_logprobs=PromptLogprobs(1, (scored(2, 1), scored(3, 1)))),
                Update(failed, None, finish=FinishReason.ERROR, error=error),
            ],
        )
    )
    pair.client.poll()
    pair.publish(
        Update(full, None, prompt_logprobs=PromptLogprobs(3, (scored(4, 1),))),
        Update(full, 12, scored(12, 2), 2),
        Update(full, 13, scored(13, 0), 2, FinishReason.LENGTH),
        Update(plain, 14, None, 3, FinishReason.STOP),
        Update(cancelled, None, finish=FinishReason.CANCELLED),
    )
    got = pair.updates
    assert got[1] == [Update(1, 11), Update(1, 14, None, 3, FinishReason.STOP)]
    assert got[2] == [
        Update(2, None, prompt_logprobs=PromptLogprobs(1, (scored(2, 1), scored(3, 1)))),
        Update(2, None, prompt_logprobs=PromptLogprobs(3, (scored(4, 1),))),
        Update(2, 12, scored(12, 2), 2),
        Update(2, 13, scored(13, 0), 2, FinishReason.LENGTH),
    ]
    (end,) = got[3]
    assert type(end.error) is NonFiniteLogitsError
    assert (end.error.message, end.error.param) == (error.message, "prompt")
    assert end.error.retry_after_s is None
    assert got[4] == [Update(4, None, finish=FinishReason.CANCELLED)]
    assert pair.client.in_flight == pair.inbox.in_flight == 0


def test_long_and_unknown_errors_are_shortened_inside_no_character(pair):
    class OddError(WeftError):
        http_status, code, retry_after_s = 418, "odd", 7

    pair.submit(request(1))
    (got,) = pair.receive()
    pair.publish(Update(got.id, None, finish=FinishReason.ERROR, error=OddError("ü" * 300)))
    error = pair.updates[1][0].error
    assert (error.http_status, error.code, error.retry_after_s) == (418, "odd", 7)
    assert error.message.strip("ü") == ""
    assert 100 < len(error.message) < 150


def test_requests_arrive_in_order_and_ids_are_unique(pair):
    for number in (5, 3, 9, 1):
        pair.submit(request(number, tokens=number))
    got = pair.receive()
    assert [len(r.prompt) for r in got] == [5, 3, 9, 1]
    for r in got:
        pair.end(r.id)
    pair.submit(request(5))
    assert pair.receive()[0].id not in {r.id for r in got}


def test_several_rings_share_one_engine():
    rings = [create_ring(4, 1 << 16) for _ in range(3)]
    inbox = RingInbox(rings)
    inbox.write_info(info())
    clients = [RingClient(fds) for fds in rings]
    got: list[list[Update]] = [[] for _ in clients]
    for client, own in zip(clients, got, strict=True):
        client.submit([request(7)], own.extend)
    requests, _ = inbox.receive()
    assert len({r.id for r in requests}) == 3
    ends = [Update(r.id, i, finish=FinishReason.STOP) for i, r in enumerate(requests)]
    inbox.publish(StepOutputs([], ends))
    for i, (client, own) in enumerate(zip(clients, got, strict=True)):
        client.poll()
        assert own == [Update(7, i, finish=FinishReason.STOP)]
        client.close()
    inbox.close()
    for fds in rings:
        fds.close()


def test_info_page(pair):
    assert pair.client.info() == info()
    numbers = range(1, len(_native.INFO_FIELDS) + 1)
    whole = EngineInfo(*numbers)
    pair.inbox.write_info(whole)
    assert pair.client.info() == whole


# -- cancelling, waiting, lag ---------------------------------------------------------------------


def test_cancel_before_and_after_the_engine_has_it(pair):
    pair.submit(request(1), request(2))
    pair.client.cancel(1)
    (second,) = pair.receive()
    pair.client.poll()
    assert pair.updates[1] == [Update(1, None, finish=FinishReason.CANCELLED)]
    pair.client.cancel(2, FinishReason.STOP)
    pair.client.cancel(2)  # one way: the first reason stays
    pair.client.cancel(77)
    assert pair.inbox.receive() == ([], [(second.id, FinishReason.STOP)])
    assert pair.inbox.receive() == ((), ())
    pair.end(second.id)
    pair.client.cancel(2)
    assert pair.inbox.receive() == ((), ())


def test_wake_ups_are_written_for_sleepers_only(pair):
    def rung() -> int:
        try:
            return os.eventfd_read(pair.fds.wake)
        except BlockingIOError:
            return 0

    pair.submit(request(1))
    (got,) = pair.receive()
    rung()
    pair.inbox.publish(StepOutputs([(got.id, 1)], []))
    assert rung() == 0
    assert not pair.client.arm()  # there is news
    pair.client.poll()
    assert pair.client.arm()
    pair.inbox.publish(StepOutputs([(got.id, 2)], []))
    pair.inbox.publish(StepOutputs([(got.id, 3)], []))
    assert rung() == 1
    pair.client.poll()
    assert [u.token for u in pair.updates[1]] == [1, 2, 3]


def test_a_sink_that_fails_takes_no_other_with_it(pair, caplog):
    def broken(_updates) -> None:
        raise RuntimeError("a bug")

    pair.client.submit([request(1)], broken)
    pair.submit(request(2))
    first, second = pair.receive()
    pair.inbox.publish(StepOutputs([(first.id, 1), (second.id, 2)], []))
    assert pair.client.poll()
    assert [u.token for u in pair.updates[2]] == [2]
    assert "a bug" in caplog.text


# -- limits ---------------------------------------------------------------------------------------


def test_a_full_ring_refuses_all_or_nothing(pair):
    pair.submit(*(request(i) for i in range(7)))
    with pytest.raises(EngineBusyError) as busy:
        pair.submit(request(20), request(21))
    assert busy.value.http_status == 429
    assert len(pair.receive()) == 7
    pair.submit(request(20))
    (last,) = pair.receive()
    pair.end(last.id)
    pair.submit(request(22))
    assert len(pair.receive()) == 1


def test_a_full_arena_refuses_and_recovers():
    pair = Pair(slots=64, arena_bytes=8192)

    def fill(first: int) -> None:
        for number in range(first, first + 64):
            pair.submit(request(number, tokens=300))

    with pytest.raises(EngineBusyError):
        fill(0)
    got = pair.receive()
    assert 0 < len(got) < 10
    for r in got:
        pair.end(r.id)
    assert pair.client._ring.free_memory == 8192
    assert pair.client._ring.free_bytes == ARENA_PER_MEMORY * 8192
    with pytest.raises(EngineBusyError):
        fill(100)
    assert len(pair.receive()) == len(got)
    pair.close()


def test_what_can_never_fit_is_refused_by_name():
    pair = Pair(slots=2, arena_bytes=4096)
    with pytest.raises(ParameterError) as refused:
        pair.submit(request(1, tokens=2000))
    assert refused.value.param == "max_tokens"
    with pytest.raises(ParameterError):
        pair.submit(request(1, tokens=0))
    with pytest.raises(ParameterError, match="in use"):
        pair.submit(request(1), request(1))
    assert pair.client._ring.free_slots == 2
    assert pair.client._ring.free_memory == 4096
    assert pair.client._ring.free_bytes == ARENA_PER_MEMORY * 4096
    pair.close()


def test_a_ring_without_engine_says_so():
    fds = create_ring(2, 4096)
    client = RingClient(fds)
    with pytest.raises(EngineDeadError):
        client.submit([request(1, sampling=SamplingParams())], print)
    client.close()
    with pytest.raises(EngineDeadError):
        client.submit([request(1)], print)
    fds.close()


def test_an_unlimited_request_gets_the_rest_of_the_context(pair):
    pair.submit(request(1, tokens=500, sampling=SamplingParams()))
    (got,) = pair.receive()
    for token in range(12):
        pair.inbox.publish(StepOutputs([(got.id, token)], []))
    with pytest.raises(ValueError, match="outgrown"):
        pair.inbox.publish(StepOutputs([(got.id, 13)], []))


def test_the_vocabulary_is_checked_by_the_engine():
    pair = Pair(vocab_size=3)
    pair.submit(request(1, tokens=5))
    assert pair.receive() == []
    pair.client.poll()
    (end,) = pair.updates[1]
    assert isinstance(end.error, ParameterError)
    assert end.error.param == "prompt"
    pair.close()


# -- broken, old and foreign memory ---------------------------------------------------------------


def test_another_version_is_refused():
    fds = create_ring(2, 4096)
    os.pwrite(fds.memory, struct.pack("I", 99), SIZES["version_offset"])
    for attach in (lambda: RingClient(fds), lambda: RingInbox([fds])):
        with pytest.raises(ParameterError, match="version 99"):
            attach()
    fds.close()


@pytest.mark.parametrize("keep", [0, 100, 4096, 8192, 9000])
def test_a_truncated_segment_is_refused(keep):
    whole = create_ring(2, 4096)
    short = os.memfd_create("short")
    os.write(short, os.pread(whole.memory, keep, 0))
    for attach in (RingClient, lambda fds: RingInbox([fds])):
        with pytest.raises(ParameterError, match=r"truncated|not hold a ring"):
            attach(RingFds(short, whole.wake))
    os.close(short)
    whole.close()


def test_what_is_no_ring_is_refused():
    read_end, write_end = os.pipe()
    zeros = os.memfd_create("zeros")
    os.truncate(zeros, 1 << 16)
    for fd in (read_end, zeros, 10**6):
        with pytest.raises(ParameterError):
            RingClient(RingFds(fd, -1))
    for fd in (read_end, write_end, zeros):
        os.close(fd)
    for sizes in ((0, 4096), (70_000, 4096), (1, 10), (1, 2**60)):
        with pytest.raises(ParameterError):
            create_ring(*sizes)
    with pytest.raises(ParameterError):
        RingFds.parse("7")


def test_the_memory_is_private_and_cannot_be_shrunk():
    fds = create_ring(2, 4096)
    assert os.fstat(fds.memory).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fds.memory)
    with pytest.raises(PermissionError):
        os.truncate(fds.memory, 4096)
    fds.close()


PLACES, PLACES8 = _native.offsets(2), _native.offsets(8)
INPUT = PLACES["slots"]  # each slot begins with its input
# All that belongs to the first slot: both words of it, and its payload.
OF_A_SLOT = [
    *range(PLACES["asked"], PLACES["asked"] + 8),
    *range(PLACES["given"], PLACES["given"] + 16),
    *range(PLACES["slots"], PLACES["slots"] + SIZES["slot_bytes"]),
]


@given(
    noise=st.lists(
        st.tuples(
            st.integers(0, SIZES["input_bytes"] // 8 - 1),
            st.one_of(
                st.integers(0, 2**64 - 1),
                st.integers(0, 2**17),
                st.sampled_from([2**63, 2**64 - 64, 1 << 16, 0]),
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
@searching(150, suppress_health_check=list(HealthCheck))
def test_a_corrupted_slot_is_rejected_not_followed(noise):
    """Whatever stands in the slot: an error or a valid request, never a crash or a hang."""
    pair = Pair(slots=2, arena_bytes=1 << 16)
    params = SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1)
    pair.submit(request(1, sampling=params))
    with mmap.mmap(pair.fds.memory, 0) as memory:
        for word, value in noise:
            struct.pack_into("Q", memory, INPUT + 8 * word, value)
    try:
        for got in pair.receive():
            end = Update(got.id, 5, finish=FinishReason.STOP)
            assert pair.inbox._say(end) in (True, False)
        pair.client.poll()
        ends = [u for u in pair.updates.get(1, []) if u.finish is not None]
        assert len(ends) == 1
    finally:
        pair.close()


def move(pair: Pair, slot: int, size: int, by: int) -> None:
    """Move all that a slot has in the arena, whatever lies there."""
    at = PLACES8["slots"] + slot * SIZES["slot_bytes"] + SIZES["extents_offset"]
    with mmap.mmap(pair.fds.memory, 0) as memory:
        (start,) = struct.unpack_from("Q", memory, at)
        memory.move(PLACES8["arena"] + start + by, PLACES8["arena"] + start, size)
        for extent in range(at, at + 16 * SIZES["extents"], 16):
            (offset,) = struct.unpack_from("Q", memory, extent)
            struct.pack_into("Q", memory, extent, offset + by)


def test_a_request_in_memory_of_one_that_is_open_is_refused():
    """Two are open, with room for a third one before, between and behind them."""
    size, taken = 448, []
    for by in range(0, 4 * size + 1, 64):
        pair = Pair()
        pair.submit(*(request(i, tokens=70) for i in range(4)))
        got = pair.receive()
        for i in (0, 2):
            pair.end(got[i].id)
        pair.submit(request(9, tokens=70))
        look = pair.client._ring.look(0)
        assert (look["extent_offset"], look["extent_bytes"]) == (0, size)
        move(pair, 0, size, by)
        if pair.receive():
            taken.append(by)
        else:
            pair.client.poll()
            assert pair.updates[9][0].error.code == "ring_corrupt"
        pair.close()
    assert taken == [0, 2 * size, 4 * size]


@given(noise=st.binary(min_size=8, max_size=len(OF_A_SLOT)), at=st.integers(0, len(OF_A_SLOT) - 8))
@searching(150, suppress_health_check=list(HealthCheck))
def test_random_bytes_over_a_slot_hang_or_crash_nobody(noise, at):
    pair = Pair(slots=2, arena_bytes=1 << 16)
    pair.submit(request(1), request(2))
    got = pair.receive()
    with mmap.mmap(pair.fds.memory, 0) as memory:
        for place, byte in zip(OF_A_SLOT[at:], noise, strict=False):
            memory[place] = byte
    for r in got:
        pair.inbox._say(Update(r.id, 3))
        pair.inbox._say(Update(r.id, 4, finish=FinishReason.STOP))
    pair.inbox._engine.flush(Bell["OUTPUT"])
    pair.client.poll()
    untouched = 2 if got[0].id & 0xFFFF == 0 else 1
    assert [u.token for u in pair.updates[untouched]] in ([3, 4], [4])
    pair.inbox.receive()
    pair.close()


@given(noise=st.binary(min_size=1, max_size=2000), at=st.integers(0, (1 << 16) - 1))
@searching(100, suppress_health_check=list(HealthCheck))
def test_random_bytes_in_the_arena_are_an_error_or_a_request(noise, at):
    pair = Pair(slots=2, arena_bytes=1 << 16, vocab_size=997)
    params = SamplingParams(
        max_tokens=8, logprobs=1, logit_bias={3: 1.0}, stop_token_ids=(4,), temperature=0.5
    )
    pair.submit(request(1, 20, params))
    start = os.fstat(pair.fds.memory).st_size - (1 << 16)
    at %= 512  # where the request lies
    with mmap.mmap(pair.fds.memory, 0) as memory:
        memory[start + at : start + at + len(noise)] = noise
    got = pair.receive()
    pair.client.poll()
    if got:
        (only,) = got
        assert max(only.prompt) < 997
        assert math.isfinite(only.sampling.temperature or 0)
    else:
        assert pair.updates[1][-1].finish is FinishReason.ERROR
    pair.close()


# -- states, handles, recovery --------------------------------------------------------------------

LIFE = {
    (State.EMPTY, State.WRITING): Side.REQUEST,
    (State.WRITING, State.PREFILL_PENDING): Side.REQUEST,
    (State.WRITING, State.EMPTY): Side.REQUEST,
    (State.PREFILL_PENDING, State.PREFILL_PROCESSING): Side.ENGINE,
    (State.PREFILL_PENDING, State.DECODE_COMPLETED): Side.ENGINE,
    (State.PREFILL_PROCESSING, State.DECODE_PROCESSING): Side.ENGINE,
    (State.PREFILL_PROCESSING, State.DECODE_COMPLETED): Side.ENGINE,
    (State.DECODE_PROCESSING, State.DECODE_PAUSED): Side.ENGINE,
    (State.DECODE_PROCESSING, State.DECODE_COMPLETED): Side.ENGINE,
    (State.DECODE_PAUSED, State.DECODE_PROCESSING): Side.ENGINE,
    (State.DECODE_PAUSED, State.DECODE_COMPLETED): Side.ENGINE,
    (State.PREFILL_PROCESSING, State.PREFILL_PENDING): Side.RECOVERY,
    (State.DECODE_PROCESSING, State.PREFILL_PENDING): Side.RECOVERY,
    (State.DECODE_PAUSED, State.PREFILL_PENDING): Side.RECOVERY,
    (State.DECODE_COMPLETED, State.EMPTY): Side.REQUEST,
}


def test_the_transition_table():
    """Exactly these moves, and each by the side that owns the state (or by recovery)."""
    for before in State:
        for after in State:
            movers = [by for by in Side if _native.may_move(before, after, by)]
            expected = LIFE.get((before, after))
            assert movers == ([] if expected is None else [expected])
            if expected in (Side.REQUEST, Side.ENGINE):
                assert _native.owner(before) == expected


def tagged_words(slots: int) -> list[int]:
    """Where the words with generations of every slot are."""
    places = _native.offsets(slots)
    words = [places["asked"] + 8 * i for i in range(slots)]
    words += [places["given"] + 8 * i for i in range(2 * slots)]
    prompts = places["slots"] + SIZES["prompt_published_offset"]
    return words + [prompts + SIZES["slot_bytes"] * i for i in range(slots)]


def test_requests_that_are_given_up_before_the_engine_sees_them_use_no_generation(pair):
    """Else they could go round to one that the engine has answered."""
    pair.submit(request(1), request(2))
    first, _ = pair.receive()
    pair.end(first.id)
    for number in range(3):
        with pytest.raises(EngineBusyError):
            pair.submit(*(request(10 * number + i) for i in range(3, 11)))
    assert [pair.client._ring.look(slot)["generation"] for slot in range(3)] == [1, 1, 0]


def test_a_slot_in_which_a_word_of_the_engine_is_ahead_is_never_used():
    for word in tagged_words(1)[1:]:
        pair = Pair(slots=1)
        with mmap.mmap(pair.fds.memory, 0) as memory:
            struct.pack_into("Q", memory, word, 7 << 24)
        with pytest.raises(EngineBusyError):
            pair.submit(request(1))
        pair.close()


def test_generations_wrap_around(pair):
    last = 2**24 - 1
    with mmap.mmap(pair.fds.memory, 0) as memory:
        for word in tagged_words(8):
            struct.pack_into("Q", memory, word, (last - 1) << 24)
    for round_number in range(3):
        pair.submit(*(request(i) for i in range(8)))
        got = pair.receive()
        assert len(got) == 8
        seen = pair.client._ring.look(0)["generation"]
        assert seen == (last + round_number) % 2**24
        pair.client.cancel(3)
        assert len(pair.inbox.receive()[1]) == 1
        for r in got:
            pair.publish(Update(r.id, 9, finish=FinishReason.STOP))
    assert all(len(updates) == 3 for updates in pair.updates.values())


def test_a_stalled_engine_cannot_touch_what_its_successor_has(pair):
    pair.submit(request(1))
    (old,) = pair.receive()
    pair.inbox.publish(StepOutputs([(old.id, 5)], []))
    pair.inbox.computing([old.id])
    successor = RingInbox([pair.fds])
    ((again,), _) = successor.receive()
    assert (again.prompt, again.output, again.crashes) == (old.prompt, (5,), 1)
    for update in (Update(old.id, 6), Update(old.id, 6, finish=FinishReason.STOP)):
        assert pair.inbox._say(update) is False
    successor.publish(StepOutputs([(again.id, 7)], [Update(again.id, 8, finish=FinishReason.STOP)]))
    pair.client.poll()
    assert [u.token for u in pair.updates[1]] == [5, 7, 8]
    assert [u.finish for u in pair.updates[1]] == [None, None, FinishReason.STOP]
    successor.close()


def test_a_successor_serves_what_had_not_spoken(pair):
    pair.submit(request(1), request(2))
    assert len(pair.receive()) == 2  # and the engine dies
    pair.submit(request(3))
    successor = RingInbox([pair.fds])
    requests, _ = successor.receive()
    assert [len(r.prompt) for r in requests] == [3, 3, 3]
    ends = [Update(r.id, 4, finish=FinishReason.STOP) for r in requests]
    successor.publish(StepOutputs([], ends))
    pair.client.poll()
    assert all([u.token for u in pair.updates[i]] == [4] for i in (1, 2, 3))
    successor.close()


def test_everything_that_recovery_needs_is_in_the_slot(pair):
    """Prompt, parameters, published tokens and crash count come with the claim."""
    pair.submit(request(1, sampling=SamplingParams(max_tokens=8, seed=3, temperature=0.5)))
    (old,) = pair.receive()
    pair.inbox.publish(StepOutputs([(old.id, 5), (old.id, 6)], []))
    pair.inbox.computing([old.id])
    for crashes in (1, 2):
        engine = _native.Engine([(pair.fds.memory, pair.fds.wake)], SAMPLING)
        (claim,) = engine.receive()[0]
        sampling, _ = unpack_numbers(claim[2])
        assert (claim[1], claim[8], claim[9]) == ((1, 2, 3), (5, 6), crashes)
        assert (sampling["seed"], sampling["temperature"]) == (3, 0.5)
        engine.set_blame([claim[0]], SHARED)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_request_goes_on_behind_what_it_has_given_out(pair, logprobs):
    """Neither the engine nor its successor computes that again, and nobody is told it again."""
    sampling = SamplingParams(max_tokens=5, seed=3, logprobs=logprobs)
    pair.submit(dataclasses.replace(request(1, sampling=sampling), output=(5, 6)))
    (taken,) = pair.receive()
    assert (taken.prompt, taken.output) == ((1, 2, 3), (5, 6))
    scored = None if logprobs is None else TokenLogprob(7, -1.0, 1, ((7, -1.0),))
    pair.publish(Update(taken.id, 7, scored))
    successor = RingInbox([pair.fds])
    ((again,), _) = successor.receive()
    assert again.output == (5, 6, 7)
    successor.publish(StepOutputs([], [Update(again.id, 8, finish=FinishReason.LENGTH)]))
    pair.client.poll()
    assert [u.token for u in pair.updates[1]] == [7, 8]
    assert pair.updates[1][0].logprob == scored
    successor.close()


def test_no_more_can_have_been_given_out_than_was_asked_for(pair):
    sampling = SamplingParams(max_tokens=2, seed=3)
    with pytest.raises(ParameterError):
        pair.submit(dataclasses.replace(request(1, sampling=sampling), output=(5, 6, 7)))
    assert pair.client._ring.free_slots == 8


def test_a_new_request_plane_takes_over_what_is_left(pair):
    pair.submit(*(request(i) for i in range(4)))
    working = pair.receive()
    pair.end(working[0].id)
    pair.submit(request(9))
    index = pair.client._ring.prepare(
        10, [1], pack_sampling(request(10)), [], [], [], b"interactive", b"", b"", [], b"", [], 4
    )  # dies amid writing
    assert index >= 0
    successor = RingClient(pair.fds)
    assert successor._ring.free_slots == 4
    requests, cancels = pair.inbox.receive()
    assert (len(requests), len(cancels)) == (0, 3)
    for sequence_id, reason in cancels:
        pair.inbox.publish(StepOutputs([], [Update(sequence_id, None, finish=reason)]))
    successor.poll()
    assert successor._ring.free_slots == 8
    assert successor._ring.free_memory == 1 << 16
    assert successor._ring.free_bytes == ARENA_PER_MEMORY * (1 << 16)
    successor.close()


def test_a_request_plane_that_leaves_frees_its_slots(pair):
    pair.submit(request(1), request(2))
    pair.receive()
    pair.submit(request(3))
    pair.client.close()
    _, cancels = pair.inbox.receive()
    for sequence_id, reason in cancels:
        pair.inbox.publish(StepOutputs([], [Update(sequence_id, None, finish=reason)]))
    assert len(cancels) == 2
    states = [pair.client._ring.look(i)["state"] for i in range(8)]
    assert states == [State.EMPTY] * 8


def test_closing_the_inbox_answers_everybody(pair):
    pair.submit(request(1))
    pair.receive()
    pair.submit(request(2))
    pair.inbox.fail(OutOfMemoryError("Nothing left."))
    pair.client.poll()
    assert all(isinstance(pair.updates[i][0].error, OutOfMemoryError) for i in (1, 2))


def test_a_sink_that_fails_loses_its_own_requests_only(pair, caplog):
    def broken(updates) -> None:
        raise ValueError(f"a bug of the caller, given {updates}")

    pair.client.submit([request(1)], broken)
    pair.submit(request(2))
    first, second = pair.receive()
    pair.inbox.publish(StepOutputs([(first.id, 5), (second.id, 6)], []))
    pair.client.poll()
    assert [update.token for update in pair.updates[2]] == [6]
    assert "its requests are cancelled" in caplog.text
    assert [i for i, _ in pair.inbox.receive()[1]] == [first.id]


def test_an_embedding_is_one_update(pair):
    """However often the client looks while its words come."""
    pair.inbox.write_info(info(hidden_size=4))
    vector = struct.pack("=4f", 0.5, -1.0, 0.0, 2.0)
    for number in (1, 2, 3):
        pair.submit(Request(number, (1, 2), SamplingParams(max_tokens=1), embed=True))
    one, two, three = (request.id for request in pair.receive() if request.embed)
    words = [(two, word) for word in struct.unpack("=4I", vector)]
    pair.inbox._engine.publish(words[:3])
    pair.inbox._engine.flush(Bell["OUTPUT"])
    pair.client.poll()
    assert 2 not in pair.updates
    pair.inbox._engine.publish(words[3:])
    pair.publish(
        Update(one, None, finish=FinishReason.STOP, embedding=vector),
        Update(two, None, finish=FinishReason.STOP),
        Update(three, None, finish=FinishReason.ERROR, error=OutOfMemoryError("full")),
    )
    (first,), (second,), (third,) = (pair.updates[number] for number in (1, 2, 3))
    assert first.embedding == second.embedding == vector
    assert (third.embedding, third.finish) == (None, FinishReason.ERROR)
    assert first.token is second.token is third.token is None


def test_a_poke_by_a_request_plane_wakes_an_engine_at_rest(monkeypatch):
    """Without it, this one would sleep for an hour."""
    monkeypatch.setattr("weft.ring.inbox.BEAT_S", 3600.0)
    pair = Pair()
    pair.inbox.receive()
    for _ in range(3):
        sleeping = threading.Thread(target=pair.inbox.wait, daemon=True)
        sleeping.start()
        pair.client.poke()
        sleeping.join(60)
        assert not sleeping.is_alive()
        pair.inbox.receive()
    pair.close()
