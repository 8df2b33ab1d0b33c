"""Leases on a CPU: the steps after a planned one that the resident loop computes without Python.

A plan may lease its rows for more steps (``StepPlan.lease``). The executor's thread computes the
planned step, then waits for the host to grant the lease; from there until it ends only that thread
uses the ring. Penalties, biases and minimum lengths are applied there, too; rows with a grammar or
with tokens that they may not sample are guests, whose choice alone is Python's. Where log
probabilities or embeddings are wanted, the step stays alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import WeftError
from weft.core.plan import SubBatch
from weft.exec.collect import StepOutput
from weft.exec.input_batch import InputBatch
from weft.exec.sample import choose_allowed, clear_others
from weft.kernels.cpu._native import Lease, RowEdits
from weft.kernels.cpu.decode import CpuDecodeLoop, LeaseTerms, id_lists
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.stack import CpuStack
from weft.kernels.interface import FusedStack, OpTable
from weft.models.decoder import Decoder

NO_IDS = np.zeros(0, np.int64)
NO_BIAS = NO_IDS, np.zeros(0, np.float32)
NO_DELAY = NO_IDS, 0


class Guests:
    """Chooses the tokens of rows that have a grammar, or tokens that they may not sample.

    Attributes:
        guest: [R] bool, which of the leased rows those are.
        faults: the rows that could not go on, and why.
    """

    def __init__(self, rows: NDArray[np.int64], table: InputBatch, ops: OpTable) -> None:
        self.guest = np.array([table.is_restricted(row) for row in rows.tolist()], np.bool_)
        self.faults: dict[int, WeftError] = {}
        self._at = np.flatnonzero(self.guest)
        self._rows = rows[self._at]
        self._table, self._ops = table, ops

    def __len__(self) -> int:
        return len(self._at)

    def choose(
        self, logits: NDArray[np.float32], tokens: NDArray[np.int64], finite: NDArray[np.bool_]
    ) -> None:
        """See ``LeaseTerms.choose``."""
        own = logits[self._at]
        good = clear_others(own)
        lengths = self._table.length[self._rows]
        chosen, self.faults = choose_allowed(own, self._rows, lengths, self._table, self._ops)
        tokens[self._at] = chosen
        finite[self._at] = good & [row not in self.faults for row in self._rows.tolist()]


class LeasedSteps:
    """Goes on with a step as long as its lease lasts."""

    def __init__(self, loop: CpuDecodeLoop, table: InputBatch, ops: OpTable) -> None:
        self._loop = loop
        self._table = table
        self._ops = ops

    def run(self, batch: SubBatch, steps: int, lease: Lease, output: StepOutput) -> None:
        """Compute up to ``steps`` more steps of the rows of ``batch``, which has been computed.

        Args:
            output: of the step; its tokens become those of the last step computed.
        """
        table, rows = self._table, np.array(batch.rows, np.int64)
        tokens = output.plain_tokens(len(rows))
        if tokens is None or table.scored or table.embedding:
            return
        try:
            guests = Guests(rows, table, self._ops)
            terms = self._terms(rows, guests, tokens, steps)
        except MemoryError:
            return
        output.go_on(batch, self._loop.run(lease, terms), guests.faults)

    def _terms(
        self, rows: NDArray[np.int64], guests: Guests, tokens: list[int], steps: int
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
            self._edits(rows),
            guests.guest,
            guests.choose if len(guests) else None,
            steps,
        )

    def _edits(self, rows: NDArray[np.int64]) -> RowEdits:
        table, which = self._table, rows.tolist()
        biases = [table.bias.get(row, NO_BIAS) for row in which]
        delays = [table.delayed.get(row, NO_DELAY) for row in which]
        penalised = np.array([row in table.penalised for row in which], np.bool_)
        edited = [row in table.bias or row in table.delayed for row in which] | penalised
        return RowEdits(
            edited,
            penalised,
            table.columns.penalties[rows],
            table.num_prompt[rows],
            *id_lists([ids for ids, _ in biases]),
            np.concatenate([NO_BIAS[1], *(values for _, values in biases)]),
            *id_lists([ids for ids, _ in delays]),
            np.array([least for _, least in delays], np.int64),
        )


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
        stack, head, decoder.spec.logit_softcap, table.tokens, table.length, table.tables,
        block_size,
    )  # fmt: skip
    return LeasedSteps(loop, table, decoder.ops)
