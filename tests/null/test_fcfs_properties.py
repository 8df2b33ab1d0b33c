"""Random traffic through the real scheduler on the modelled executor: exact, nothing lost."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.core.errors import InvariantError
from weft.core.plan import Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.draft import REMEMBERED, NgramDrafter
from weft.sched.fcfs import FCFSScheduler
from weft.sched.planner import Limits
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor, first_allowed, next_token

VOCAB = 97


@dataclass
class ScriptedInbox:
    """Delivers arrivals and cancellations at given rounds and keeps everything published."""

    arrivals: dict[int, list[Request]]
    cancels: dict[int, list[int]]
    round: int = 0
    updates: dict[int, list[Update]] = field(default_factory=dict)

    def receive(self):
        requests = self.arrivals.pop(self.round, [])
        cancels = [(i, FinishReason.CANCELLED) for i in self.cancels.pop(self.round, [])]
        self.round += 1
        return requests, cancels

    def computing(self, sequence_ids) -> None:
        """Nothing here outlives an engine."""

    def publish(self, news):
        plain = [Update(sequence_id, token) for sequence_id, token in news.tokens]
        for update in (*plain, *news.updates):
            self.updates.setdefault(update.sequence_id, []).append(update)

    def wait(self):
        raise AssertionError("the loop must not wait under a script")


@dataclass(frozen=True)
class World:
    groups: tuple[GroupSpec, ...]
    limits: Limits
    depth: int
    prefix_caching: bool = True
    vocab: int = VOCAB


def expected_output(request: Request, world: World) -> tuple[list[int], FinishReason]:
    tokens = list(request.prompt)
    end = min(world.limits.max_model_len, len(tokens) + (request.sampling.max_tokens or 10**9))
    stop_ids = request.stop_ids()
    while True:
        token = next_token(tokens, world.groups, world.vocab)
        if len(tokens) < len(request.prompt) + request.sampling.min_tokens:
            token = first_allowed(token, stop_ids, world.vocab)
        tokens.append(token)
        if token in stop_ids:
            return tokens[len(request.prompt) :], FinishReason.STOP
        if len(tokens) >= end:
            return tokens[len(request.prompt) :], FinishReason.LENGTH


def run(world: World, arrivals, cancels, faulty=None):
    """Run the script to its end, checking every invariant after every round."""
    cache = KVCache(world.groups, prefix_caching=world.prefix_caching)
    scheduler = FCFSScheduler(cache, world.limits)
    executor = ModelledExecutor(world.groups, world.vocab, depth=world.depth, faulty=faulty)
    requests = {r.id: r for batch in arrivals.values() for r in batch}
    inbox = ScriptedInbox(dict(arrivals), dict(cancels))
    loop = EngineLoop(scheduler, executor, inbox, VirtualClock())
    last = max([*arrivals, *cancels], default=0)
    idle_rounds = 0
    for _ in range(200_000):
        busy = loop.step()
        scheduler.check()
        assert_leases(executor, cache)
        idle_rounds = 0 if busy else idle_rounds + 1
        if idle_rounds and inbox.round > last:
            break
    assert scheduler.idle, "the scheduler stopped with unanswered sequences"
    assert all(pool.held == 0 for pool in cache.pools)
    executor.close()
    return requests, inbox, scheduler


def assert_leases(executor: ModelledExecutor, cache: KVCache) -> None:
    """No block that an outstanding step touches may be free."""
    for pool, touched in zip(cache.pools, executor.touched_blocks(), strict=True):
        assert all(pool._references[block] > 0 for block in touched if block >= 0)


def assert_answers(world: World, requests, inbox, cancelled: set[int], faulted: set[int]) -> None:
    for request_id, request in requests.items():
        updates = inbox.updates.get(request_id, [])
        ends = [u.finish for u in updates if u.finish is not None]
        assert len(ends) == 1, f"request {request_id} ended {len(ends)} times"
        assert updates[-1].finish is not None
        tokens = [u.token for u in updates if u.token is not None]
        wanted, reason = expected_output(request, world)
        wanted = wanted[len(request.output) :]
        if request.embed:  # the modelled vector is what would be the first token
            vector = struct.pack("<f", wanted[0])
            wanted, reason = [], FinishReason.STOP
            assert updates[-1].embedding == (vector if ends[0] is reason else None)
        if ends[0] is FinishReason.CANCELLED:
            assert request_id in cancelled
            assert tokens == wanted[: len(tokens)]
        elif ends[0] is FinishReason.ERROR:
            assert request_id in faulted
            assert tokens == wanted[: len(tokens)]
        else:
            assert (tokens, ends[0]) == (wanted, reason)


@st.composite
def worlds(draw, tight: bool = False):
    """Groups, limits and depth; with ``tight`` one longest sequence just fits."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 7]))
    max_model_len = draw(st.integers(8, 60))
    seqs = draw(st.integers(1, 6))
    limits = Limits(seqs, draw(st.integers(seqs, 24)), max_model_len)
    groups = []
    layout = draw(st.sampled_from(["full", "sliding", "both", "three", "two sliding"]))
    if layout in ("full", "both", "three"):
        least = -(-max_model_len // block_size)
        most = least if tight else 4 * least
        groups.append(GroupSpec("full", block_size, draw(st.integers(least, most))))
    if layout != "full":
        groups.append(draw(sliding_groups("sliding", block_size, tight)))
    if layout in ("three", "two sliding"):
        groups.append(draw(sliding_groups("other", max(1, block_size // 2), tight)))
    vocab = draw(st.sampled_from([VOCAB, 2, 3]))  # with few tokens drafts come out right
    return World(tuple(groups), limits, draw(st.integers(0, 2)), draw(st.booleans()), vocab)


@st.composite
def sliding_groups(draw, name: str, block_size: int, tight: bool) -> GroupSpec:
    """From the fewest blocks with which one sequence can advance to more than all can use."""
    window = draw(st.integers(1, 20))
    least = GroupSpec(name, block_size, 0, window).blocks_to_hold(0, window + 2 * block_size)
    num_blocks = least if tight else draw(st.integers(least, least + 60))
    return GroupSpec(name, block_size, num_blocks, window)


@st.composite
def traffic(draw, world: World):
    """Arrivals and cancellations by round; many prompts share a prefix."""
    stems = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), max_size=3))
    arrivals: dict[int, list[Request]] = {}
    cancels: dict[int, list[int]] = {}
    for request_id in range(draw(st.integers(1, 14))):
        stem = draw(st.sampled_from([[], *stems]))
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        prompt = tuple([*stem, *tail][: world.limits.max_model_len - 1])
        sampling = SamplingParams(
            max_tokens=draw(st.one_of(st.none(), st.integers(1, 30))),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))),
        )
        if draw(st.booleans()) and sampling.max_tokens is not None:
            sampling = SamplingParams(
                max_tokens=sampling.max_tokens,
                min_tokens=draw(st.integers(0, sampling.max_tokens)),
                stop_token_ids=sampling.stop_token_ids,
            )
        sampling = replace(sampling, speculation=draw(st.sampled_from([0, 0, 1, 3, 9])))
        if draw(st.integers(0, 2)) == 0:
            sampling = replace(sampling, grammar="any: it only puts the sequence in lockstep")
        request = Request(
            request_id,
            prompt,
            sampling,
            service_class=draw(st.sampled_from(["priority", "interactive", "batch"])),
            cache_salt=draw(st.sampled_from([b"", b"other"])),
        )
        if draw(st.integers(0, 7)) == 0:
            request = replace(request, embed=True)
        elif draw(st.integers(0, 3)) == 0:  # an engine died after it had given out some of it
            output, _ = expected_output(request, world)
            request = replace(request, output=tuple(output[: draw(st.integers(0, len(output)))]))
        arrival = draw(st.integers(0, 25))
        arrivals.setdefault(arrival, []).append(request)
        if draw(st.integers(0, 3)) == 0:
            cancels.setdefault(arrival + draw(st.integers(0, 25)), []).append(request_id)
    return arrivals, cancels


