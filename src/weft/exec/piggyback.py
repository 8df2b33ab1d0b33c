"""Piggybacked rows: tokens on their way through the layers while a host worker attends for them.

A token begins with a step that computes its embedding and q, k and v of the first layer; these go
to the worker. Any later step that executes a layer carries the results that are there for it: it
computes the rest of the layer and q, k and v of the next one along with its own rows, up to the
logits (OmniServe section 3.2). A row waits in one layer at a time, so that what it needs there, its
residual and the angles of its position, is kept by row and not by layer.

Every pass can be computed again: what it took and has not handed on is put back, what it has handed
on has come a layer further, and a token that it did not begin begins again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import HostWorkerError, InvariantError
from weft.core.plan import PIGGYBACK_WAIT_S, PlaceStatus, StepPlan
from weft.exec.host_attention import HostAttention
from weft.exec.host_results import results_of
from weft.exec.input_batch import InputBatch
from weft.kernels.arrays import Array, numpy_dtype
from weft.models.decoder import Decoder
from weft.models.layers import Angles

NOWHERE = -1  # the layer of rows without a token on its way

Rows = NDArray[np.int32]  # executor rows, which are also slots of the mailbox


def check_plan(plan: StepPlan, layers: int) -> None:
    """Raise InvariantError if a plan limits other layers than there are."""
    if plan.piggyback_limits and len(plan.piggyback_limits) != layers:
        raise InvariantError(f"step {plan.step_id} has no limit for each of {layers} layers")


def attention_failed(why: str) -> HostWorkerError:
    """The failure of a request whose job the worker could not compute."""
    return HostWorkerError(f"The host could not attend for this request: {why}.")


class AbortedJobs:
    """Aborted rows that the worker may be computing still, so that it may write to their blocks."""

    def __init__(self, host: HostAttention) -> None:
        self._host = host
        self._rows: list[int] = []

    def add(self, rows: Iterable[int]) -> None:
        """Add rows, as ``HostMailbox.abort`` returns them."""
        self._rows += rows

    def before(self, plan: StepPlan, *, begins: bool = False) -> None:
        """Wait for the worker if a plan may use blocks of such rows, or begins tokens."""
        if self._rows and (plan.writes_host or begins):
            self._host.await_aborted(self._rows)
            self._rows = []


class PiggybackedRows:
    """The rows of an executor that have a token on its way. For one thread."""

    def __init__(self, decoder: Decoder, table: InputBatch, host: HostAttention) -> None:
        self._decoder, self._table, self.host = decoder, table, host
        self._mailbox, self._places = host.mailbox, host.places
        spec, rows = decoder.spec, len(table.sequence_ids)
        self._layer = np.full(rows, NOWHERE, np.int32)  # in which each row waits
        self._residual = np.empty((rows, spec.hidden_size), numpy_dtype(decoder.dtype))
        halves = [cos.shape[1] for cos, _ in decoder.angles(np.zeros(0, np.int64))]
        self._angles = [
            (np.empty((rows, half), np.float32), np.empty((rows, half), np.float32))
            for half in halves
        ]
        self.carried = self._mailbox.carried(self._residual, self._layer, self._angles)
        self._results = results_of(self._mailbox, decoder.ops.ranks)
        self._taken: Rows = np.zeros(0, np.int32)  # and not handed on yet
        self._aborted = AbortedJobs(host)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._layer != NOWHERE))

    @property
    def in_layers(self) -> tuple[int, ...]:
        """The number of rows that wait for each layer or its attention."""
        waiting = self._layer[self._layer != NOWHERE]
        return tuple(np.bincount(waiting, minlength=self._decoder.spec.num_layers).tolist())

    # -- between steps ---------------------------------------------------------------------------

    def before(self, plan: StepPlan) -> None:
        """Do what a plan says of tokens on their way before it moves or writes any KV.

        Tokens whose place has gone are dropped first.

        Raises:
            InvariantError: it drops or moves a row whose token is on its way, or limits other
                layers than there are.
        """
        check_plan(plan, self._decoder.spec.num_layers)
        if self._places is not None:
            self._abort(self._places.refresh(plan.drop))
            self._places.resume()
        if plan.abort:
            self._abort(plan.abort)
        for row in (*plan.drop, *(move.row for move in plan.moves)):
            if self._layer[row] != NOWHERE:
                raise InvariantError(f"row {row} leaves the host while its token is on its way")
        if self._places is not None:
            self._places.leave(plan.drop)
        self._aborted.before(plan)

    def _abort(self, rows: Iterable[int]) -> None:
        """Drop the tokens of rows; those that have none on their way are ignored."""
        gone = [row for row in rows if self._layer[row] != NOWHERE]
        running = self._mailbox.abort(gone)
        self._layer[gone] = NOWHERE
        if self._places is not None:
            own = self._places.free(gone)
            running = [row for row in running if row in own]
        self._aborted.add(running)

    def present(self, rows: Seq[int]) -> Seq[int]:
        """Those of these rows whose KV has not been lost with a place."""
        return rows if self._places is None else self._places.present(rows)

    def lost(self) -> tuple[int, ...]:
        """Sequences whose KV has been lost with a place since the last call."""
        return () if self._places is None else self._places.take_lost()

    def places(self) -> tuple[PlaceStatus, ...]:
        """What remote places offer."""
        return () if self._places is None else self._places.status

    def look(self, *, wait: bool) -> dict[int, HostWorkerError]:
        """Look for results, which the pass of this step may take; once a step.

        Args:
            wait: where there are none, for no longer than new requests may wait.

        Returns:
            by row, why the worker could not attend for it; its token has ended. Where the model is
            cut over ranks, the worker of any of them.

        Raises:
            HostWorkerError: there is no worker any more.
        """
        self.host.check()
        if not len(self):
            return {}
        failures = self._results.look(PIGGYBACK_WAIT_S if wait else 0.0)
        self._abort(failures)
        return {row: attention_failed(why) for row, why in failures.items()}

    # -- within a pass ---------------------------------------------------------------------------

    def begin(self, rows: Rows) -> NDArray[np.int64]:
        """Begin the next token of rows, whose KV lies with the host.

        Returns:
            the ids [n] to be embedded: the latest token of each.

        Raises:
            InvariantError: a token of a row is on its way already.
        """
        if (self._layer[rows] != NOWHERE).any():
            raise InvariantError(f"of rows {rows.tolist()} one has a token on its way already")
        table = self._table
        contexts = table.length[rows]
        positions = contexts - 1
        places = None if self._places is None else self._places.of_rows[rows]
        self._mailbox.begin(rows, contexts, table.tables_of(rows), places)
        for kept, found in zip(self._angles, self._decoder.angles(positions), strict=True):
            for mine, fresh in zip(kept, found, strict=True):
                mine[rows] = fresh
        return table.tokens[rows, positions].astype(np.int64)

    def submit(
        self, rows: Rows, layer: int, residual: Array, q: Array, k: Array | None, v: Array | None
    ) -> None:
        """Hand q [n, H, D] and k, v [n, Hkv, D] of a layer to the worker; keep the residual."""
        self._mailbox.submit(rows, layer, q, k, v)
        self._residual[rows], self._layer[rows] = residual, layer
        self._taken = self._taken[:0]

    def take(self, layer: int, most: int) -> tuple[Rows, Array, Array]:
        """Take results of a layer, in the order of their submission.

        Returns:
            the rows [n], their attention [n, H, D] and their residuals [n, C].
        """
        rows = self._results.done(layer, most)
        attended = self._mailbox.take(rows, layer)
        self._taken = rows
        return rows, attended, self._residual[rows]

    def angles(self, rows: Rows) -> tuple[Angles, ...]:
        """The angles of the rows' positions, for each rope of the model: each [n, R]."""
        return tuple((cos[rows], sin[rows]) for cos, sin in self._angles)

    def done_counts(self) -> NDArray[np.int32]:
        """The number of results for each layer; the next call overwrites it."""
        return self._results.counts()

    def finish(self, rows: Rows) -> None:
        """The tokens of rows that were taken from the last layer are there."""
        self._taken = self._taken[:0]
        self._end(rows)

    def taken_natively(self) -> Rows:
        """Return the rows that a native pass took and has not handed on, in order."""
        self._taken = np.array(self.carried.taken(), np.int32)
        return self._taken

    # -- after a pass that ran out of memory -----------------------------------------------------

    def put_back(self) -> None:
        """Undo what the pass took and has not handed on."""
        self._mailbox.put_back(self._taken)
        self._taken = self._taken[:0]

    def give_up(self, begun: Iterable[int]) -> list[int]:
        """End the tokens that the pass took and has not handed on; ``begun`` are those of its own.

        Returns:
            the rows of both that have no token on their way now.
        """
        lost = [*self.not_begun(begun), *self._taken.tolist()]
        self._end(self._taken)
        self._taken = self._taken[:0]
        return lost

    def not_begun(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows that have no token on its way."""
        return [row for row in rows if self._layer[row] == NOWHERE]

    def _end(self, rows: Rows | list[int]) -> None:
        self._mailbox.release(rows)
        self._layer[rows] = NOWHERE
