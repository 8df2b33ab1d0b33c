"""The states of the jobs in a host mailbox, without their payload.

    empty -submit-> submitted -claim-> running -finish-> done -take-> taken -release-> empty

It makes the same transitions, gives results in the same order and refuses the same calls as the
mailbox of an engine (``kernels/cpu/job_state.hpp``, ``mailbox.cpp``, ``host.cpp``); a test drives
both side by side. Here the worker's steps are calls, too, so that a simulation chooses their times.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weft.core.errors import InvariantError


class JobState(StrEnum):
    """The state of a slot; the names are those of ``kernels.cpu.host.STATES``."""

    EMPTY = "empty"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"
    TAKEN = "taken"
    FAILED = "failed"
    ABORTING = "aborting"


@dataclass(slots=True)
class _Slot:
    """Attributes:
    place: of the host that has the row's KV.
    order: of the submission of its job.
    """

    place: int
    state: JobState = JobState.EMPTY
    layer: int = 0
    order: int = 0


class JobStates:
    """The slots of a mailbox; any number is a slot.

    Methods that take slots raise InvariantError, before anything is changed, if a slot occurs twice
    or is in a state that the call is not for.

    Args:
        layers: of the model.
        places: hosts, each with a worker that serves the rows whose KV it has.
    """

    def __init__(self, layers: int, places: int = 1) -> None:
        self._slots: dict[int, _Slot] = {}  # that are not empty, or have a token
        self._submitted: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(places)]
        self._done: list[list[tuple[int, int]]] = [[] for _ in range(layers)]  # (order, slot)
        self._next = 0

    def state(self, slot: int) -> JobState:
        """The state of a slot."""
        found = self._slots.get(slot)
        return JobState.EMPTY if found is None else found.state

    def has_token(self, slot: int) -> bool:
        """Whether a token of the row has begun."""
        return slot in self._slots

    # -- the client's steps ----------------------------------------------------------------------

    def begin(self, slots: Sequence[int], place: int = 0) -> None:
        """Begin a token of rows in empty slots."""
        self._require(slots, "begun", JobState.EMPTY)
        for slot in slots:
            self._slots[slot] = _Slot(place)

    def submit(self, slots: Sequence[int], layer: int) -> None:
        """Hand a layer's jobs to the worker; the slots are empty, with a token begun, or taken."""
        self._check_layer(layer)
        self._require(slots, "submitted", JobState.EMPTY, JobState.TAKEN)
        for slot in slots:
            if slot not in self._slots:
                raise InvariantError(f"slot {slot} has no token")
        for slot in slots:
            own = self._slots[slot]
            own.state, own.layer, own.order = JobState.SUBMITTED, layer, self._next
            self._next += 1
            self._submitted[own.place][slot] = None

    def done(self, layer: int, most: int) -> list[int]:
        """Slots with a result of a layer, in the order of their submission."""
        self._check_layer(layer)
        return [slot for _, slot in self._done[layer][: max(most, 0)]]

    def done_counts(self) -> list[int]:
        """The number of results for each layer."""
        return [len(results) for results in self._done]

    def failed(self) -> list[int]:
        """Slots whose job has failed, in ascending order."""
        return sorted(n for n, own in self._slots.items() if own.state is JobState.FAILED)

    def take(self, slots: Sequence[int], layer: int) -> None:
        """Take results of a layer."""
        self._check_layer(layer)
        self._require(slots, "taken", JobState.DONE)
        for slot in slots:
            if self._slots[slot].layer != layer:
                raise InvariantError(f"slot {slot} has a result of another layer than {layer}")
        for slot in slots:
            self._slots[slot].state = JobState.TAKEN
        self._remove_results(layer, set(slots))

    def put_back(self, slots: Sequence[int]) -> None:
        """Undo ``take``."""
        self._require(slots, "put back", JobState.TAKEN)
        for slot in slots:
            self._show(slot, JobState.DONE)

    def release(self, slots: Sequence[int]) -> None:
        """Empty taken or failed slots: their tokens are over."""
        self._require(slots, "released", JobState.TAKEN, JobState.FAILED)
        for slot in slots:
            del self._slots[slot]

    def abort(self, slots: Sequence[int]) -> list[int]:
        """Empty slots in any state; those that the worker is computing are empty when it ends.

        Returns:
            the latter.
        """
        self._require(slots, "aborted", *JobState)
        return [slot for slot in slots if self._abort(slot)]

    def _abort(self, slot: int) -> bool:
        own = self._slots.get(slot)
        if own is None:
            return False
        if own.state in (JobState.RUNNING, JobState.ABORTING):
            own.state = JobState.ABORTING
            return True
        if own.state is JobState.SUBMITTED:
            del self._submitted[own.place][slot]
        elif own.state is JobState.DONE:
            self._remove_results(own.layer, {slot})
        del self._slots[slot]
        return False

    # -- the worker's steps ----------------------------------------------------------------------

    def oldest(self, place: int = 0) -> int | None:
        """The slot whose job the worker of a place claims next, along with others of its layer."""
        return next(iter(self._submitted[place]), None)

    def claim(self, place: int = 0) -> list[int]:
        """Make the jobs of the oldest one's layer one call: they are running.

        Returns:
            their slots in the order of submission; none if no job waits.
        """
        oldest = self.oldest(place)
        if oldest is None:
            return []
        layer, waiting = self._slots[oldest].layer, self._submitted[place]
        claimed = [slot for slot in waiting if self._slots[slot].layer == layer]
        for slot in claimed:
            del waiting[slot]
            self._slots[slot].state = JobState.RUNNING
        return claimed

    def finish(self, slots: Iterable[int], *, failed: bool = False) -> None:
        """End running jobs: their results are done, or they have failed. Aborted ones are empty."""
        self._require(slots := tuple(slots), "finished", JobState.RUNNING, JobState.ABORTING)
        for slot in slots:
            if self._slots[slot].state is JobState.ABORTING:
                del self._slots[slot]
            else:
                self._show(slot, JobState.FAILED if failed else JobState.DONE)

    def reclaim(self, place: int = 0) -> None:
        """The worker of a place has died: its running jobs wait for the next one."""
        waiting = self._submitted[place]
        for slot, own in list(self._slots.items()):
            if own.place != place:
                continue
            if own.state is JobState.ABORTING:
                del self._slots[slot]
            elif own.state is JobState.RUNNING:
                own.state = JobState.SUBMITTED
                waiting[slot] = None
        for slot in sorted(waiting, key=lambda slot: self._slots[slot].order):
            waiting.move_to_end(slot)

    # -- within ----------------------------------------------------------------------------------

    def _show(self, slot: int, state: JobState) -> None:
        own = self._slots[slot]
        own.state = state
        if state is JobState.DONE:
            insort(self._done[own.layer], (own.order, slot))

    def _remove_results(self, layer: int, slots: set[int]) -> None:
        self._done[layer] = [each for each in self._done[layer] if each[1] not in slots]

    def _require(self, slots: Sequence[int], what: str, *states: JobState) -> None:
        if len(set(slots)) < len(slots):
            raise InvariantError(f"of slots {list(slots)} one occurs twice")
        for slot in slots:
            if (seen := self.state(slot)) not in states:
                raise InvariantError(f"slot {slot} is {seen} and cannot be {what}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self._done):
            raise InvariantError(f"there is no layer {layer} of {len(self._done)}")