def ids(cancels) -> set[int]:
    return {request_id for batch in cancels.values() for request_id in batch}


COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=600, **COMMON)
@given(st.data())
def test_random_traffic_is_answered_exactly(data):
    world = data.draw(worlds())
    arrivals, cancels = data.draw(traffic(world))
    requests, inbox, _ = run(world, arrivals, cancels)
    assert_answers(world, requests, inbox, ids(cancels), set())


@settings(max_examples=600, **COMMON)
@given(st.data())
def test_a_pool_that_is_always_full_answers_everybody(data):
    world = data.draw(worlds(tight=True))
    arrivals, cancels = data.draw(traffic(world))
    requests, inbox, _ = run(world, arrivals, cancels)
    assert_answers(world, requests, inbox, ids(cancels), set())


@settings(max_examples=300, **COMMON)
@given(st.data())
def test_a_faulty_row_ends_alone(data):
    world = data.draw(worlds(tight=data.draw(st.booleans())))
    arrivals, cancels = data.draw(traffic(world))
    bad = data.draw(st.sets(st.integers(0, 13), max_size=4))
    at = data.draw(st.integers(1, 40))
    requests, inbox, _ = run(
        world, arrivals, cancels, faulty=lambda sequence, length: sequence in bad and length >= at
    )
    assert_answers(world, requests, inbox, ids(cancels), bad)


