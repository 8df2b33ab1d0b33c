"""Memory of the KV: taken when it is written, given back when it holds nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.engine.idle import PAUSE_S, SAVE_S, IdleMemory
from weft.engine.kv_file import create_kv_file
from weft.exec.memory import Arena, give_back, map_file
from weft.exec.store import KVStore
from weft.kernels.arrays import address
from weft.kv.pool import BlockPool
from weft.models.spec import KVGroup

BLOCK, HEADS, SIZE, MIB = 16, 2, 64, 2**20
BLOCKS = 8192  # 32 MiB in each of the four tensors


def resident(tensor: NDArray[Any]) -> int:
    """Bytes of a tensor's pages that are in memory."""
    first = address(tensor) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(tensor.nbytes // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def make_store() -> KVStore:
    group = KVGroup("full", (0, 1), None, HEADS, SIZE)
    return KVStore([group], [BLOCKS], BLOCK, "bfloat16")


def make_shared_store() -> Iterator[KVStore]:
    """A store in a file without a name, as KV that outlives its engine has it."""
    fd = create_kv_file()
    nbytes = 4 * BLOCKS * 4096
    os.ftruncate(fd, nbytes)
    group = KVGroup("full", (0, 1), None, HEADS, SIZE)
    memory = Arena(map_file(fd, nbytes))
    store = KVStore([group], [BLOCKS], BLOCK, "bfloat16", file=memory)
    assert store.like([3]).keys[0][0].shape[0] == 3, "which lies elsewhere"
    yield store
    os.close(fd)


@pytest.fixture(params=["private", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    if request.param == "private":
        yield make_store()
    else:
        yield from make_shared_store()


def size_of(store: KVStore) -> int:
    return sum(resident(tensor) for tensor in store.tensors(0))


def write(store: KVStore, blocks: range) -> None:
    for tensor in store.tensors(0):
        tensor[blocks.start : blocks.stop] = 1.0


def test_memory_is_taken_when_it_is_written(store):
    whole = sum(tensor.nbytes for tensor in store.tensors(0))
    assert whole == 128 * MIB
    assert size_of(store) == 0
    write(store, range(0, 1))
    assert 0 < size_of(store) <= 4 * 2 * MIB  # a large page of each


def test_blocks_that_hold_nothing_are_zeros_without_memory(store):
    write(store, range(BLOCKS))
    assert size_of(store) == 128 * MIB
    held = [3, 4, 4000]
    given = sum(store.give_back(0, [block for block in range(BLOCKS) if block not in held]))
    assert given >= 127 * MIB
    assert size_of(store) <= MIB
    for tensor in store.tensors(0):
        assert bool((tensor[held] == 1.0).all())
        assert bool((tensor[[2, 5, 3999, 4001]] == 0.0).all())
    write(store, range(2))
    store.zero(0, 1)
    assert store.tensors(0)[0][:2].max((1, 2, 3)).tolist() == [1.0, 0.0]


def test_only_whole_pages_go():
    store = make_store()
    write(store, range(4))
    (keys, *_) = store.tensors(0)
    block = keys.nbytes // BLOCKS  # 4096 bytes
    assert give_back(address(keys) + 1, block) == 0
    assert give_back(address(keys) + 1, 2 * block) == block
    assert bool((keys[[0, 2, 3]] == 1.0).all())
    assert bool((keys[1] == 0.0).all())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rest(memory: IdleMemory, pool: BlockPool) -> int:
    """Let it do what there is to do; return the moments that took."""
    moments = 0
    while memory.idle((pool,)):
        moments += 1
    return moments


def some_blocks(pool: BlockPool, cached: int, count: int) -> tuple[int, ...]:
    blocks = pool.allocate(count)
    assert blocks is not None
    for block in blocks[:cached]:
        pool.register_hash(block, block.to_bytes(2))
    return blocks


def test_an_idle_engine_keeps_prefixes_for_a_while():
    store, pool, clock = make_store(), BlockPool(BLOCKS), Clock()
    memory = IdleMemory(store, 60.0, clock)
    assert rest(memory, pool) == 0
    blocks = some_blocks(pool, cached=BLOCKS // 2, count=BLOCKS)
    write(store, range(BLOCKS))
    memory.busy()
    for block in blocks:
        pool.release(block)
    assert rest(memory, pool) == 0  # the next request may be near
    clock.now += PAUSE_S
    assert rest(memory, pool) == 4  # a moment for each tensor
    assert size_of(store) == 64 * MIB
    assert rest(memory, pool) == 0
    clock.now += 60 - PAUSE_S
    assert rest(memory, pool) == 4
    assert size_of(store) == 0
    assert pool.find((0).to_bytes(2)) is None
    clock.now += 1000
    assert rest(memory, pool) == 0
    pool.check({})


def test_work_interrupts_and_prefixes_may_stay_for_ever():
    store, pool, clock = make_store(), BlockPool(BLOCKS), Clock()
    memory = IdleMemory(store, 0.0, clock)
    blocks = some_blocks(pool, cached=BLOCKS // 2, count=BLOCKS)
    write(store, range(BLOCKS))
    memory.busy()
    for block in blocks:
        pool.release(block)
    rest(memory, pool)
    clock.now += PAUSE_S
    assert memory.idle((pool,))
    assert size_of(store) == 112 * MIB
    memory.busy()
    taken = pool.allocate(1000)
    assert taken == tuple(range(BLOCKS // 2, BLOCKS // 2 + 1000))
    write(store, range(taken[0], taken[-1] + 1))
    assert rest(memory, pool) == 0
    clock.now += 10_000
    assert rest(memory, pool) == 4
    assert size_of(store) <= (64 + 4 * 1000 * 4096 / MIB + 4) * MIB
    for tensor in store.tensors(0):
        assert bool((tensor[: BLOCKS // 2] == 1.0).all())
        assert bool((tensor[list(taken)] == 1.0).all())


def test_prefixes_are_saved_once_though_measurements_write_blocks():
    """A slice of a measurement leaves nothing to save, and the next one need not wait for it."""
    store, pool, clock, saves = make_store(), BlockPool(BLOCKS), Clock(), []

    def save():
        saves.append(clock.now)
        yield
        return True

    memory = IdleMemory(store, 60.0, clock, save)
    memory.busy()
    rest(memory, pool)
    clock.now += SAVE_S
    assert rest(memory, pool) == 1
    assert memory.saved
    for _ in range(3):
        write(store, range(BLOCKS))
        memory.wrote()
        assert memory.saved
        rest(memory, pool)
        clock.now += PAUSE_S
    assert rest(memory, pool) == 4
    assert size_of(store) == 0, "measurements leave nothing"
    assert len(saves) == 1
    memory.busy()
    assert not memory.saved


def test_a_second_map_of_the_file_has_the_same_blocks():
    fd = create_kv_file()
    os.ftruncate(fd, 2**20)
    first, second = (Arena(map_file(fd, 2**20)) for _ in range(2))
    for shape, dtype in (((3, 100), "bfloat16"), ((5, 7), "float32")):
        one, other = first(shape, dtype), second(shape, dtype)
        one[1] = 2.5
        assert bool((other[1] == 2.5).all())
        assert not other[2].any()
    with pytest.raises(InvariantError, match="do not fit"):
        first((2**20,), "uint8")
    os.close(fd)


def test_memory_that_cannot_be_given_is_an_error():
    with pytest.raises(OSError, match="memory"):
        give_back(2**46, 2**20)
