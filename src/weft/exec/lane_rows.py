"""The piggybacked rows of an executor with captured steps: who begins, is dropped, or has ended.

A plan says which tokens begin and how many results each layer may take; what a step is told of it
is a ``Carried``. Tokens for which a step has no lane begin in the next steps, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.plan import PIGGYBACK_WAIT_S, StepPlan
from weft.exec.collect import StepOutput, no_memory
from weft.exec.courier import Courier, Rows, rows_of
from weft.exec.device import Device
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.lane_pass import LanePass
from weft.exec.piggyback import AbortedJobs, attention_failed, check_plan
from weft.exec.step_packer import Carried


class LaneRows:
    """See the module docstring. For one thread, beside the courier's.

    Attributes:
        courier: carries between the device and the host worker.
    """

    def __init__(
        self, table: InputBatch, host: HostAttention, lanes: LanePass, device: Device
    ) -> None:
        self.host = host
        self.courier = Courier(host, lanes, device)
        self._table, self._lanes, self._device = table, lanes, device
        self._aborted = AbortedJobs(host)
        rows = len(table.sequence_ids)
        self._on_way = np.zeros(rows, np.bool_)  # that have a token, begun or about to begin
        self._dropped: list[int] = []  # of which the device has not heard
        self._to_begin: deque[int] = deque()
        self._serial = 1  # of the padding that was captured

    @property
    def on_way(self) -> Rows:
        """The rows that have a token on its way, ascending."""
        return rows_of(np.flatnonzero(self._on_way))

    def in_layers(self) -> tuple[int, ...]:
        """The number of rows that wait for each layer or its attention."""
        counts = np.bincount(self.courier.layers(self.on_way), minlength=self._lanes.rule.layers)
        return tuple(counts.tolist())

    def before(self, plan: StepPlan) -> None:
        """Do what a plan says of tokens on their way before it moves or writes any KV.

        No launched step may end one of those tokens.

        Raises:
            InvariantError: see ``check_plan``.
        """
        check_plan(plan, self._lanes.rule.layers)
        gone = [row for row in plan.abort if self._on_way[row]]
        self._forget(gone)
        for row in (*plan.drop, *(move.row for move in plan.moves)):
            if self._on_way[row]:
                raise InvariantError(f"row {row} leaves the host while its token is on its way")
        self._aborted.before(plan, begins=bool(self._to_begin))

    def _forget(self, rows: Seq[int]) -> None:
        """Drop the tokens of rows, wherever they are."""
        self._aborted.add(self.courier.abort(rows))
        self._to_begin = deque(row for row in self._to_begin if row not in rows)
        self._dropped += rows
        self._on_way[list(rows)] = False

    def carry(self, plan: StepPlan, output: StepOutput) -> Carried | None:
        """Return what the lanes of a step are to do; None if there is nothing.

        Raises:
            HostWorkerError: there is no worker any more.
            InvariantError: a row that is to begin has a token on its way already.
        """
        self._end_failed(output)
        if self._on_way[list(plan.piggybacked)].any():
            rows = list(plan.piggybacked)
            raise InvariantError(f"of rows {rows} one has a token on its way already")
        self._to_begin += plan.piggybacked
        self._on_way[list(plan.piggybacked)] = True
        begins = bool(plan.piggybacked or (plan.piggyback_limits and self._to_begin))
        if begins or (plan.piggyback_limits and self.courier.has_results(self.on_way)):
            return self._next(plan.piggyback_limits)
        return None

    def _next(self, limits: Seq[int]) -> Carried:
        """The next step with lanes, with as many tokens that begin as it has lanes."""
        count = min(self._lanes.rule.lanes, len(self._to_begin))
        begun = tuple(self._to_begin.popleft() for _ in range(count))
        self._serial += 1
        if begun:
            table, rows = self._table, rows_of(begun)
            self.courier.begin(rows, table.length[rows], table.tables_of(rows), self._serial)
        dropped, self._dropped = tuple(self._dropped), []
        return Carried(self._serial, begun, tuple(limits), dropped)

    def wait(self) -> None:
        """Wait until there is a result or a failure, for no longer than new requests may wait."""
        news = self.courier.news
        news.clear()
        if not self.courier.has_results(self.on_way) and not self.courier.failed():
            news.wait(PIGGYBACK_WAIT_S)

    def _end_failed(self, output: StepOutput) -> None:
        failures = self.courier.failed()
        if failures:
            self.courier.release(list(failures))
            self._dropped += failures
            self._on_way[list(failures)] = False
        for row, why in failures.items():
            output.fail_piggybacked(row, attention_failed(why))

    def finish(self, rows: Rows) -> None:
        """The tokens of rows that have come through the last layer are there."""
        self.courier.release(rows)
        self._on_way[rows] = False

    # -- after a pass that ran out of memory -----------------------------------------------------

    def undo(self, carried: Carried) -> list[int]:
        """Undo what a pass took and has not handed on, with nothing in flight.

        What it has handed on has come a layer further. Tokens that it has not begun begin again.

        Returns:
            rows whose results it took, which may have been counted as sampled.
        """
        jobs, first = self._jobs(), self._lanes.rule.first(carried.serial)
        self._dropped += [row for row in carried.dropped if abs(jobs[row]) < first]
        self._to_begin.extendleft(reversed(self._not_begun(carried, jobs)))
        with self._device.work():
            self._lanes.put_back()
        return np.flatnonzero(jobs < 0).tolist()

    def again(self, carried: Carried) -> Carried:
        """The same step without others: the tokens that did not begin, and a result a layer."""
        return self._next([min(1, limit) for limit in carried.limits])

    def give_up(self, carried: Carried, output: StepOutput) -> None:
        """End the tokens that a pass took and has not handed on, or was to begin."""
        jobs = self._jobs()
        lost = [*self._not_begun(carried, jobs), *np.flatnonzero(jobs < 0).tolist()]
        first = self._lanes.rule.first(carried.serial)
        self._dropped += [row for row in carried.dropped if abs(jobs[row]) < first]
        self._forget(lost)
        for row in lost:
            output.fail_piggybacked(row, no_memory(1))

    def _jobs(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._lanes.state.jobs[:-1].cpu().numpy().copy()
        return found

    def _not_begun(self, carried: Carried, jobs: NDArray[np.int64]) -> list[int]:
        first = self._lanes.rule.first(carried.serial)
        return [row for row in carried.begun if abs(jobs[row]) < first]

    def close(self) -> None:
        """End courier and worker. May be called twice."""
        self.courier.close()
        self.host.close()
