"""Leases on a CPU: the steps after a planned one that the resident loop computes without Python.

A plan may lease its rows for more steps (``StepPlan.lease``). The thread that computes the planned
step goes on as soon as the lease is granted; from there until it ends only that thread uses the
ring. Penalties, biases and minimum lengths are applied there, too. Some rows are guests,
whose choice alone is Python's; where those have log probabilities, their tokens come with the end
of the lease, which is sooner then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError, WeftError
from weft.core.plan import StateRow, SubBatch
from weft.core.types import TokenLogprob
from weft.exec.collect import StepOutput
from weft.exec.input_batch import InputBatch
from weft.exec.sample import sample
from weft.kernels.cpu._native import Lease, RowEdits
from weft.kernels.cpu.decode import CpuDecodeLoop, LeasedStates, LeaseTerms, id_lists
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.stack import CpuStack
from weft.kernels.interface import FusedStack, OpTable
from weft.models.decoder import Decoder

NO_IDS = np.zeros(0, np.int64)
NO_BIAS = NO_IDS, np.zeros(0, np.float32)
NO_DELAY = NO_IDS, 0


class Guests:
    """Rows whose tokens Python chooses, amid a step.

    Those with a grammar, with tokens that they may not sample, or with log probabilities.

    Attributes:
        guest: [R] bool, which of the leased rows those are.
        withheld: [R] bool, those with log probabilities, which are published with their tokens.
        logprobs: of each step that was computed, by sequence id.
        faults: the rows that could not go on, and why.
    """

    def __init__(self, rows: NDArray[np.int64], table: InputBatch, ops: OpTable) -> None:
        which = rows.tolist()
        self.withheld = np.array([row in table.scored for row in which], np.bool_)
        restricted = np.array([table.is_restricted(row) for row in which], np.bool_)
        self.guest = self.withheld | restricted
        self.logprobs: list[dict[int, TokenLogprob]] = []
        self.faults: Mapping[int, WeftError] = {}
        self._at = np.flatnonzero(self.guest)
        self._rows = rows[self._at]
        self._ids = [table.sequence_ids[row] for row in self._rows.tolist()]
        self._table, self._ops = table, ops

    def __len__(self) -> int:
        return len(self._at)

    def choose(
        self, logits: NDArray[np.float32], tokens: NDArray[np.int64], finite: NDArray[np.bool_]
    ) -> bool:
        """See ``LeaseTerms.choose``. Without memory nothing is chosen, and no grammar advances."""
        try:
            found = sample(logits[self._at], self._rows, self._table, self._ops)
        except MemoryError:
            return False
        self.logprobs.append({self._ids[i]: entry for i, entry in found.logprobs.items()})
        self.faults = found.faults
        tokens[self._at] = found.tokens
        finite[self._at] = found.finite & [row not in found.faults for row in self._rows.tolist()]
        return True


class LeasedSteps:
    """Goes on with a step as long as its lease lasts."""

    def __init__(self, loop: CpuDecodeLoop, table: InputBatch, ops: OpTable) -> None:
        self._loop = loop
        self._table = table
        self._ops = ops

    def run(
        self, batch: SubBatch, steps: int, lease: Lease, output: StepOutput, step_s: float
    ) -> None:
        """Compute up to ``steps`` more steps of the rows of ``batch``, which has been computed.

        Args:
            output: of the step; its tokens become those of the last step computed.
            step_s: seconds that the step took.
        """
        table, rows = self._table, np.array(batch.rows, np.int64)
        tokens = output.leasable_tokens(len(rows))
        if tokens is None or table.embedding:
            return
        try:
            guests = Guests(rows, table, self._ops)
            states = leased_states(batch.states)
            terms = self._terms(rows, guests, states, tokens, steps, step_s)
        except MemoryError:
            return
        output.go_on(batch, self._loop.run(lease, terms), guests)

    def _terms(
        self,
        rows: NDArray[np.int64],
        guests: Guests,
        states: LeasedStates | None,
        tokens: list[int],
        steps: int,
        step_s: float,
    ) -> LeaseTerms:
        table, which = self._table, rows.tolist()
        columns = table.columns
        return LeaseTerms(
            rows,
            np.array([table.sequence_ids[row] for row in which], np.uint64),
            columns.choice[rows],
            columns.seed[rows],
            table.length[rows] - table.num_prompt[rows],
            [table.stop_ids.get(row, NO_IDS) for row in which],
            np.array(tokens, np.int64),
            self._edits(rows, ~guests.guest),
            guests.guest,
            guests.withheld,
            guests.choose if len(guests) else None,
            states,
            steps,
            step_s,
        )

    def _edits(self, rows: NDArray[np.int64], own: NDArray[np.bool_]) -> RowEdits:
        """What rows want changed of their logits, but for guests, which see to it themselves."""
        table, which = self._table, rows.tolist()
        biases = [table.bias.get(row, NO_BIAS) for row in which]
        delays = [table.delayed.get(row, NO_DELAY) for row in which]
        penalised = np.array([row in table.penalised for row in which], np.bool_)
        edited = [row in table.bias or row in table.delayed for row in which] | penalised
        return RowEdits(
            edited & own,
            penalised,
            table.columns.penalties[rows],
            table.num_prompt[rows],
            *id_lists([ids for ids, _ in biases]),
            np.concatenate([NO_BIAS[1], *(values for _, values in biases)]),
            *id_lists([ids for ids, _ in delays]),
            np.array([least for _, least in delays], np.int64),
        )


def leased_states(rows: Sequence[StateRow]) -> LeasedStates | None:
    """Return what leased steps of a model with recurrent layers read and write; None of others.

    Raises:
        InvariantError: the plan lends a row no slots.
    """
    lent = [row.lent for row in rows if row.lent is not None]
    if len(lent) < len(rows):
        raise InvariantError("a lease of a model with recurrent layers needs slots for each row")
    return LeasedStates.of([row.write for row in rows], lent) if rows else None


def bind_leases(
    decoder: Decoder, stack: FusedStack | None, table: InputBatch, block_size: int
) -> LeasedSteps | None:
    """Bind the resident loop to an executor's rows, and to its model and KV by ``stack``.

    None where the model does not run as one native call.
    """
    head = decoder.lm_head
    if not isinstance(stack, CpuStack) or not isinstance(head, CpuMatrix):
        return None
    loop = CpuDecodeLoop(
        stack, head, decoder.spec.logit_scale, decoder.spec.logit_softcap, table.tokens,
        table.length, table.tables, block_size,
    )  # fmt: skip
    return LeasedSteps(loop, table, decoder.ops)
