"""Leases on a device: decode steps after a planned one that are replayed, not planned or uploaded.

A plan may lease its rows for more steps (``StepPlan.lease``). The inputs of each are made on the
device, of what the step before has given (``kernels.advance``). So the host orders some of them
ahead, and has nothing to do between two steps but to look at tokens and hand them on:

    planned step | advance, forward, sample | advance, forward, sample | ...     (device)
                   order 1 .. n, take planned, order n + 1, take 1, ...          (host)

Host and device tell the end of a row by the same rules. Steps that were ordered behind it are
padding, which leaves nothing behind. Until a step is followed by another one that counts, its
tokens may end a sequence, and are for the host to commit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import InvariantError, WeftError
from weft.core.plan import StepPlan
from weft.core.types import TokenLogprob
from weft.exec.captured import CapturedSteps
from weft.exec.collect import OutOfMemoryGuard, StepOutput
from weft.exec.device import Device, Event
from weft.exec.functions import StepFunctions
from weft.exec.input_batch import InputBatch
from weft.exec.launched import LaunchedBatch
from weft.exec.step_layout import AHEAD
from weft.kernels.advance import RowBounds
from weft.kernels.cpu._native import Outlet
from weft.kernels.cpu.decode import LIMIT_S, UNPUBLISHED_S, Decoded, id_lists

AHEAD_OF_STOPS = 2  # likewise, where a token may end a row
NO_IDS = np.zeros(0, np.int64)


class DeviceLease:
    """``weft.core.ports.Lease`` of a step on a device: whoever collects it goes on with it."""

    def __init__(self) -> None:
        self.outlet: Outlet | None = None
        self.granted = False
        self.recalled = False

    def grant(self, outlet: object | None) -> None:
        self.outlet = None if outlet is None else Outlet(outlet)
        self.granted = True

    def recall(self) -> None:
        self.recalled = True

    @property
    def asked(self) -> bool:
        """Whether the steps that are ordered are to be the last ones."""
        return self.recalled or (self.outlet is not None and self.outlet.asked())


class Ordered(NamedTuple):
    """A step that was ordered, and where its results go."""

    results: Tensor
    read: tuple[int, int]  # hashes of the layouts by which it reads
    done: Event


@dataclass
class NoGuests:
    """Rows [R] none of whose tokens the host chooses; see ``collect.ToldOfGuests``."""

    withheld: NDArray[np.bool_]
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    faults: Mapping[int, WeftError] = field(default_factory=dict)


class StopIds:
    """The token ids that end rows [R], in the order of a step."""

    def __init__(self, rows: NDArray[np.int64], table: InputBatch) -> None:
        self.ids, self.bounds = id_lists([table.stop_ids.get(row, NO_IDS) for row in rows.tolist()])
        self._of = np.repeat(np.arange(len(rows)), np.diff(self.bounds))

    def end(self, tokens: NDArray[np.int64]) -> bool:
        """Whether one of the tokens [R] ends its row, or means nothing."""
        return bool((tokens < 0).any() or (tokens[self._of] == self.ids).any())


class ReplayedSteps:
    """Goes on with launched steps as long as their leases last."""

    def __init__(
        self, table: InputBatch, functions: StepFunctions, steps: CapturedSteps, device: Device
    ) -> None:
        self._table, self._functions, self._steps, self._device = table, functions, steps, device
        told = functions.bounds.told
        self._told = device.host_memory(len(told), told.dtype)
        self._most = len(RowBounds.of(told).limits)
        self._results = [device.host_memory(2 + 2 * self._most, torch.int64) for _ in range(AHEAD)]
        self._uploaded: Event | None = None  # when the last lease's end was told
        self._step_s = 0.0  # that a step of the latest lease took

    def lease(self, plan: StepPlan) -> DeviceLease | None:
        """A lease for the rows of a plan; None if they have one that the device cannot go on with.

        The host has a part in the tokens of such a row, or the row has too many stop ids.
        """
        if not plan.lease or plan.needs_host or len(plan.batches) != 1:
            return None
        table, rows = self._table, plan.batches[0].rows
        special = table.on_host | table.embedding | table.prompt_scored | table.scored.keys()
        special |= table.masked
        if len(rows) > self._most or not special.isdisjoint(rows):
            return None
        ids = sum(len(table.stop_ids.get(row, NO_IDS)) for row in rows)
        return DeviceLease() if ids <= len(RowBounds.of(self._told).stop_ids) else None

    def run(
        self,
        launched: Seq[LaunchedBatch],
        output: StepOutput,
        lease: DeviceLease,
        take: Callable[[], None],
    ) -> None:
        """Go on with a step until its lease ends, if it was launched whole and nothing else is.

        Args:
            launched: what is.
            output: of the step.
            take: waits for the step itself, and hands its tokens out.

        Raises:
            InvariantError: the device has ended the lease where the host sees no reason.
        """
        if not lease.granted or lease.asked or len(launched) != 1:
            return
        (part,) = launched
        if part.output is not output or not part.packed.ahead:
            return
        stops = StopIds(part.rows, self._table)
        self._tell(part, stops)
        order = partial(self._order, part)
        steps = LeasedRun(lease, order, part.packed.ahead, stops, self._step_s)
        steps.order()
        take()
        steps.begin()
        tokens = output.leasable_tokens(len(part.rows))
        given = [] if tokens is None else [np.array(tokens, np.int64)]
        ids = np.array([self._table.sequence_ids[row] for row in part.rows.tolist()], np.uint64)
        while given and not stops.end(given[-1]) and (step := steps.next()) is not None:
            if lease.outlet is not None:
                lease.outlet.publish(ids, given[-1])
            given.append(self._wait(step, ends=False))
            self._table.append_tokens(part.rows, np.maximum(given[-1], 0))
        while steps.ordered:
            self._wait(steps.ordered.popleft(), ends=True)
        self._step_s = steps.step_s
        if given:
            numbers = [np.maximum(tokens, 0).tolist() for tokens in given]
            finite, published = (given[-1] >= 0).tolist(), lease.outlet is not None
            guests = NoGuests(np.zeros(len(part.rows), np.bool_))
            output.go_on(part.batch, Decoded(numbers, finite, published, ""), guests)

    def _tell(self, part: LaunchedBatch, stops: StopIds) -> None:
        """Order the upload of what ends the lease on the device, once the last one has arrived.

        No step may have followed that one.
        """
        if self._uploaded is not None:
            self._uploaded.wait()
        count, bounds = len(part.rows), RowBounds.of(self._told.numpy())
        bounds.limits[:count] = part.packed.inputs.starts + 1 + part.packed.ahead
        bounds.stop_from[: count + 1] = stops.bounds
        bounds.stop_ids[: len(stops.ids)] = stops.ids
        with self._device.work():
            self._device.upload(self._told, self._functions.bounds.told)
            self._uploaded = self._device.record()

    def _order(self, part: LaunchedBatch, number: int) -> Ordered | None:
        """Order a step; None if there is no memory for it, which leaves what counts as it was."""
        count = 1 + len(part.rows)
        results = self._results[number % AHEAD][: 2 * count]
        with OutOfMemoryGuard(ranks=1) as memory, self._device.work():
            read = self._steps.go_on(part.packed)
            self._device.download(self._functions.results[:count].view(-1), results)
            done = self._device.record()
        return None if memory.ran_out else Ordered(results, read, done)

    def _wait(self, step: Ordered, *, ends: bool) -> NDArray[np.int64]:
        """Wait for a step, which is padding where the lease ``ends``; return its tokens [R]."""
        step.done.wait()
        self._functions.check_host()
        found = step.results.view(-1, 2).numpy()
        was = tuple(found[0].tolist())
        if ends != (was[0] == 0) or (not ends and was != step.read):
            raise InvariantError(f"a leased step laid out as {step.read} was computed as {was}")
        return found[1:, 0].copy()


class LeasedRun:
    """Steps under one lease: which are ordered, and whether there are to be more.

    Args:
        order: orders the step of a number; None if there is no memory for it.
        most: steps that the lease is for.
        step_s: seconds that a step takes, as far as is known.
    """

    def __init__(
        self,
        lease: DeviceLease,
        order: Callable[[int], Ordered | None],
        most: int,
        stops: StopIds,
        step_s: float,
    ) -> None:
        self.ordered: deque[Ordered] = deque()
        self.step_s = step_s
        self._lease, self._order, self._most, self._number = lease, order, most, 0
        # What is ordered behind the end of a row is for nothing.
        self._ahead = AHEAD_OF_STOPS if len(stops.ids) else AHEAD
        self._began = self._behind = time.monotonic()
        self._limit_s = UNPUBLISHED_S if lease.outlet is None else LIMIT_S

    def begin(self) -> None:
        """The planned step is over, so that the device computes those that were ordered."""
        self._behind = time.monotonic()

    def order(self) -> None:
        """Order steps, so many ahead as may be."""
        while len(self.ordered) < self._ahead and not self._over():
            step = self._order(self._number)
            if step is None:
                self._most = self._number
                return
            self.ordered.append(step)
            self._number += 1

    def next(self) -> Ordered | None:
        """The next step that was ordered, once others are ordered behind it; None for no more."""
        taken = self._number - len(self.ordered)
        if taken:
            self.step_s = (time.monotonic() - self._behind) / taken
        self.order()
        return self.ordered.popleft() if self.ordered else None

    def _over(self) -> bool:
        """Whether the steps that are ordered are the last ones; it stays so.

        One is ordered however long steps took before, or that would never be known to be otherwise.
        """
        ends_s = time.monotonic() - self._began + (len(self.ordered) + 1) * self.step_s
        if self._lease.asked or (self._number and ends_s >= self._limit_s):
            self._most = self._number
        return self._number == self._most
