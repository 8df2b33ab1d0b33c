"""Chained content hashes of full blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import TypeAlias

from weft.core.images import PromptImage, marks_of

HASH_BYTES = 16

Images: TypeAlias = Sequence[PromptImage]


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return Struct(f"<{block_size}q").pack


class HashChain:
    """Digests of the full blocks of one sequence: each covers its tokens and all before them.

    Also the images that stand there. Cryptographic, so that no one can craft a prompt that matches
    another prompt's blocks.
    """

    __slots__ = ("_images", "_pack", "_root", "block_hashes", "block_size")

    def __init__(self, block_size: int, salt: bytes, images: Images = ()) -> None:
        self.block_size = block_size
        # Another hash than that of blocks, so that no salt can pass for the hash of a prefix.
        self._root = blake2b(salt, digest_size=HASH_BYTES, person=b"weft salt").digest()
        self.block_hashes: list[bytes] = []
        self._pack = _packer(block_size)
        self._images = images

    def extend(self, tokens: Sequence[int], upto_blocks: int) -> list[bytes]:
        """Hash up to ``upto_blocks`` blocks in all and return every hash so far."""
        size, block_hashes = self.block_size, self.block_hashes
        if len(block_hashes) >= upto_blocks:
            return block_hashes
        parent = block_hashes[-1] if block_hashes else self._root
        for start in range(len(block_hashes) * size, upto_blocks * size, size):
            content = self._pack(*tokens[start : start + size])
            if self._images:
                content += marks_of(self._images, start, start + size)  # longer than without any
            parent = blake2b(content + parent, digest_size=HASH_BYTES).digest()
            block_hashes.append(parent)
        return block_hashes
