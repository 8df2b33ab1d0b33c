"""A sub-batch, or overlapped ones, in flight on a device."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import WeftError
from weft.core.plan import SubBatch
from weft.exec.collect import StepOutput
from weft.exec.device import Event
from weft.exec.step_packer import PackedStep


@dataclass(eq=False)
class LaunchedBatch:
    """A launched sub-batch.

    Attributes:
        batch: of overlapped ones, the rows of both, in the order of the plan.
        read: hashes of the layouts by which its numbers were read, as ``Buffer`` has them.
        rows: [S] the sampled rows.
        scored: samples whose log probabilities come back too.
        scores: [M, 2 + 2W] of these, as ``logprobs.score`` gives them.
        needs_host: something of it is done on the host before the next step may run.
        carried: rows with a token on its way, any of which may end in it.
        masked: samples [G] whose grammars go on by their tokens.
        faults: rows whose grammar cannot go on, and why.
    """

    batch: SubBatch
    packed: PackedStep
    read: tuple[int, int]
    rows: NDArray[np.int64]
    scored: list[int]
    scores: Tensor
    needs_host: bool
    done: Event
    output: StepOutput
    carried: frozenset[int] = frozenset()
    masked: Seq[int] = ()
    faults: Mapping[int, WeftError] = field(default_factory=dict)

    @property
    def rows_computed(self) -> frozenset[int]:
        return self.carried.union(self.batch.rows)
