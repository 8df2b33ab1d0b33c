"""An engine with a ring whose resident loop is counted; prints what its steps did, as JSON.

Wants the library of ``counting.cpp`` loaded first, and its path as the first word; then the threads
of the pool, and a JSON list of cases: the instruction set, rows, what they ask, and a fault of the
loop (0: none). More words are settings of the engine, as ``name=value``.

The client of the ring is in this process, whose threads that run Python are not counted but for the
one that computes. Each case runs twice, and the second run is counted: what the loop keeps from
step to step has grown by then.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from itertools import pairwise
from typing import Any

from weft.core.config import EngineConfig
from weft.core.plan import Update
from weft.core.types import Request, SamplingParams
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.kernels.cpu.attention import use_isa
from weft.ring.client import RingClient
from weft.ring.inbox import RingInbox
from weft.ring.layout import EngineInfo
from weft.ring.segment import create_ring

KINDS = ("allocations", "throws", "locks", "strange_locks", "waits")
PROMPT, TOKENS, LENGTH = 20, 64, 128
MOST_STEPS = 1 << 16
CAPSULE = b"weft.resident.Outlet"


class Counting:
    """The library, whose outlet stands before that of an inbox."""

    def __init__(self, library: str, inbox: RingInbox) -> None:
        self.native = ctypes.CDLL(library)
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.native.counting_outlet.restype = ctypes.c_void_p
        self.native.counting_outlet.argtypes = [ctypes.c_void_p]
        self._inner = inbox._outlet
        address = api.PyCapsule_GetPointer(self._inner, CAPSULE)
        inbox._outlet = api.PyCapsule_New(self.native.counting_outlet(address), CAPSULE, None)
        lend = inbox.lend

        def counted(lease: Any) -> None:
            self.native.counting_lease()
            lend(lease)

        inbox.lend = counted  # type: ignore[method-assign]

    def pass_over(self) -> None:
        """Count no thread that runs Python but this one, which plans and computes."""
        others = set(threading.enumerate()) - {threading.current_thread()}
        here = [thread.native_id for thread in others]
        self.native.counting_pass_over((ctypes.c_int * len(here))(*here), len(here))

    def take(self) -> list[dict[str, int]]:
        """What each step did since the one before it, under the same lease."""
        width = 1 + len(KINDS)
        memory = (ctypes.c_int64 * (MOST_STEPS * width))()
        number = self.native.counting_take(memory)
        rows = [memory[i * width : (i + 1) * width] for i in range(number)]
        return [
            {kind: new - old for kind, new, old in zip(KINDS, after[1:], before[1:], strict=True)}
            for before, after in pairwise(rows)
            if not after[0]
        ]


class Side:
    """An engine, its ring and a client."""

    def __init__(self, library: str, engine: Engine, vocabulary: int) -> None:
        self.fds = create_ring(64, 2**20)
        self.inbox = RingInbox([self.fds], spin_s=0)
        self.inbox.write_info(
            EngineInfo(ready=1, max_model_len=LENGTH, vocab_size=vocabulary, max_num_seqs=64)
        )
        self.client = RingClient(self.fds)
        self.client.run_in_thread()
        self.counting = Counting(library, self.inbox)
        self.loop = EngineLoop(engine.scheduler, engine.executor, self.inbox, WallClock())
        self._vocabulary, self._next = vocabulary, 0

    def run(self, rows: int, ask: dict[str, Any]) -> list[dict[str, int]]:
        left, over = rows, threading.Event()

        def answer(updates: list[Update]) -> None:
            nonlocal left
            left -= sum(update.finish is not None for update in updates)
            if left == 0:
                over.set()
                self.inbox.poke()

        requests = []
        for row in range(rows):
            self._next += 1
            prompt = tuple(8 + (17 * row + 5 * i) % (self._vocabulary - 8) for i in range(PROMPT))
            wanted = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **ask}
            sampling = SamplingParams(seed=row, **wanted).with_defaults({})
            requests.append(Request(self._next, prompt, sampling))
        self.client.submit(requests, answer)
        while not over.is_set():
            if not self.loop.step():
                self.inbox.wait(0.2)
        return self.counting.take()

    def close(self) -> None:
        self.loop.drain()
        self.inbox.close()
        self.client.close()
        self.fds.close()


def main() -> None:
    library, threads, cases, *more = sys.argv[1:]
    settings: dict[str, Any] = {"model": "builtin", "threads": int(threads)}
    settings |= {"kv_memory": "64MiB", "max_num_seqs": 32, "max_model_len": LENGTH}
    settings |= {"prefix_caching": False, **dict(word.split("=") for word in more)}
    engine = build_engine(EngineConfig(**settings))
    side = Side(library, engine, engine.model.spec.vocab_size)
    found = []
    for isa, rows, ask, fault in json.loads(cases):
        use_isa(isa)
        side.run(rows, ask)
        side.counting.pass_over()
        side.counting.native.counting_fault(fault)
        found.append(side.run(rows, ask))
        side.counting.native.counting_fault(0)
    side.close()
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
