"""Blocks of one tier and one layer group: reference counts, content hashes, eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from weft.core.errors import InvariantError
from weft.kv.record import BlockRecord


class BlockPool:
    """Hands out block ids 0..num_blocks-1.

    A block is *held* while tables refer to it, *cached* when none does but its content can
    still be found by hash, else *free*. Free blocks are handed out first, then the cached block
    that was released longest ago.

    Args:
        on_evict: told of each cached block that is handed out again, and the hash of its content.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._record: BlockRecord | None = None
        self._opened: dict[int, tuple[int, int]] = {}
        self._unclean: set[int] = set()
        self._to_zero: list[int] = []

    def keep(self, record: BlockRecord) -> int:
        """Continue with what a record says of the blocks, and keep the record from now on.

        The content that it knows is cached. All else that was written is zeroed before it is used.

        Returns:
            How many blocks are cached.

        Raises:
            InvariantError: blocks were handed out before.
        """
        if len(self._free) != self.num_blocks or record.num_blocks != self.num_blocks:
            raise InvariantError("only a pool that is new can continue with a record")
        self._record, self._unclean, self._opened = record, record.written(), record.opened()
        for block, block_hash in record.full():
            if block_hash in self._block_of:  # which no engine that is sound records
                self._unclean.add(block)
                record.write((block,))
                continue
            self.register_hash(block, block_hash)
            self._cached[block] = None
        last = [block for _, block in self._opened.values()]
        others = self._cached.keys() | set(last)
        self._free = last + [block for block in self._free if block not in others]
        return len(self._cached)

    def open(self, block: int, sequence_id: int, index: int) -> None:
        """Record, if there is a record, that a sequence that decodes fills its ``index``-th block.

        It is held by the sequence alone, and has no hash.
        """
        if self._record is not None:
            self._record.open(block, sequence_id, index)

    def opened(self, sequence_id: int) -> int:
        """The index of the block that a sequence was filling in the engine before; -1 for none."""
        index, block = self._opened.get(sequence_id, (-1, -1))
        return index if block in self._unclean else -1

    def take_opened(self, sequence_id: int) -> int:
        """Hold the block that ``opened`` is about, as it is, for its sequence."""
        _, block = self._opened.pop(sequence_id)
        self._unclean.remove(block)
        self._free.remove(block)
        self._references[block] = 1
        return block

    def seal_opened(self, sequence_id: int, block_hash: bytes) -> None:
        """Cache the block that ``opened`` is about, all of which is written, by its content."""
        if block_hash in self._block_of:
            self.drop_opened(sequence_id)
            return
        _, block = self._opened.pop(sequence_id)
        self._unclean.remove(block)
        self._free.remove(block)
        self.register_hash(block, block_hash)
        self._cached[block] = None

    def drop_opened(self, sequence_id: int) -> None:
        """Forget such a block, if there is one: its sequence goes on without it."""
        _, block = self._opened.pop(sequence_id, (-1, -1))
        if self._record is not None and block in self._unclean:
            self._record.write((block,))

    def take_unclean(self) -> list[int]:
        """Blocks handed out since the last call that must be zeroed before they are written."""
        unclean, self._to_zero = self._to_zero, []
        return unclean

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.num_blocks - self.available

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Hand out blocks with one reference each and no hash, or None if there are fewer."""
        free = self._free
        if count > len(free) + len(self._cached):
            return None
        blocks = []
        for _ in range(count):
            block = free.pop() if free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        if self._record is not None:
            self._record.write(blocks)
            if self._unclean:
                self._to_zero += [block for block in blocks if block in self._unclean]
                self._unclean.difference_update(blocks)
        return tuple(blocks)

    def _evict(self) -> int:
        """Make the cached block that was let go longest ago free."""
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._on_evict is not None:
            self._on_evict(block, block_hash)
        return block

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget the content of blocks that nobody holds, so that they may be written.

        Raises:
            InvariantError: a block is held.
        """
        blocks = tuple(blocks)
        for block in blocks:
            if self._references[block]:
                raise InvariantError(f"block {block} is held and cannot be evicted")
            if block in self._cached:
                del self._cached[block]
                del self._block_of[self._hash_of.pop(block)]
                self._free.append(block)
        if self._record is not None:
            self._record.write(blocks)
            gone = frozenset(blocks)
            self._opened = {i: own for i, own in self._opened.items() if own[1] not in gone}

    def forget(self) -> None:
        """Make the content of all cached blocks impossible to find, and the blocks free."""
        self.evict(tuple(self._cached))

    def cached(self) -> list[tuple[int, bytes]]:
        """Blocks that nobody holds and whose content can be found, with its hash; oldest first."""
        return [(block, self._hash_of[block]) for block in self._cached]

    def tidy(self) -> list[int]:
        """Return the free blocks in ascending order, in which they are handed out from now on.

        Nothing in them is needed any more.
        """
        for sequence_id in tuple(self._opened):
            self.drop_opened(sequence_id)
        self._free.sort(reverse=True)
        return self._free[::-1]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, without taking a reference."""
        return self._block_of.get(block_hash)

    def run_lengths(self, block_hashes: Iterable[bytes], stop_at_gap: bool) -> list[int]:
        """For each block, how many blocks in a row up to it are present."""
        run, lengths = 0, []
        for block_hash in block_hashes:
            run = run + 1 if block_hash in self._block_of else 0
            if run == 0 and stop_at_gap:
                break
            lengths.append(run)
        return lengths

    def share(self, block: int) -> None:
        """Take one more reference to a block that ``find`` returned."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def register_hash(self, block: int, block_hash: bytes, *, written: bool = True) -> None:
        """Record the content of a full block, which is immutable from now on.

        If another block has the same content already, that one stays the one to be found.

        Args:
            written: all of it; else the next step writes it, and it does not outlive this engine.
        """
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if written and self._record is not None:
                self._record.fill(block, block_hash)

    def demote(self, block: int) -> None:
        """Have a cached block written over before all others; one that is held stays as it is."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def release(self, block: int) -> None:
        """Release one reference; content that can be found again stays cached."""
        references = self._references[block] - 1
        if references < 0:
            raise InvariantError(f"block {block} was released more often than held")
        self._references[block] = references
        if references == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)
                if self._record is not None:
                    self._record.write((block,))

    def invalidate(self, block: int) -> bool:
        """Make the content of a held block impossible to find; whether only one table holds it."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self._record is not None:
                self._record.write((block,))
        return self._references[block] == 1

    def references(self, block: int) -> int:
        """In how many tables a block is."""
        return self._references[block]

    def check(self, expected_references: dict[int, int]) -> None:
        """Raise InvariantError unless the counts equal those of all tables and nothing is lost."""
        for block, references in enumerate(self._references):
            expected = expected_references.get(block, 0)
            if references != expected:
                raise InvariantError(f"block {block}: {references} references, {expected} tables")
        free = [*self._free, *self._cached]
        if len(set(free)) != len(free):
            raise InvariantError("a block is free twice")
        if any(self._references[block] for block in free):
            raise InvariantError("a free block is referenced")
        held = sum(1 for references in self._references if references)
        if held + len(free) != self.num_blocks:
            raise InvariantError(f"{self.num_blocks - held - len(free)} blocks are lost")
        if {block_hash: block for block, block_hash in self._hash_of.items()} != self._block_of:
            raise InvariantError("hash index and block hashes differ")
        if any(block not in self._hash_of for block in self._cached):
            raise InvariantError("a cached block has no hash")
        recorded = {} if self._record is None else dict(self._record.full())
        if not recorded.items() <= self._hash_of.items():
            raise InvariantError("the record knows content that cannot be found")


def fullest(pools: Iterable[BlockPool]) -> BlockPool:
    """The pool with the smallest share left, whose group of layers runs out first."""
    return min(pools, key=lambda pool: pool.available / max(1, pool.num_blocks))
