"""Prefixes beyond a device's memory, on the host and on disk: what goes there, and what comes back.

A block that memory gives up goes to the host tier, if there is one, and to disk, if there is one. A
waiting sequence whose prompt goes on with blocks on disk waits until they are read, if that is
faster than to compute them. It never waits for others to be read, or long. When it starts, what was
read and what the host has is copied into blocks of its own, before the step computes; from then on
they are shared like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.core.plan import BlockCopy, StepPlan
from weft.core.types import Sequence
from weft.kv.block_files import Key
from weft.kv.disk_cache import DiskCache, Fetch
from weft.kv.host_prefixes import HostPrefixes

if TYPE_CHECKING:
    from weft.kv.cache import GroupSpec, KVCache


class LowerPrefixes:
    """The levels below one cache of blocks in memory.

    Attributes:
        host: the prefixes on the host; None without such a tier.
        disk: those on disk; None without one.
        compute_s: predicts the seconds to compute tokens from one position up to another.
        fill_s: the same to copy so many tokens from the host.
        loaded_tokens: tokens that were loaded from disk, not computed, since the start.
    """

    def __init__(self, cache: KVCache, host: HostPrefixes | None, disk: DiskCache | None) -> None:
        self.host, self.disk = host, disk
        self.compute_s: Callable[[int, int], float] = lambda _start, _upto: math.inf
        self.fill_s: Callable[[int], float] = lambda _tokens: 0.0
        self.loaded_tokens = 0
        self._cache = cache
        self._saves: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []
        self._fetches: dict[int, Fetch] = {}

    # -- down ---------------------------------------------------------------------------------

    def evicted(self, group: int, block: int, block_hash: bytes) -> None:
        """A block of memory is about to be written, and what it has could be found until now."""
        key = group, block_hash
        if self.host is not None:
            self.host.keep(key, block)
        if self.disk is not None and self.disk.reserve(key):
            self._saves.append((group, block, block_hash))

    def save_cached(
        self, save: Callable[[Iterable[BlockCopy]], None]
    ) -> Generator[None, None, bool]:
        """Save to disk what nobody holds in memory, block by block, the newest first.

        Returns:
            Whether all is saved, or cannot be; False if there must be room for the rest first.
        """
        if self.disk is None:
            return True
        for group, pool in enumerate(self._cache.all_pools):
            for block, block_hash in reversed(pool.cached()):
                if self.disk.paused:
                    return True
                if self.disk.full:
                    return False
                if self.disk.reserve((group, block_hash)):
                    save([(group, block, block_hash)])
                    yield
        return True

    # -- up -----------------------------------------------------------------------------------

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
        if self.disk is None:
            return False
        if self.disk.starting:
            return True
        if (keys := self._to_read(self.disk, sequence, hit)) is None:
            return False
        self._fetches[sequence.id] = self.disk.fetch(keys)
        return self.pending(sequence)

    def _to_read(self, disk: DiskCache, sequence: Sequence, hit: int) -> list[Key] | None:
        """Blocks behind a hit in memory that take less time to read than to compute.

        None if there is no memory for them at present.
        """

        def has(key: Key) -> bool:
            return self._on_host(key) or disk.has(key)

        def nbytes(keys: Iterable[Key]) -> int:
            return sum(disk.block_bytes(group) for group, _ in keys)

        upto = self._found(sequence, hit, has)
        keys = self._not_on_host(self._keys(sequence, hit, upto))
        while keys and (wanted := nbytes(keys)) > disk.room:
            # Blocks of a sliding group do not become fewer with the tokens.
            most = min(upto - 1, hit + (upto - hit) * max(0, disk.room) // wanted)
            upto = self._found(sequence, hit, has, most)
            if not (keys := self._not_on_host(self._keys(sequence, hit, upto))):
                return None
        return keys if disk.read_s(nbytes(keys)) < self.compute_s(hit, upto) else []

    def _on_host(self, key: Key) -> bool:
        return self.host is not None and self.host.has(key)

    def _not_on_host(self, keys: list[Key]) -> list[Key]:
        return [key for key in keys if not self._on_host(key)]

    def found(self, sequence: Sequence, hit: int) -> int:
        """Tokens of a sequence that memory, the host and what was read have, if memory has ``hit``.

        What would be computed faster than it is copied from the host is left there.
        """
        disk = self.disk if sequence.id in self._fetches else None

        def staged(key: Key) -> bool:
            return disk is not None and disk.staged(key)

        if self.host is not None:
            upto = self._found(sequence, hit, lambda key: self._on_host(key) or staged(key))
            if upto > hit and self.fill_s(upto - hit) < self.compute_s(hit, upto):
                for key in reversed(self._keys(sequence, hit, upto)):
                    if self.host.has(key):
                        self.host.touch(key)
                return upto
        return hit if disk is None else self._found(sequence, hit, staged)

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
        cache, tokens, shared = self._cache, sequence.tokens, self._shared(sequence, hit)
        unit = cache.alignment
        upto = int(min(len(tokens) - 1, most)) // unit * unit
        gaps: list[tuple[GroupSpec, list[int]]] = []  # of sliding groups: blocks that are missing
        for index, group in enumerate(cache.groups):
            hashes = cache.block_hashes(sequence.id, index, tokens, upto // group.block_size)
            first = shared // group.block_size
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
        while upto > hit and (state := self._state(sequence, upto)) and not has(state):
            upto -= unit
        return max(upto, hit)

    def _shared(self, sequence: Sequence, hit: int) -> int:
        """Tokens whose KV memory has: more than the hit where only their state is not there."""
        states = self._cache.states
        return hit if states is None else states.attention(sequence.id, hit)

    def _state(self, sequence: Sequence, upto: int) -> Key | None:
        """The recurrent state after so many tokens, if there are states and it must come, too."""
        states = self._cache.states
        if states is None:
            return None
        block_hash = self._cache.state_hashes(sequence.id)[upto // states.block_size - 1]
        return (
            (len(self._cache.groups), block_hash) if states.pool.find(block_hash) is None else None
        )

    def _keys(self, sequence: Sequence, hit: int, upto: int) -> list[Key]:
        """Blocks to bring: those of tokens [hit, upto) that a query at ``upto`` can read."""
        cache, keys, shared = self._cache, list[Key](), self._shared(sequence, hit)
        for index, group in enumerate(cache.groups):
            last = upto // group.block_size
            hashes = cache.block_hashes(sequence.id, index, sequence.tokens, last)
            first = self._first(group, shared, upto)
            keys += [(index, block_hash) for block_hash in hashes[first:]]
        state = self._state(sequence, upto) if upto > hit else None
        return keys if state is None else [*keys, state]

    @staticmethod
    def _first(group: GroupSpec, hit: int, upto: int) -> int:
        return max(hit // group.block_size, group.first_block(upto))

    def load(self, sequence: Sequence, hit: int, upto: int) -> int | None:
        """Fill blocks that a sequence has for tokens [hit, upto) with what ``found`` found.

        They count as computed.

        Returns:
            How many blocks the host gives; None, with nothing changed, if some block is not there
            any more.
        """
        cache, shared = self._cache, self._shared(sequence, hit)
        state, slot = self._state(sequence, upto), -1
        if state is not None and cache.states is not None:
            if (slots := cache.states.pool.allocate(1)) is None:
                return None
            (slot,) = slots
        from_disk = self._not_on_host(self._keys(sequence, hit, upto))
        if from_disk and (self.disk is None or not self.disk.claim(from_disk)):
            if slot >= 0 and cache.states is not None:
                cache.states.pool.release(slot)
            return None
        table = cache.table(sequence.id)
        assert table is not None, "it was opened"
        wanted: list[tuple[Key, int]] = []
        for index, group in enumerate(cache.groups):
            last = upto // group.block_size
            hashes = cache.block_hashes(sequence.id, index, sequence.tokens, last)
            for position in range(self._first(group, shared, upto), last):
                block, block_hash = table.blocks[index][position], hashes[position]
                cache.pools[index].register_hash(block, block_hash, written=False)
                wanted.append(((index, block_hash), block))
            table.full[index] = last
        if state is not None and cache.states is not None:
            cache.states.enter(sequence.id, slot, state[1])
            wanted.append((state, slot))
        if from_disk:
            self.loaded_tokens += upto - hit
        return self._bring(wanted, set(from_disk))

    def _bring(self, wanted: list[tuple[Key, int]], read: set[Key]) -> int:
        """Have the next step fill blocks from the host, or with what was ``read``.

        Returns:
            How many blocks the host gives.
        """
        for key, block in wanted:
            if self.host is not None and key not in read:
                self.host.fill(key, block)
            else:
                self._loads.append((key[0], block, key[1]))
        return sum(key not in read for key, _ in wanted)

    def forget(self, sequence_id: int) -> None:
        """Read nothing for a sequence any more, as it has started or will not."""
        fetch = self._fetches.pop(sequence_id, None)
        if fetch is not None and self.disk is not None:
            self.disk.release(fetch)

    # -- plans --------------------------------------------------------------------------------

    def take_saves(self) -> tuple[BlockCopy, ...]:
        """What the next launched step must save before anything is written."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def nothing_launched(self) -> None:
        """A plan came to nothing: what its blocks have may be gone before the next one."""
        if self.host is not None:
            self.host.drop_spills()

    def added(self, plan: StepPlan) -> StepPlan:
        """A plan that is launched now, with the copies that it must make."""
        loads, self._loads = tuple(self._loads), []
        plan = replace(plan, saves=self.take_saves(), loads=loads)
        if self.host is None:
            return plan
        return replace(plan, spills=self.host.take_spills(), fills=self.host.take_fills())
