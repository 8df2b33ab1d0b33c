"""Links of engine processes to the one that starts them: descriptors, and signs of life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.process import BEAT_S
from weft.ring.segment import RingFds


@dataclass(frozen=True, slots=True)
class EngineLinks:
    """What every engine of a server gets.

    Attributes:
        rings: that it serves.
        targets: of a ``ring.target_board``; None if targets cannot be changed.
        beat_s: seconds after which an engine at rest writes its info page again.
    """

    rings: Sequence[RingFds]
    targets: int | None = None
    beat_s: float = BEAT_S

    @property
    def pass_fds(self) -> list[int]:
        """For ``subprocess.Popen(pass_fds=...)``; the numbers are the same in the child."""
        board = [] if self.targets is None else [self.targets]
        return [*board, *(fd for ring in self.rings for fd in ring.pass_fds)]

    def arguments(self) -> list[str]:
        """Of ``weft.engine.process``."""
        given = ["--beat-s", str(self.beat_s)]
        given += [] if self.targets is None else ["--targets", str(self.targets)]
        for ring in self.rings:
            given += ["--ring", str(ring)]
        return given
