"""Routed experts that the host computes for a device which waits for them (KTransformers).

Attention, norms, routers and dense MLPs stay on the device. In each layer it hands normalised rows
and the choices of its router to the host, and goes on with what the host has made of them. What the
host has ready is a *ticket*, a number that grows from layer to layer and from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.kernels.arrays import Array

MOST_LOOKS = 2**27  # at an answer that does not come: minutes, if nobody ends the wait before
GIVEN_UP = 2**62  # in the place of an answer: nobody computes any more; larger than any ticket
LOOK_S = 2e-5  # between looks of the reference


class ExpertLink(Protocol):
    """Carries rows of a device to the host, and what experts make of them back."""

    def send(self, place: int, x: Array, shares: Array, experts: Array) -> None: ...

    def receive(self, place: int, x: Array) -> Array: ...


class HostedExperts:
    """The experts of a layer whose matrices lie on the host, in place of the packed weights.

    Attributes:
        gate_up: E matrices [2 J, C] as the CPU's ops packed them, gates first.
        down: E matrices [C, J], likewise.
        activation: see ``reference.act_mul``.
        biases: [E, 2 J] and [E, C] of numpy, or None each.
    """

    def __init__(
        self,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        activation: str,
        biases: tuple[Array | None, Array | None] = (None, None),
    ) -> None:
        self.gate_up, self.down, self.activation = tuple(gate_up), tuple(down), activation
        self.biases = biases
        self._link: ExpertLink | None = None
        self._place = 0

    def __len__(self) -> int:
        return len(self.down)

    def attach(self, link: ExpertLink, place: int) -> None:
        """Have a link carry the rows from now on, in which this is the layer at ``place``."""
        self._link, self._place = link, place

    def send(self, x: Array, shares: Array, experts: Array) -> None:
        """Order that the host computes on rows; see ``reference.moe``.

        Args:
            x: [T, C].
            shares: [T, K] float32.
            experts: [T, K] int64.
        """
        self._attached().send(self._place, x, shares, experts)

    def receive(self, x: Array) -> Array:
        """Return what comes of the rows [T, C] that were sent last; the device waits for it."""
        return self._attached().receive(self._place, x)

    def _attached(self) -> ExpertLink:
        if self._link is None:
            raise ValueError("nothing carries rows to the experts on the host")
        return self._link


@dataclass(frozen=True)
class HostWord:
    """A number in memory of the host that a device reads or writes where it lies.

    Attributes:
        memory: [1] int64 on the host.
        address: [1] int64 on the device: where that is.
    """

    memory: Array
    address: Array


class AwaitAnswer(Protocol):
    """See ``await_answer``."""

    def __call__(
        self, answered: HostWord, ticket: Array, gave_up: HostWord, looks: int, /
    ) -> None: ...


def await_answer(answered: HostWord, ticket: Array, gave_up: HostWord, looks: int) -> None:
    """Wait until the host has answered a ticket, in plain tensor operations.

    Args:
        ticket: [1] int64 on the device; a later answer will do.
        gave_up: becomes 1 if the answer is ``GIVEN_UP``, or is not there after so many looks; once
            it is 1 nothing is waited for.
    """
    wanted = int(ticket[0])
    for _ in range(looks if int(gave_up.memory[0]) == 0 else 0):
        found = int(answered.memory[0])
        if found == GIVEN_UP:
            break
        if found >= wanted:
            return
        time.sleep(LOOK_S)
    gave_up.memory[0] = 1
