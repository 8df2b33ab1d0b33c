"""Two tiers of KV: moves keep the content, and no block is free that a launched step touches."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from depth import searching
from weft.core.errors import InvariantError
from weft.core.plan import RowAdd, RowExtend, StepPlan, SubBatch, Tier
from weft.core.types import SamplingParams
from weft.kv.cache import GroupSpec
from weft.kv.tiers import MovePin, TieredCache
from weft.sim.executor import ModelledExecutor, next_token

VOCAB = 97
FULL = GroupSpec("full", 4, 8)
SLIDING = GroupSpec("sliding", 4, 8, window=6)


def filled(cache: TieredCache, sequence_id: int, tokens: list[int], tier=Tier.DEVICE) -> int:
    """Open, extend and commit a sequence in a tier; return its prefix hit there."""
    cache.register(sequence_id, b"")
    here = cache.tier(tier)
    hit = here.find_prefix(sequence_id, tokens)
    here.open(sequence_id, hit)
    assert here.extend(sequence_id, len(tokens)) is not None
    cache.commit(sequence_id, tokens, len(tokens))
    cache.check()
    return hit


def held(cache: TieredCache) -> tuple[int, int]:
    return cache.device.pools[0].held, cache.host.pools[0].held


def test_a_move_takes_its_room_at_once_and_gives_the_old_back_when_it_is_committed():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    old = cache.device.tables(1)
    move, pin = cache.move(1, row=5, upto=10)
    assert (move.row, move.to, move.source, move.after_layer) == (5, Tier.HOST, old, False)
    assert move.target == cache.host.tables(1)
    assert cache.tier_of(1) is Tier.HOST
    assert held(cache) == (3, 3)
    cache.check()
    cache.complete_move(pin)
    assert held(cache) == (0, 3)
    cache.check()
    assert pickle.loads(pickle.dumps(move)) == move


def test_a_move_copies_shared_blocks():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    assert filled(cache, 2, list(range(10))) == 8
    _, pin = cache.move(1, 0, 10)
    cache.complete_move(pin)
    cache.check()
    assert held(cache) == (3, 3)
    cache.register(3, b"")
    assert cache.device.find_prefix(3, list(range(10))) == 8  # the second one has them still


def test_each_tier_finds_its_own_prefixes():
    cache = TieredCache([FULL], [8])
    tokens = list(range(10))
    filled(cache, 1, tokens)
    _, pin = cache.move(1, 0, 10)
    cache.commit(1, tokens, 10)
    cache.register(2, b"")
    assert cache.host.find_prefix(2, tokens) == 0  # nobody may read what is on its way
    cache.complete_move(pin)
    assert cache.device.find_prefix(2, tokens) == 8  # cached, though nobody holds it
    cache.commit(1, tokens, 10)
    assert cache.host.find_prefix(2, tokens) == 8


def test_a_sliding_group_moves_its_window_only():
    cache = TieredCache([FULL, SLIDING], [8, 3])
    filled(cache, 1, list(range(20)))
    move, pin = cache.move(1, 0, 20)
    assert move.source[1][:3] == move.target[1][:3] == (-1, -1, -1)
    assert cache.host.pools[1].held == 2
    cache.complete_move(pin)
    cache.check()
    cache.commit(1, list(range(20)), 20)
    cache.check()


def test_blocks_reserved_beyond_what_is_written_do_not_move():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    assert cache.of(1).extend(1, 20) is not None
    move, _ = cache.move(1, 0, 10)
    assert len(move.source[0]) == len(move.target[0]) == 3
    assert held(cache) == (5, 3)


def test_a_move_without_room_takes_nothing():
    cache = TieredCache([FULL, SLIDING], [8, 1])
    filled(cache, 1, list(range(10)))
    assert cache.move(1, 0, 10) is None
    assert cache.tier_of(1) is Tier.DEVICE
    assert [pool.held for pool in cache.host.pools] == [0, 0]
    cache.check()


def test_a_sequence_that_ends_while_it_moves_leaves_both_tables_to_the_lease():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    _, pin = cache.move(1, 0, 10)
    cache.release(1)
    cache.forget(1)
    assert held(cache) == (3, 3)
    cache.check()
    cache.complete_move(pin)
    assert held(cache) == (0, 0)
    cache.check()


def test_nothing_of_a_faulty_sequence_is_found_in_a_tier_that_it_has_left():
    cache, tokens = TieredCache([FULL], [8]), list(range(10))
    filled(cache, 1, tokens)
    assert filled(cache, 2, tokens[:5]) == 4  # shares the first block
    _, pin = cache.move(1, 0, 10)
    cache.complete_move(pin)
    cache.register(3, b"")
    assert cache.device.find_prefix(3, tokens) == 8
    left = cache.device.pools[0].cached()
    cache.release(1, faulty_from=4)
    cache.check()
    assert cache.device.find_prefix(3, tokens) == 4  # what it was given by another one
    assert cache.device.take_zero() == ((0, left[0][0]),)


def test_a_faulty_sequence_that_moves_leaves_nothing_to_find_in_either_tier():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    move, pin = cache.move(1, 0, 10)
    cache.release(1, faulty_from=4)
    cache.forget(1)
    cache.complete_move(pin)
    cache.check()
    assert {block for _, block in cache.device.take_zero()} == set(move.source[0][1:])
    assert {block for _, block in cache.host.take_zero()} == set(move.target[0][1:])
    cache.register(2, b"")
    assert cache.device.find_prefix(2, list(range(10))) == 4


def test_check_finds_a_sequence_in_both_tiers():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    cache.host.open(1, 0)
    with pytest.raises(InvariantError, match="both tiers"):
        cache.check()


def test_moves_are_completed_in_their_order():
    cache = TieredCache([FULL], [8])
    filled(cache, 1, list(range(10)))
    _, first = cache.move(1, 0, 10)
    _, second = cache.move(1, 0, 10)
    with pytest.raises(InvariantError, match="out of order"):
        cache.complete_move(second)
    assert first.tables


# -- on the modelled executor -----------------------------------------------------------------


def executor(*groups: GroupSpec, host=(8,)) -> ModelledExecutor:
    return ModelledExecutor(groups, VOCAB, host_blocks=host)


def one_row(cache: TieredCache, tokens: list[int], **more) -> StepPlan:
    add = RowAdd(
        0, 1, tuple(tokens), len(tokens), SamplingParams(), frozenset(), cache.of(1).tables(1)
    )
    count = len(tokens)
    return StepPlan(1, (SubBatch((0,), (0,), (count,), (True,)),), add=(add,), **more)


def test_a_row_that_reads_from_the_wrong_tier_is_a_bug():
    cache, device = TieredCache([FULL], [8]), executor(FULL)
    tokens = list(range(10))
    filled(cache, 1, tokens)
    plan = one_row(cache, tokens)
    wrong = SubBatch((0,), (0,), (10,), (True,), tiers=(Tier.HOST,))
    ticket = device.launch(StepPlan(1, (wrong,), add=plan.add))
    with pytest.raises(InvariantError, match="its KV lies in the device tier"):
        ticket.result()


def test_an_executor_without_a_host_tier_refuses_moves():
    cache, device = TieredCache([FULL], [8]), executor(FULL, host=())
    filled(cache, 1, list(range(10)))
    plan = one_row(cache, list(range(10)))
    move, _ = cache.move(1, 0, 10)
    ticket = device.launch(StepPlan(1, (), add=plan.add, moves=(move,)))
    with pytest.raises(InvariantError, match="no host tier"):
        ticket.result()


@pytest.mark.parametrize("after_layer", [False, True])
def test_a_layer_wise_move_takes_along_what_its_step_writes(after_layer):
    cache, device = TieredCache([FULL], [8]), executor(FULL)
    tokens = list(range(1, 11))
    filled(cache, 1, tokens)
    plan = one_row(cache, tokens)
    move, _ = cache.move(1, 0, 10, after_layer=after_layer)
    tiers = () if after_layer else (Tier.HOST,)
    batch = SubBatch((0,), (0,), (10,), (True,), tiers)
    device.launch(StepPlan(1, (batch,), add=plan.add, moves=(move,))).result()
    following = SubBatch((0,), (10,), (1,), (True,), (Tier.HOST,))
    token = device.launch(StepPlan(2, (following,))).result().tokens[0]
    tokens.append(next_token(tokens, [FULL], VOCAB))
    assert token == next_token(tokens, [FULL], VOCAB)


@dataclass
class Wanderer:
    """A sequence of the random driver: where it stands, and what it must say."""

    id: int
    row: int
    known: int
    tokens: list[int]
    planned: int = 0
    computed: int = 0
    in_flight: int = 0
    leaves: bool = False


@dataclass
class Driver:
    """Plans at random: sequences start, compute, move, pause and end while steps are in flight."""

    cache: TieredCache
    device: ModelledExecutor
    groups: tuple[GroupSpec, ...]
    draw: st.DataObject
    live: list[Wanderer] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: list(range(6)))
    drop: list[int] = field(default_factory=list)
    flying: deque = field(default_factory=deque)
    started: int = 0
    moved: int = 0

    def plan(self, step_id: int) -> None:
        adds, extends, moves = [], [], []
        pins: list[MovePin] = []
        work: list[tuple[Wanderer, int, int, bool, Tier]] = []
        if self.rows and self.draw.draw(st.booleans()):
            adds += self._start()
        for sequence in self.live:
            choice = self.draw.draw(st.sampled_from(["compute", "move", "last", "wait"]))
            if sequence.leaves or choice == "wait":
                continue
            after = self.draw.draw(st.booleans())
            if choice != "compute" and not after:
                self._move(sequence, False, moves, pins)
            tier = self.cache.tier_of(sequence.id)
            known, count = sequence.known, self._compute(sequence, extends)
            if count:
                start, samples = sequence.planned - count, sequence.known > known
                work.append((sequence, start, count, samples, tier))
            if choice != "compute" and after:
                self._move(sequence, True, moves, pins)
            sequence.leaves = choice == "last"
        drop, self.drop = tuple(self.drop), []
        for sequence, *_ in work:
            sequence.in_flight += 1
        plan = StepPlan(
            step_id,
            self._batches(work),
            drop=drop,
            add=tuple(adds),
            extend=tuple(extends),
            moves=tuple(moves),
            zero=self.cache.device.take_zero(),
            zero_host=self.cache.host.take_zero(),
        )
        self.flying.append((self.device.launch(plan), [w[0] for w in work], work, pins))

    def _start(self) -> list[RowAdd]:
        stem = self.draw.draw(st.sampled_from([(1, 2, 3, 4, 5, 6), (7, 8, 9)]))
        prompt = [*stem, *self.draw.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))]
        tier = self.draw.draw(st.sampled_from(Tier))
        self.started += 1
        cache = self.cache.tier(tier)
        self.cache.register(self.started, b"")
        hit = cache.find_prefix(self.started, prompt)
        cache.open(self.started, hit)
        row = self.rows.pop()
        self.live.append(Wanderer(self.started, row, len(prompt), prompt, hit, hit))
        tables = cache.tables(self.started)
        sampling, stop = SamplingParams(), frozenset()
        return [
            RowAdd(row, self.started, tuple(prompt), len(prompt), sampling, stop, tables, tier=tier)
        ]

    def _compute(self, sequence: Wanderer, extends: list[RowExtend]) -> int:
        most = sequence.known - sequence.planned
        count = self.draw.draw(st.integers(0, most))
        grown = self.cache.of(sequence.id).extend(sequence.id, sequence.planned + count)
        if not count or grown is None:
            return 0
        extends += [RowExtend(sequence.row, group, blocks) for group, blocks in grown]
        sequence.planned += count
        sequence.known += sequence.planned == sequence.known
        return count

    def _move(self, sequence: Wanderer, after_layer: bool, moves: list, pins: list) -> None:
        upto = sequence.planned
        done = self.cache.move(sequence.id, sequence.row, upto, after_layer=after_layer)
        if done is not None:
            moves.append(done[0])
            pins.append(done[1])
            self.moved += 1

    def _batches(self, work) -> tuple[SubBatch, ...]:
        cut = self.draw.draw(st.integers(0, len(work)))
        return tuple(
            SubBatch(
                tuple(s.row for s, *_ in part),
                tuple(start for _, start, *_ in part),
                tuple(count for _, _, count, *_ in part),
                tuple(samples for *_, samples, _ in part),
                tuple(tier for *_, tier in part),
            )
            for part in (work[:cut], work[cut:])
        )

    def commit(self) -> None:
        ticket, sequences, work, pins = self.flying.popleft()
        result = ticket.result()
        tokens = dict(zip(result.sequence_ids, result.tokens, strict=True))
        for sequence, _, count, *_ in work:
            sequence.computed += count
            if sequence.id in tokens:
                expected = next_token(sequence.tokens, self.groups, VOCAB)
                assert tokens[sequence.id] == expected
                sequence.tokens.append(expected)
            self.cache.commit(sequence.id, sequence.tokens, sequence.computed)
        for sequence in sequences:
            sequence.in_flight -= 1
        for sequence in [s for s in self.live if s.leaves and not s.in_flight]:
            self.cache.release(sequence.id)
            self.cache.forget(sequence.id)
            self.live.remove(sequence)
            self.rows.append(sequence.row)
            self.drop.append(sequence.row)
        for pin in pins:
            self.cache.complete_move(pin)

    def check(self) -> None:
        self.cache.check()
        for tier in Tier:
            pools = self.cache.tier(tier).pools
            for pool, touched in zip(pools, self.device.touched_blocks(tier), strict=True):
                assert all(pool._references[block] > 0 for block in touched if block >= 0)


def wander(data, cache_class=TieredCache) -> Driver:
    size = data.draw(st.sampled_from([1, 2, 3]))
    groups = [GroupSpec("full", size, data.draw(st.integers(8, 40)))]
    if data.draw(st.booleans()):
        window = data.draw(st.integers(1, 8))
        groups.append(GroupSpec("sliding", size, data.draw(st.integers(12, 40)), window))
    host = [data.draw(st.integers(4, 40)) for _ in groups]
    depth = data.draw(st.integers(0, 2))
    cache = cache_class(groups, host, prefix_caching=data.draw(st.booleans()))
    device = ModelledExecutor(groups, VOCAB, depth=depth, host_blocks=host)
    driver = Driver(cache, device, tuple(groups), data)
    for step_id in range(1, 14):
        driver.plan(step_id)
        driver.check()
        if len(driver.flying) > depth:
            driver.commit()
            driver.check()
    while driver.flying:
        driver.commit()
        driver.check()
    return driver


@searching(400)
@given(st.data())
def test_whatever_moves_when_the_tokens_are_right_and_no_touched_block_is_free(data):
    wander(data)


def test_without_leases_the_test_above_fails():
    class Hasty(TieredCache):
        def move(self, sequence_id, row, upto, *, after_layer=False):
            done = super().move(sequence_id, row, upto, after_layer=after_layer)
            if done is not None:
                for cache, table in done[1].tables:
                    cache.free(table)
                done[1].tables.clear()
            return done

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(st.data())
    def attempt(data):
        wander(data, Hasty)

    with pytest.raises((AssertionError, InvariantError)):
        attempt()
