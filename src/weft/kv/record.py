"""A record of what the blocks of a pool hold, which outlives the engine that writes it.

It lies in the same memory as the blocks, beside them. An engine may be killed between any two
writes, so the record never says more than is true: a block is recorded as full when all of its
content is written, and as written before anything in it changes. The block that a sequence is
filling has the KV of all tokens whose successor is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from weft.kv.hashing import HASH_BYTES

WRITTEN, FULL, OPEN = b"\1\2\3"  # 0: nobody has had the block, it is zeros
_OWNER = Struct("<qq")  # sequence, and which of its blocks


class BlockRecord:
    """One byte a block, its state, then the hashes of full blocks and the owners of open ones.

    Args:
        memory: of ``nbytes(num_blocks)``, zeros at first; must stay mapped.
    """

    def __init__(self, memory: memoryview, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._states = memory[:num_blocks]
        self._hashes = memory[num_blocks : self.nbytes(num_blocks)]

    @staticmethod
    def nbytes(num_blocks: int) -> int:
        return num_blocks * (1 + HASH_BYTES)

    def write(self, blocks: Iterable[int]) -> None:
        """Record that nobody may look for what is in these blocks, which may be written now."""
        states = self._states
        for block in blocks:
            states[block] = WRITTEN

    def fill(self, block: int, block_hash: bytes) -> None:
        """Record the content of a block, all of which is written."""
        self._set(block, FULL, block_hash)

    def open(self, block: int, sequence_id: int, index: int) -> None:
        """Record that a sequence that decodes is filling this block, its ``index``-th."""
        self._set(block, OPEN, _OWNER.pack(sequence_id, index))

    def _set(self, block: int, state: int, content: bytes) -> None:
        self._states[block] = WRITTEN
        start = block * HASH_BYTES
        self._hashes[start : start + HASH_BYTES] = content
        self._states[block] = state

    def full(self) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks whose content is known, and its hash."""
        return self._having(FULL)

    def opened(self) -> dict[int, tuple[int, int]]:
        """For each sequence its last open block: the index, and the block; not if two claim it."""
        claims: dict[tuple[int, int], list[int]] = {}
        for block, owner in self._having(OPEN):
            claims.setdefault(_OWNER.unpack(owner), []).append(block)
        return {
            sequence_id: (index, blocks[0])
            for (sequence_id, index), blocks in sorted(claims.items())
            if len(blocks) == 1
        }

    def written(self) -> set[int]:
        """Blocks with anything in them that cannot be found by a hash."""
        states = enumerate(self._states.tobytes())
        return {block for block, state in states if state in (WRITTEN, OPEN)}

    def _having(self, wanted: int) -> Iterator[tuple[int, bytes]]:
        for block, state in enumerate(self._states.tobytes()):
            if state == wanted:
                start = block * HASH_BYTES
                yield block, bytes(self._hashes[start : start + HASH_BYTES])
