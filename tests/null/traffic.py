"""Random worlds and traffic, a loop that runs them to their end, and the answers that must come."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from hypothesis import HealthCheck
from hypothesis import strategies as st

from weft.core.plan import NO_STATE, StepOutputs, Tier, Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.record import BlockRecord
from weft.kv.tiers import TieredCache
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor, first_allowed, next_token
from weft.sim.piggyback import Piggyback

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

    def lend(self, lease) -> None:
        lease.grant(None)

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
    host_blocks: tuple[int, ...] = ()
    piggyback: Callable[[], Piggyback] | None = None
    watermark_tokens: int | None = None  # of the scheduler, where it is not its own
    leases: int = 0  # makes the lengths of leases

    def cache(self):
        """The KV that a scheduler gets, in two tiers if the world has a host."""
        if self.host_blocks:
            return TieredCache(self.groups, self.host_blocks, prefix_caching=self.prefix_caching)
        return KVCache(self.groups, prefix_caching=self.prefix_caching)

    def scheduler(self, make, cache):
        """The scheduler that ``make`` makes of a cache and limits."""
        scheduler = make(cache, self.limits)
        if self.watermark_tokens is not None:
            scheduler.memory.watermark_tokens = self.watermark_tokens
        return scheduler

    def executor(self, faulty=None) -> ModelledExecutor:
        return ModelledExecutor(
            self.groups,
            self.vocab,
            depth=self.depth,
            faulty=faulty,
            host_blocks=self.host_blocks,
            piggyback=self.piggyback and self.piggyback(),
            leases=partial(Random(self.leases).randint, 0),
        )


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


def run(world: World, arrivals, cancels, faulty=None, make=fcfs, step_s=0.0):
    """Run the script to its end, checking every invariant after every round.

    Args:
        make: makes the scheduler of a cache and limits.
        step_s: seconds that the clock advances in each round.
    """
    scheduler = world.scheduler(make, cache := world.cache())
    executor = world.executor(faulty)
    clock = VirtualClock()
    requests = {r.id: r for batch in arrivals.values() for r in batch}
    inbox = ScriptedInbox(dict(arrivals), dict(cancels))
    loop = EngineLoop(scheduler, executor, inbox, clock)
    last = max([*arrivals, *cancels], default=0)
    idle_rounds = 0
    for _ in range(200_000):
        busy = loop.step()
        clock.advance(step_s)
        scheduler.check()
        assert_pins(executor, cache)
        idle_rounds = 0 if busy else idle_rounds + 1
        if idle_rounds and inbox.round > last:
            break
    stuck = [(s.id, s.state.name, s.known, s.planned) for s in scheduler.sequences.by_id.values()]
    assert scheduler.idle, f"the scheduler stopped with unanswered sequences {stuck}"
    for part in (cache.device, cache.host) if world.host_blocks else (cache,):
        assert all(pool.held == 0 for pool in part.all_pools)
    executor.close()
    return requests, inbox, scheduler


def run_with_deaths(world: World, arrivals, cancels, deaths, make=fcfs):
    """As ``run``, but in each round of ``deaths`` the engine dies, and the next one goes on.

    That one has the KV of the device, the record of it, and what was published; nothing else.

    Args:
        deaths: for each such round, how many launched steps are still computed, but not collected.

    Returns:
        requests, inbox, and tokens that the next engines found computed.
    """
    records = [bytearray(BlockRecord.nbytes(group.num_blocks)) for group in world.groups]
    requests = {r.id: r for batch in arrivals.values() for r in batch}
    inbox = ScriptedInbox(dict(arrivals), dict(cancels))
    last, found, executor = max([*arrivals, *cancels, *deaths], default=0), 0, None

    def engine() -> EngineLoop:
        nonlocal executor
        cache, heir = world.cache(), world.executor()
        (cache.device if world.host_blocks else cache).keep(
            [
                BlockRecord(memoryview(record), group.num_blocks)
                for record, group in zip(records, world.groups, strict=True)
            ]
        )
        if executor is not None:
            heir._kv[Tier.DEVICE] = executor._kv[Tier.DEVICE]
        executor = heir
        return EngineLoop(world.scheduler(make, cache), heir, inbox, VirtualClock())

    loop, idle = engine(), False
    for _ in range(200_000):
        turn = inbox.round
        idle = not loop.step()
        loop.scheduler.check()
        if idle and inbox.round > last:
            break
        if turn in deaths:
            found += sum(s.reused for s in loop.scheduler.sequences.running)
            for place, ticket in enumerate(list(loop._in_flight)[: deaths[turn]]):
                if ticket.lease is not None and place == 0:
                    inbox.lend(ticket.lease)  # all that comes before is published
                publish_leased(inbox, executor.collect(ticket))
            alive = list(loop.scheduler.sequences.by_id)
            loop = engine()
            for sequence_id in alive:
                updates = inbox.updates.get(sequence_id, [])
                if any(update.finish is not None for update in updates):
                    continue
                given = tuple(update.token for update in updates if update.token is not None)
                request = requests[sequence_id]
                loop._add(replace(request, output=(*request.output, *given)))
    found += sum(s.reused for s in loop.scheduler.sequences.running)
    assert loop.scheduler.idle
    executor.close()
    return requests, inbox, found


def publish_leased(inbox: ScriptedInbox, result) -> None:
    """Publish the tokens of a lease as an executor does: all but those of the last step."""
    for tokens in result.leased.steps if result.leased else ():
        inbox.publish(StepOutputs(list(zip(result.sequence_ids, tokens, strict=True)), []))


def watching(make, look):
    """The scheduler, of which every plan is shown."""

    def made(cache, limits):
        scheduler = make(cache, limits)
        plan = scheduler.plan

        def note(now):
            step = plan(now)
            if step is not None:
                look(scheduler, step)
            return step

        scheduler.plan = note
        return scheduler

    return made


def tiers(cache):
    """Each tier of a cache with its pools."""
    if isinstance(cache, TieredCache):
        return [(tier, cache.tier(tier).pools) for tier in Tier]
    return [(Tier.DEVICE, cache.pools)]


def assert_pins(executor: ModelledExecutor, cache) -> None:
    """No block or slot that an outstanding step touches may be free."""
    for tier, pools in tiers(cache):
        for pool, touched in zip(pools, executor.touched_blocks(tier), strict=True):
            assert all(pool._references[block] > 0 for block in touched if block >= 0)
    for tier, slots in touched_slots(executor):
        pool = (cache.tier(tier) if isinstance(cache, TieredCache) else cache).states.pool
        assert pool._references[slots] > 0


def touched_slots(executor: ModelledExecutor) -> list[tuple[Tier, int]]:
    """The slots of recurrent state that outstanding steps read or write."""
    found = []
    for ticket in executor._outstanding:
        for batch in ticket.plan.batches:
            for state in batch.states:
                lent = () if state.lent is None else state.lent.spare
                slots = (state.read, state.write, *lent, *(slot for _, slot in state.marks))
                found += [(Tier.DEVICE, slot) for slot in slots if slot != NO_STATE]
        for move in ticket.plan.moves:
            if move.state is not None:
                origin = Tier.HOST if move.to is Tier.DEVICE else Tier.DEVICE
                found += [(origin, move.state[0]), (move.to, move.state[1])]
    return found


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
    limits = Limits(
        seqs,
        draw(st.integers(seqs, 24)),
        max_model_len,
        lease_steps=draw(st.sampled_from([0, 2, 9])),
    )
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
    ahead = draw(st.sampled_from([0, 0, 2, 32]))  # with 0 many sequences must give way
    return World(
        tuple(groups),
        limits,
        draw(st.integers(0, 2)),
        draw(st.booleans()),
        vocab,
        watermark_tokens=ahead,
        leases=draw(st.integers(0, 99)),
    )


@st.composite
def recurrent_worlds(draw, tight: bool = False):
    """Worlds with recurrent layers beside attention; with ``tight`` there are hardly any slots."""
    world = draw(worlds(tight))
    slots = draw(st.integers(3, 5 if tight else 40))
    state = GroupSpec("state", world.groups[0].block_size, slots, window=1, recurrent=True)
    return replace(world, groups=(*world.groups, state))


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
    plain = draw(st.booleans())  # so that steps are leased
    for request_id in range(draw(st.integers(1, 14))):
        stem = draw(st.sampled_from([[], *stems]))
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        prompt = tuple([*stem, *tail][: world.limits.max_model_len - 1])
        sampling = SamplingParams(
            max_tokens=draw(st.one_of(st.none(), st.integers(1, 30))),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))),
        )
        if not plain and draw(st.booleans()) and sampling.max_tokens is not None:
            sampling = SamplingParams(
                max_tokens=sampling.max_tokens,
                min_tokens=draw(st.integers(0, sampling.max_tokens)),
                stop_token_ids=sampling.stop_token_ids,
            )
        if not plain:
            sampling = replace(sampling, speculation=draw(st.sampled_from([0, 0, 1, 3, 9])))
        if not plain and draw(st.integers(0, 2)) == 0:
            sampling = replace(sampling, grammar="any: it only forbids drafts")
        request = Request(
            request_id,
            prompt,
            sampling,
            service_class=draw(st.sampled_from(["priority", "interactive", "batch"])),
            cache_salt=draw(st.sampled_from([b"", b"other"])),
        )
        if not plain and draw(st.integers(0, 7)) == 0:
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


def plans(world: World, arrivals, cancels, make=fcfs, step_s=0.0) -> list[str]:
    """What the scheduler plans in the first rounds."""
    scheduler = world.scheduler(make, world.cache())
    executor = world.executor()
    seen: list[str] = []
    inbox = ScriptedInbox(dict(arrivals), dict(cancels))
    tickets: deque = deque()
    for turn in range(60):
        requests, cancelled = inbox.receive()
        for request in requests:
            scheduler.add(request)
        for sequence_id, reason in cancelled:
            scheduler.cancel(sequence_id, reason)
        plan = scheduler.plan(turn * step_s)
        seen.append(repr(plan))
        if plan is not None:
            tickets.append(executor.launch(plan))
        depth = world.depth if plan is None or not plan.lease else 0  # nothing is planned under it
        while tickets and (plan is None or len(tickets) > depth):
            scheduler.commit(tickets.popleft().result(), turn * step_s)
            if plan is None:
                break
    return seen


COMMON = {
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
