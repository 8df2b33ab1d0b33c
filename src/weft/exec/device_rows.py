"""The rows of an input batch on a device, as sampling there reads them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from weft.exec.device import Device
from weft.exec.input_batch import MOST_EDITS, TOKENS_AT_ONCE, InputBatch
from weft.kernels.sampling import EDIT, EDITED, HEADER, IN_PROMPT, PENALISED, RowState


class DeviceRows:
    """The rows of a table on a device, as sampling there reads them.

    A row costs nothing that asks for no change of its logits.

    Attributes:
        state: tensors that stay where they are.
    """

    def __init__(self, table: InputBatch, vocab_size: int, device: Device) -> None:
        self._table = table
        self._device = device
        rows = len(table.sequence_ids)
        self.state = RowState.empty(rows, MOST_EDITS, vocab_size, device.where)

    def add_row(self, row: int) -> None:
        """Upload a row's sampling parameters, and count its known tokens on the device.

        For rows that are added; their later tokens are counted as they are sampled.
        """
        changes = self._table.columns.changes[row]
        if changes & (PENALISED | EDITED):
            asked = self._device.send(torch.from_numpy(self._asked(row)))
            self.state.asked[row, : len(asked)] = asked
        if changes & PENALISED:
            self._count(row)

    def _asked(self, row: int) -> NDArray[np.int32]:
        """The sampling parameters of a row, as in ``RowState.asked``."""
        table, size = self._table, self.state.counts.shape[1]
        edits: dict[int, tuple[float, int]] = {}
        if row in table.bias:
            ids, values = table.bias[row]
            edits = {i: (x, 0) for i, x in zip(ids.tolist(), values.tolist(), strict=True)}
        if row in table.delayed:
            stop_ids, min_tokens = table.delayed[row]
            # A model may name end ids that its vocabulary lacks; they never come anyway.
            for token in stop_ids[stop_ids < size].tolist():
                edits[token] = edits.get(token, (0.0, 0))[0], min_tokens
        asked = np.zeros(HEADER + EDIT * len(edits), np.int32)
        asked[: HEADER - 1] = table.columns.penalties[row].view(np.int32)
        asked[HEADER - 1] = len(edits)
        parts = asked[HEADER:].reshape(-1, EDIT)
        parts[:, 0] = list(edits)
        parts[:, 1] = np.array([value for value, _ in edits.values()], np.float32).view(np.int32)
        parts[:, 2] = [until for _, until in edits.values()]
        return asked

    def _count(self, row: int) -> None:
        table, counts = self._table, self.state.counts[row]
        prompt, length = int(table.num_prompt[row]), int(table.length[row])
        known = torch.from_numpy(table.tokens[row])
        counts.zero_()
        for start in range(0, prompt, TOKENS_AT_ONCE):
            tokens = self._device.send(known[start : min(start + TOKENS_AT_ONCE, prompt)])
            counts.scatter_(0, tokens.long(), IN_PROMPT)
        for start in range(prompt, length, TOKENS_AT_ONCE):
            tokens = self._device.send(known[start : min(start + TOKENS_AT_ONCE, length)])
            counts.scatter_add_(0, tokens.long(), torch.ones_like(tokens))
