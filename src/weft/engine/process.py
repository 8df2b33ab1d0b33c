"""The engine process: builds the engine, then serves rings until it is told to stop.

    python -m weft.engine.process --ring FDS [--ring FDS ...] --report FD --parent PID

Settings come as one line of JSON on standard input; at another line, or its end, the engine ends.
SIGTERM is ignored: whoever ends a whole group of processes wants running streams to finish first,
and the parent decides when they have. One JSON line goes to the report descriptor when the engine
is ready (``{"served": ...}``) or has failed (``{"error": ...}``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import InvariantError, WeftError
from weft.core.logs import log_level, set_up_logs
from weft.core.process import die_with, set_process_title
from weft.engine.build import Engine, build_engine, describe_served
from weft.engine.compiling import CompilingInbox
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.ring.inbox import RingInbox
from weft.ring.layout import EngineInfo
from weft.ring.segment import RingFds

INFO_EVERY_S = 0.25
CHECK_EVERY_S = 10.0


def main() -> None:
    """Run until told to stop: exit code 0; 1 if the engine cannot start or breaks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ring", action="append", required=True)
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    set_process_title("weft-engine")
    die_with(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    report = os.fdopen(options.report, "w")
    settings = json.loads(sys.stdin.readline())
    inboxes: list[RingInbox] = []
    threading.Thread(target=_stop_when_told, args=(inboxes,), daemon=True).start()
    try:
        config = EngineConfig.from_mapping(settings)
        set_up_logs("engine", log_level(config.log_level), config.log_format)
        engine = build_engine(config)
        inbox = RingInbox(
            [RingFds.parse(text) for text in options.ring],
            vocab_size=engine.model.spec.vocab_size,
        )
    except WeftError as error:
        _tell(report, {"error": {"type": type(error).__name__, "message": error.message}})
        sys.exit(1)
    inboxes.append(inbox)
    inbox.write_info(_info(engine, ready=True))
    _tell(report, {"served": describe_served(config, engine).to_json()})
    sys.exit(_serve(engine, inbox))


def _stop_when_told(inboxes: list[RingInbox]) -> None:
    """End the loop, or the process at once while it still builds the engine."""
    sys.stdin.readline()
    if not inboxes:
        os._exit(0)
    for inbox in inboxes:
        inbox.stop()


def _serve(engine: Engine, inbox: RingInbox) -> int:
    ready = CompilingInbox(inbox, engine.grammars.compile)
    loop = EngineLoop(engine.scheduler, engine.executor, ready, WallClock())
    gc.collect()
    gc.freeze()  # weights and modules live as long as the process: never scan them again
    told = checked = 0.0
    try:
        while not inbox.closed:
            busy = loop.step()
            if not busy and time.monotonic() - checked > CHECK_EVERY_S:
                engine.scheduler.check()
                checked = time.monotonic()
            if not busy or time.monotonic() - told > INFO_EVERY_S:
                inbox.write_info(_info(engine, ready=True))
                told = time.monotonic()
            if not busy:
                inbox.wait()
        loop.drain()
    except Exception as error:
        loop.abandon()
        inbox.fail(InvariantError(f"The engine stopped: {type(error).__name__}: {error}"))
        raise
    finally:
        inbox.write_info(_info(engine, ready=False))
        engine.executor.close()
    inbox.close()
    return 0


def _info(engine: Engine, ready: bool) -> EngineInfo:
    scheduler, resolved = engine.scheduler, engine.resolved
    pools = scheduler.cache.pools
    waiting = list(scheduler.waiting)
    return EngineInfo(
        ready=int(ready),
        pid=os.getpid(),
        started_ns=engine.started_ns,
        updated_ns=time.monotonic_ns(),
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        vocab_size=engine.model.spec.vocab_size,
        block_size=resolved.block_size,
        blocks=sum(pool.num_blocks for pool in pools),
        free_blocks=sum(pool.available for pool in pools),
        waiting=len(waiting),
        running=len(scheduler.running),
        paused=sum(sequence.preemptions > 0 for sequence in waiting),
        queued_prompt_tokens=sum(len(sequence.tokens) for sequence in waiting),
        **asdict(scheduler.totals),
    )


def _tell(report: Any, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=report, flush=True)


if __name__ == "__main__":
    main()
