"""The prefix cache on the host: blocks that the device gives up, and that come back with a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.plan import TierCopy
from weft.kv.block_files import Key

if TYPE_CHECKING:
    from weft.kv.cache import KVCache


class HostPrefixes:
    """Cached blocks in the host tier, as the device's cache sees them.

    They are as those that sequences of the host have left there: found by hash, shared, and the
    first to go when the tier needs blocks, even before they are copied.
    """

    def __init__(self, host: KVCache) -> None:
        self._pools = host.all_pools
        self._spills: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._fills: list[TierCopy] = []

    def has(self, key: Key) -> bool:
        """Whether a block lies here."""
        group, block_hash = key
        return self._pools[group].find(block_hash) is not None

    def keep(self, key: Key, block: int) -> None:
        """Keep a block that the device gives up, in the place of the least recently used one."""
        group, block_hash = key
        pool = self._pools[group]
        if self.has(key):
            self.touch(key)
        elif (taken := pool.allocate(1)) is not None:
            pool.register_hash(taken[0], block_hash)
            pool.release(taken[0])
            self._spills[group, taken[0]] = block, block_hash

    def touch(self, key: Key) -> None:
        """A block that lies here is used now, so that others go before it."""
        group, block_hash = key
        pool = self._pools[group]
        block = pool.find(block_hash)
        assert block is not None, "it was found"
        pool.share(block)
        pool.release(block)

    def fill(self, key: Key, block: int) -> None:
        """Copy a block that lies here into one of the device before the next step computes."""
        group, block_hash = key
        pool = self._pools[group]
        source = pool.find(block_hash)
        assert source is not None, "it was found"
        pool.share(source)
        self._fills.append((group, source, block))

    def take_spills(self) -> tuple[TierCopy, ...]:
        """What the next launched step copies to the host before anything is written."""
        spills, self._spills = self._spills, {}
        return tuple(
            (group, block, target)
            for (group, target), (block, block_hash) in spills.items()
            if self._pools[group].find(block_hash) == target  # else it was given away again
        )

    def drop_spills(self) -> None:
        """Forget the blocks that were to be copied here."""
        for group, _, target in self.take_spills():
            self._pools[group].evict([target])

    def take_fills(self) -> tuple[TierCopy, ...]:
        """What the next launched step copies to the device before it computes."""
        fills, self._fills = tuple(self._fills), []
        for group, source, _ in reversed(fills):  # a beginning is of use to more prompts
            self._pools[group].release(source)
        return fills

    def held(self) -> list[list[int]]:
        """Blocks, by group, that fills not launched yet will read; one stands once for each."""
        blocks: list[list[int]] = [[] for _ in self._pools]
        for group, source, _ in self._fills:
            blocks[group].append(source)
        return blocks
