"""Block pool and KV cache, by hand."""

from __future__ import annotations

import pytest

from weft.core.errors import InvariantError
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.hashing import HashChain
from weft.kv.pool import BlockPool, fullest

FULL = GroupSpec("full", 4, 8)
SLIDING = GroupSpec("sliding", 4, 8, window=6)


def fill(cache: KVCache, sequence_id: int, tokens: list[int], salt: bytes = b"") -> int:
    """Open, extend and commit a sequence as a scheduler does; return its prefix hit."""
    cache.register(sequence_id, salt)
    hit = cache.find_prefix(sequence_id, tokens)
    cache.open(sequence_id, hit)
    assert cache.extend(sequence_id, len(tokens)) is not None
    cache.commit(sequence_id, tokens, len(tokens))
    cache.check()
    return hit


def drop(cache: KVCache, sequence_id: int, **options) -> None:
    cache.release(sequence_id, **options)
    cache.forget(sequence_id)
    cache.check()


def test_blank_blocks_go_first_then_the_longest_unused():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block, block_hash in ((a, b"a"), (b, b"b")):
        pool.register_hash(block, block_hash)
    for block in (b, a, c):
        pool.release(block)
    assert pool.allocate(1) == (c,)
    assert pool.allocate(1) == (b,)
    assert pool.find(b"b") is None
    assert pool.find(b"a") == a
    pool.share(a)
    assert pool.available == 0
    assert pool.allocate(1) is None


def test_a_block_released_twice_is_a_bug():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(block)


def test_equal_content_is_found_once():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register_hash(first, b"same")
    pool.register_hash(second, b"same")
    pool.release(second)
    assert pool.find(b"same") == first
    pool.check({first: 1})


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._references.__setitem__(0, 2),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._block_of.__setitem__(b"x", 1),
        lambda pool: pool._cached.__setitem__(pool._free.pop(), None),
    ],
)
def test_check_finds_every_kind_of_damage(damage):
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.check({block: 1})
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check({block: 1})


