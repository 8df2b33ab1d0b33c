"""Writes packed weights into the cache folder beside an engine that serves already."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.core.settings import format_bytes
from weft.models.packed_cache import PackedCache, PackedKey
from weft.models.packed_file import packed_bytes

logger = logging.getLogger("weft")

LOWEST_PRIORITY = 19
LONGEST_STOP_S = 2.0  # a disk may take longer; what it leaves behind, the next writer replaces
BUSY_SHARE = 0.1  # of a core while the engine computes, which needs the memory and the cores
BUSY_S = 0.2  # for which an engine counts as computing after a step


class PackedWriter:
    """A thread of the lowest priority that writes one file.

    Args:
        weights: by parameter; held until they are written.
        current: the key of what is on disk now; weights of a checkpoint that has changed since they
            were read are not kept.
    """

    def __init__(
        self,
        cache: PackedCache,
        key: PackedKey,
        weights: Mapping[str, Any],
        current: Callable[[], PackedKey],
    ) -> None:
        self._cache, self._key, self._current = cache, key, current
        self._weights: Mapping[str, Any] | None = weights
        self._stop = threading.Event()
        self._busy_until = self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._run, name="weft-packed-writer", daemon=True)

    def make_way(self) -> None:
        """The engine computes: write slowly for a moment."""
        self._busy_until = time.monotonic() + BUSY_S

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Give up, unless it is written already. May be called twice."""
        self._stop.set()
        self.join(LONGEST_STOP_S)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it is written or given up; whether that was so in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        weights, self._weights = self._weights, None
        assert weights is not None
        folder, began = self._cache.folder, time.monotonic()
        try:
            if not self._is_current():
                logger.warning("%s has changed; its weights are not kept.", self._key.source)
            elif self._cache.keep(self._key, weights, self._between):
                logger.info(
                    "The packed weights are kept in %s (%s, in %.1f s).",
                    folder,
                    format_bytes(packed_bytes(weights)),
                    time.monotonic() - began,
                )
        except GivenUpError:
            logger.info("The packed weights are not kept, as the engine ends.")
        except OSError as error:
            logger.warning(
                "The packed weights cannot be kept in %s (%s); the next start packs them again.",
                folder,
                error.strerror,
            )

    def _is_current(self) -> bool:
        try:
            return self._current() == self._key
        except OSError:  # it is gone
            return False

    def _between(self) -> None:
        """Pause beside an engine that computes, by the CPU time that the last piece took."""
        used_s, self._cpu_s = time.thread_time() - self._cpu_s, time.thread_time()
        busy = time.monotonic() < self._busy_until
        if self._stop.wait(used_s * (1 / BUSY_SHARE - 1) if busy else 0.0):
            raise GivenUpError


class GivenUpError(Exception):
    """The process ends before the weights are written."""
