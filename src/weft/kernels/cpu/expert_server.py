"""Answers a device that waits for experts: a thread of this process, without the interpreter lock.

It needs nothing of the device's driver, only memory that both see. Another thread ends the waits of
the device if an answer takes too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.errors import HostWorkerError
from weft.kernels.arrays import Array, address, view
from weft.kernels.cpu import _native
from weft.kernels.cpu.experts import bind_experts
from weft.kernels.hosted import GIVEN_UP, HostedExperts

ANSWER_S = 60.0  # that an answer may take
CHECK_S = 1.0  # between looks at whether one takes so long
CLOSE_S = 5.0  # that the end may wait for an answer


@dataclass(frozen=True)
class ExpertMemory:
    """Memory of N rows that a device and the host see, numpy's arrays here.

    Attributes:
        asked: [1] int64, the latest ticket of the device, written behind the rows.
        tokens: [1] int32, how many rows of its pass are not padding.
        x: [N, C].
        shares: [N, K] float32.
        experts: [N, K] int64.
        answered: [1] int64, the latest ticket whose results are there.
        out: [N, C], the results.
    """

    asked: Array
    tokens: Array
    x: Array
    shares: Array
    experts: Array
    answered: Array
    out: Array


class ExpertServer:
    """See the module docstring. Computes with the threads that the native kernels have.

    Attributes:
        error: why nobody answers any more; None while somebody does.
    """

    def __init__(self, memory: ExpertMemory, layers: Sequence[HostedExperts]) -> None:
        """Start the threads.

        Args:
            layers: that of a ticket is its rest when divided by their number.

        Raises:
            HostWorkerError: experts and rows do not fit together.
        """
        self.error: HostWorkerError | None = None
        self._memory = memory
        self._layers = tuple(layers)  # which the native experts do not keep alive
        bound = [bind_experts(one.gate_up, one.down, one.activation, *one.biases) for one in layers]
        self._bound = bound
        try:
            self._native = _native.ExpertServer(
                address(memory.asked),
                address(memory.tokens),
                view("x", memory.x),
                address(memory.experts),
                address(memory.shares),
                memory.experts.shape[1],
                address(memory.answered),
                address(memory.out),
                bound,
            )
        except ValueError as error:
            raise HostWorkerError(f"The host cannot compute experts: {error}.") from None
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name="weft-experts", daemon=True),
            threading.Thread(target=self._watch, name="weft-experts-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """A pass has been ordered: look for its tickets."""
        self._native.wake()

    @property
    def answers(self) -> int:
        """Layers computed so far."""
        return self._native.answers

    @property
    def rows(self) -> int:
        """Rows of them, each counted once a layer."""
        return self._native.rows

    @property
    def busy_s(self) -> float:
        """Seconds that they took."""
        return self._native.busy_ns / 1e9

    def _serve(self) -> None:
        try:
            self._native.run()
        except (IndexError, MemoryError, RuntimeError) as error:
            self._give_up(f"The host cannot compute experts any more: {error}.")

    def _watch(self) -> None:
        """Give up if the same ticket is not answered for long."""
        seen, since = 0, time.monotonic()
        while not self._closing.wait(CHECK_S):
            asked, answered = int(self._memory.asked[0]), int(self._memory.answered[0])
            if asked != seen or asked == answered:
                seen, since = asked, time.monotonic()
            elif time.monotonic() - since > ANSWER_S and answered != GIVEN_UP:
                self._give_up(f"The host has not computed experts within {ANSWER_S:.0f} s.")

    def _give_up(self, why: str) -> None:
        self.error = HostWorkerError(why)
        self._memory.answered[0] = GIVEN_UP  # ends the waits of the device

    def close(self) -> None:
        """End the threads, with nothing in flight. May be called twice."""
        self._closing.set()
        self._native.stop()
        for thread in self._threads:
            thread.join(CLOSE_S)
