"""The turns that leased steps take in slots of recurrent state; decode.cpp has the same rule."""

from __future__ import annotations

from weft.core.plan import LentSlots


class LeaseTurns:
    """Which slots the steps of a row under a lease read and write, one step after the other.

    Attributes:
        now: what the next step reads.
        kept: whether no step writes that.
        spare: what steps may write, the next one the last.
        newest: the newest state that is kept of these steps, with the tokens that it holds.
    """

    def __init__(self, now: int, lent: LentSlots) -> None:
        self.now, self.kept, self.spare = now, lent.kept, list(lent.spare)
        self.newest: tuple[int, int] | None = None
        self._every = lent.every

    def computed(self, tokens: int) -> None:
        """Go on after a step that came to so many tokens."""
        written = self.spare.pop()
        if not self.kept:
            self.spare.append(self.now)
        self.now, self.kept = written, bool(self._every) and tokens % self._every == 0
        if not self.kept:
            return
        if self.newest is not None:
            self.spare.append(self.newest[1])
        self.newest = tokens, written
