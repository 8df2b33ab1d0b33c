"""A record of what the blocks of a pool hold, which outlives the engine that writes it.

It lies in the same memory as the blocks, beside them. An engine may be killed between any two
writes, so the record never says more than is true: a block is recorded as full when all of its
content is written, and as written before anything in it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.kv.hashing import HASH_BYTES

WRITTEN, FULL = b"\1\2"  # 0: nobody has had the block, it is zeros


class BlockRecord:
    """One byte a block, its state, then the hashes of all blocks.

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
        start = block * HASH_BYTES
        self._hashes[start : start + HASH_BYTES] = block_hash
        self._states[block] = FULL

    def full(self) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks whose content is known, and its hash."""
        for block, state in enumerate(self._states.tobytes()):
            if state == FULL:
                start = block * HASH_BYTES
                yield block, bytes(self._hashes[start : start + HASH_BYTES])

    def written(self) -> set[int]:
        """Blocks with anything in them that nobody may look for."""
        return {block for block, state in enumerate(self._states.tobytes()) if state == WRITTEN}
