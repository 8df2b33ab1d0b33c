"""The set-up of a graph executor: the sizes and kinds of its steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.exec.halves_pass import HalvesSetup
from weft.exec.step_layout import SIZES, buffers_for


@dataclass(frozen=True)
class Steps:
    """The sizes and kinds of steps.

    Attributes:
        max_tokens: of a step.
        max_samples: of a step in which no request asks for more drafts than the settings; more are
            chosen uncaptured.
        depth: launched steps that may wait for collection while another is launched.
        capture: whether steps are captured.
        sizes: ascending, those that steps are padded to.
        lanes: for piggybacked rows, in steps that carry some.
        leases: whether a plan may lease its rows for steps that are not planned.
        halves: how two sub-batches of the device overlap; None: they run in turn.
    """

    max_tokens: int
    max_samples: int
    depth: int
    capture: bool = True
    sizes: Seq[int] = SIZES
    lanes: int = 0
    leases: bool = False
    halves: HalvesSetup | None = None

    @property
    def buffers(self) -> int:
        """Of the host, for steps in flight and the one that is packed."""
        return buffers_for(self.depth)
