"""Invariants of the block tables of one group of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from weft.core.errors import InvariantError
from weft.kv.group import GroupSpec
from weft.kv.pool import BlockPool
from weft.kv.table import Table


def check_blocks(
    index: int,
    group: GroupSpec,
    pool: BlockPool,
    tables: Mapping[int, Table],
    leased: Seq[Table] = (),
) -> None:
    """Raise InvariantError if a block of a group is lost, owned twice, or wrongly shared.

    Args:
        index: of the group.
        tables: by sequence.
        leased: detached tables whose blocks are not given up yet.
    """
    references: Counter[int] = Counter()
    for sequence_id, table in tables.items():
        held = [block for block in table.blocks[index] if block >= 0]
        if len(set(held)) != len(held):
            raise InvariantError(f"sequence {sequence_id} holds a block twice")
        if any(block >= 0 for block in table.blocks[index][: table.num_freed_prefix_blocks[index]]):
            raise InvariantError(f"sequence {sequence_id} holds a dropped head")
        references.update(held)
    for table in leased:
        references.update(block for block in table.blocks[index] if block >= 0)
    pool.check(references)
    _check_writers(index, group, tables)


def _check_writers(index: int, group: GroupSpec, tables: Mapping[int, Table]) -> None:
    writers: dict[int, int] = {}
    for sequence_id, table in tables.items():
        for block in table.blocks[index][table.full[index] :]:
            if block >= 0 and writers.setdefault(block, sequence_id) != sequence_id:
                raise InvariantError(f"block {block} of {group.name} has two writers")
