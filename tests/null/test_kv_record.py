"""KV that outlives its engine: what the next one finds is true, whenever the last was killed."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import searching
from weft.core.errors import InvariantError
from weft.core.plan import Tier
from weft.core.types import Request, SamplingParams
from weft.engine.kv_file import create_kv_file, fits, forget_kv, make_fit, used_bytes
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.hashing import HashChain
from weft.kv.opened import find_opened
from weft.kv.pool import BlockPool
from weft.kv.record import BlockRecord
from weft.kv.tiers import TieredCache
from weft.sched.batch import BatchBuilder
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits

BLOCKS = 6
FULL, SLIDING = GroupSpec("full", 4, 16), GroupSpec("sliding", 4, 12, window=6)


def empty_record(num_blocks: int = BLOCKS) -> bytearray:
    return bytearray(BlockRecord.nbytes(num_blocks))


def recording(memory: bytearray, num_blocks: int = BLOCKS) -> tuple[BlockPool, int]:
    pool = BlockPool(num_blocks)
    return pool, pool.keep(BlockRecord(memoryview(memory), num_blocks))


def digest(number: int) -> bytes:
    return number.to_bytes(16)


def test_the_next_pool_finds_what_was_full_and_cleans_what_was_written():
    memory = empty_record()
    pool, kept = recording(memory)
    assert kept == 0
    blocks = pool.allocate(4)
    assert blocks == (0, 1, 2, 3)
    pool.register_hash(0, digest(7))
    pool.register_hash(2, digest(9))
    pool.register_hash(3, digest(11), written=False)  # its content comes with the next step
    pool.check(dict.fromkeys(blocks, 1))

    heir, kept = recording(memory)
    assert kept == 2
    assert (heir.find(digest(7)), heir.find(digest(9)), heir.find(digest(11))) == (0, 2, None)
    heir.check({})
    assert heir.held == 0
    assert heir.take_unclean() == []
    assert heir.allocate(3) == (1, 3, 4)
    assert heir.take_unclean() == [1, 3], "nobody has written block 4"
    assert heir.allocate(3) == (5, 0, 2), "kept blocks go last"
    assert heir.take_unclean() == []
    assert recording(memory)[1] == 0


def test_only_a_new_pool_of_this_size_continues_with_a_record():
    pool = BlockPool(BLOCKS)
    pool.allocate(1)
    with pytest.raises(InvariantError, match="new"):
        pool.keep(BlockRecord(memoryview(empty_record()), BLOCKS))
    with pytest.raises(InvariantError, match="new"):
        BlockPool(BLOCKS + 1).keep(BlockRecord(memoryview(empty_record()), BLOCKS))


def test_a_damaged_record_breaks_no_pool():
    """No sound engine records one content, or one place of a sequence, twice."""
    memory = empty_record()
    record = BlockRecord(memoryview(memory), BLOCKS)
    for block in (0, 1):
        record.fill(block, digest(1))
        record.open(block + 2, 7, 5)
    pool, kept = recording(memory)
    assert kept == 1
    assert pool.opened(7) == -1
    pool.check({})
    assert pool.allocate(BLOCKS) is not None
    assert sorted(pool.take_unclean()) == [1, 2, 3]


def test_a_record_of_content_that_is_gone_is_damage():
    memory = empty_record()
    pool, _ = recording(memory)
    BlockRecord(memoryview(memory), BLOCKS).fill(0, digest(1))
    with pytest.raises(InvariantError, match="record"):
        pool.check({})


class Watched(BlockRecord):
    """Compares the record with the content of the blocks after each single change of it."""

    def __init__(self, memory: bytearray, content: dict[int, bytes]) -> None:
        super().__init__(memoryview(memory), BLOCKS)
        self._content = content

    def write(self, blocks):
        for block in blocks:
            super().write((block,))
            self.look()

    def fill(self, block, block_hash):
        super().fill(block, block_hash)
        self.look()

    def look(self) -> None:
        for block, block_hash in self.full():
            assert self._content.get(block) == block_hash


OPERATION = st.tuples(
    st.sampled_from(["take", "fill", "load", "step", "release", "share", "evict", "invalidate"]),
    st.integers(0, 5),
)


@given(st.lists(OPERATION, max_size=60), st.sampled_from(range(1, 60)))
@searching(300)
def test_a_record_never_says_more_than_is_true(operations, death):
    """Blocks are written only by whoever took them; the engine dies now and then."""
    memory, content = empty_record(), {}
    names = iter(range(10**6))

    def engine() -> tuple[BlockPool, list[int], dict[int, bytes]]:
        pool = BlockPool(BLOCKS)
        record = Watched(memory, content)
        record.look()
        kept = pool.keep(record)
        assert kept == len(list(record.full()))
        return pool, [], {}

    pool, held, loading = engine()
    for moment, (operation, number) in enumerate(operations, 1):
        block = held[number % len(held)] if held else None
        if operation == "take" and (taken := pool.allocate(1 + number % 3)) is not None:
            held += taken
            content.update(dict.fromkeys(taken, b"torn"))
        elif operation == "step":
            content.update(loading)
            loading.clear()
        elif operation == "share" and (found := [b for b, _ in pool.cached()]):
            pool.share(found[0])
            held.append(found[0])
        elif operation == "evict":
            pool.forget()
        elif block is None:
            continue
        elif operation == "fill" and content[block] == b"torn" and block not in loading:
            content[block] = digest(next(names))
            pool.register_hash(block, content[block])
        elif operation == "load" and content[block] == b"torn" and block not in loading:
            loading[block] = digest(next(names))
            pool.register_hash(block, loading[block], written=False)
        elif operation == "release" and not loading:
            held.remove(block)
            pool.release(block)
        elif operation == "invalidate":
            pool.invalidate(block)
        pool.check({one: held.count(one) for one in held})
        if moment == death:
            pool, held, loading = engine()


class Engines:
    """Caches of engines, each of which has the records of the one before it."""

    def __init__(self, groups: list[GroupSpec]) -> None:
        self._groups = groups
        self._memories = [empty_record(group.num_blocks) for group in groups]

    def next(self) -> KVCache:
        cache = KVCache(self._groups)
        records = zip(self._memories, self._groups, strict=True)
        cache.keep([BlockRecord(memoryview(m), group.num_blocks) for m, group in records])
        return cache


def grown(cache: KVCache, tokens: list[int], computed: int, sequence_id: int = 1) -> int:
    """Compute a sequence up to a token; return how many were there already."""
    cache.register(sequence_id, b"")
    hit = cache.find_prefix(sequence_id, tokens)
    hit = find_opened(cache, sequence_id, tokens, hit)
    cache.open(sequence_id, hit)
    assert cache.extend(sequence_id, max(computed, hit + 1)) is not None
    cache.commit(sequence_id, tokens, computed)
    cache.check()
    return hit


ALL = pytest.mark.parametrize("groups", [[FULL], [SLIDING], [FULL, SLIDING]])
TOKENS = list(range(19))  # of which the last one is not computed


@ALL
def test_sequences_go_on_where_the_last_engine_was_killed(groups):
    engines = Engines(groups)
    assert grown(engines.next(), TOKENS, 18) == 0
    heir = engines.next()
    assert grown(heir, TOKENS, 18) == 18, "with the block that was being filled"
    assert heir.take_zero() == (), "which nothing may zero"
    assert grown(engines.next(), [*TOKENS, 7], 19) == 19, "the one after it as well"
    assert grown(engines.next(), [0, *TOKENS], 19) == 0, "other tokens have other hashes"


@ALL
def test_a_block_that_a_lease_has_filled_is_found(groups):
    """Steps under a lease are committed together: their blocks are not recorded before."""
    size, longer = FULL.block_size, [*TOKENS, *range(50, 60)]
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 18)  # and then to 28 without a word
    heir = engines.next()
    end = 16 + size
    assert grown(heir, longer, 28) == end
    assert heir.take_zero() == ()
    assert grown(heir, longer, 28, sequence_id=2) >= end, "anybody may find it"
    heir.check()
    assert grown(engines.next(), longer, 28) == 28


@ALL
def test_a_block_that_a_sequence_fills_is_its_own(groups):
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 18)
    heir = engines.next()
    assert grown(heir, TOKENS, 18, sequence_id=2) == 16
    assert grown(heir, TOKENS, 18, sequence_id=1) == 18
    assert set(heir.take_zero()) == set()


@ALL
def test_what_a_resumed_sequence_has_not_computed_again_is_not_there(groups):
    """It was preempted; the block of its last tokens is there, and not computed yet."""
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 17)
    assert grown(engines.next(), TOKENS, 18) == 16


@ALL
def test_a_block_that_was_given_up_is_nobodys(groups):
    engines = Engines(groups)
    first = engines.next()
    grown(first, TOKENS, 18)
    first.release(1)
    first.check()
    assert grown(engines.next(), TOKENS, 18) == 16


@ALL
def test_a_sequence_that_goes_on_without_its_block_leaves_it(groups):
    """Else the next engine would find two, of which one lacks what was computed since."""
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 18)
    second = engines.next()
    second.register(1, b"")
    assert find_opened(second, 1, TOKENS, 16) == 18
    second.find_prefix(1, TOKENS)
    second.open(1, 16)
    assert find_opened(second, 1, TOKENS, 16) == 16
    assert second.extend(1, 19) is not None
    assert second.take_zero() == (), "blocks that nobody has written go first"
    second.check()
    assert grown(engines.next(), TOKENS, 18) == 16


@ALL
@pytest.mark.parametrize("rest", ["tidy", "measure"])
def test_an_engine_at_rest_uses_blocks_that_nobody_has_asked_for(groups, rest):
    """Free pages go back to the system, and measurements write anywhere."""
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 18)
    heir = engines.next()
    for pool in heir.pools:
        if rest == "tidy":
            assert 4 in pool.tidy()
        else:
            pool.evict(range(pool.num_blocks))
    assert grown(heir, TOKENS, 18) == (16 if rest == "tidy" else 0)


def test_a_sequence_that_goes_on_on_the_host_leaves_its_block():
    """What the host computes is not in the block that the device's memory has of it."""
    memory = empty_record(FULL.num_blocks)

    def device() -> TieredCache:
        cache = TieredCache([FULL], [FULL.num_blocks])
        cache.device.keep([BlockRecord(memoryview(memory), FULL.num_blocks)])
        return cache

    grown(device().device, TOKENS, 18)
    kv = device()
    scheduler = fcfs(kv, Limits(4, 64, 64))
    scheduler.add(Request(1, tuple(TOKENS[:10]), SamplingParams(), output=tuple(TOKENS[10:])))
    sequence = scheduler.sequences.by_id[1]
    assert kv.device.find_prefix(1, TOKENS) == 16
    assert find_opened(kv.device, 1, TOKENS, 16) == 18
    kv.host.open(1, 0)
    assert kv.host.extend(1, 19) is not None
    scheduler.admission.start(BatchBuilder(64), sequence, 0, kv.host, Tier.HOST)
    assert find_opened(kv.device, 1, TOKENS, 16) == 16
    assert grown(device().device, TOKENS, 18) == 16, "nor does the next engine find it"


