"""The sizes of a ring: room for the longest outputs, memory only for what is used."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
from modelled import info

from weft.core.config import MOST_RING_SLOTS, EngineConfig
from weft.core.errors import ConfigError, EngineBusyError, ParameterError
from weft.core.plan import StepOutputs, Update
from weft.core.types import FinishReason, Request, SamplingParams, TokenLogprob
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.segment import RingFds, create_ring, ring_of

CONTEXT = 128 * 1024
MIB = 2**20


class Pair:
    """A ring whose engine has a long context, driven by hand."""

    def __init__(self, slots: int, memory: int) -> None:
        self.fds = create_ring(slots, memory)
        self.inbox = RingInbox([self.fds], spin_s=0)
        self.inbox.write_info(dataclasses.replace(info(), max_model_len=CONTEXT))
        self.client = RingClient(self.fds)
        self.tokens: dict[int, list[int]] = {}

    def sink(self, updates) -> None:
        for update in updates:
            if update.token is not None:
                self.tokens.setdefault(update.sequence_id, []).append(update.token)

    def submit(self, *numbers: int, prompt: int = 16, **sampling) -> None:
        params = SamplingParams(**sampling)
        requests = [Request(number, tuple(range(1, prompt + 1)), params) for number in numbers]
        self.client.submit(requests, self.sink)

    def receive(self) -> list[Request]:
        return list(self.inbox.receive()[0])

    def say(self, sequence_id: int, tokens: int) -> None:
        """Publish so many, while the client keeps up."""
        for start in range(0, tokens, 100):
            said = range(start, min(start + 100, tokens))
            self.inbox.publish(StepOutputs([(sequence_id, i % 900) for i in said], []))
            self.client.poll()

    def end(self, sequence_id: int) -> None:
        end = Update(sequence_id, None, finish=FinishReason.LENGTH)
        self.inbox.publish(StepOutputs([], [end]))
        self.client.poll()

    @property
    def free_memory(self) -> int:
        return self.client._ring.free_memory

    def close(self) -> None:
        self.inbox.close()
        self.client.close()
        self.fds.close()


def held(fds: RingFds) -> int:
    """Bytes of memory that a ring has taken."""
    return os.fstat(fds.memory).st_blocks * 512


def gives_pages_back() -> bool:
    """Whether the system can punch holes into anonymous memory; sandboxes may not."""
    import mmap

    fd = os.memfd_create("holes")
    os.truncate(fd, MIB)
    with mmap.mmap(fd, MIB) as memory:
        memory[:] = b"x" * MIB
        try:
            memory.madvise(mmap.MADV_REMOVE)
        except OSError:
            return False
        finally:
            left = os.fstat(fd).st_blocks
            os.close(fd)
    return left == 0


def test_requests_without_a_limit_take_no_memory_for_the_whole_context():
    """A ring of 64 MiB had room for two with 20 alternatives a token, and for 127 without."""
    pair = Pair(1024, 64 * MIB)
    for number in range(150):
        pair.submit(number, logprobs=20)
    for number in range(150, 1000):
        pair.submit(number)
    assert len(pair.receive()) == 1000
    assert held(pair.fds) < 16 * MIB
    pair.close()


def test_an_output_grows_to_the_end_of_the_context_though_the_memory_is_used_up():
    pair = Pair(8, MIB + 2**16)
    pair.submit(1)
    pair.submit(2)
    first, second = pair.receive()
    before = pair.free_memory
    pair.say(first.id, 1000)
    assert before - pair.free_memory == 4 * (1000 - 256)
    pair.say(first.id, CONTEXT - 16 - 1000)
    pair.say(second.id, CONTEXT - 16)
    assert pair.free_memory < 2**17
    assert len(pair.tokens[1]) == len(pair.tokens[2]) == CONTEXT - 16
    pair.submit(3)
    (third,) = pair.receive()
    pair.say(third.id, CONTEXT - 16)
    assert pair.free_memory == 0
    with pytest.raises(EngineBusyError):
        pair.submit(4)
    for ended in (first, second, third):
        pair.end(ended.id)
    assert pair.free_memory == MIB + 2**16
    pair.submit(4)
    pair.close()


def test_the_next_engine_goes_on_behind_a_long_output():
    pair = Pair(4, MIB)
    pair.submit(1)
    (request,) = pair.receive()
    pair.say(request.id, 100_000)
    successor = RingInbox([pair.fds], spin_s=0)
    ((again,), _) = successor.receive()
    assert list(again.output) == [i % 900 for i in range(100_000)]
    successor.publish(StepOutputs([(again.id, 7)], []))
    pair.client.poll()
    assert pair.tokens[1][-2:] == [99_999 % 900, 7]
    successor.close()
    pair.close()


@pytest.mark.skipif(not gives_pages_back(), reason="the system does not give pages back")
def test_memory_of_long_outputs_goes_back_to_the_system():
    pair = Pair(16, MIB)
    scored = TokenLogprob(1, -1.0, 1, tuple((i, -2.0) for i in range(20)))
    for round_ in range(3):
        pair.submit(*range(10 * round_, 10 * round_ + 2), logprobs=20)
        requests = pair.receive()
        for request in requests:
            update = Update(request.id, 1, scored)
            for _ in range(400):
                pair.inbox.publish(StepOutputs([], [update] * 100))
                pair.client.poll()
        assert held(pair.fds) > 12 * MIB
        for request in requests:
            pair.end(request.id)
        assert held(pair.fds) < 2 * MIB
    pair.close()


@pytest.mark.skipif(not gives_pages_back(), reason="the system does not give pages back")
def test_short_answers_to_requests_with_high_limits_leave_no_memory_behind():
    """Each lies somewhere else, and every page that was ever used would stay."""
    pair = Pair(512, 4 * MIB)
    draw = random.Random(1)
    open_ids: list[int] = []
    for number in range(3000):
        limit = draw.choice((None, draw.randrange(1000, CONTEXT)))
        pair.submit(number, prompt=draw.randrange(1, 2000), max_tokens=limit)
        open_ids += [request.id for request in pair.receive()]
        pair.say(open_ids[-1], draw.randrange(1, 20))
        if len(open_ids) > 200:
            pair.end(open_ids.pop(draw.randrange(200)))
    assert held(pair.fds) < 9 * MIB
    for sequence_id in open_ids:
        pair.end(sequence_id)
    assert pair.free_memory == 4 * MIB
    assert held(pair.fds) < 6 * MIB
    pair.close()


def test_a_new_request_plane_counts_from_the_start():
    pair = Pair(8, MIB)
    pair.submit(1, 2, 3)
    requests = pair.receive()
    successor = RingClient(pair.fds)
    pair.inbox.receive()
    for request in requests:
        end = Update(request.id, None, finish=FinishReason.CANCELLED)
        pair.inbox.publish(StepOutputs([], [end]))
    successor.poll()
    assert successor._ring.free_memory == MIB
    assert successor._ring.free_slots == 8
    successor.close()
    pair.client.close()
    pair.inbox.close()
    pair.fds.close()


def test_what_would_not_fit_into_an_empty_ring_is_told_from_what_does_not_fit_now():
    pair = Pair(4, MIB)
    with pytest.raises(ParameterError, match="raise ring_slots") as refused:
        pair.submit(1, 2, 3, 4, 5)
    assert refused.value.param == "n"
    with pytest.raises(ParameterError, match="raise ring_slots and ring_memory"):
        pair.submit(1, 2, prompt=128 * 1024 + 1)
    with pytest.raises(ParameterError, match="raise ring_memory"):
        pair.submit(1, prompt=256 * 1024)
    pair.submit(1, 2)
    with pytest.raises(EngineBusyError):
        pair.submit(3, 4, 5)
    pair.close()


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "slots", "memory"),
    [
        ({}, 512, 64 * MIB),
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 2048}, 4096, 512 * MIB),
        (
            {"max_num_seqs": 65536, "max_num_batched_tokens": 65536},
            MOST_RING_SLOTS,
            128 * 2**10 * MOST_RING_SLOTS,
        ),
        ({"ring_slots": 128}, 128, 64 * MIB),
        ({"ring_slots": 2000, "ring_memory": "1MiB"}, 2000, MIB),
    ],
)
def test_sizes_follow_the_sequences_that_run_at_once(settings, slots, memory):
    config = EngineConfig.from_mapping(settings)
    assert config.ring_sizes() == (slots, memory)
    fds = ring_of(config)
    client = RingClient(fds)
    assert (client._ring.slots, client._ring.memory_bytes) == (slots, memory)
    assert held(fds) < 4 * MIB + 1024 * slots
    client.close()
    fds.close()


def test_there_are_slots_for_all_that_is_to_be_open_at_once():
    assert EngineConfig().ring_sizes(3000)[0] == 3000
    assert EngineConfig(ring_slots=600).ring_sizes(3000)[0] == 600


def test_sizes_that_are_too_small_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"ring_slots 64 is less than max_num_seqs 128") as few:
        EngineConfig(ring_slots=64)
    assert few.value.param == "ring_slots"
    config = EngineConfig(ring_memory=2**18)
    config.check_ring(4096)
    with pytest.raises(ConfigError, match="max_model_len 131072; it needs 589824 bytes") as less:
        config.check_ring(CONTEXT)
    assert less.value.param == "ring_memory"
