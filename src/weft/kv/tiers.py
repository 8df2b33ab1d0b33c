"""KV accounting over two tiers: the device's cache, the host's, and the moves between them.

Where a sequence's KV lies over a move (swap-out; swap-in is the mirror):

    plan of step n    device table ==detached==> pin          host table: new blocks, written by n
    n in flight       its blocks stay taken: n reads them       the sequence grows here from now on
    commit of n       complete_move(): the pin gives them up   hashed by the commits after it

A sequence that ends while its move is in flight leaves its host table to the pin as well. So
no block is free that a launched step reads or writes, and no sequence is ever in two tiers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.errors import InvariantError
from weft.core.plan import OWN_HOST, KVMove, Tier
from weft.kv.cache import GroupSpec, KVCache
from weft.kv.disk_cache import DiskCache
from weft.kv.hashing import HashChain, Images
from weft.kv.host_prefixes import HostPrefixes
from weft.kv.places import HostPool, HostPools
from weft.kv.states import LiveSlots, Prefix, StateSlots
from weft.kv.table import Table


@dataclass(slots=True, eq=False)
class MovePin:
    """Tables of a sequence that a launched move reads or writes, kept until it is committed.

    Attributes:
        tables: with the cache of each.
        states: the slots of recurrent state that belong to them.
        faulty_from: first token that the sequence computed itself, if it turned out to be faulty.
    """

    sequence_id: int
    tables: list[tuple[KVCache, Table]] = field(default_factory=list)
    states: list[tuple[StateSlots, LiveSlots]] = field(default_factory=list)
    faulty_from: int | None = None


class TieredCache:
    """A KVCache on the device and one on the host; each sequence has its KV in one of them.

    What it has in common with KVCache acts in the tier in which the sequence is. The host tier may
    have remote places beside the device's own host.

    Attributes:
        host: the KV of the device's own host.
        hosts: the pools of that and of remote places.

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
        self.hosts = HostPools(self.host)
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
        self._pins: dict[int, list[MovePin]] = {}

    def tier_of(self, sequence_id: int) -> Tier:
        """The tier of the sequence's KV; the device if it has none."""
        return Tier.DEVICE if self.of(sequence_id) is self.device else Tier.HOST

    def of(self, sequence_id: int) -> KVCache:
        """The cache in which the sequence is."""
        if (remote := self.hosts.remote_of(sequence_id)) is not None:
            return remote
        return self.device if self.host.table(sequence_id) is None else self.host

    def tier(self, tier: Tier) -> KVCache:
        """The cache of the tier; of the host tier that of the device's own host."""
        return self.device if tier is Tier.DEVICE else self.host

    def hosted(self) -> list[int]:
        """Ids of the sequences of the host tier."""
        return [*self.host.sequences(), *self.hosts.remote_sequences()]

    # -- as of one tier -------------------------------------------------------------------------

    def register(self, sequence_id: int, salt: bytes, images: Images = ()) -> None:
        """See ``KVCache.register``; the hashes serve both tiers."""
        self.device.register(sequence_id, salt, images)

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
        if sequence_id in self._pins:
            return computed + 1
        return self.of(sequence_id).commit(sequence_id, tokens, computed)

    def settle(self, sequence_id: int, upto: int) -> int:
        """See ``KVCache.settle``; only the device computes drafts."""
        return self.device.settle(sequence_id, upto)

    def max_tokens(self) -> int:
        """Longest sequence that fits into one of the tiers when it has all of it to itself."""
        return max(self.device.max_tokens(), self.host.max_tokens())

    def release(self, sequence_id: int, *, faulty_from: int | None = None) -> None:
        """Release the blocks of the sequence, after its move if one is in flight."""
        cache, pins = self.of(sequence_id), self._pins.get(sequence_id)
        self.hosts.remove(sequence_id)
        if faulty_from is not None:
            for other in (self.device, self.host):
                if other is not cache:
                    other.disown(sequence_id, faulty_from)
        if pins is None:
            cache.release(sequence_id, faulty_from=faulty_from)
            return
        if faulty_from is not None:
            cache.disown_states(sequence_id, faulty_from)
        self._pin_state(pins[-1], cache)
        pins[-1].tables.append((cache, cache.detach(sequence_id)))
        if faulty_from is not None:
            for pin in pins:
                pin.faulty_from = faulty_from

    # -- moving ---------------------------------------------------------------------------------

    def move(
        self, sequence_id: int, row: int, upto: int, *, after_layer: bool = False
    ) -> tuple[KVMove, MovePin] | None:
        """Move the KV of tokens [0, upto) to the other tier, or return None if it has no room.

        From the device it goes to the host that ``choose_host`` names, layer by layer only to the
        device's own. From a remote place nothing comes back.

        The sequence has its new table at once. What it moves from stays taken until
        ``complete_move`` is called for the pin, when the step of the move is committed.
        """
        here = self.of(sequence_id)
        to = Tier.HOST if here is self.device else Tier.DEVICE
        source = here.table(sequence_id)
        if source is None:
            raise InvariantError(f"sequence {sequence_id} has no KV that could move")
        pool = None
        if here is self.device:
            pool = self._host_for(source, upto, after_layer=after_layer)
        if pool is None and here is not self.host:
            return None
        there = self.device if pool is None else pool.cache
        target = there.open_like(sequence_id, here, upto)
        if target is None:
            return None
        here.detach(sequence_id)
        if pool is not None:
            self.hosts.put(sequence_id, pool)
        pin = MovePin(sequence_id, [(here, source)])
        state = None
        if here.states is not None and there.states is not None:
            state = here.states.live(sequence_id).now, there.states.live(sequence_id).now
            if not after_layer:
                self._pin_state(pin, here)
        self._pins.setdefault(sequence_id, []).append(pin)
        tables = zip(source.blocks, target.blocks, strict=True)
        pairs = [(tuple(old[: len(new)]), tuple(new)) for old, new in tables]
        old, new = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
        host = OWN_HOST if pool is None else pool.session
        return KVMove(row, to, old, new, after_layer, host, state), pin

    @staticmethod
    def _pin_state(pin: MovePin, cache: KVCache) -> None:
        if cache.states is not None:
            pin.states.append((cache.states, cache.states.detach(pin.sequence_id)))

    def planned(self, move: KVMove, pin: MovePin) -> KVMove:
        """A move of a step that is planned whole: what leaves after it is the state it writes."""
        here, _ = pin.tables[0]
        if not move.after_layer or move.state is None or here.states is None:
            return move
        now = here.states.live(pin.sequence_id).now
        self._pin_state(pin, here)
        return move._replace(state=(now, move.state[1]))

    def _host_for(self, source: Table, upto: int, *, after_layer: bool) -> HostPool | None:
        """The host that takes tokens [0, upto) of a table of the device."""
        kept = [
            blocks[: -(-upto // group.block_size)]
            for group, blocks in zip(self.groups, source.blocks, strict=True)
        ]
        states = [] if self.device.states is None else [1]
        blocks = [sum(block >= 0 for block in blocks) for blocks in kept]
        pool = self.hosts.choose([*blocks, *states])
        return None if pool is None or (after_layer and pool.session != OWN_HOST) else pool

    def complete_move(self, pin: MovePin) -> None:
        """Release the source blocks of a committed move. Moves are completed in order."""
        pins = self._pins[pin.sequence_id]
        if pins.pop(0) is not pin:
            raise InvariantError(f"moves of sequence {pin.sequence_id} are completed out of order")
        if not pins:
            del self._pins[pin.sequence_id]
        for cache, table in pin.tables:
            cache.free(table, faulty_from=pin.faulty_from)
        for slots, live in pin.states:
            slots.free(live)

    def moving(self, sequence_id: int) -> bool:
        """Whether a move of the sequence is in flight."""
        return sequence_id in self._pins

    def coming(self) -> list[int]:
        """Device blocks, by group, that moves in flight will release unless they are shared.

        Of states the slots, as the last number.
        """
        counts = [0] * len(self.device.all_pools)
        for pins in self._pins.values():
            for cache, table in (pair for pin in pins for pair in pin.tables):
                for group, blocks in enumerate(table.blocks if cache is self.device else ()):
                    counts[group] += sum(block >= 0 for block in blocks)
            for slots, live in (pair for pin in pins for pair in pin.states):
                counts[-1] += live.own() if slots is self.device.states else 0
        return counts

    def check(self) -> None:
        """Raise InvariantError if a tier is damaged or a sequence is in both."""
        for cache in (self.device, self.host, *self.hosts.remote_caches()):
            pinned = [
                table
                for pins in self._pins.values()
                for pin in pins
                for where, table in pin.tables
                if where is cache
            ]
            if cache is self.host:
                pinned.append(Table(self._prefixes.held(), [], []))
            states = (pair for pins in self._pins.values() for pin in pins for pair in pin.states)
            detached = [live for slots, live in states if slots is cache.states]
            if cache is self.host and self.host.states is not None:
                detached.append(LiveSlots(Prefix(), spare=self._prefixes.held()[-1]))
            cache.check(pinned, detached)
        hosted = self.hosted()
        if len(set(hosted)) < len(hosted):
            raise InvariantError("a sequence has KV in two hosts")
        for sequence_id in hosted:
            if self.device.table(sequence_id) is not None:
                raise InvariantError(f"sequence {sequence_id} has KV in both tiers")


AnyCache = KVCache | TieredCache