@ALL
def test_only_as_much_is_found_as_precedes_the_block(groups):
    engines = Engines(groups)
    grown(engines.next(), TOKENS, 18)
    heir = engines.next()
    for pool in heir.pools:
        block = pool.find(heir_hash(heir, pool))
        assert block is not None
        pool.evict([block])
    assert grown(heir, TOKENS, 18) < 16


def heir_hash(cache: KVCache, pool: BlockPool) -> bytes:
    """The hash of the last full block of ``TOKENS``."""
    group = cache.groups[cache.pools.index(pool)]
    return HashChain(group.block_size, b"").extend(TOKENS, 4)[3]


def test_a_file_is_empty_for_other_kv_and_when_it_is_forgotten():
    fd, size, identity = create_kv_file(), 2**20, b"0123456789abcdef"
    try:
        assert not fits(fd, identity, size)
        make_fit(fd, identity, size)
        mapped = mmap.mmap(fd, size)
        mapped[5000:5004] = b"full"
        make_fit(fd, identity, size)
        assert fits(fd, identity, size)
        assert mapped[5000:5004] == b"full"
        assert not fits(fd, identity, 2 * size)
        assert used_bytes(fd) >= 4096
        forget_kv(fd)
        assert mapped[5000:5004] == bytes(4), "a standby has it mapped already"
        assert fits(fd, identity, size), "and still uses it"
        mapped[5000:5004] = b"full"
        make_fit(fd, bytes(16), size)
        assert mapped[5000:5004] == bytes(4)
        mapped.close()
    finally:
        os.close(fd)


def test_a_file_that_nobody_has_used_can_be_forgotten():
    fd = create_kv_file()
    forget_kv(fd)
    assert used_bytes(fd) == 0
    assert not fits(fd, b"0123456789abcdef", 4096)
