"""Chained content hashes of full blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct

DIGEST_BYTES = 16


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return Struct(f"<{block_size}q").pack


class HashChain:
    """Digests of the full blocks of one sequence: each covers its tokens and all before them.

    Cryptographic, so that nobody can craft a prompt that finds another prompt's blocks.
    """

    __slots__ = ("_pack", "_root", "block_size", "digests")

    def __init__(self, block_size: int, salt: bytes) -> None:
        self.block_size = block_size
        # Another hash than that of blocks, so that no salt can pass for the digest of a prefix.
        self._root = blake2b(salt, digest_size=DIGEST_BYTES, person=b"weft salt").digest()
        self.digests: list[bytes] = []
        self._pack = _packer(block_size)

    def extend(self, tokens: Sequence[int], upto_blocks: int) -> list[bytes]:
        """Hash up to ``upto_blocks`` blocks in all and return every digest so far."""
        size, digests = self.block_size, self.digests
        if len(digests) >= upto_blocks:
            return digests
        parent = digests[-1] if digests else self._root
        for start in range(len(digests) * size, upto_blocks * size, size):
            content = self._pack(*tokens[start : start + size])
            parent = blake2b(content + parent, digest_size=DIGEST_BYTES).digest()
            digests.append(parent)
        return digests
