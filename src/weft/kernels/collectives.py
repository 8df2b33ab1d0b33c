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
