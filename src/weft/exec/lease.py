"""Leases on a CPU: the steps after a planned one that the resident loop computes without Python.

A plan may lease its rows for more steps (``StepPlan.lease``). The executor's thread computes the
planned step, then waits for the host to grant the lease; from there until it ends only that thread
uses the ring. Where a row wants more than a choice among its logits, the step stays alone.
"""

from __future__ import annotations

import numpy as np

from weft.core.plan import SubBatch
from weft.exec.collect import StepOutput
from weft.exec.input_batch import InputBatch
from weft.kernels.cpu._native import Lease
from weft.kernels.cpu.decode import CpuDecodeLoop, LeaseTerms
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.stack import CpuStack
from weft.kernels.interface import FusedStack
from weft.models.decoder import Decoder

NO_IDS = np.zeros(0, np.int64)


class LeasedSteps:
    """Goes on with a step as long as its lease lasts."""

    def __init__(self, loop: CpuDecodeLoop, table: InputBatch) -> None:
        self._loop = loop
        self._table = table

    def run(self, batch: SubBatch, steps: int, lease: Lease, output: StepOutput) -> None:
        """Compute up to ``steps`` more steps of the rows of ``batch``, which has been computed.

        Args:
            output: of the step; its tokens become those of the last step computed.
        """
        table = self._table
        tokens = output.plain_tokens(len(batch.rows))
        if tokens is None or table.changes_logits or table.embedding:
            return
        try:
            terms = self._terms(batch, tokens, steps)
        except MemoryError:
            return
        output.go_on(batch, self._loop.run(lease, terms))

    def _terms(self, batch: SubBatch, tokens: list[int], steps: int) -> LeaseTerms:
        table = self._table
        rows = np.array(batch.rows, np.int64)
        ids = [table.sequence_ids[row] for row in batch.rows]
        columns = table.columns
        return LeaseTerms(
            rows,
            np.array(ids, np.uint64),
            columns.choice[rows],
            columns.seed[rows],
            table.length[rows] - table.num_prompt[rows],
            [table.stop_ids.get(row, NO_IDS) for row in batch.rows],
            np.array(tokens, np.int64),
            steps,
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
    return LeasedSteps(loop, table)