@settings(max_examples=100, **COMMON)
@given(st.data())
def test_equal_inputs_give_equal_plans(data):
    world = data.draw(worlds())
    arrivals, cancels = data.draw(traffic(world))

    def plans():
        cache = KVCache(world.groups, prefix_caching=world.prefix_caching)
        scheduler = FCFSScheduler(cache, world.limits)
        executor = ModelledExecutor(world.groups, world.vocab, depth=world.depth)
        seen: list[str] = []
        inbox = ScriptedInbox(dict(arrivals), dict(cancels))
        tickets: deque = deque()
        for _ in range(60):
            requests, cancelled = inbox.receive()
            for request in requests:
                scheduler.add(request)
            for sequence_id, reason in cancelled:
                scheduler.cancel(sequence_id, reason)
            plan = scheduler.plan(0.0)
            seen.append(repr(plan))
            if plan is not None:
                tickets.append(executor.launch(plan))
            if tickets and (plan is None or len(tickets) > world.depth):
                scheduler.commit(tickets.popleft().result())
        return seen

    assert plans() == plans()


def test_lower_classes_do_not_take_the_blocks_that_come_back_for_a_higher_one():
    """Two batch requests took turns in being preempted for a third, which never ran again."""
    groups = (GroupSpec("full", 4, 15), GroupSpec("sliding", 4, 5, 10))
    world = World(groups, Limits(6, 7, 58), 1, prefix_caching=False)
    low = [
        Request(i, tuple(range(1, n)), SamplingParams(), (), "batch") for i, n in ((0, 2), (1, 6))
    ]
    first = Request(2, (1, 2, 3, 4, 5, 6), SamplingParams())
    last = Request(3, (79, 26, 51, 68, 69, 31, 84), SamplingParams(max_tokens=4), (), "priority")
    arrivals = {0: [first, low[0]], 1: [low[1]], 8: [last]}
    requests, inbox, _ = run(world, arrivals, {})
    assert_answers(world, requests, inbox, set(), set())


def run_rounds(loop: EngineLoop, rounds: int) -> None:
    for _ in range(rounds):
        loop.step()


def test_drafts_are_taken_where_they_come_out_right():
    """A text of one token repeats for ever: each step gives as many tokens as were drafted."""
    world = World((GroupSpec("full", 4, 40),), Limits(4, 32, 150), 1, vocab=1)
    request = Request(0, (0,) * 8, SamplingParams(max_tokens=100, speculation=8))
    requests, inbox, scheduler = run(world, {0: [request]}, {})
    assert_answers(world, requests, inbox, set(), set())
    totals = scheduler.totals
    assert totals.drafted_tokens == totals.accepted_tokens > 70
    assert totals.output_tokens == 100
    assert totals.steps < 28  # seven of them until it has shown that it pays


def test_drafts_that_fail_become_rare():
    """Text in which runs repeat that are long enough for a draft, and go on differently."""
    drafter, tokens, drafted = NgramDrafter(8, start=50), [], []
    for i in range(4000):
        tokens += [1, 2, 3, 4, 5, 6, 7, 100 + i]
    at = 50
    while at < len(tokens):
        draft = drafter.propose(tokens[:at], 8)
        at += 1
        if draft:
            taken = next((j for j, t in enumerate(draft) if t != tokens[at - 1 + j]), len(draft))
            drafted.append(at)
            at += taken + drafter.learn(len(draft), taken)
        else:
            at += drafter.searched_in_vain()
    late = [at for at in drafted if at > len(tokens) // 2]
    assert drafted
    assert len(late) < len(tokens) / 2 / 5


def test_the_index_of_drafts_is_bounded_and_filled_bit_by_bit():
    drafter, tokens = (
        NgramDrafter(4),
        [i % 50_000 for i in range(100_000)] + list(range(40_000, 40_008)),
    )
    calls = 0
    while not (draft := drafter.propose(tokens, 4)):
        calls += 1
        assert len(drafter._after) <= 2 * 1024 * calls
        assert calls < 40
    assert calls >= REMEMBERED // 1024 - 1
    assert draft == (40_008, 40_009)


def test_the_property_test_can_fail():
    """A cache that shares blocks it should not is caught by the modelled executor."""

    class Forgetful(KVCache):
        def open(self, sequence_id, hit):
            super().open(sequence_id, hit)
            if hit:
                (wrong,) = self.pools[0].allocate(1)
                table = self._tables[sequence_id].blocks[0]
                self.pools[0].release(table[-1])
                table[-1] = wrong

    world = World((GroupSpec("full", 2, 40),), Limits(4, 16, 30), 0)
    cache = Forgetful(world.groups)
    scheduler = FCFSScheduler(cache, world.limits)
    executor = ModelledExecutor(world.groups, VOCAB)
    request = [Request(i, tuple(range(1, 10)), SamplingParams(max_tokens=3)) for i in range(2)]
    inbox = ScriptedInbox({0: request[:1], 20: request[1:]}, {})
    loop = EngineLoop(scheduler, executor, inbox, VirtualClock())
    with pytest.raises(InvariantError, match="reads"):
        run_rounds(loop, 40)
