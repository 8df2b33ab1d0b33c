"""Block tables of one sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Table:
    """The blocks of a sequence in all groups of layers.

    Attributes:
        blocks: for each group the block ids by index; -1 where none is held.
        num_freed_prefix_blocks: for each group the number of leading blocks that are given up.
        full: for each group the number of leading blocks that are full and hashed.
    """

    blocks: list[list[int]]
    num_freed_prefix_blocks: list[int]
    full: list[int]
