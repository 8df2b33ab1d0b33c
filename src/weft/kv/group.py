"""A group of layers whose KV has the same lifetime, as the accounting sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a block table: full attention, or sliding with a window in tokens.

    Or recurrent layers, ``recurrent``: blocks are slots of their state (``states.py``), and the
    window is one token.
    """

    name: str
    block_size: int
    num_blocks: int
    window: int | None = None
    recurrent: bool = False

    def first_block(self, position: int) -> int:
        """Index of the first block that a query at ``position`` or later can read."""
        if self.window is None:
            return 0
        return max(0, position - self.window) // self.block_size

    def blocks_to_hold(self, start: int, upto: int) -> int:
        """Blocks that tokens [0, upto) occupy when queries start at ``start``."""
        return -(-upto // self.block_size) - self.first_block(start)
