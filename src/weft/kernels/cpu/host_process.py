"""The host worker as a process of its own, ``weft-host``, which may be killed at any time.

    python -m weft.kernels.cpu.host_process PARENT

The descriptors of its memory, the layers and the threads come as JSON on its input. All state lies
in the mailbox, so the process that follows a dead one finds the jobs there.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from weft.core.errors import ConfigError, HostWorkerError, WeftError
from weft.core.process import (
    Backoff,
    describe_exit,
    die_with,
    process_state,
    set_process_title,
    start_child,
)
from weft.kernels.arrays import NAMES, View, numpy_dtype
from weft.kernels.cpu import attention
from weft.kernels.cpu.host import HostMailbox, SharedMemory, attach, attached_worker

logger = logging.getLogger("weft")

START_S = 60.0  # until a new process serves the mailbox
MOST_FRUITLESS = 6  # processes in a row that end while jobs wait and none has been computed


class HostProcess:
    """Keeps a process that serves a mailbox: one that ends is followed by another one.

    A job that ends whatever process computes it would be tried for ever. So there is none any more
    after ``MOST_FRUITLESS`` that have computed nothing of what waited.

    Attributes:
        restarts: processes that have followed a dead one.
        error: why there is none any more; None as long as there is one, or will be.
    """

    def __init__(
        self,
        mailbox: HostMailbox,
        kv: SharedMemory,
        *,
        threads: int = 1,
        cpus: Sequence[int] = (),
    ) -> None:
        """Start it and wait until it serves the mailbox.

        Args:
            kv: holds the caches of the mailbox's layers.
            cpus: the processor that each thread stays on; none: they move.

        Raises:
            ConfigError: a cache lies elsewhere.
            HostWorkerError: the process cannot be started, or ends at once.
        """
        self.restarts = 0
        self.error: HostWorkerError | None = None
        self._mailbox, self._kv = mailbox, kv
        self._killed = 0  # the process that took too long
        self._orders = json.dumps(
            {
                "mailbox": mailbox.memory.fd,
                "kv": kv.fd,
                "layers": [
                    layer.native(*(_offset(cache, kv) for cache in layer.views()))
                    for layer in mailbox.layers
                ],
                "threads": threads,
                "cpus": list(cpus),
                "isa": attention.isa(),
            }
        ).encode()
        self._closing = threading.Event()
        self._process = self._start()
        self._wait_until_it_serves()
        self._keeper = threading.Thread(target=self._keep, name="weft-host-keeper", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, so that no call of it ends."""
        return process_state(self._process.pid) in ("T", "t")

    def restart(self) -> None:
        """Kill the process, as it takes too long; another one follows."""
        self._killed = self._process.pid
        self._process.kill()

    def close(self) -> None:
        """Kill the process. Jobs that are not done stay submitted."""
        self._closing.set()
        self._process.kill()
        self._keeper.join()

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = start_child(
                [sys.executable, "-m", "weft.kernels.cpu.host_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=[self._mailbox.memory.fd, self._kv.fd],
            )
        except OSError as error:
            raise HostWorkerError(f"The host worker cannot be started: {error}.") from None
        assert process.stdin is not None
        try:
            with process.stdin as orders:
                orders.write(self._orders)
        except BrokenPipeError:
            pass  # it has ended, which is found out where it is waited for
        return process

    def _wait_until_it_serves(self) -> None:
        end = time.monotonic() + START_S
        while self._mailbox.native.worker != self._process.pid:
            code = self._process.poll()
            if code is None and time.monotonic() < end:
                time.sleep(0.002)
                continue
            why = "it takes too long"
            if code is not None:
                why = f"it ended by {describe_exit(code)}, and may have said why on stderr"
            self._process.kill()
            self._process.wait()
            self._mailbox.native.reclaim(self._process.pid)
            raise HostWorkerError(f"The host worker cannot be started: {why}.")

    def _keep(self) -> None:
        backoff = Backoff("host worker", proven=True)
        fruitless, computed = 0, 0
        while True:
            started = time.monotonic()
            code = self._process.wait()
            self._mailbox.native.reclaim(self._process.pid)
            why = describe_exit(code)
            if self._killed == self._process.pid:
                why = "being killed, as it took too long"
            before, computed = computed, self._mailbox.counters().jobs
            fruitless = fruitless + 1 if self._mailbox.waiting and computed == before else 0
            if fruitless >= MOST_FRUITLESS:
                self.error = HostWorkerError(
                    f"The host worker ended {fruitless} times in a row without a result, at last "
                    f"by {why}."
                )
                return
            if self._closing.wait(backoff.delay_s(time.monotonic() - started, why)):
                return
            logger.warning("The host worker ended by %s; another one follows.", why)
            try:
                self._process = self._start()
            except HostWorkerError as error:
                self.error = error
                return
            self.restarts += 1
            if self._closing.is_set():  # it may have been started after `close` killed the last one
                self._process.kill()


def _moved(cache: View, by: int) -> View:
    start, code, shape, strides = cache
    return start + by, code, tuple(shape), tuple(strides)


def _offset(cache: View, kv: SharedMemory) -> View:
    """Return where a cache lies in the host's KV.

    Raises:
        ConfigError: it does not lie there.
    """
    moved = _moved(cache, -kv.address)
    start, code, shape, strides = moved
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    end = start + (last + 1) * numpy_dtype(NAMES[code]).itemsize
    if min(start, *strides) < 0 or end > len(kv):
        raise ConfigError("A KV cache of the host worker does not lie in its shared memory.")
    return moved


def serve(orders: dict[str, Any]) -> None:
    """Serve a mailbox until the process is killed."""
    memory, kv = SharedMemory(orders["mailbox"]), SharedMemory(orders["kv"])
    attention.use_isa(orders["isa"])
    layers = [
        (_moved(k_cache, kv.address), _moved(v_cache, kv.address), *rest)
        for k_cache, v_cache, *rest in orders["layers"]
    ]
    attached_worker(attach(memory), layers, orders["threads"], orders["cpus"]).run()


def main() -> None:
    """Read the orders, and serve."""
    die_with(int(sys.argv[1]))
    set_process_title("weft-host")
    try:
        serve(json.load(sys.stdin))
    except WeftError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
