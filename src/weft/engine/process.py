"""The engine process: builds the engine, then serves rings until it receives a stop signal.

    python -m weft.engine.process --ring FDS [...] [--targets FD] [--kv FD] [--beat-s S]
                                  --report FD --parent PID
    python -m weft.engine.process --fork-for FD

The second form is a fork server, which becomes an engine in every process that it forks.
On standard input come settings as one line of JSON, then ``go`` once no other engine can touch the
rings any more, then ``stop``, which ends the engine and what is open. The end of it means that the
parent has died: the process ends at once and leaves the rings alone. SIGTERM is ignored:
a signal to the whole group of processes must not end running streams, and the parent decides when
they have finished. To the report descriptor go ``{"served": ...}`` when the engine is built or
``{"error": ...}`` if that has failed, and ``{"attached": ...}`` when it serves the rings, with the
seconds that each part of the start took.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from weft.core.config import EngineConfig
from weft.core.errors import EngineDeadError, InvariantError, WeftError
from weft.core.logs import log_level, notice, set_up_logs
from weft.core.process import (
    BEAT_S,
    STALLED,
    die_with,
    offer_to_memory_killer,
    set_process_title,
)
from weft.core.schedulers import POLICIES
from weft.core.starting import SHOWN, show_start
from weft.core.types import ServiceClass
from weft.engine.compiling import CompilingInbox
from weft.engine.forkserver import import_engine, limit_memory, serve_forks
from weft.engine.kv_file import forget_kv
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.engine.postpone import postpone
from weft.kv.lower_prefixes import LowerPrefixes
from weft.kv.pool import BlockPool, fullest
from weft.kv.tiers import TieredCache
from weft.ring.inbox import RingInbox
from weft.ring.layout import INFO_CLASSES, EngineInfo, places_of_classes
from weft.ring.segment import RingFds
from weft.ring.target_board import TargetBoard

if TYPE_CHECKING:
    from weft.engine.build import Engine
    from weft.engine.live_targets import LiveTargets
    from weft.engine.self_profile import PolicyChoice
    from weft.sched.scheduler import Scheduler, SchedulerPart

INFO_EVERY_S = 0.25
CHECK_EVERY_S = 10.0
SOON_S = 0.5  # between two looks at what is due soon
STANDBY_PATIENCE_S = 600.0  # with packed weights that are being written; its memory stays small


def prepare() -> None:
    """Do what every engine and fork server does, whatever its arguments will be."""
    limit_memory()
    import_engine()


def main() -> None:
    """Run until told to stop: exit code 0; 1 if the engine cannot start or breaks."""
    options = _options(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, STALLED):
        signal.signal(number, signal.SIG_IGN)
    offer_to_memory_killer()  # streams outlive an engine; those of a request plane break with it
    if options.fork_for is not None:
        end = socket.socket(fileno=options.fork_for)
        arguments, orders, report = serve_forks(
            end, background=options.background, torch=options.torch
        )
        options = _options([*arguments, "--report", str(report)])
        os.dup2(orders, sys.stdin.fileno())
        os.close(orders)
    _run(options)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ring", action="append")
    parser.add_argument("--targets", type=int)
    parser.add_argument("--kv", type=int)
    parser.add_argument("--report", type=int)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--beat-s", type=float, default=BEAT_S)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--first", choices=SHOWN)  # of its parent; says what a user sees of it
    parser.add_argument("--returning-bytes", type=int, default=0)
    parser.add_argument("--since", type=float, default=time.monotonic())
    parser.add_argument("--fork-for", type=int)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--torch", action="store_true")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> NoReturn:
    laps, orders = Laps(options.since), _Orders()  # which come when the parent knows its child
    set_process_title("weft-standby" if options.standby else "weft-engine")
    die_with(options.parent)
    report = os.fdopen(options.report, "wb", buffering=0)
    postpone("torch._meta_registrations")  # a fourth of the import of torch; for compilers
    laps.mark("process")
    try:
        config = EngineConfig.from_mapping(orders.settings)
        set_up_logs("engine", log_level(config.log_level), config.log_format)
        show_start(options.first, bars=config.log_format == "text")
        patience_s = STANDBY_PATIENCE_S if options.standby else 0.0
        engine, choice, served = _build(config, options, patience_s, laps)
        _tell(report, {"served": served})
        orders.go.wait()
        if options.standby:
            laps = Laps(time.monotonic())  # its earlier work delayed no request
            if choice is not None:
                engine.scheduler = choice.look(engine.scheduler) or engine.scheduler
        set_process_title("weft-engine")
        engine.adopt_kv()
        if options.kv is not None and engine.kept_kv is None:
            forget_kv(options.kv)  # which nobody will continue with
        inbox = RingInbox(
            [RingFds.parse(text) for text in options.ring],
            vocab_size=engine.model.spec.vocab_size,
            classes=[row.name for row in engine.scheduler.policy.classes],
            max_crashes=config.max_crashes,
        )
    except WeftError as error:
        _tell(report, {"error": {"type": type(error).__name__, "message": error.message}})
        sys.exit(1)
    orders.inbox = inbox
    engine.start_disk(inbox.poke)
    engine.start_places()
    targets = None if options.targets is None else _live_targets(options, config, engine, choice)
    inbox.write_info(_info(engine, ready=True))
    laps.mark("rings")
    _tell(report, {"attached": laps.seconds})
    sys.exit(_serve(engine, inbox, choice, targets, options.beat_s))


class Laps:
    """The time that each part of a start took.

    Args:
        since: when the first one began, on the monotonic clock.

    Attributes:
        seconds: of each part, by its name.
    """

    def __init__(self, since: float) -> None:
        self.seconds: dict[str, float] = {}
        self._since = since

    def mark(self, part: str) -> None:
        """This part ends now, and the next one begins."""
        now = time.monotonic()
        self.seconds[part], self._since = round(now - self._since, 3), now


class _Orders:
    """Orders of the parent on standard input.

    Attributes:
        settings: the first line.
        go: set when the rings may be touched.
        inbox: what to stop when the parent says so; before there is one the process ends at once.
    """

    def __init__(self) -> None:
        settings = sys.stdin.readline()
        if not settings:
            os._exit(1)  # the parent has ended, or has given up
        self.settings: dict[str, Any] = json.loads(settings)
        self.go = threading.Event()
        self.inbox: RingInbox | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while (line := sys.stdin.readline()) == "go\n":
            self.go.set()
        # A parent that dies closes its end before the kernel kills this process; in between, no
        # request may end that could be resumed.
        if not line or self.inbox is None:
            os._exit(0)
        self.inbox.stop()


def _build(
    config: EngineConfig, options: argparse.Namespace, patience_s: float, laps: Laps
) -> tuple[Engine, PolicyChoice | None, str]:
    from weft.engine.build import build_engine, choose_policy
    from weft.engine.describe import describe_served
    from weft.engine.kept_kv import KVFile

    laps.mark("imports")
    kv_file = None if options.kv is None else KVFile(options.kv, in_use=options.standby)
    engine = build_engine(config, options.returning_bytes, patience_s, kv_file=kv_file)
    config.check_ring(engine.resolved.max_model_len)
    auto = config.scheduler == "auto" and config.pipeline_parallel == 1
    auto = auto and engine.model.spec.encoder is None
    choice = choose_policy(config, engine) if auto else None
    served = describe_served(config, engine)
    if choice is not None:
        served = replace(served, scheduling=choice.describe(), classes=choice.classes)
    laps.mark("model")
    return engine, choice, served.to_json()


def _live_targets(
    options: argparse.Namespace,
    config: EngineConfig,
    engine: Engine,
    choice: PolicyChoice | None,
) -> LiveTargets:
    from weft.engine.live_targets import LiveTargets
    from weft.sched.targets import TargetSettings

    board = TargetBoard(options.targets)
    settings = TargetSettings(config.classes, config.interactivity)
    return LiveTargets(board, settings, engine.resources, choice, engine.scheduler)


def _serve(
    engine: Engine,
    inbox: RingInbox,
    choice: PolicyChoice | None,
    targets: LiveTargets | None,
    beat_s: float,
) -> int:
    ready = CompilingInbox(inbox, engine.grammars.compile, engine.encode)
    loop = EngineLoop(engine.scheduler, engine.executor, ready, WallClock())
    gc.collect()
    gc.freeze()  # weights and modules live as long as the process: never scan them again
    told = checked = 0.0
    computed = False  # since the last check
    signal.signal(STALLED, _raise_stalled)
    engine.keep_weights()
    try:
        while not inbox.closed:
            busy = loop.step()
            if busy:
                engine.worked()
                computed = True
            if time.monotonic() - checked > CHECK_EVERY_S:
                if computed and not busy:
                    engine.scheduler.check()
                    computed = False
                if choice is not None:
                    choice.watch(engine.scheduler, time.monotonic())
                checked = time.monotonic()
            if not busy or time.monotonic() - told > INFO_EVERY_S:
                if targets is not None:
                    targets.look(engine.scheduler)
                inbox.write_info(_info(engine, ready=True))
                told = time.monotonic()
            if not busy:
                engine.check_ranks()
                if _measured(choice, engine, loop):
                    engine.measured()
                elif not engine.rest():
                    settled = engine.settled and (choice is None or choice.settled)
                    inbox.wait(beat_s if settled else min(beat_s, SOON_S))
        loop.drain()
        engine.save_prefixes()
    except Exception as error:
        loop.abandon()  # what is open stays open, for the next engine
        if not isinstance(error, EngineDeadError):  # of a rank, as if this process had been killed
            inbox.blame()
        raise
    finally:
        inbox.write_info(_info(engine, ready=False))
        engine.close()
    inbox.close()
    return 0


def _measured(choice: PolicyChoice | None, engine: Engine, loop: EngineLoop) -> bool:
    """Use an idle moment for the choice of a policy; whether there was something to do.

    Weights that are to be kept are written first: that would disturb the steps that are measured,
    and the next start and the standby wait for it.
    """
    if choice is None or not engine.scheduler.idle:  # a request may wait for its prefix
        return False
    if engine.writes_weights() or engine.has_unsaved_prefixes():
        return False
    before = choice.describe_with_targets()
    scheduler = choice.idle(engine.scheduler, engine.executor)
    if scheduler is None:
        return False
    loop.scheduler = engine.scheduler = scheduler
    if (after := choice.describe_with_targets()) != before:
        notice(after)
    return True


def _raise_stalled(*_: object) -> None:
    raise InvariantError("The engine has sequences to compute, but plans no steps any more.")


def _info(engine: Engine, ready: bool) -> EngineInfo:
    scheduler, resolved = engine.scheduler, engine.resolved
    pool, host = fullest(scheduler.cache.pools), _host_pool(scheduler)
    waiting = list(scheduler.sequences.waiting)
    return EngineInfo(
        ready=int(ready),
        pid=os.getpid(),
        started_ns=engine.started_ns,
        updated_ns=time.monotonic_ns(),
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        vocab_size=engine.model.spec.vocab_size,
        hidden_size=engine.model.spec.vector_size,
        block_size=resolved.block_size,
        blocks=pool.num_blocks,
        free_blocks=pool.available,
        host_blocks=0 if host is None else host.num_blocks,
        free_host_blocks=0 if host is None else host.available,
        waiting=len(waiting),
        running=len(scheduler.sequences.running),
        paused=sum(sequence.preemptions > 0 for sequence in waiting),
        queued_prompt_tokens=sum(len(sequence.tokens) for sequence in waiting),
        policy=list(POLICIES).index(scheduler.policy.name),
        **engine.host_attention(),
        **_slower(scheduler.parts),
        **_on_disk(scheduler.cache.lower),
        **_targets(scheduler.policy.classes),
        **_queues(
            scheduler.policy.classes,
            (sequence.request.service_class for sequence in waiting),
            (sequence.request.service_class for sequence in scheduler.sequences.running),
        ),
        **asdict(scheduler.totals),
    )


def _host_pool(scheduler: Scheduler) -> BlockPool | None:
    """The fullest pool of the host tier; None if there is no such tier."""
    kv = scheduler.memory.kv
    return fullest(kv.host.pools) if isinstance(kv, TieredCache) else None


def _slower(parts: Sequence[SchedulerPart]) -> dict[str, int]:
    """What the info page says of steps that carry rows of the host."""
    found = [part.slower for part in parts]
    return {
        "host_slower_permille": max((round(1000 * one.ratio) for one in found), default=0),
        "host_surplus_us": max((round(1e6 * one.surplus_s) for one in found), default=0),
    }


def _on_disk(prefixes: LowerPrefixes | None) -> dict[str, int]:
    """What the info page says of the prefixes on disk."""
    if prefixes is None or prefixes.disk is None:
        return {}
    totals = prefixes.disk.totals
    return {
        "disk_bytes": prefixes.disk.files.nbytes,
        "disk_saved": totals.saved,
        "disk_lost": totals.lost,
        "disk_missing": totals.missing,
        "disk_tokens": prefixes.loaded_tokens,
    }


def _targets(classes: Sequence[ServiceClass]) -> dict[str, int]:
    """Targets as the info page has them: of the first classes in the order of their names."""
    found = {}
    for index, row in enumerate(sorted(classes, key=lambda row: row.name)[:INFO_CLASSES]):
        found[f"ttft_us_{index}"] = round(1e6 * (row.ttft_s or 0))
        found[f"tpot_us_{index}"] = round(1e6 * (row.tpot_s or 0))
    return found


def _queues(
    classes: Sequence[ServiceClass], waiting: Iterable[str], running: Iterable[str]
) -> dict[str, int]:
    """What waits and runs of each class, as the info page has it.

    Args:
        waiting, running: the classes of these sequences.
    """
    places = places_of_classes([row.name for row in classes])
    found: Counter[str] = Counter()
    for kind, names in (("waiting", waiting), ("running", running)):
        for name, count in Counter(names).items():
            found[f"{kind}_{places[name]}"] += count
    return dict(found)


def _tell(report: BinaryIO, line: dict[str, Any]) -> None:
    """Report to the parent, unless it has given up: that ends this process by its orders."""
    with contextlib.suppress(BrokenPipeError):
        report.write(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
