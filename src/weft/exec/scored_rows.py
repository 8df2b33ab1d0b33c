"""Log probabilities of samples of captured steps: ordered behind the tokens, described later."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.exec.device import Device
from weft.exec.functions import StepFunctions
from weft.exec.input_batch import InputBatch
from weft.exec.launched import LaunchedBatch
from weft.exec.logprobs import COLUMNS, describe
from weft.exec.sample import Sampled
from weft.exec.step_packer import PackedStep


class ScoredRows:
    """What the rows of a table that want log probabilities get, of steps in flight on a device."""

    def __init__(
        self,
        table: InputBatch,
        functions: StepFunctions,
        device: Device,
        samples: int,
        buffers: int,
    ) -> None:
        """Take memory of the host for the most samples of a step, for each of its buffers."""
        self._table, self._functions, self._device = table, functions, device
        size = samples * COLUMNS
        self._scores = [device.host_memory(size, torch.float64) for _ in range(buffers)]

    def order(self, packed: PackedStep) -> tuple[list[int], Tensor]:
        """Order log probabilities of the samples that want them; see ``LaunchedBatch``."""
        wanted, target = self._table.scored, self._scores[packed.buffer]
        at = [
            (i, wanted[row])
            for i, row in enumerate(packed.inputs.sample_rows.tolist() if wanted else ())
            if row in wanted and row not in self._table.on_host
        ]
        scored = [i for i, _ in at]
        if packed.sample is None or not scored:
            return [], target[:0]
        samples = self._device.send(torch.tensor(scored))
        found = self._functions.score(packed.sample, samples, any(count for _, count in at))
        self._device.download(found.view(-1), target[: found.numel()])
        return scored, target[: found.numel()].view(found.shape)

    def describe(self, part: LaunchedBatch, sampled: Sampled) -> None:
        """Add what a sub-batch got to its samples, once it has ended."""
        alternatives = [self._table.scored[int(part.rows[i])] for i in part.scored]
        entries = describe(part.scores, sampled.tokens[part.scored], alternatives)
        scored = zip(part.scored, entries, strict=True)
        sampled.logprobs.update({i: entry for i, entry in scored if sampled.finite[i]})
