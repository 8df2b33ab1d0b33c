"""The rows of overlapped sub-batches by tier, and the order of their layers (NEO)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.plan import SubBatch, Tier

MOST = 2  # sub-batches of a step

Result = TypeVar("Result", covariant=True)


class Lane(Protocol[Result]):
    """A sub-batch on its way through the layers."""

    def enter(self, layer: int) -> None:
        """Compute what precedes attention, hand the host its part, and attend on the device."""

    def leave(self, layer: int) -> None:
        """Await the host's attention, and compute what follows attention."""

    def end(self) -> Result:
        """Compute what follows the last layer."""


def check_overlaps(batches: Seq[SubBatch]) -> None:
    """Raise InvariantError for more sub-batches than overlap."""
    if len(batches) > MOST:
        raise InvariantError(f"{len(batches)} sub-batches cannot overlap")


def run_overlapped(lanes: Seq[Lane[Result]], layers: int) -> list[Result]:
    """Run one or two sub-batches; one has the device while the host attends for the other one.

    Returns:
        what their ``end`` gives.
    """
    first, *others = lanes
    for lane in others:
        lane.enter(0)
    for layer in range(layers):
        if layer:
            first.leave(layer - 1)
        first.enter(layer)
        for lane in others:
            lane.leave(layer)
            if layer + 1 < layers:
                lane.enter(layer + 1)
    ended = [lane.end() for lane in others]  # while the host has the first one
    first.leave(layers - 1)
    return [first.end(), *ended]


def kinds_of(batch: SubBatch) -> tuple[list[int], list[int], list[int]]:
    """The rows, as places in the batch: on the device; prompts and decodes on the host."""
    device, prompts, decodes = list[int](), list[int](), list[int]()
    for index, tier in enumerate(batch.row_tiers):
        if tier is Tier.DEVICE:
            device.append(index)
        elif batch.counts[index] == 1 and batch.starts[index] > 0:
            decodes.append(index)
        else:
            prompts.append(index)
    return device, prompts, decodes


def chosen(batch: SubBatch, indices: Seq[int]) -> SubBatch:
    """The sub-batch of some rows of another one."""
    rows, tiers = tuple(batch.rows[i] for i in indices), batch.row_tiers
    return SubBatch(
        rows,
        tuple(batch.starts[i] for i in indices),
        tuple(batch.counts[i] for i in indices),
        tuple(batch.samples[i] for i in indices),
        tuple(tiers[i] for i in indices),
        {row: batch.drafts[row] for row in rows if row in batch.drafts},
    )


def merged(batches: Seq[SubBatch]) -> SubBatch:
    """One sub-batch with the rows of all, one behind the other."""
    return SubBatch(
        tuple(row for batch in batches for row in batch.rows),
        tuple(start for batch in batches for start in batch.starts),
        tuple(count for batch in batches for count in batch.counts),
        tuple(samples for batch in batches for samples in batch.samples),
        tuple(tier for batch in batches for tier in batch.row_tiers),
        {row: draft for batch in batches for row, draft in batch.drafts.items()},
    )


def order_of(counts: NDArray[np.int64], rows: Seq[int]) -> NDArray[np.int64] | None:
    """Which token of a batch comes where if its rows come in this order; None if all stay.

    Args:
        counts: tokens of each row.
    """
    if list(rows) == list(range(len(rows))):
        return None
    ends = np.cumsum(counts)
    return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in rows])
