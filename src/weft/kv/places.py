"""KV pools of remote places: hosts beside the device's own that keep KV and attend over it.

Each connection to a place has a pool of its own: what lay there before is gone. Sequences that are
still in an old pool are lost, and stay in it until the scheduler has released them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from weft.core.plan import OWN_HOST, PlaceSession, PlaceStatus
from weft.kv.cache import GroupSpec, KVCache


def choose_host(fits: Seq[bool], held: Seq[int]) -> int | None:
    """The host that a sequence goes to: the device's own while it has room, then the others evenly.

    OmniServe section 4.

    Args:
        fits: for each host whether it has room, the device's own being the first.
        held: for each how much it keeps.

    Returns:
        its number; None if it fits nowhere.
    """
    if fits[0]:
        return 0
    others = [host for host in range(1, len(fits)) if fits[host]]
    return min(others, key=lambda host: held[host], default=None)


@dataclass(slots=True)
class HostPool:
    """The KV of one host.

    Attributes:
        accepts: whether sequences may be sent there.
    """

    session: PlaceSession
    cache: KVCache
    accepts: bool = True

    def fits(self, needs: Seq[int]) -> bool:
        """Whether it takes so many blocks of each group."""
        free = zip(needs, self.cache.available(), strict=True)
        return self.accepts and all(need <= most for need, most in free)

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return sum(pool.held for pool in self.cache.pools)


class HostPools:
    """The pools of all hosts, and the remote one in which a sequence is."""

    def __init__(self, own: KVCache) -> None:
        self._own = HostPool(OWN_HOST, own)
        self._status: tuple[PlaceStatus, ...] = ()
        self._remote: list[HostPool | None] = []  # None while it is not connected
        self._of: dict[int, HostPool] = {}  # by sequence, also pools of sessions that are over

    def update(self, status: tuple[PlaceStatus, ...]) -> None:
        """Take in what remote places offer now."""
        if status == self._status:
            return
        self._remote += [None] * (len(status) - len(self._remote))
        for index, (now, pool) in enumerate(zip(status, self._remote, strict=True)):
            session = PlaceSession(index + 1, now.session)
            if not now.blocks:
                self._remote[index] = None
            elif pool is None or pool.session != session:
                self._remote[index] = HostPool(session, self._cache(now.blocks), not now.busy)
            else:
                pool.accepts = not now.busy
        self._status = status

    def _cache(self, blocks: Seq[int]) -> KVCache:
        groups: list[GroupSpec] = [
            replace(group, num_blocks=count)
            for group, count in zip(self._own.cache.groups, blocks, strict=True)
        ]
        return KVCache(groups, prefix_caching=False)

    def choose(self, needs: Seq[int]) -> HostPool | None:
        """The pool that a sequence with so many blocks of each group goes to, if there is one."""
        pools = [self._own, *self.connected()]
        chosen = choose_host([pool.fits(needs) for pool in pools], [pool.held for pool in pools])
        return None if chosen is None else pools[chosen]

    def connected(self) -> list[HostPool]:
        """Pools of the remote places that are there."""
        return [pool for pool in self._remote if pool is not None]

    def max_tokens(self) -> int:
        """The longest sequence that fits one of the hosts."""
        return max(pool.cache.max_tokens() for pool in (self._own, *self.connected()))

    # -- sequences in remote pools -----------------------------------------------------------------

    def put(self, sequence_id: int, pool: HostPool) -> None:
        """A sequence has its table in a pool."""
        if pool is not self._own:
            self._of[sequence_id] = pool

    def remote_of(self, sequence_id: int) -> KVCache | None:
        """The cache of the remote place in which a sequence is; None if it is in none."""
        pool = self._of.get(sequence_id)
        return None if pool is None else pool.cache

    def remove(self, sequence_id: int) -> None:
        """A sequence has left its place, if it was at one."""
        self._of.pop(sequence_id, None)

    def remote_sequences(self) -> list[int]:
        """Ids of the sequences in remote pools."""
        return list(self._of)

    def take_zero(self) -> tuple[tuple[PlaceSession, int, int], ...]:
        """Return blocks of remote pools that the next launched step must zero first."""
        return tuple(
            (pool.session, group, block)
            for pool in self.connected()
            for group, block in pool.cache.take_zero()
        )

    def remote_caches(self) -> list[KVCache]:
        """Every remote cache that is connected or has a sequence."""
        pools = [*self.connected(), *self._of.values()]
        return list({id(pool): pool.cache for pool in pools}.values())
