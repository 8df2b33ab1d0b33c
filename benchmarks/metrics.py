"""Cost of metrics for a request and a token of the request plane, with and without them in turn.

    python benchmarks/metrics.py [--out benchmarks/results/metrics.json]

The application without sockets, before an engine that has answered already. "Without" replaces the
timer that follows a job into the metrics by one that only notes which sequences have ended. The
figure is CPU time of the process; both kinds run in turn, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import orjson

import report
from weft.api import ModelCard
from weft.core.plan import Update
from weft.core.types import FinishReason
from weft.server import service
from weft.server.app import create_app
from weft.server.metrics import JobTimer
from weft.server.options import ServerOptions
from weft.text import Tokenizer

FOLDER = Path(__file__).parents[1] / "src" / "weft" / "builtin"
REQUESTS, STREAMS, TOKENS = 500, 4, 2000


class NoTimer:
    """Stands in for `JobTimer` and counts nothing."""

    def __init__(self, _: Any, requests: Seq[Any], __: int) -> None:
        self.unseen = len(requests)
        self.ends: list[str] = []
        self.first_token = self.ended = 0.0
        self.start_ns = self.scheduled_ns = self.prefilled_ns = self.output_tokens = 0

    def saw(self, updates: Seq[Update]) -> list[int]:
        return [update.sequence_id for update in updates if update.finish is not None]

    def close(self, _: int) -> None:
        pass


class Answering:
    """An engine client: a token in each turn of the event loop, then the end."""

    def submit(self, requests: Seq[Any], sink: Any) -> None:
        loop = asyncio.get_running_loop()
        request = requests[0]

        def give(left: int) -> None:
            if left == 0:
                sink([Update(request.id, None, finish=FinishReason.LENGTH)])
                return
            sink([Update(request.id, 300 + left % 500)])
            loop.call_soon(give, left - 1)

        loop.call_soon(give, request.sampling.max_tokens)

    def cancel(self, *_: Any) -> None:
        pass


async def ask(app: Any, tokens: int, stream: bool) -> None:
    """One request to the application itself."""
    body = {"model": "null", "prompt": [5, 6, 7], "max_tokens": tokens, "stream": stream}
    given = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
    status = 0

    async def receive() -> Any:
        if given:
            return given.pop()
        return await asyncio.Future()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "",
        "query_string": b"", "headers": [], "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    assert status == 200


def measure(app: Any, timer: type) -> tuple[float, float]:
    """CPU time in us: of a request with one token, and of a token of a stream."""
    service.JobTimer = timer  # type: ignore[misc, assignment]

    async def run() -> tuple[float, float]:
        started = time.process_time()
        for _ in range(REQUESTS):
            await asyncio.create_task(ask(app, 1, stream=False))
        middle = time.process_time()
        for _ in range(STREAMS):
            await asyncio.create_task(ask(app, TOKENS, stream=True))
        return middle - started, time.process_time() - middle

    app.state.service._bridge = None  # of the last event loop
    requests, tokens = asyncio.run(run())
    return requests / REQUESTS * 1e6, tokens / (STREAMS * TOKENS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING")
    card = ModelCard(("null",), 4096, 10**6)
    app = create_app(Answering(), Tokenizer.load(FOLDER), None, card, ServerOptions())
    kinds = {"with": JobTimer, "without": NoTimer}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, timer in kinds.items():
            samples[name].append(measure(app, timer))
    median: dict[str, float] = {}
    for i, what in enumerate(("request", "token")):
        pairs = zip(samples["with"], samples["without"], strict=True)
        median[f"us_per_{what}"] = statistics.median(s[i] for s in samples["with"])
        median[f"metrics_us_per_{what}"] = statistics.median(a[i] - b[i] for a, b in pairs)
    started = time.process_time()
    for _ in range(20):
        app.state.service.metrics.render()
    median["ms_per_scrape"] = (time.process_time() - started) / 20 * 1e3
    print("median: " + ", ".join(f"{name} {value:.2f}" for name, value in median.items()))
    if options.out:
        report.save(options.out, median=median, samples=samples)


if __name__ == "__main__":
    main()
