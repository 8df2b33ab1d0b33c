"""``/v1/loom``: what the engine computes, step by step, as one JSON object or a stream of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft import __version__
from weft.api.endpoints import EVENT_STREAM
from weft.batch.records import UNFINISHED, BatchRecord
from weft.core.errors import ParameterError, WeftError, suggest
from weft.ring.layout import LoggedStep, counted_classes
from weft.server.batches import PATH as BATCHES
from weft.server.counts import ITL_BUCKETS, TTFT_BUCKETS, Counts, percentile
from weft.server.data import DataFolder
from weft.server.errors import ShuttingDownError, json_response
from weft.server.exchange import current_key, current_owner
from weft.server.generation import STREAM_HEADERS
from weft.server.keys import KeyRing
from weft.server.message_batches import PATH as MESSAGE_BATCHES
from weft.server.metrics import target_key
from weft.server.options import ServerOptions
from weft.server.service import Service

Batches = list[dict[str, Any]] | None

PATH = "/v1/loom"
EVERY_S = 0.25  # between two events of a stream
MOST_READERS = 32  # of streams, of one request plane
KEYS_SHARE = 4  # a key may have one reader in so many
BATCHES_EVERY_S = 1.0  # between two looks into the data folder
MOST_BATCHES = 50
ENDED_S = 600.0  # that batches are shown after their end
MAY_BE_CANCELLED = ("validating", "in_progress")

TOTALS = (
    "steps", "resident_steps", "split_steps", "prompt_tokens", "cached_tokens", "output_tokens",
    "host_tokens", "preemptions", "blocks_to_host", "blocks_to_device", "drafted_tokens",
    "accepted_tokens", "requests", "finished", "failed", "cancelled",
)  # fmt: skip
"""Fields of the engine's info page that count since its start."""


