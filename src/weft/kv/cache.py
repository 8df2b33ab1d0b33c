"""KV accounting for one model: block tables of every sequence over all layer groups.

Where memory changes hands, for one sequence in a full group (block size 4):

    tokens    0 . . . 4 . . . 8 . . . 12. . . 16. .
              |--cached--|-----new------|
    open()    shared from the prefix cache (references + 1)
    extend()                free or evicted blocks, owned by this sequence alone
    commit()  |===full==|==full=|      full and computed: hashed, immutable, can be shared
    release() every reference is given up; hashed blocks stay findable until they are evicted

A sliding group also gives up its head: blocks wholly before ``computed - window`` become -1.

A launched step touches blocks from ``computed - window`` on, and only of sequences with pending
tokens. So the scheduler's rule "nothing of a sequence is released while it has pending tokens" is
the rule that keeps blocks from being freed under a launched step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial
from math import lcm

from weft.core.errors import InvariantError
from weft.kv.block_checks import check_blocks
from weft.kv.disk_cache import DiskCache
from weft.kv.group import GroupSpec as GroupSpec
from weft.kv.hashing import HashChain, Images
from weft.kv.host_prefixes import HostPrefixes
from weft.kv.lower_prefixes import LowerPrefixes
from weft.kv.pool import BlockPool
from weft.kv.record import BlockRecord
from weft.kv.states import LiveSlots, StateSlots
from weft.kv.table import Table


class KVCache:
    """Reserves, hashes, shares and releases the KV blocks of all sequences in one tier.

    Args:
        chains: hashes by sequence, where the cache of another tier keeps them too.
        host, disk: keep the blocks of prefixes that memory gives up, unless it has states and
            windows: blocks of a window may be there at some states only.

    Attributes:
        groups: those of attention, whose blocks sequences have tables of.
        lower: the prefixes there; None without such a level.
        states: the slots of recurrent layers; None without any.
    """

    def __init__(
        self,
        groups: Seq[GroupSpec],
        *,
        prefix_caching: bool = True,
        chains: dict[int, dict[int, HashChain]] | None = None,
        host: HostPrefixes | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        if not groups:
            raise InvariantError("a KV cache needs at least one group")
        self.groups = tuple(group for group in groups if not group.recurrent)
        recurrent = [group for group in groups if group.recurrent]
        if len(recurrent) > 1 or (recurrent and not self.groups):
            raise InvariantError("states need layers of attention beside them")
        below = prefix_caching and (host is not None or disk is not None)
        below &= not (recurrent and any(group.window for group in self.groups))
        self.lower = LowerPrefixes(self, host, disk) if below else None
        self.pools = tuple(
            BlockPool(
                group.num_blocks,
                None if self.lower is None else partial(self.lower.evicted, index),
            )
            for index, group in enumerate(self.groups)
        )
        self.prefix_caching = prefix_caching
        self.alignment = lcm(*(group.block_size for group in groups))
        self.states: StateSlots | None = None
        for group in recurrent:
            size, index = self.groups[0].block_size, len(self.groups)
            told = None if self.lower is None else partial(self.lower.evicted, index)
            self.states = StateSlots(
                group.num_blocks, size, self.alignment, marks=prefix_caching, on_evict=told
            )
        self._tables: dict[int, Table] = {}
        self._chains: dict[int, dict[int, HashChain]] = {} if chains is None else chains
        self._zero: list[tuple[int, int]] = []
        self._block_sizes = tuple((i, group.block_size) for i, group in enumerate(self.groups))

    # -- opening: the prefix cache ------------------------------------------------------------

    def register(self, sequence_id: int, salt: bytes, images: Images = ()) -> None:
        """Make known a sequence that may be opened later; its hashes are kept until ``forget``."""
        if sequence_id in self._chains:
            raise InvariantError(f"sequence {sequence_id} is registered already")
        sizes = sorted({group.block_size for group in self.groups})
        self._chains[sequence_id] = {size: HashChain(size, salt, images) for size in sizes}

    def forget(self, sequence_id: int) -> None:
        """Drop the hashes of a sequence that has no table and will not be opened again."""
        if sequence_id in self._tables:
            raise InvariantError(f"sequence {sequence_id} still holds blocks")
        del self._chains[sequence_id]
        if self.lower is not None:
            self.lower.forget(sequence_id)
        if self.states is not None:
            self.states.forget(sequence_id)

    def open(self, sequence_id: int, hit: int, loaded: int = 0) -> None:
        """Make the table of a sequence, sharing the blocks of its first ``hit`` tokens.

        Args:
            hit: what ``find_prefix`` or ``opened.find_opened`` returned, or 0 to share nothing.
            loaded: tokens behind these whose blocks get content before the sequence computes.
        """
        if sequence_id in self._tables:
            raise InvariantError(f"sequence {sequence_id} has a table already")
        count = len(self.groups)
        table = Table([[] for _ in range(count)], [0] * count, [0] * count)
        self._tables[sequence_id], shared = table, hit
        if loaded and self.states is not None:
            shared = min(self.states.attention(sequence_id, hit), hit + loaded)
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            block_hashes = self._chains[sequence_id][group.block_size].block_hashes
            first, last = group.first_block(hit + loaded), shared // group.block_size
            table.num_freed_prefix_blocks[index] = first
            table.full[index] = last
            table.blocks[index].extend([-1] * first)
            for block_hash in block_hashes[first:last]:
                block = pool.find(block_hash)
                if block is None:
                    raise InvariantError("the prefix cache changed between find and open")
                pool.share(block)
                table.blocks[index].append(block)
            if hit % group.block_size:
                table.blocks[index].append(pool.take_opened(sequence_id))
            else:
                pool.drop_opened(sequence_id)
        if self.states is not None:
            self.states.open(sequence_id, self.state_hashes(sequence_id), hit, loaded)

    def state_hashes(self, sequence_id: int) -> list[bytes]:
        """Hashes of the blocks of a sequence that are full, of the size of those of states."""
        assert self.states is not None
        return self._chains[sequence_id][self.states.block_size].block_hashes

    def drop_opened(self, sequence_id: int) -> None:
        """Forget what ``find_opened`` found: the sequence goes on elsewhere."""
        for pool in self.pools:
            pool.drop_opened(sequence_id)

    def find_prefix(self, sequence_id: int, tokens: Seq[int]) -> int:
        """Return the largest n with [0, n) in full groups and [n - window, n) in sliding ones.

        n is a multiple of ``alignment`` and leaves at least one token to compute, since the logits
        of the last token are needed.
        """
        best = (len(tokens) - 1) // self.alignment * self.alignment
        if not self.prefix_caching:
            return 0
        runs: list[list[int]] = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            chain = self._chains[sequence_id][group.block_size]
            upto = best // group.block_size
            lengths = pool.run_lengths(chain.extend(tokens, upto)[:upto], group.window is None)
            if group.window is None:
                best = len(lengths) * group.block_size // self.alignment * self.alignment
            runs.append(lengths)
        while best > 0 and not self._covers(runs, best):
            best -= self.alignment
        if self.states is None:
            return best
        hashes, covers = self.state_hashes(sequence_id), partial(self._covers, runs)
        return self.states.find(sequence_id, hashes, len(tokens), best, covers)

    def _covers(self, runs: list[list[int]], upto: int) -> bool:
        for group, lengths in zip(self.groups, runs, strict=True):
            last = upto // group.block_size
            if lengths[last - 1] < last - group.first_block(upto):
                return False
        return True

    # -- growing ------------------------------------------------------------------------------

    def capacity(self, sequence_id: int) -> int:
        """Tokens that the reserved blocks of the sequence can hold."""
        blocks = self._tables[sequence_id].blocks
        if len(blocks) == 1:
            return len(blocks[0]) * self.groups[0].block_size
        return min(len(b) * group.block_size for group, b in zip(self.groups, blocks, strict=True))

    def extend(
        self, sequence_id: int, upto: int, *, drafts: bool = False
    ) -> list[tuple[int, tuple[int, ...]]] | None:
        """Reserve blocks for tokens [0, upto): (group, new blocks), or None with nothing taken.

        Args:
            drafts: whether the next step has drafts, for which states take a slot more.
        """
        tables = self._tables[sequence_id].blocks
        grown: list[tuple[int, tuple[int, ...]]] = []
        for index, size in self._block_sizes:
            need = -(-upto // size) - len(tables[index])
            if need <= 0:
                continue
            new = self.pools[index].allocate(need)
            if new is None:
                self._shrink(tables, grown)
                return None
            tables[index].extend(new)
            grown.append((index, new))
        if self.states is not None and not self.states.reserve(sequence_id, drafts=drafts):
            self._shrink(tables, grown)
            return None
        return grown

    def _shrink(
        self, tables: list[list[int]], grown: Iterable[tuple[int, tuple[int, ...]]]
    ) -> None:
        """Release blocks that were just taken."""
        for index, blocks in grown:
            del tables[index][-len(blocks) :]
            for block in blocks:
                self.pools[index].release(block)

    def growable(self, sequence_id: int) -> int:
        """Tokens that the sequence could hold if it took every available block."""
        table = self._tables[sequence_id]
        return min(
            (len(blocks) + pool.available) * group.block_size
            for group, pool, blocks in zip(self.groups, self.pools, table.blocks, strict=True)
        )

    def fits(self, sequence_id: int, upto: int, chunk: int) -> bool:
        """Whether there is room to compute [0, upto) in chunks of at most ``chunk`` tokens now.

        A sliding group needs room for its window and one chunk only.
        """
        needs = self.needs(sequence_id, upto, chunk)
        return all(need <= most for need, most in zip(needs, self.available(), strict=True))

    def available(self) -> list[int]:
        """Blocks of each group that can be taken now; of states the slots, as the last number."""
        return [pool.available for pool in self.all_pools]

    @property
    def all_pools(self) -> tuple[BlockPool, ...]:
        """The pools of all groups, and the last one that of slots of recurrent state."""
        return self.pools if self.states is None else (*self.pools, self.states.pool)

    def needs(self, sequence_id: int, upto: int, chunk: int) -> list[int]:
        """Blocks of each group that must be available to compute [0, upto) in such chunks."""
        return self.needs_of_all([(sequence_id, upto)], chunk)

    def needs_of_all(self, ends: Iterable[tuple[int, int]], chunk: int) -> list[int]:
        """The sum of ``needs`` over hundreds of sequences, without a call for each.

        Args:
            ends: a sequence, and the tokens that it grows to.
        """
        tables, ends = self._tables, list(ends)
        pairs = [(tables[sequence_id], upto) for sequence_id, upto in ends]
        totals = []
        for index, group in enumerate(self.groups):
            size, total = group.block_size, 0
            peak = None  # of a sliding group: the most that a sequence holds
            if group.window is not None:
                peak = min(group.blocks_to_hold(0, group.window + chunk) + 1, group.num_blocks)
            for table, upto in pairs:
                blocks = table.blocks[index]
                need = -(-upto // size) - len(blocks)
                if peak is not None:
                    need = min(need, peak - len(blocks) + table.num_freed_prefix_blocks[index])
                if need > 0:
                    total += need
            totals.append(total)
        states = self.states
        return totals if states is None else [*totals, states.needed(i for i, _ in ends)]

    def freed(self, sequence_ids: Seq[int]) -> list[int]:
        """Blocks of each group that only these sequences hold, and that their end would free."""
        tables = [self._tables[sequence_id] for sequence_id in sequence_ids]
        totals = []
        for index, pool in enumerate(self.pools):
            held = Counter(block for table in tables for block in table.blocks[index] if block >= 0)
            totals.append(sum(pool.references(block) == count for block, count in held.items()))
        if self.states is not None:
            totals.append(self.states.freed(sequence_ids))
        return totals

    def held(self, sequence_id: int) -> list[int]:
        """Blocks of each group that the sequence holds, shared ones included; and its own slots."""
        table = self._tables[sequence_id]
        blocks = [
            len(b) - head
            for b, head in zip(table.blocks, table.num_freed_prefix_blocks, strict=True)
        ]
        return blocks if self.states is None else [*blocks, self.states.live(sequence_id).own()]

    def max_tokens(self) -> int:
        """Longest sequence that fits when it has all memory to itself."""
        limits = [
            group.num_blocks * group.block_size for group in self.groups if group.window is None
        ]
        for group in self.groups:
            if group.window is not None and group.num_blocks < group.blocks_to_hold(
                group.window, group.window + 2 * group.block_size
            ):
                limits.append(group.num_blocks * group.block_size)
        return min(limits, default=2**31 - 1)

    # -- committing ---------------------------------------------------------------------------

    def settle(self, sequence_id: int, upto: int) -> int:
        """Return how many of ``upto`` tokens stay computed after a step with drafts.

        Fewer where there is no state after the last right guess: the others are computed again.
        """
        return upto if self.states is None else self.states.settle(sequence_id, upto)

    def commit(self, sequence_id: int, tokens: Seq[int], computed: int) -> int:
        """Hash the blocks that are full now, free those before windows; return when to call again.

        Args:
            tokens: tokens that the host knows; only they can be hashed.
            computed: tokens whose KV is written and will not change.
        """
        table = self._tables[sequence_id]
        known = len(tokens)
        known_computed = computed if computed < known else known
        next_full = computed + self.alignment
        for index, size in self._block_sizes:
            full = known_computed // size
            if full > table.full[index] and self.prefix_caching:
                block_hashes = self._chains[sequence_id][size].extend(tokens, full)
                blocks, register_hash = table.blocks[index], self.pools[index].register_hash
                for position in range(table.full[index], full):
                    if blocks[position] >= 0:
                        register_hash(blocks[position], block_hashes[position])
                table.full[index] = full
            place = computed // size
            if computed >= known - 1 and place < len(table.blocks[index]):
                # From here on the KV of a token is there when the token after it is known.
                self.pools[index].open(table.blocks[index][place], sequence_id, place)
            window = self.groups[index].window
            if window is not None:
                first = self.groups[index].first_block(computed)
                self._drop_head(self.pools[index], table, index, first)
            boundary = (computed // size + 1) * size
            if boundary < next_full:
                next_full = boundary
        if self.states is not None:
            due = self.states.commit(sequence_id, self.state_hashes(sequence_id), known_computed)
            next_full = next_full if due is None else min(next_full, due)
        return next_full

    @staticmethod
    def _drop_head(pool: BlockPool, table: Table, index: int, first: int) -> None:
        blocks = table.blocks[index]
        for position in range(table.num_freed_prefix_blocks[index], min(first, len(blocks))):
            pool.release(blocks[position])
            blocks[position] = -1
        table.num_freed_prefix_blocks[index] = max(
            table.num_freed_prefix_blocks[index], min(first, len(blocks))
        )

    def block_hashes(
        self, sequence_id: int, group: int, tokens: Seq[int], count: int
    ) -> list[bytes]:
        """Hashes of the first ``count`` blocks of ``tokens`` in a group."""
        chain = self._chains[sequence_id][self.groups[group].block_size]
        return chain.extend(tokens, count)[:count]

    def prompt_hashes(self, sequence_id: int, tokens: Seq[int]) -> list[bytes]:
        """Hashes of the full blocks of ``tokens`` in the first group that a hit could cover."""
        count = (len(tokens) - 1) // self.groups[0].block_size
        return self.block_hashes(sequence_id, 0, tokens, count)

    # -- releasing ----------------------------------------------------------------------------

    def release(self, sequence_id: int, *, faulty_from: int | None = None) -> None:
        """Release all blocks of the sequence, the last first: prefixes stay cached longest.

        Args:
            faulty_from: first token that a faulty sequence computed itself; its block and all
                after it can no longer be found, and are zeroed before they are used again.
        """
        if self.states is not None:
            self.states.close(sequence_id)
            if faulty_from is not None:
                self.disown_states(sequence_id, faulty_from)
        self.free(self.detach(sequence_id), faulty_from=faulty_from)

    def detach(self, sequence_id: int) -> Table:
        """Detach the table from the sequence; the caller must release its blocks."""
        return self._tables.pop(sequence_id)

    def free(self, table: Table, *, faulty_from: int | None = None) -> None:
        """Release all blocks of a detached table; see ``release``."""
        groups = zip(self.groups, self.pools, table.blocks, strict=False)
        for index, (group, pool, blocks) in enumerate(groups):
            if faulty_from is not None:
                for block in blocks[faulty_from // group.block_size :]:
                    if block >= 0 and pool.invalidate(block):
                        self._zero.append((index, block))
            for block in reversed(blocks):
                if block >= 0:
                    pool.release(block)

    def disown_states(self, sequence_id: int, start: int) -> None:
        """Let nobody find states that a faulty sequence has computed from ``start`` on."""
        if self.states is not None:
            hashes = self.state_hashes(sequence_id)
            self.states.disown(hashes[start // self.states.block_size :])

    def disown(self, sequence_id: int, start: int) -> None:
        """Let nobody find what a faulty sequence, now in another tier, left here from ``start`` on.

        Blocks that nobody holds are zeroed before they are used again.
        """
        self.disown_states(sequence_id, start)
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            hashes = self._chains[sequence_id][group.block_size].block_hashes
            for block_hash in hashes[start // group.block_size :]:
                block = pool.find(block_hash)
                if block is None:
                    continue
                if pool.references(block) == 0:
                    pool.evict([block])
                    self._zero.append((index, block))
                else:
                    pool.invalidate(block)

    def take_zero(self) -> tuple[tuple[int, int], ...]:
        """Return (group, block) pairs that the next launched step must zero first."""
        zero, self._zero = self._zero, []
        for index, pool in enumerate(self.pools):
            zero += [(index, block) for block in pool.take_unclean()]
        return tuple(zero)

    def keep(self, records: Seq[BlockRecord]) -> int:
        """Continue with what is recorded of the blocks, and keep the records from now on.

        Returns:
            How many blocks are cached.
        """
        return sum(pool.keep(record) for pool, record in zip(self.pools, records, strict=True))

    # -- moving ---------------------------------------------------------------------------------

    def table(self, sequence_id: int) -> Table | None:
        """The table of the sequence, if it has one here."""
        return self._tables.get(sequence_id)

    def sequences(self) -> list[int]:
        """Ids of the sequences that have a table here."""
        return list(self._tables)

    def open_like(self, sequence_id: int, origin: KVCache, upto: int) -> Table | None:
        """Make a table that can take in the KV of tokens [0, upto) that another tier has.

        Its blocks are all new and none is hashed. None, with nothing taken, if there is no room.
        """
        other = origin._tables[sequence_id]
        table = Table([], list(other.num_freed_prefix_blocks), [0] * len(self.groups))
        for group, pool, blocks in zip(self.groups, self.pools, other.blocks, strict=True):
            kept = blocks[: -(-upto // group.block_size)]
            new = pool.allocate(sum(block >= 0 for block in kept))
            if new is None:
                self.free(table)
                return None
            fresh = iter(new)
            table.blocks.append([next(fresh) if block >= 0 else -1 for block in kept])
        here, there = self.states, origin.states
        if here and there and not here.open_like(sequence_id, there.live(sequence_id)):
            self.free(table)
            return None
        self._tables[sequence_id] = table
        return table

    # -- looking ------------------------------------------------------------------------------

    def tables(self, sequence_id: int) -> tuple[tuple[int, ...], ...]:
        """Block ids of the sequence for each group."""
        return tuple(tuple(blocks) for blocks in self._tables[sequence_id].blocks)

    def check(self, leased: Seq[Table] = (), detached: Iterable[LiveSlots] = ()) -> None:
        """Raise InvariantError if a block is lost, owned twice, or wrongly shared.

        Args:
            leased: detached tables whose blocks are not given up yet.
            detached: the same of slots of recurrent state.
        """
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            check_blocks(index, group, pool, self._tables, leased)
        if self.states is not None:
            self.states.check(self._tables, detached)
