"""The data folder of a request plane: opened when first needed, used on a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from weft.batch.database import BASE, DataFolderError, reachable
from weft.batch.folder import StoreLimits
from weft.batch.store import BatchStore
from weft.core.errors import ConfigError
from weft.core.state_folder import state_folder
from weft.server.options import ServerOptions

SWEEP_EVERY_S = 60.0

Result = TypeVar("Result")


def data_folder(options: ServerOptions) -> Path:
    """Where files and batches are kept."""
    return state_folder() if options.data_dir is None else Path(options.data_dir)


def store_limits(options: ServerOptions) -> StoreLimits:
    """Bounds on files, as the options have them."""
    return StoreLimits(
        options.max_file_bytes, options.max_key_files_bytes, options.disk_reserve_bytes
    )


class DataFolder:
    """A `BatchStore` for handlers."""

    def __init__(self, options: ServerOptions) -> None:
        self._folder = data_folder(options)
        self._limits = store_limits(options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")
        self._store: BatchStore | None = None
        self._swept = 0.0

    @property
    def in_use(self) -> bool:
        """Whether anything has been kept there; else ``run`` would make the folder."""
        return self._store is not None or (self._folder / BASE).exists()

    async def run(self, work: Callable[[BatchStore], Result]) -> Result:
        """Let the thread do some work.

        Raises:
            DataFolderError: the folder cannot be used.
            StorageFullError: its disk is full.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[BatchStore], Result]) -> Result:
        with reachable():
            if self._store is None:
                self._store = self._open()
            elif time.monotonic() - self._swept > SWEEP_EVERY_S:
                self._swept = time.monotonic()
                self._store.sweep()
            return work(self._store)

    def _open(self) -> BatchStore:
        self._swept = time.monotonic()
        try:
            return BatchStore(self._folder, self._limits)
        except ConfigError as error:
            raise DataFolderError(error.message) from None

    def close(self) -> None:
        """Close the store, if it was opened."""
        if self._store is not None:
            self._thread.submit(self._store.close)
        self._thread.shutdown()
