"""Engines that die: streams go on without a lost or repeated token, and poison is found."""

from __future__ import annotations

import contextlib
import random
import signal
import struct
import time

import pytest
from modelled import VOCAB, info
from test_ring_contract import Pair, request
from test_ring_processes import (
    Collector,
    comparable,
    endless,
    in_process,
    random_requests,
    start_engine,
    threaded,
)

from weft.core.errors import RequestCrashedError, RequestOutOfMemoryError
from weft.core.plan import PromptLogprobs, StepOutputs, Update
from weft.core.types import FinishReason, Request, SamplingParams, TokenLogprob
from weft.ring import _native
from weft.ring.inbox import RingInbox
from weft.ring.recover import Quarantine
from weft.ring.segment import ARENA_PER_MEMORY

POISON = VOCAB - 1


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def successor(pair: Pair, **options) -> RingInbox:
    """Another engine on the ring of the pair, whose own has died."""
    return RingInbox([pair.fds], spin_s=0, **options)


def uncached(updates: list[Update]) -> list[tuple]:
    """What was said, but for how much of the prompt was cached, which a restart changes."""
    return comparable([update._replace(cached_tokens=0) for update in updates])


@pytest.mark.parametrize("depth", [0, 1])
def test_engines_killed_at_any_moment_lose_and_repeat_nothing(ring, depth):
    draw = random.Random(depth)
    requests = random_requests(depth, 50)
    expected = in_process(requests, depth)
    total = sum(len(updates) for updates in expected.values())
    kills = sorted(draw.sample(range(total * 3 // 4), 6))
    collector = Collector()

    def said(updates) -> int:
        return sum(len(own) for own in updates.values())

    with contextlib.ExitStack() as stack, threaded(ring) as client:
        process = start_engine(ring, depth=depth, step_s=0.001)
        client.submit(requests, collector)
        for moment in kills:
            collector.wait_for(lambda updates, moment=moment: said(updates) >= moment)
            process.kill()
            process.wait()
            process.stdout.close()
            process = start_engine(ring, depth=depth, step_s=0.001)
        stack.callback(process.stdout.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        collector.ends(len(requests))
        assert client._ring.free_slots == 64
        assert client._ring.free_memory == 1 << 20
        assert client._ring.free_bytes == ARENA_PER_MEMORY * (1 << 20)
        assert client._ring.engines() == len(kills) + 1
    for number, updates in expected.items():
        assert uncached(collector.updates[number]) == uncached(updates)


def test_a_poison_request_fails_alone(ring):
    """Restarted again and again, the engine gets rid of it, and the others get their tokens."""
    requests = random_requests(3, 20)
    requests[7] = Request(7, (POISON, 5, 6), SamplingParams(max_tokens=9))
    requests[13] = Request(13, (POISON,), SamplingParams(max_tokens=9))
    innocents = [r for r in requests if r.prompt[0] != POISON]
    assert len(innocents) == len(requests) - 2
    expected = in_process(innocents, 1)
    collector = Collector()
    exits = []
    with threaded(ring) as client:
        client.submit(requests, collector)
        for _ in range(12):
            process = start_engine(ring, depth=1, poison=POISON)
            while process.poll() is None:
                with contextlib.suppress(AssertionError):
                    collector.ends(len(requests), patience_s=0.05)
                    process.kill()
            exits.append(process.wait())
            process.stdout.close()
            if exits[-1] != -signal.SIGSEGV:
                break
        assert exits[-1] == -signal.SIGKILL, "the poison was never given up"
        # In company twice, together or each, and each as the only suspect three times.
        assert set(exits[:-1]) == {-signal.SIGSEGV}
        assert 2 + 2 * 3 <= len(exits[:-1]) <= 2 * (2 + 3)
    for number in (7, 13):
        (end,) = collector.updates[number]
        assert isinstance(end.error, RequestCrashedError)
        assert "5 times" in end.error.message
    for number, updates in expected.items():
        assert uncached(collector.updates[number]) == uncached(updates)


def test_a_stop_that_came_while_there_was_no_engine_counts_what_was_said(pair):
    pair.submit(request(1))
    (old,) = pair.receive()
    pair.inbox.publish(StepOutputs([(old.id, 5), (old.id, 6)], []))
    pair.client.poll()
    pair.client.cancel(1, FinishReason.STOP)
    engine = successor(pair)
    assert not any(engine.receive())
    pair.client.poll()
    assert [(u.token, u.finish) for u in pair.updates[1]] == [
        (5, None), (6, None), (None, FinishReason.STOP),
    ]  # fmt: skip
    engine.close()


def scores(start: int, end: int) -> PromptLogprobs:
    return PromptLogprobs(start, tuple(TokenLogprob(i, -i / 4, 0) for i in range(start, end)))


def test_prompt_logprobs_are_not_delivered_twice(pair):
    params = SamplingParams(max_tokens=8, prompt_logprobs=0)
    pair.submit(request(1, 6, params))
    (old,) = pair.receive()
    pair.publish(Update(old.id, None, prompt_logprobs=scores(1, 4)))
    engine = successor(pair)
    ((again,), _) = engine.receive()
    for start, end in ((1, 3), (3, 6)):  # in other pieces
        said = Update(again.id, None, prompt_logprobs=scores(start, end))
        engine.publish(StepOutputs([], [said]))
    engine.publish(StepOutputs([], [Update(again.id, 7, finish=FinishReason.STOP)]))
    pair.client.poll()
    entries = [entry for u in pair.updates[1] if u.prompt_logprobs
               for entry in u.prompt_logprobs.entries]  # fmt: skip
    assert entries == list(scores(1, 6).entries)
    engine.close()


def test_words_of_an_embedding_that_were_published_are_not_published_twice(pair):
    words = [struct.unpack("I", struct.pack("f", x))[0] for x in (0.5, -1.0, 2.0)]
    sequence = Request(1, (1, 2), SamplingParams(max_tokens=8), embed=True)
    pair.inbox.write_info(info(hidden_size=3))
    pair.submit(sequence)
    (old,) = pair.receive()
    pair.inbox._engine.publish([(old.id, word) for word in words[:2]])
    engine = successor(pair, vocab_size=VOCAB)
    ((again,), _) = engine.receive()
    assert (again.output, again.embed) == ((), True)
    engine._engine.publish([(again.id, word) for word in words])
    assert pair.client._ring.look(0)["published"] == 3
    engine.close()


# -- blame ----------------------------------------------------------------------------------------


def crashed(number: int, crashes: int, memory_kills: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=8)
    return Request(number, (1,), sampling, crashes=crashes, memory_kills=memory_kills)


class Clears:
    """Stands for the ring: tells which sequences are cleared, remembers who is to blame."""

    def __init__(self) -> None:
        self.clear: set[int] = set()
        self.blames: list[tuple[list[int], int]] = []

    def set_blame(self, ids: list[int], blame: int) -> None:
        self.blames.append((ids, blame))

    def cleared(self, sequence_id: int) -> bool:
        return sequence_id in self.clear


def test_suspects_are_tried_one_after_the_other_and_before_all_others():
    ring = Clears()
    quarantine = Quarantine(ring, 3)
    first = [crashed(1, 0), crashed(2, 2), crashed(3, 1), crashed(4, 3)]
    assert [r.id for r in quarantine.admit(first)] == [2]
    quarantine.computing([2])
    assert quarantine.admit([crashed(5, 0)]) == []
    ring.clear = {2}
    assert [r.id for r in quarantine.admit([])] == [4]
    assert not quarantine.idle
    assert quarantine.remove(3)
    assert not quarantine.remove(4)
    quarantine.computing([2, 4])
    ring.clear = {2, 4}
    assert [r.id for r in quarantine.admit([])] == [1, 5]
    assert quarantine.idle
    quarantine.computing([1, 5])
    assert ring.blames == [([], 1), ([2], 2), ([2], 1), ([4], 2), ([1, 5], 1)]


@pytest.mark.parametrize("limit", [1, 3])
def test_nobody_is_given_up_without_having_been_tried_alone(limit):
    quarantine = Quarantine(Clears(), limit)
    quarantine.check(crashed(1, 2))
    quarantine.check(crashed(1, 1 + limit))
    with pytest.raises(RequestCrashedError):
        quarantine.check(crashed(1, 2 + limit))
    assert len(quarantine.admit([crashed(1, 1), crashed(2, 1)])) == 2
    assert len(quarantine.admit([crashed(3, 2), crashed(4, 2)])) == 1


def test_who_is_there_whenever_memory_runs_out_is_tried_alone_and_then_given_up_for_that():
    quarantine = Quarantine(Clears(), 1)
    assert len(quarantine.admit([crashed(1, 0, 1), crashed(2, 1, 1)])) == 2
    assert len(quarantine.admit([crashed(3, 0, 2), crashed(4, 0, 2)])) == 1
    quarantine.check(crashed(1, 2, 2))
    with pytest.raises(RequestOutOfMemoryError, match="Memory ran out 3 times"):
        quarantine.check(crashed(1, 0, 3))


@pytest.mark.parametrize(("blame", "counts"), [(0, [0, 0, 0]), (1, [1, 2, 2]), (2, [1, 2, 3])])
def test_an_engine_killed_for_memory_is_no_crash_of_its_requests(pair, blame, counts):
    page, ring = _native.Page(pair.fds.memory), pair.client._ring
    pair.submit(request(1))
    (held,) = pair.receive()
    engine = pair.inbox
    for kills, count in enumerate(counts, 1):
        engine._engine.set_blame([held.id], blame)
        page.killed_for_memory()
        assert (pair.client.memory_kills, pair.client.out_of_memory) == (kills, True)
        assert pair.client.killed_for_memory
        engine = successor(pair)
        assert not pair.client.out_of_memory
        assert not pair.client.killed_for_memory
        assert (ring.look(0)["crashes"], ring.look(0)["memory_kills"]) == (0, count)
        engine._quarantine = Quarantine(engine._engine, 9)
        ((held,), _) = engine.receive()
        assert (held.crashes, held.memory_kills) == (0, count)
    engine.computing([held.id])
    engine.publish(StepOutputs([(held.id, 7)] * 4, []))
    assert ring.look(0)["memory_kills"] == 0  # it has got ahead
    engine.close()


def test_too_little_memory_for_a_successor_is_no_kill(pair):
    page, client = _native.Page(pair.fds.memory), pair.client
    page.killed_for_memory()
    second = successor(pair)
    page.short_of_memory()
    assert (client.out_of_memory, client.killed_for_memory, client.memory_kills) == (True, False, 1)
    page.killed_for_memory()  # a successor that got memory, but not enough
    page.short_of_memory()
    assert (client.out_of_memory, client.killed_for_memory, client.memory_kills) == (True, True, 2)
    second.close()


def test_engines_killed_for_memory_one_after_the_other_count_a_request_once(pair):
    page, ring = _native.Page(pair.fds.memory), pair.client._ring
    for number in range(3):
        pair.submit(request(number))
    first, second, _ = pair.receive()
    pair.inbox.computing([first.id, second.id])
    pair.inbox.publish(StepOutputs([], [Update(second.id, 7, finish=FinishReason.STOP)]))
    for _ in range(3):  # the successors of the first one do not get as far as to the ring
        page.killed_for_memory()
    assert [ring.look(slot)["memory_kills"] for slot in range(3)] == [1, 0, 0]
    assert pair.client.memory_kills == 3
    successor(pair).close()


@pytest.mark.parametrize(("blame", "counts"), [(0, [0, 0, 0]), (1, [1, 2, 2]), (2, [1, 2, 3])])
def test_what_a_crash_counts(pair, blame, counts):
    """Waiting, not at all; in company, until it is a suspect; as the only suspect, always."""
    pair.submit(request(1))
    (held,) = pair.receive()
    engine = pair.inbox
    for count in counts:
        engine._engine.set_blame([held.id], blame)
        engine = successor(pair)
        assert pair.client._ring.look(0)["crashes"] == count
        engine._quarantine = Quarantine(engine._engine, 9)
        ((held,), _) = engine.receive()
        assert held.crashes == count


def test_kills_from_outside_are_no_crashes_unless_they_never_end(pair):
    page = _native.Page(pair.fds.memory)
    pair.submit(request(1))
    (held,) = pair.receive()
    pair.inbox.computing([held.id])
    for crashes in (*[0] * 8, 1, 2):
        page.killed_from_outside()
        engine = successor(pair)
        assert pair.client._ring.look(0)["crashes"] == crashes
        ((held,), _) = engine.receive()
        engine.computing([held.id])
    engine.publish(StepOutputs([(held.id, 7)] * 4, []))  # it gets ahead, and starts afresh
    page.killed_from_outside()
    engine = successor(pair)
    assert pair.client._ring.look(0)["crashes"] == 0
    engine.close()


def test_an_error_of_the_engine_concerns_all_that_it_took_in_but_who_is_held_back(pair):
    for number in range(3):
        pair.submit(request(number))
    engine = pair.inbox
    for expected in ([1, 1, 1], [2, 2, 2], [3, 2, 2]):  # at last only the first one is tried
        engine.receive()
        engine.blame()
        engine = successor(pair)
        assert [pair.client._ring.look(slot)["crashes"] for slot in range(3)] == expected


def test_getting_ahead_clears_a_sequence(pair):
    pair.submit(request(1))
    pair.inbox.computing([pair.receive()[0].id])
    for tokens, before, after in ((3, 1, 1), (4, 2, 0)):
        engine = successor(pair)
        ((again,), _) = engine.receive()
        assert again.crashes == before
        engine.computing([again.id])
        engine.publish(StepOutputs([(again.id, 7)] * tokens, []))
        assert pair.client._ring.look(0)["crashes"] == after


def test_a_request_keeps_its_id_over_engines_and_shares_it_with_no_other(pair):
    """By it the next engine finds the KV of a sequence, in whatever order it takes them in."""
    pair.submit(*(request(number) for number in range(1, 4)))
    first, *others = pair.receive()
    pair.end(first.id)
    pair.submit(request(4))
    (last,) = pair.receive()
    before = {one.id for one in (*others, last)}
    assert first.id not in before, "not even in the same slot"
    heir = successor(pair)
    requests, _ = heir.receive()
    assert {request.id for request in requests} == before
    heir.close()


def test_a_new_holder_of_a_slot_starts_without_blame(pair):
    pair.submit(request(1))
    pair.inbox.computing([pair.receive()[0].id])
    engine = successor(pair)
    ((again,), _) = engine.receive()
    engine.computing([again.id])
    assert pair.client._ring.look(0)["crashes"] == pair.client._ring.look(0)["blame"] == 1
    engine.publish(StepOutputs([], [Update(again.id, 7, finish=FinishReason.STOP)]))
    pair.client.poll()
    pair.submit(request(2))
    assert pair.client._ring.look(0)["crashes"] == pair.client._ring.look(0)["blame"] == 0
    engine.close()


def test_the_page_of_a_dead_engine_says_not_ready_and_keeps_its_limits(pair):
    page = _native.Page(pair.fds.memory)
    before = page.info()
    assert before["ready"] == 1
    page.not_ready()
    assert pair.client.info().ready == 0
    died_ns = page.info()["died_ns"]
    assert 0 < died_ns <= time.monotonic_ns()
    assert page.info() == before | {"ready": 0, "died_ns": died_ns}
    assert pair.client._ring.engines() == 1
    pair.client.submit([endless(1)], pair.sink)  # it waits for the next engine
    engine = successor(pair)
    assert len(engine.receive()[0]) == 1
    engine.close()
