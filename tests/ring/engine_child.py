"""An engine process for the tests: the real scheduler on the modelled executor, behind rings.

python engine_child.py DEPTH STEP_SECONDS POISON RING...     prints "ready", ends on SIGTERM

It dies of SIGSEGV when it computes a sequence whose first token is POISON (-1: none).
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


class PoisonedExecutor(ScoringExecutor):
    """Dies of a token."""

    poison = -1

    def collect(self, ticket):
        for batch in ticket.plan.batches:
            for row in batch.rows:
                adding = [add.tokens for add in ticket.plan.add if add.row == row]
                tokens = adding[0] if adding else self._rows[row].tokens
                if self.poison == tokens[0]:
                    os.kill(os.getpid(), signal.SIGSEGV)
        return super().collect(ticket)


def main() -> None:
    depth, step_s, poison, *rings = sys.argv[1:]
    inbox = RingInbox(
        [RingFds.parse(text) for text in rings],
        vocab_size=VOCAB,
    )
    signal.signal(signal.SIGTERM, lambda *_: inbox.stop())
    planner = scheduler()
    executor = PoisonedExecutor(depth=int(depth), step_s=float(step_s))
    executor.poison = int(poison)
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
