"""Gives memory that an idle engine does not need back to the system."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from weft.core.process import give_back_freed_memory
from weft.core.settings import format_bytes

if TYPE_CHECKING:
    from weft.exec.store import KVStore
    from weft.kv.pool import BlockPool

logger = logging.getLogger("weft")

SAVE_S = 1.0  # without work, after which cached prefixes are saved to disk
PAUSE_S = 5.0  # the same, after which blocks that hold nothing give their pages back


class IdleMemory:
    """The KV memory of an engine in moments without work.

    A short while after the last step, cached prefixes are saved to disk, if there is one, and then
    the pages of free blocks go back. After ``forget_s``, the cached prefixes are forgotten, and
    theirs go, too.

    Args:
        forget_s: 0 for never.
        now: seconds on a clock that goes on.
        save: saves cached prefixes piece by piece, and returns whether all are saved.

    Attributes:
        saved: whether no cached prefix is to be saved any more.
    """

    def __init__(
        self,
        store: KVStore,
        forget_s: float,
        now: Callable[[], float] = time.monotonic,
        save: Callable[[], Generator[None, None, bool]] | None = None,
    ) -> None:
        self._store, self._forget_s, self._now, self._save = store, forget_s, now, save
        self._since: float | None = None
        self._work: Iterator[None] = iter(())
        self.saved = self._freed = self._forgot = True  # nothing was written yet

    @property
    def settled(self) -> bool:
        """Whether all is saved and given back, so that nothing is due soon."""
        return self.saved and self._freed

    def busy(self) -> None:
        """There is work to do: blocks may be written."""
        self._since = None
        self._work = iter(())
        self._freed = self._forgot = False
        self.saved = self._save is None

    def wrote(self) -> None:
        """Blocks were written that hold nothing any more."""
        self._since, self._work, self._freed = None, iter(()), False

    def idle(self, pools: tuple[BlockPool, ...], host_pools: tuple[BlockPool, ...] = ()) -> bool:
        """Use a moment in which nothing is computed; whether there is more to do at once.

        Args:
            pools: of a cache in which no sequence has a table.
            host_pools: of the host tier, whose prefixes are forgotten as well.
        """
        if next(self._work, self) is not self:
            return True
        now = self._now()
        if self._since is None:
            self._since = now
        idle_s = now - self._since
        if not self.saved:
            if idle_s >= SAVE_S:
                self._work = self._save_all()
        elif self._forget_s and not self._forgot and idle_s >= self._forget_s:
            for pool in (*pools, *host_pools):
                pool.forget()
            self._freed, self._forgot, self._work = True, True, self._give_back(pools)
        elif not self._freed and idle_s >= PAUSE_S:
            self._freed, self._work = True, self._give_back(pools)
        return next(self._work, self) is not self

    def _save_all(self) -> Iterator[None]:
        assert self._save is not None, "all is saved without"
        self.saved = yield from self._save()

    def _give_back(self, pools: tuple[BlockPool, ...]) -> Iterator[None]:
        given = 0
        for group, pool in enumerate(pools):
            for nbytes in self._store.give_back(group, pool.tidy()):
                given += nbytes
                yield
        give_back_freed_memory()  # of steps that were larger than those to come
        logger.debug("The engine is idle: %s of KV hold nothing.", format_bytes(given))
