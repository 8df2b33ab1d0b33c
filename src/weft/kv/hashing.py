"""Chained content hashes of full blocks of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class HashChain:
    """Digests of the full blocks of one sequence: each covers its tokens and all before them.

    Cryptographic, so that nobody can craft a prompt that finds another prompt's blocks.
    """

    __slots__ = ("block_size", "digests", "salt")

    def __init__(self, block_size: int, salt: bytes) -> None:
        self.block_size = block_size
        self.salt = salt
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int], upto_blocks: int) -> list[bytes]:
        """Hash up to ``upto_blocks`` blocks in all and return every digest so far."""
        size = self.block_size
        for index in range(len(self.digests), upto_blocks):
            parent = self.digests[index - 1] if index else self.salt
            content = array("q", tokens[index * size : (index + 1) * size]).tobytes()
            state = blake2b(parent, digest_size=DIGEST_BYTES)
            state.update(content)
            self.digests.append(state.digest())
        return self.digests
