"""KV accounting over two tiers: the device's cache, the host's, and the moves between them.

Where a sequence's KV lies over a move (swap-out; swap-in is the mirror):

    plan of step n    device table ==detached==> lease          host table: new blocks, written by n
    n in flight       its blocks stay taken: n reads them       the sequence grows here from now on
    commit of n       complete_move(): the lease gives them up   hashed by the commits after it

A sequence that ends while its move is in flight leaves its host table to the lease as well. So
no block is free that a launched step reads or writes, and no sequence is ever in two tiers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.errors import InvariantError
from weft.core.plan import KVMove, Tier
from weft.kv.cache import GroupSpec, KVCache, Table
from weft.kv.disk_cache import DiskCache
from weft.kv.hashing import HashChain
from weft.kv.host_prefixes import HostPrefixes


@dataclass(slots=True, eq=False)
class Lease:
    """Tables of a sequence that a launched move reads or writes, kept until it is committed.

    Attributes:
        tables: with the tier of each.
        faulty_from: first token that the sequence computed itself, if it turned out to be faulty.
    """

    sequence_id: int
    tables: list[tuple[Tier, Table]] = field(default_factory=list)
    faulty_from: int | None = None


class TieredCache:
    """A KVCache on the device and one on the host; each sequence has its KV in one of them.

    What it has in common with KVCache acts in the tier in which the sequence is.

    Args:
        groups: the KV groups of the device.
        host_blocks: for each of them, how many blocks the host has.
        disk: keeps the prefixes that the device gives up.
    """

    def __init__(
        self,
        groups: Seq[GroupSpec],
        host_blocks: Seq[int],
        *,
        prefix_caching: bool = True,
        disk: DiskCache | None = None,
    ) -> None:
        chains: dict[int, dict[int, HashChain]] = {}
        host_groups = [
            replace(group, num_blocks=count)
            for group, count in zip(groups, host_blocks, strict=True)
        ]
        self.host = KVCache(host_groups, prefix_caching=prefix_caching, chains=chains)
        self._prefixes = HostPrefixes(self.host)
        self.device = KVCache(
            groups,
            prefix_caching=prefix_caching,
            chains=chains,
            host=self._prefixes,
            disk=disk,
        )
        self.groups = self.device.groups
        self.prefix_caching = prefix_caching
        self._leases: dict[int, list[Lease]] = {}

    def tier_of(self, sequence_id: int) -> Tier:
        """The tier of the sequence's KV; the device if it has none."""
        return Tier.DEVICE if self.host.table(sequence_id) is None else Tier.HOST

    def tier(self, tier: Tier) -> KVCache:
        """The cache of the tier."""
        return self.device if tier is Tier.DEVICE else self.host

    def of(self, sequence_id: int) -> KVCache:
        """The cache in which the sequence is."""
        return self.device if self.host.table(sequence_id) is None else self.host

    # -- as of one tier -------------------------------------------------------------------------

    def register(self, sequence_id: int, salt: bytes) -> None:
        """See ``KVCache.register``; the hashes serve both tiers."""
        self.device.register(sequence_id, salt)

    def forget(self, sequence_id: int) -> None:
        """See ``KVCache.forget``."""
        self.of(sequence_id).forget(sequence_id)

    def prompt_hashes(self, sequence_id: int, tokens: Seq[int]) -> list[bytes]:
        """See ``KVCache.prompt_hashes``."""
        return self.device.prompt_hashes(sequence_id, tokens)

    def capacity(self, sequence_id: int) -> int:
        """See ``KVCache.capacity``."""
        return self.of(sequence_id).capacity(sequence_id)

    def commit(self, sequence_id: int, tokens: Seq[int], computed: int) -> int:
        """See ``KVCache.commit``; while the sequence moves, nothing is hashed or released."""
        if sequence_id in self._leases:
            return computed + 1
        return self.of(sequence_id).commit(sequence_id, tokens, computed)

    def max_tokens(self) -> int:
        """Longest sequence that fits into one of the tiers when it has all of it to itself."""
        return max(self.device.max_tokens(), self.host.max_tokens())

    def release(self, sequence_id: int, *, faulty_from: int | None = None) -> None:
        """Release the blocks of the sequence, after its move if one is in flight."""
        cache, leases = self.of(sequence_id), self._leases.get(sequence_id)
        if faulty_from is not None:
            (self.device if cache is self.host else self.host).disown(sequence_id, faulty_from)
        if leases is None:
            cache.release(sequence_id, faulty_from=faulty_from)
            return
        leases[-1].tables.append((self.tier_of(sequence_id), cache.detach(sequence_id)))
        if faulty_from is not None:
            for lease in leases:
                lease.faulty_from = faulty_from

    # -- moving ---------------------------------------------------------------------------------

    def move(
        self, sequence_id: int, row: int, upto: int, *, after_layer: bool = False
    ) -> tuple[KVMove, Lease] | None:
        """Move the KV of tokens [0, upto) to the other tier, or return None if it has no room.

        The sequence has its new table at once. What it moves from stays taken until
        ``complete_move`` is called for the lease, when the step of the move is committed.
        """
        here = self.tier_of(sequence_id)
        to = Tier.HOST if here is Tier.DEVICE else Tier.DEVICE
        source = self.tier(here).table(sequence_id)
        if source is None:
            raise InvariantError(f"sequence {sequence_id} has no KV that could move")
        target = self.tier(to).open_like(sequence_id, source, upto)
        if target is None:
            return None
        self.tier(here).detach(sequence_id)
        lease = Lease(sequence_id, [(here, source)])
        self._leases.setdefault(sequence_id, []).append(lease)
        tables = zip(source.blocks, target.blocks, strict=True)
        pairs = [(tuple(old[: len(new)]), tuple(new)) for old, new in tables]
        move = KVMove(row, to, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), after_layer)
        return move, lease

    def complete_move(self, lease: Lease) -> None:
        """Release the source blocks of a committed move. Moves are completed in order."""
        leases = self._leases[lease.sequence_id]
        if leases.pop(0) is not lease:
            raise InvariantError(
                f"moves of sequence {lease.sequence_id} are completed out of order"
            )
        if not leases:
            del self._leases[lease.sequence_id]
        for tier, table in lease.tables:
            self.tier(tier).free(table, faulty_from=lease.faulty_from)

    def moving(self, sequence_id: int) -> bool:
        """Whether a move of the sequence is in flight."""
        return sequence_id in self._leases

    def coming(self) -> list[int]:
        """Device blocks, by group, that moves in flight will release unless they are shared."""
        counts = [0] * len(self.groups)
        for leases in self._leases.values():
            for tier, table in (pair for lease in leases for pair in lease.tables):
                for group, blocks in enumerate(table.blocks if tier is Tier.DEVICE else ()):
                    counts[group] += sum(block >= 0 for block in blocks)
        return counts

    def check(self) -> None:
        """Raise InvariantError if a tier is damaged or a sequence is in both."""
        for tier in Tier:
            leased = [
                table
                for leases in self._leases.values()
                for lease in leases
                for where, table in lease.tables
                if where is tier
            ]
            if tier is Tier.HOST:
                leased.append(Table(self._prefixes.held(), [], []))
            self.tier(tier).check(leased)
        for sequence_id in self.host.sequences():
            if self.device.table(sequence_id) is not None:
                raise InvariantError(f"sequence {sequence_id} has KV in both tiers")


AnyCache = KVCache | TieredCache
