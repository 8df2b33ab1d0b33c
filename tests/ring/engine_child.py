"""An engine process for the tests: the real scheduler on the modelled executor, behind rings.

python engine_child.py DEPTH STEP_SECONDS RING...     prints "ready", ends on SIGTERM
"""

from __future__ import annotations

import os
import signal
import sys

from modelled import VOCAB, ScoringExecutor, info, scheduler

from weft.engine.loop import EngineLoop
from weft.ring.inbox import RingInbox
from weft.ring.segment import RingFds
from weft.sim.clock import VirtualClock


def main() -> None:
    depth, step_s, *rings = sys.argv[1:]
    inbox = RingInbox([RingFds.parse(text) for text in rings], vocab_size=VOCAB)
    signal.signal(signal.SIGTERM, lambda *_: inbox.stop())
    planner = scheduler()
    executor = ScoringExecutor(depth=int(depth), step_s=float(step_s))
    loop = EngineLoop(planner, executor, inbox, VirtualClock())
    inbox.write_info(info(pid=os.getpid()))
    print("ready", flush=True)
    steps = 0
    while not inbox.closed:
        busy = loop.step()
        steps += busy
        planner.check()
        if not busy:
            inbox.write_info(info(pid=os.getpid(), steps=steps, running=inbox.in_flight))
            inbox.wait()
    loop.drain()
    inbox.close()
    executor.close()


main()
