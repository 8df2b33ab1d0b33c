"""Rows whose tokens a device chooses among those that their grammars allow.

A mask depends on the row's latest token, the choice of the next token on the mask. So the forward
pass of a step is ordered before the tokens of the last one are known; masks are made of these while
the device computes, and sampling is ordered behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import WeftError
from weft.exec.device import Device
from weft.exec.input_batch import InputBatch
from weft.exec.launched import LaunchedBatch
from weft.exec.sample import Sampled


class MaskedRows:
    """See the module docstring.

    Args:
        masks: ``RowState.masks``.
    """

    def __init__(self, table: InputBatch, masks: Tensor, device: Device) -> None:
        self._table, self._masks, self._device = table, masks, device

    def send(
        self, rows: NDArray[np.int64], finish: Callable[[], None]
    ) -> tuple[list[int], dict[int, WeftError]]:
        """Tell the device which tokens the rows of samples [S] may have.

        Args:
            finish: takes the tokens of all earlier steps.

        Returns:
            the samples that have masks, and the rows whose grammar cannot go on, with the reason.
        """
        grammars, wanted = self._table.grammars, self._table.masked
        at = [i for i, row in enumerate(rows.tolist()) if row in wanted] if wanted else []
        if not at or grammars is None:
            return [], {}
        finish()
        bits = np.zeros((len(at), 4 * self._masks.shape[1]), np.uint8)
        faults = grammars.fill(rows[at].tolist(), bits)
        words = self._device.send(torch.from_numpy(bits.view(np.int32)))
        self._masks.index_copy_(0, self._device.send(torch.from_numpy(rows[at])), words)
        return at, faults

    def advance(self, part: LaunchedBatch, sampled: Sampled) -> None:
        """Have grammars go on by the tokens of a step; adds the rows for which there were none."""
        at = list(part.masked)
        if at and self._table.grammars is not None:
            self._table.grammars.advance(part.rows[at].tolist(), sampled.tokens[at])
            sampled.faults.update(part.faults)