class TooManyReadersError(WeftError):
    """The request plane streams the loom to as many readers as it may, or as one key may have."""

    http_status = 503
    code = "too_many_readers"
    retry_after_s = 5


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks.

    Attributes:
        owner: as of a batch.
        sees_all: whether the batches of all keys are shown.
    """

    owner: bytes
    sees_all: bool

    @classmethod
    def current(cls, options: ServerOptions) -> Viewer:
        """Who has sent the request that is being answered."""
        key = current_key()
        return cls(current_owner(), key is not None and key.name in options.admin_key)


def loom_routes(service: Service, data: DataFolder, keys: KeyRing) -> list[Route]:
    """The route of the loom."""
    loom = Loom(service, data, keys)

    async def show(request: Request) -> Response:
        viewer = Viewer.current(service.options)
        if not _wants_once(request):
            return loom.stream(viewer)
        batches = await loom.batches(viewer)
        return json_response(loom.look()[1] | {"batches": batches})

    return [Route(PATH, show, methods=["GET"])]


def _wants_once(request: Request) -> bool:
    """Whether one object is wanted, and no stream. Raises ParameterError."""
    for name in request.query_params:
        if name not in ("once", "model"):  # the latter where there are several
            hint = suggest(name[:64], ["once", "model"])
            raise ParameterError(f"Unknown parameter '{name[:64]}'.{hint}", param=name[:64])
    given = request.query_params.get("once")
    if given not in (None, "0", "1"):
        raise ParameterError(f"once must be 0 or 1, not '{given[:64]}'.", param="once")
    accepts = request.headers.get("accept", "")
    return given == "1" or (given is None and accepts.startswith("application/json"))


class Loom:
    """Makes objects and streams of what the engine's pages and the data folder have."""

    def __init__(self, service: Service, data: DataFolder, keys: KeyRing) -> None:
        self._service = service
        self._data = data
        self._keys = keys
        self._readers: Counter[bytes] = Counter()  # by owner
        self._looks: dict[Viewer, tuple[float, asyncio.Task[Batches]]] = {}  # and when they began
        self._classes: tuple[float, list[dict[str, Any]]] = (-math.inf, [])  # and when that was

    def stream(self, viewer: Viewer) -> Response:
        """A stream of events.

        Raises:
            TooManyReadersError: there are enough of them, or of the viewer's key.
            ShuttingDownError: the server ends.
        """
        if self._service.draining:
            raise ShuttingDownError("The server is shutting down; try again in a moment.")
        most, whose = MOST_READERS, "clients"
        readers = self._readers.total()
        if self._keys.demanded and readers < most:
            most, whose = max(1, MOST_READERS // KEYS_SHARE), "clients with this key"
            readers = self._readers[viewer.owner]
        if readers >= most:
            raise TooManyReadersError(
                f"{most} {whose} read the loom here, which is the most; try again later, or ask "
                "for one object with ?once=1."
            )
        return _LoomStream(self, viewer)

    @contextlib.contextmanager
    def reading(self, viewer: Viewer) -> Iterator[None]:
        """Count a reader."""
        self._readers[viewer.owner] += 1
        try:
            yield
        finally:
            self._readers[viewer.owner] -= 1
            if not self._readers[viewer.owner]:
                del self._readers[viewer.owner]
                self._looks.pop(viewer, None)

    async def send(self, viewer: Viewer, send: Send) -> None:
        """Send events until the server ends, or the viewer's key is valid no more."""
        since: int | None = None
        while (reason := self._end_of(viewer)) is None:
            batches = await self._recent_batches(viewer)
            since, seen = self.look(since)
            await _send_event(send, seen | {"batches": batches})
            await asyncio.sleep(EVERY_S)
        await _send_event(send, {"object": "loom.end", "reason": reason}, more=False)

    def _end_of(self, viewer: Viewer) -> str | None:
        """Why a stream ends now, if it does."""
        if self._service.draining:
            return "server_stopping"
        if self._keys.demanded:
            self._keys.refresh()
            if not self._keys.named(viewer.owner):
                return "key_revoked"
        return None

    # -- the engine --------------------------------------------------------------------------------

    def look(self, since: int | None = None) -> tuple[int, dict[str, Any]]:
        """The number of the next step, and the loom but for batches, with steps since this one."""
        service = self._service
        probe, card = service.probe, service.builder.card
        info = probe.page()
        to_unix_s = time.time() - time.monotonic()
        names = counted_classes([row.name for row in card.classes])
        written, steps = probe.steps(since or 0)
        lost = 0 if since is None or since > written else written - since - len(steps)
        return written, {
            "object": "loom",
            "at": time.time(),
            "version": __version__,
            "models": card.served_names,
            "engine": {
                "state": service.state,
                "number": probe.engines(),
                "started_at": _unix(info.started_ns, to_unix_s),
                "updated_at": _unix(info.updated_ns, to_unix_s),
                "policy": probe.policy(),
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_model_len": info.max_model_len,
            },
            "load": {
                "waiting": info.waiting,
                "running": info.running,
                "paused": info.paused,
                "queued_prompt_tokens": info.queued_prompt_tokens,
                "host_queue": info.host_queue,
            },
            "classes": self._by_class(dict(zip(names, info.queues, strict=False))),
            "kv": {
                "blocks": info.blocks,
                "used_blocks": info.blocks - info.free_blocks,
                "block_size": info.block_size,
                "host_blocks": info.host_blocks,
                "used_host_blocks": info.host_blocks - info.free_host_blocks,
            },
            "totals": {name: getattr(info, name) for name in TOTALS},
            "recoveries": [
                {
                    "engine": one.engine,
                    "n": one.next_step,
                    "died_at": _unix(one.died_ns, to_unix_s),
                    "back_at": _unix(one.back_ns, to_unix_s),
                    "gap_s": max(0, one.back_ns - one.died_ns) / 1e9,
                }
                for one in probe.recoveries()
            ],
            "lost_steps": lost,
            "steps": [_step_object(step, names, to_unix_s) for step in steps],
        }

    def _by_class(self, queues: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
        """Each class, with what waits and runs of it where that is counted apart."""
        at, shown = self._classes
        if time.monotonic() - at < EVERY_S / 2:  # as another reader has just got it
            return shown
        shown = self._look_at_classes(queues)
        self._classes = time.monotonic(), shown
        return shown

    def _look_at_classes(self, queues: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
        metrics = self._service.metrics
        metrics.follow_targets()
        total = metrics.total()
        recent = metrics.attainment.recent(total.observed())
        shown = []
        for place, row in sorted(metrics.classes.values(), key=lambda pair: pair[1].priority):
            keys = [target_key(place, "all", kept) for kept in (True, False)]
            waiting, running = queues.get(row.name, (None, None))
            shown.append(
                {
                    "name": row.name,
                    "priority": row.priority,
                    "waiting": waiting,
                    "running": running,
                    "ttft_s": _latency(recent, place, "ttft", row.ttft_s),
                    "tpot_s": _latency(recent, place, "tpot", row.tpot_s),
                    "kept": metrics.attainment.share(total.targets, *keys),
                    "judged": sum(recent[key] for key in keys),
                }
            )
        return shown

    # -- batches -----------------------------------------------------------------------------------

    async def _recent_batches(self, viewer: Viewer) -> Batches:
        """The batches as of lately: all readers of a key share a look."""
        began, look = self._looks.get(viewer, (-math.inf, None))
        if look is None or time.monotonic() - began >= BATCHES_EVERY_S:
            look = asyncio.create_task(self.batches(viewer))
            self._looks[viewer] = time.monotonic(), look
        return await asyncio.shield(look)  # which outlives a reader that leaves

    async def batches(self, viewer: Viewer) -> Batches:
        """The batches that the viewer may see; None if the data folder cannot be read."""
        if not self._data.in_use:
            return []
        now = time.time()
        owner = None if viewer.sees_all else viewer.owner
        try:
            records = await self._data.run(
                lambda store: store.recent_batches(owner, int(now - ENDED_S), MOST_BATCHES)
            )
        except WeftError:
            return None
        return [_batch_object(record, viewer.owner, now) for record in records]


class _LoomStream(Response):
    """Sends events until the client goes away, or `Loom.send` ends."""

    def __init__(self, loom: Loom, viewer: Viewer) -> None:
        super().__init__()
        self._loom = loom
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._loom.reading(self._viewer):
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        given = {"content-type": EVENT_STREAM, **STREAM_HEADERS}
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.create_task(self._loom.send(self._viewer, send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, event: Mapping[str, Any], *, more: bool = True) -> None:
    body = b"data: " + orjson.dumps(event) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _unix(at_ns: int, to_unix_s: float) -> float | None:
    """Unix time of one on the monotonic clock; None for 0, which is never."""
    return at_ns / 1e9 + to_unix_s if at_ns else None


def _latency(
    recent: Mapping[str, int], place: int, kind: str, target: float | None
) -> dict[str, float | int | None]:
    bounds = TTFT_BUCKETS if kind == "ttft" else ITL_BUCKETS
    counts = [recent[Counts.bucket_key(place, kind, at)] for at in range(len(bounds) + 1)]
    return {
        "target": target,
        "p50": percentile(bounds, counts, 0.5),
        "p99": percentile(bounds, counts, 0.99),
        "count": sum(counts),
    }


def _step_object(step: LoggedStep, names: list[str], to_unix_s: float) -> dict[str, Any]:
    def by_class(counts: tuple[int, ...]) -> dict[str, int]:
        return {name: count for name, count in zip(names, counts, strict=False) if count}

    kind = "resident" if step.steps > 1 else "split" if step.split else "planned"
    return {
        "n": step.number,
        "engine": step.engine,
        "step": step.step,
        "at": step.began_ns / 1e9 + to_unix_s,
        "ms": (step.ended_ns - step.began_ns) / 1e6 / max(step.steps, 1),
        "predicted_ms": step.predicted_ns / 1e6 or None,
        "prefill": by_class(step.prefill),
        "decode": by_class(step.decode),
        "drafts": step.drafts,
        "host": step.host_tokens,
        "steps": step.steps,
        "kind": kind,
    }


def _batch_object(record: BatchRecord, owner: bytes, now: float) -> dict[str, Any]:
    own = record.owner == owner
    done = record.completed + record.failed
    path = MESSAGE_BATCHES if record.of_messages else BATCHES
    open_still = record.status in UNFINISHED
    left_s = None if record.predicted_at is None else max(0.0, record.predicted_at - now)
    return {
        "id": record.id,
        "status": record.status,
        "endpoint": record.endpoint,
        "service_class": record.service_class,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "ended_at": record.ended_at,
        "total": record.total,
        "completed": record.completed,
        "failed": record.failed,
        "progress": min(1.0, done / record.total) if record.total else 0.0,
        "predicted_end_at": record.predicted_at if open_still else None,
        "eta_s": left_s if open_still else None,
        "warning": record.warning,
        "own": own,
        "cancel": f"{path}/{record.id}/cancel"
        if own and record.status in MAY_BE_CANCELLED
        else None,
    }
