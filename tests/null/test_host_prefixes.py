"""Cached prefixes that the device gives up go to the host and come back: by hand, and at random."""

from __future__ import annotations

import math
from random import Random

import pytest
from costs import LinearCost
from test_load_aware import planned

from weft.core.types import Request, SamplingParams
from weft.kv.cache import GroupSpec
from weft.kv.tiers import TieredCache
from weft.sched.registry import fcfs, slo
from weft.sched.scheduler import Limits
from weft.sim.executor import ModelledExecutor, next_token

FULL = (GroupSpec("full", 4, 16),)
MIXED = (GroupSpec("full", 4, 24), GroupSpec("sliding", 8, 16, window=16))
LIMITS = Limits(16, 64, 64)
OUTPUT = 3


class Site:
    """A scheduler over two tiers, which answers one request after another."""

    def __init__(self, groups=FULL, host=(200,), make=fcfs) -> None:
        self.groups = groups
        self.scheduler = make(TieredCache(groups, host), LIMITS)
        self.executor = ModelledExecutor(groups, 97, host_blocks=host)
        self._number = 0

    def answer(self, *prompts, salt: bytes = b"") -> list:
        """Answer prompts at once, check each token, and return the plans."""
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=OUTPUT)
            request = Request(self._number, tuple(prompt), sampling, cache_salt=salt)
            self.scheduler.add(request)
            self._number += 1
        told: dict[int, list[int]] = {}
        collect = self.executor.collect

        def collected(ticket):
            result = collect(ticket)
            for number, token in zip(result.sequence_ids, result.tokens, strict=True):
                told.setdefault(number, []).append(token)
            return result

        self.executor.collect = collected
        plans = planned(self.scheduler, self.executor)
        self.executor.collect = collect
        for index, prompt in enumerate(prompts):
            tokens = list(prompt)
            for _ in range(OUTPUT):
                tokens.append(next_token(tokens, self.groups, 97))
            assert told[self._number - len(prompts) + index] == tokens[len(prompt) :]
        return plans


def prompt(number: int, count: int = 33) -> list[int]:
    return [Random(f"{number} {index}").randrange(97) for index in range(count)]


def computed(plans) -> int:
    return sum(plan.num_tokens for plan in plans)


def filled(plans) -> int:
    return sum(len(plan.fills) for plan in plans)


def test_a_prefix_comes_back_from_the_host():
    site = Site()
    plans = site.answer(prompt(1))
    assert (computed(plans), filled(plans)) == (33 + OUTPUT - 1, 0)
    plans = site.answer(prompt(2))
    assert sum(len(plan.spills) for plan in plans) == 1, "the device has 16 blocks, for 17"
    site.answer(prompt(3))
    plans = site.answer(prompt(1))
    assert (computed(plans), filled(plans)) == (1 + OUTPUT - 1, 8)
    totals = site.scheduler.totals
    assert totals.blocks_to_device == 8
    assert totals.blocks_to_host >= 9
    assert totals.cached_tokens == 32
    assert not any(plan.moves for plan in plans)


def test_what_lies_there_already_is_not_copied_again():
    site = Site()
    for number in (1, 2, 3, 1, 2, 3):
        plans = site.answer(prompt(number))
    copied = site.scheduler.totals.blocks_to_host
    for number in (1, 2, 3):
        plans = site.answer(prompt(number))
        assert filled(plans) > 0
    assert site.scheduler.totals.blocks_to_host == copied


def test_salts_do_not_share():
    site = Site()
    for number in (1, 2, 3):
        site.answer(prompt(number), salt=b"mine")
    plans = site.answer(prompt(1), salt=b"yours")
    assert (computed(plans), filled(plans)) == (33 + OUTPUT - 1, 0)
    assert filled(site.answer(prompt(1), salt=b"mine")) == 8


@pytest.mark.parametrize("host", [1, 3, 8])
def test_a_host_that_gives_away_what_was_found_costs_computing_alone(host):
    """Blocks for the copies push others of the device to the host, and those of the prefix out."""
    site, draw = Site(host=(host,)), Random(host)
    for _ in range(60):
        site.answer(prompt(draw.randrange(4)))
    site.scheduler.check()


@pytest.mark.parametrize("groups", [FULL, MIXED])
@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_with_common_beginnings(groups, seed):
    draw = Random(seed)
    host = tuple(draw.choice((5, 40)) for _ in groups)
    site, fills = Site(groups, host), 0
    for _ in range(40):
        asked = []
        for _ in range(draw.randint(1, 5)):
            begin = draw.randrange(3)
            tail = prompt(10 + draw.randrange(1000), draw.randint(1, 12))
            asked.append([*prompt(begin, draw.randint(4, 40)), *tail])
        fills += filled(site.answer(*asked))
    assert fills > 0 or min(host) < 40, "so few blocks are soon another's"


@pytest.mark.parametrize("seed", [12, 191])
def test_what_the_device_loses_while_it_makes_room_is_computed_too(seed):
    """A sliding group shares only what a later start needs; the rest may go, and is asked for."""
    draw = Random(seed)
    groups = (
        GroupSpec("full", 4, draw.choice((20, 24))),
        GroupSpec("sliding", 4, draw.choice((8, 10, 12)), window=draw.choice((6, 8, 16))),
    )
    site = Site(groups, (draw.choice((2, 5, 10)), draw.choice((2, 5))))
    for _ in range(25):
        asked = []
        for _ in range(draw.randint(1, 5)):
            begin = prompt(draw.randrange(3), draw.randint(4, 40))
            asked.append([*begin, *prompt(10 + draw.randrange(1000), draw.randint(1, 12))])
        site.answer(*asked)


def test_a_plan_that_comes_to_nothing_leaves_nothing_to_copy():
    """What its blocks have may be zeroed or written before the next step."""
    site = Site()
    for number in (1, 2):
        site.answer(prompt(number))
    cache = site.scheduler.memory.kv
    lost = [block_hash for _, block_hash in cache.device.pools[0].cached()]
    cache.register(999, b"")
    cache.device.open(999, 0)
    assert cache.device.extend(999, 60) is not None
    cache.release(999)
    assert site.scheduler.plan(0.0) is None
    assert cache.device.lower.host.take_spills() == ()
    gone = [block_hash for block_hash in lost if cache.device.pools[0].find(block_hash) is None]
    assert len(gone) > 8
    assert not any(cache.device.lower.host.has((0, block_hash)) for block_hash in gone)
    cache.forget(999)
    site.answer(prompt(1))


def test_what_is_computed_faster_stays_there():
    for move_s, expected in ((1e-6, 8), (10.0, 0)):
        cost = LinearCost(0.01, 0.001, move_s=move_s)
        site = Site(make=lambda cache, limits, cost=cost: slo(cache, limits, cost))
        for number in (1, 2, 3):
            site.answer(prompt(number))
        plans = site.answer(prompt(1))
        assert filled(plans) == expected
        assert computed(plans) == 33 - 4 * expected + OUTPUT - 1


def test_without_prefix_caching_nothing_goes_there():
    cache = TieredCache(FULL, (200,), prefix_caching=False)
    assert cache.device.lower is None
    assert math.isinf(TieredCache(FULL, (200,)).device.lower.compute_s(0, 1))
