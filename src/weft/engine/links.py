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
        kv: a file of ``engine.kv_file``; None if KV ends with its engine.
    """

    rings: Sequence[RingFds]
    targets: int | None = None
    beat_s: float = BEAT_S
    kv: int | None = None

    @property
    def pass_fds(self) -> list[int]:
        """For ``subprocess.Popen(pass_fds=...)``; the numbers are the same in the child."""
        single = [fd for fd in (self.targets, self.kv) if fd is not None]
        return [*single, *(fd for ring in self.rings for fd in ring.pass_fds)]

    def arguments(self) -> list[str]:
        """Of ``weft.engine.process``."""
        given = ["--beat-s", str(self.beat_s)]
        given += [] if self.targets is None else ["--targets", str(self.targets)]
        given += [] if self.kv is None else ["--kv", str(self.kv)]
        for ring in self.rings:
            given += ["--ring", str(ring)]
        return given
