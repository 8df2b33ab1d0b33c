"""Results of host workers: of the one worker of a model, or those that all ranks have.

Rows whose attention is there go on through a layer, and every rank of a model that is cut must take
the same ones, or sums over ranks would add rows of different sequences. The workers of the ranks
need different times, so the ranks agree once a step: on results that all of them have, and on
failures that any of them has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.kernels.collectives import Collectives
from weft.kernels.cpu.host import FAULTS, STATES, HostMailbox

DONE, FAILED = STATES.index("done"), STATES.index("failed")
# What a rank says of a slot; from FAULT on, a place in `FAULTS`.
NOTHING, RESULT, FAULT = 0, 1, 2

Slots = NDArray[np.int32]
NO_SLOTS: Slots = np.zeros(0, np.int32)


class HostResults(Protocol):
    """The results that a step may take. For the thread that computes steps."""

    def look(self, wait_s: float) -> dict[int, str]:
        """Look for results, at the start of a step; where there are none, wait for so long.

        Returns:
            slots that have failed, and why. Their state may still be another one.
        """

    def counts(self) -> NDArray[np.int32]:
        """Return the number of results for each layer; the next call overwrites it."""

    def done(self, layer: int, most: int) -> Slots:
        """Return slots with a result of a layer, which are to be taken, the first submitted first.

        For ranks this is asked of each layer once a step.
        """


def results_of(mailbox: HostMailbox, ranks: Collectives) -> HostResults:
    """Return the results of a mailbox that the ranks of a model may take."""
    return OwnResults(mailbox) if ranks.size == 1 else AgreedResults(mailbox, ranks)


class OwnResults:
    """Those of a model that is not cut, also such as come while a step computes."""

    def __init__(self, mailbox: HostMailbox) -> None:
        self._mailbox = mailbox

    def look(self, wait_s: float) -> dict[int, str]:
        if wait_s:
            self._mailbox.wait(wait_s)
        return self._mailbox.failed()

    def counts(self) -> NDArray[np.int32]:
        return self._mailbox.done_counts()

    def done(self, layer: int, most: int) -> Slots:
        return self._mailbox.done(layer, most)


class AgreedResults:
    """Those that the workers of all ranks have when a step begins.

    Every rank calls the same methods in the same order, and has submitted and taken the same rows.
    A row comes one layer further in a step at most, as results that come later are not agreed on.
    """

    def __init__(self, mailbox: HostMailbox, ranks: Collectives) -> None:
        self._mailbox, self._ranks = mailbox, ranks
        self._slots: dict[int, Slots] = {}  # by layer, those that are agreed on and not taken yet
        self._counts = np.zeros(len(mailbox.layers), np.int32)  # of them

    def look(self, wait_s: float) -> dict[int, str]:
        """See ``HostResults``. Raises RuntimeError if a rank has ended, as every collective."""
        if wait_s:
            # Each rank waits for the same result, which its worker computes next.
            self._mailbox.wait_for_first(wait_s)
        mine = self._said()
        said = self._ranks.gather(mine[None]).reshape(self._ranks.size, -1)  # [ranks, slots]
        worst = said.max(axis=0)
        self._agree_on((said == RESULT).all(axis=0))
        return {int(slot): FAULTS[worst[slot] - FAULT] for slot in np.flatnonzero(worst >= FAULT)}

    def _said(self) -> NDArray[np.int8]:
        """What this rank says of each slot [slots]."""
        states = self._mailbox.state_numbers()
        said: NDArray[np.int8] = np.where(states == DONE, RESULT, NOTHING).astype(np.int8)
        if (states == FAILED).any():
            for slot, why in self._mailbox.failed().items():
                said[slot] = FAULT + FAULTS.index(why)
        return said

    def _agree_on(self, theirs: NDArray[np.bool_]) -> None:
        """Keep the slots [slots] of which all ranks have the results, by layer."""
        self._slots.clear()
        self._counts[:] = 0
        for layer in np.flatnonzero(self._mailbox.done_counts()).tolist():
            slots = self._mailbox.done(layer, self._mailbox.slots)
            self._slots[layer] = slots[theirs[slots]]
            self._counts[layer] = len(self._slots[layer])

    def counts(self) -> NDArray[np.int32]:
        return self._counts

    def done(self, layer: int, most: int) -> Slots:
        slots = self._slots.pop(layer, NO_SLOTS)[: max(most, 0)]
        self._counts[layer] = 0
        return slots