def test_hashes_are_chained_and_salted():
    def block_hashes(tokens, salt=b""):
        return HashChain(2, salt).extend(tokens, len(tokens) // 2)

    assert block_hashes([1, 2, 3, 4])[0] == block_hashes([1, 2, 9, 9])[0]
    assert block_hashes([1, 2, 3, 4])[1] != block_hashes([9, 2, 3, 4])[1]
    assert block_hashes([1, 2])[0] != block_hashes([1, 2], b"salt")[0]
    assert block_hashes([258, 0])[0] != block_hashes([2, 1])[0]
    prefix = block_hashes([1, 2])[0]
    assert block_hashes([3, 4], salt=prefix)[0] != block_hashes([1, 2, 3, 4])[1]


def test_a_prefix_hit_leaves_one_token_to_compute():
    cache = KVCache([FULL])
    assert fill(cache, 1, list(range(8))) == 0
    assert fill(cache, 2, list(range(8))) == 4
    assert fill(cache, 3, [*range(8), 99]) == 8
    assert cache.tables(3)[0][:2] == cache.tables(1)[0]


def test_other_salts_and_other_tokens_do_not_hit():
    cache = KVCache([FULL])
    fill(cache, 1, list(range(8)))
    assert fill(cache, 2, list(range(9)), salt=b"x") == 0
    assert fill(cache, 3, [7, *range(1, 9)]) == 0


def test_a_full_group_stops_at_the_first_gap_a_sliding_one_does_not():
    """With the first block evicted, the window is still there, but full attention is not."""
    tokens = list(range(17))
    for groups, expected in (([FULL], 0), ([SLIDING], 16), ([FULL, SLIDING], 0)):
        cache = KVCache(groups)
        fill(cache, 1, tokens)
        drop(cache, 1)
        first = cache._chains.get(1)
        assert first is None
        chain = HashChain(4, b"").extend(tokens, 1)
        for pool in cache.pools:
            block = pool.find(chain[0])
            if block is not None:
                pool.share(block)
                pool.invalidate(block)
                pool.release(block)
        cache.register(2, b"")
        assert cache.find_prefix(2, tokens) == expected


def test_a_sliding_group_gives_up_its_head():
    cache = KVCache([SLIDING])
    fill(cache, 1, list(range(20)))
    table = cache.tables(1)[0]
    assert table[:3] == (-1, -1, -1)  # blocks of tokens 0-11 lie before 20 - 6
    assert all(block >= 0 for block in table[3:])
    assert cache.pools[0].held == 2


def test_a_hit_in_a_sliding_group_takes_the_window_only():
    cache = KVCache([SLIDING])
    fill(cache, 1, list(range(20)))
    drop(cache, 1)
    cache.register(2, b"")
    tokens = [*range(20), 77]
    assert cache.find_prefix(2, tokens) == 20
    cache.open(2, 20)
    assert cache.tables(2)[0][:3] == (-1, -1, -1)
    cache.check()


def test_groups_with_different_block_sizes_align():
    cache = KVCache([GroupSpec("full", 4, 24), GroupSpec("small", 6, 24, window=7)])
    assert cache.alignment == 12
    fill(cache, 1, list(range(24)))
    assert fill(cache, 2, [*range(24), 1]) == 24
    assert fill(cache, 3, [*range(23), 1, 1]) == 12


def test_extend_takes_everything_or_nothing():
    cache = KVCache([FULL, GroupSpec("small", 4, 2)])
    cache.register(1, b"")
    cache.open(1, 0)
    assert cache.extend(1, 12) is None
    assert cache.pools[0].held == cache.pools[1].held == 0
    assert cache.growable(1) == 8
    assert cache.extend(1, 8) is not None
    assert cache.capacity(1) == 8


def test_faulty_blocks_are_zeroed_and_never_found():
    cache = KVCache([FULL])
    fill(cache, 1, list(range(12)))
    fill(cache, 2, [*range(8), 50, 51, 52, 53, 54])
    shared = cache.tables(2)[0][:2]
    own = cache.tables(2)[0][2:]
    drop(cache, 2, faulty_from=8)
    assert {block for _, block in cache.take_zero()} == set(own)
    assert cache.take_zero() == ()
    assert cache.tables(1)[0][:2] == shared
    cache.register(3, b"")
    assert cache.find_prefix(3, [*range(8), 50, 51, 52, 53, 54, 55]) == 8


def test_a_faulty_block_that_others_share_is_not_zeroed():
    cache = KVCache([FULL])
    fill(cache, 1, list(range(9)))
    fill(cache, 2, list(range(9)))
    drop(cache, 1, faulty_from=0)
    shared = set(cache.tables(2)[0][:2])
    assert not shared & {block for _, block in cache.take_zero()}


def test_check_finds_two_writers():
    cache = KVCache([FULL])
    fill(cache, 1, list(range(6)))
    fill(cache, 2, [9, 8, 7, 6, 5, 4])
    tail = cache._tables[1].blocks[0][1]
    cache.pools[0].release(cache._tables[2].blocks[0][1])
    cache._tables[2].blocks[0][1] = tail
    cache.pools[0].share(tail)
    with pytest.raises(InvariantError, match="two writers"):
        cache.check()


def test_the_longest_sequence_that_fits():
    assert KVCache([FULL]).max_tokens() == 32
    assert KVCache([SLIDING]).max_tokens() > 10**6
    assert KVCache([FULL, SLIDING]).max_tokens() == 32
    assert KVCache([GroupSpec("s", 4, 3, window=6)]).max_tokens() == 12


def test_blocks_that_are_evicted_are_free_and_forgotten():
    pool = BlockPool(4)
    held, cached, plain = (pool.allocate(1)[0] for _ in range(3))
    pool.register_hash(held, b"held")
    pool.register_hash(cached, b"cached")
    pool.release(cached)
    pool.release(plain)
    with pytest.raises(InvariantError, match="held"):
        pool.evict([held])
    pool.evict([cached, plain, 3])
    assert pool.find(b"cached") is None
    assert pool.find(b"held") == held
    pool.check({held: 1})
    assert pool.available == 3


def test_the_fullest_pool_is_the_one_that_runs_out_first():
    sliding, full = BlockPool(10), BlockPool(100)
    assert sliding.allocate(4)
    assert full.allocate(30)
    assert fullest([full, sliding]) is sliding
    assert full.allocate(20)
    assert fullest([full, sliding]) is full


def test_forgotten_blocks_are_free_and_the_lowest_goes_first():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block in blocks[:2]:
        pool.register_hash(block, bytes([block]))
    for block in (1, 3, 0):
        pool.release(block)
    assert pool.tidy() == [3, 4]
    pool.forget()
    assert pool.find(bytes([0])) is None
    pool.check({2: 1})
    assert pool.tidy() == [0, 1, 3, 4]
    assert pool.allocate(3) == (0, 1, 3)
