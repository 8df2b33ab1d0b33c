"""Sums and gathers over tensor-parallel ranks, added in the order of ranks.

Collectives of NCCL and gloo add in an order that depends on the size of a tensor. Here every number
is ``((x0 + x1) + x2) + ...`` in float32, whatever else is in the tensor, and the same on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.core.errors import InvariantError
from weft.kernels.arrays import Array

# Below this every rank gets all parts and adds them itself: one exchange instead of two. The size
# is that of vLLM's custom all-reduce for up to 4 GPUs (csrc/custom_all_reduce.cuh).
ONE_EXCHANGE_BYTES = 512 * 1024


class Collectives(Protocol):
    """Collective operations; every rank calls the same ones in the same order.

    Attributes:
        rank: of this process, below ``size``.
    """

    rank: int
    size: int

    def sum(self, x: Array) -> Array:
        """Return the sum of every rank's ``x`` [...], in its dtype."""

    def gather(self, x: Array) -> Array:
        """Return the columns [S, size * n] of every rank's ``x`` [S, n], in the order of ranks."""

    def splits(self, x: Array) -> bool:
        """Whether what follows a sum of an array like ``x`` [T, C] pays by rows; see ``ByRows``."""

    def sum_rows(self, x: Array) -> Array:
        """Return this rank's rows [T / size, C] of the sum of every rank's ``x`` [T, C]."""

    def gather_rows(self, x: Array) -> Array:
        """Return the rows [size * n, C] of every rank's ``x`` [n, C], in the order of ranks."""

    def own(self, x: Array) -> Array:
        """Return the rows of ``x`` [T, C] for which this rank gets sums: all of them."""

    def enter(self, x: Array) -> Array:
        """Return all rows [T, C] of those that ranks have got sums for: they have all of them."""


def in_order(parts: Sequence[Array]) -> Array:
    """Return the sum of every rank's tensor [...], in its dtype: the reference of all sums here."""
    first, second, *others = parts
    total = first.float() + second
    for part in others:
        total += part
    return total.to(first.dtype)


class Alone:
    """A model that is not cut."""

    rank = 0
    size = 1

    def sum(self, x: Array) -> Array:
        return x

    def gather(self, x: Array) -> Array:
        return x

    def splits(self, x: Array) -> bool:  # noqa: ARG002 - as others have it
        return False

    def sum_rows(self, x: Array) -> Array:
        return x

    def gather_rows(self, x: Array) -> Array:
        return x

    def own(self, x: Array) -> Array:
        return x

    def enter(self, x: Array) -> Array:
        return x


class ByRows:
    """Ranks that get the sums of a share of the rows each, until a product needs all rows.

    Norms and residual sums in between take a share of the time, and the exchanges are the two that
    a large sum consists of (Korthikanti et al. 2022, sequence parallelism). All bits are those of
    whole sums, as nothing in between looks at two rows.
    """

    def __init__(self, ranks: Collectives) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.gather, self.gather_rows = ranks.gather, ranks.gather_rows
        self.sum = self.sum_rows = ranks.sum_rows
        self.enter = ranks.gather_rows

    def splits(self, x: Array) -> bool:  # noqa: ARG002 - it is split already
        return False

    def own(self, x: Array) -> Array:
        each = len(x) // self.size
        return x[self.rank * each : (self.rank + 1) * each]


ALONE = Alone()


class Link(Protocol):
    """The way of hidden states through the stages of a pipeline.

    Every stage takes the same steps in the same order, so a stage receives what the one before it
    has sent. Ranks of a stage have the same hidden states; each sends them to the rank of the next
    stage that has its number.

    Attributes:
        stage: of this process, below ``stages``.
    """

    stage: int
    stages: int

    def send(self, x: Array) -> None:
        """Send an array to the next stage; it must not change any more."""

    def receive(self, into: Array) -> Array:
        """Return ``into`` with what the previous stage has sent: an array of its shape and dtype.

        Raises:
            RuntimeError: that stage has ended.
        """


class OneStage:
    """A model that is not split into stages."""

    stage = 0
    stages = 1

    def send(self, x: Array) -> None:  # noqa: ARG002 - as a link has it
        raise InvariantError("there is no next stage")

    def receive(self, into: Array) -> Array:  # noqa: ARG002 - as a link has it
        raise InvariantError("there is no previous stage")


ONE_STAGE = OneStage()
