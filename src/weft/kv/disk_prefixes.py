"""Prefixes on disk beside those in memory: which blocks go there, and which come back for whom.

A waiting sequence whose prompt goes on with blocks on disk waits until they are read, if that is
faster than to compute them. It never waits for others to be read, or long. When it starts, they are
copied into blocks of its own, before the step computes; from then on they are shared like all
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from weft.core.plan import BlockCopy
from weft.core.types import Sequence
from weft.kv.block_files import Key
from weft.kv.disk_cache import DiskCache, Fetch

if TYPE_CHECKING:
    from weft.kv.cache import GroupSpec, KVCache


class DiskPrefixes:
    """The prefixes on disk, as one cache of blocks in memory sees them.

    Attributes:
        disk: where they lie.
        compute_s: predicts the seconds to compute tokens from one position up to another.
        loaded_tokens: tokens that were loaded, not computed, since the start.
    """

    def __init__(self, cache: KVCache, disk: DiskCache) -> None:
        self.disk = disk
        self.compute_s: Callable[[int, int], float] = lambda _start, _upto: math.inf
        self.loaded_tokens = 0
        self._cache = cache
        self._saves: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._fetches: dict[int, Fetch] = {}

    # -- to disk ------------------------------------------------------------------------------

    def evicted(self, group: int, block: int, block_hash: bytes) -> None:
        """A block of memory is about to be written, and what it has could be found until now."""
        if self.disk.reserve((group, block_hash)):
            self._saves.append((group, block, block_hash))

    def save_cached(
        self, save: Callable[[Iterable[BlockCopy]], None]
    ) -> Generator[None, None, bool]:
        """Save what nobody holds in memory and is not on disk, block by block, the newest first.

        Returns:
            Whether all is saved, or cannot be; False if there must be room for the rest first.
        """
        for group, pool in enumerate(self._cache.pools):
            for block, block_hash in reversed(pool.cached()):
                if self.disk.paused:
                    return True
                if self.disk.full:
                    return False
                if self.disk.reserve((group, block_hash)):
                    save([(group, block, block_hash)])
                    yield
        return True

    # -- from disk ----------------------------------------------------------------------------

    def pending(self, sequence: Sequence) -> bool:
        """Whether to wait for what is being read for a waiting sequence."""
        fetch = self._fetches.get(sequence.id)
        return fetch is not None and fetch.pending

    def awaited(self, sequence: Sequence, hit: int) -> bool:
        """Whether to wait for blocks behind the first ``hit`` tokens of a waiting sequence.

        They are looked up once, and are read now if there is memory for them.
        """
        if sequence.id in self._fetches:
            return self.pending(sequence)
        if self.disk.starting:
            return True
        if (keys := self._to_read(sequence, hit)) is None:
            return False
        self._fetches[sequence.id] = self.disk.fetch(keys)
        return self.pending(sequence)

    def _to_read(self, sequence: Sequence, hit: int) -> list[Key] | None:
        """Blocks behind a hit in memory that take less time to read than to compute.

        None if there is no memory for them at present.
        """
        disk, room = self.disk, self.disk.room
        upto = self._found(sequence, hit, disk.has)
        keys = self._keys(sequence, hit, upto)
        if (nbytes := self._bytes(keys)) > room:
            upto = self._found(sequence, hit, disk.has, hit + (upto - hit) * room // nbytes)
            if not (keys := self._keys(sequence, hit, upto)):
                return None
        return keys if disk.read_s(self._bytes(keys)) < self.compute_s(hit, upto) else []

    def _bytes(self, keys: Seq[Key]) -> int:
        return sum(self.disk.block_bytes(group) for group, _ in keys)

    def found(self, sequence: Sequence, hit: int) -> int:
        """Tokens of a sequence that memory and what was read have, if memory has ``hit``."""
        if sequence.id not in self._fetches:
            return hit
        return self._found(sequence, hit, self.disk.staged)

    def _found(
        self,
        sequence: Sequence,
        hit: int,
        has: Callable[[Key], bool],
        most: float = math.inf,
    ) -> int:
        """The largest n of which each group has the blocks that a query at n can read.

        As ``KVCache.find_prefix``, which gave ``hit``; n leaves a token to compute, too.
        """
        cache, tokens = self._cache, sequence.tokens
        unit = cache.alignment
        upto = int(min(len(tokens) - 1, most)) // unit * unit
        gaps: list[tuple[GroupSpec, list[int]]] = []  # of sliding groups: blocks that are missing
        for index, group in enumerate(cache.groups):
            hashes = cache.block_hashes(sequence.id, index, tokens, upto // group.block_size)
            first = hit // group.block_size
            missing = (i for i in range(first, len(hashes)) if not has((index, hashes[i])))
            if group.window is None:
                upto = next(missing, len(hashes)) * group.block_size // unit * unit
            else:
                gaps.append((group, list(missing)))
        while upto > hit and any(
            group.first_block(upto) <= i < upto // group.block_size
            for group, missing_blocks in gaps
            for i in missing_blocks
        ):
            upto -= unit
        return max(upto, hit)

    def _keys(self, sequence: Sequence, hit: int, upto: int) -> list[Key]:
        """Blocks to read: those of tokens [hit, upto) that a query at ``upto`` can read."""
        cache, keys = self._cache, []
        for index, group in enumerate(cache.groups):
            last = upto // group.block_size
            hashes = cache.block_hashes(sequence.id, index, sequence.tokens, last)
            keys += [(index, block_hash) for block_hash in hashes[self._first(group, hit, upto) :]]
        return keys

    @staticmethod
    def _first(group: GroupSpec, hit: int, upto: int) -> int:
        return max(hit // group.block_size, group.first_block(upto))

    def load(self, sequence: Sequence, hit: int, upto: int) -> bool:
        """Fill blocks that a sequence has for tokens [hit, upto) with what ``found`` found.

        They count as computed. False, with nothing changed, if some of it is not there any more.
        """
        cache = self._cache
        if not self.disk.claim(self._keys(sequence, hit, upto)):
            return False
        table = cache.table(sequence.id)
        assert table is not None, "it was opened"
        for index, group in enumerate(cache.groups):
            last = upto // group.block_size
            hashes = cache.block_hashes(sequence.id, index, sequence.tokens, last)
            for position in range(self._first(group, hit, upto), last):
                block, block_hash = table.blocks[index][position], hashes[position]
                cache.pools[index].register_hash(block, block_hash)
                self._loads.append((index, block, block_hash))
            table.full[index] = last
        self.loaded_tokens += upto - hit
        return True

    def forget(self, sequence_id: int) -> None:
        """Read nothing for a sequence any more, as it has started or will not."""
        if (fetch := self._fetches.pop(sequence_id, None)) is not None:
            self.disk.release(fetch)

    # -- plans --------------------------------------------------------------------------------

    def take_saves(self) -> tuple[BlockCopy, ...]:
        """What the next launched step must save before anything is written."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def take_loads(self) -> tuple[BlockCopy, ...]:
        """What the next launched step must load before it computes."""
        loads, self._loads = tuple(self._loads), []
        return loads
