"""Pools of remote places: who goes where, and what becomes of a sequence whose place is gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.plan import OWN_HOST, PlaceSession, PlaceStatus, Tier
from weft.kv.cache import GroupSpec
from weft.kv.places import choose_host
from weft.kv.tiers import TieredCache

FULL = GroupSpec("full", 4, 64)
SLIDING = GroupSpec("sliding", 4, 64, window=6)
UP = PlaceStatus(1, (8, 8))


def tiers(own: int = 4) -> TieredCache:
    return TieredCache([FULL, SLIDING], [own, own])


def start(cache: TieredCache, sequence_id: int, tokens: int = 12) -> None:
    """A sequence on the device; one of 12 tokens has 3 blocks of each group, all still held."""
    cache.register(sequence_id, b"")
    cache.device.open(sequence_id, 0)
    assert cache.device.extend(sequence_id, tokens) is not None


def send(cache: TieredCache, sequence_id: int, tokens: int = 12):
    """Move a sequence to the other tier; the place that it has come to, None if it has no room."""
    done = cache.move(sequence_id, 0, tokens)
    if done is None:
        return None
    cache.complete_move(done[1])
    cache.check()
    return done[0].host


@searching(200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=6))
def test_the_own_host_is_filled_first_then_the_others_evenly(hosts):
    fits, held = zip(*hosts, strict=True)
    chosen = choose_host(fits, held)
    if not any(fits):
        assert chosen is None
        return
    assert chosen is not None
    assert fits[chosen]
    if fits[0]:
        assert chosen == 0
    else:
        assert held[chosen] == min(h for fit, h in zip(fits[1:], held[1:], strict=True) if fit)


def test_sequences_go_to_places_when_the_own_host_is_full():
    cache = tiers()
    for number in range(7):
        start(cache, number)
    assert send(cache, 0) == OWN_HOST
    assert send(cache, 1) is None
    cache.hosts.update((UP, PlaceStatus(3, (8, 8))))
    first, second = PlaceSession(1, 1), PlaceSession(2, 3)
    assert [send(cache, number) for number in range(1, 6)] == [first, second, first, second, None]
    assert cache.tier_of(1) is Tier.HOST
    assert sorted(cache.hosted()) == [0, 1, 2, 3, 4]
    assert cache.hosts.max_tokens() == 32
    assert cache.of(1).extend(1, 16) is not None
    cache.commit(1, list(range(13)), 13)
    cache.check()
    cache.release(2)
    assert send(cache, 5) == second
    for number in range(7):
        cache.release(number) if number != 2 else None
        cache.forget(number)
    assert cache.hosted() == []
    assert all(pool.held == 0 for place in cache.hosts.connected() for pool in place.cache.pools)


def test_nothing_comes_back_and_nothing_goes_layer_by_layer():
    cache = tiers(own=1)
    cache.hosts.update((UP,))
    start(cache, 0)
    assert cache.move(0, 0, 12, after_layer=True) is None
    assert send(cache, 0) == PlaceSession(1, 1)
    assert cache.move(0, 0, 12) is None


def test_a_place_that_is_busy_or_gone_gets_nothing():
    cache = tiers(own=1)
    start(cache, 0)
    cache.hosts.update((PlaceStatus(1, (8, 8), busy=True),))
    assert send(cache, 0) is None
    cache.hosts.update((PlaceStatus(1),))
    assert send(cache, 0) is None
    cache.hosts.update((UP,))
    assert send(cache, 0) == PlaceSession(1, 1)


def test_each_session_has_a_pool_of_its_own():
    """A sequence that is lost stays in the old one until it is released."""
    cache = tiers(own=1)
    cache.hosts.update((UP,))
    start(cache, 0)
    start(cache, 1)
    assert send(cache, 0) == PlaceSession(1, 1)
    cache.hosts.update((PlaceStatus(2, (4, 4)),))
    assert cache.tier_of(0) is Tier.HOST
    (pool,) = cache.hosts.connected()
    assert [p.held for p in pool.cache.pools] == [0, 0]
    assert send(cache, 1) == PlaceSession(1, 2)
    cache.check()
    cache.release(0)
    assert cache.hosted() == [1]
    assert cache.tier_of(0) is Tier.DEVICE
    cache.check()


def test_blocks_of_a_faulty_sequence_are_zeroed_where_they_are():
    cache = tiers(own=1)
    cache.hosts.update((UP,))
    start(cache, 0)
    send(cache, 0)
    cache.release(0, faulty_from=4)
    zero = cache.hosts.take_zero()
    assert {where for where, _, _ in zero} == {PlaceSession(1, 1)}
    assert len(zero) == 4  # two blocks of each group
    assert cache.hosts.take_zero() == ()
    with pytest.raises(KeyError):
        cache.release(0)
