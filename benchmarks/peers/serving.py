"""Starts a server, weft's or a peer's, and asks it with one streaming client for each request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import uvloop
from driving import Watch, Work
from install import InstallError

from weft.bench.asking import ask
from weft.bench.client import LoadClient
from weft.bench.stats import Outcome

START_S = 300.0
STOP_S = 60.0
POLL_S = 0.005


@contextlib.contextmanager
def running(
    command: list[str],
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    ready: str = "/health",
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Serve on a free port while the block runs: the process and the port, once it is ready.

    Args:
        log: takes what the server says; without, standard output and error do.
        ready: has status 200 when requests are answered.

    Raises:
        InstallError: it does not serve.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {**os.environ, **(environment or {})}
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, env=environment
        )
    try:
        if not answers(process, f"http://127.0.0.1:{port}{ready}"):
            raise InstallError("it does not serve" + (f" (see {log})" if log else ""))
        yield process, port
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until there is a good answer; False if the process ends first, or takes too long."""
    end = time.monotonic() + START_S
    with httpx.Client(timeout=5) as client:
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return True
            time.sleep(POLL_S)
    return False


def streamed(port: int, model: str) -> Callable[[Work], dict[str, float]]:
    """Run work by a client for each request, timed by the events that come out of the socket."""
    body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}

    async def clients(prompts: list[list[int]], output: int) -> list[Outcome]:
        client = LoadClient(f"http://127.0.0.1:{port}", None, 3600.0)
        outcomes = await asyncio.gather(
            *(ask(client, body, prompt, Outcome(0.0, output), lambda t: t) for prompt in prompts)
        )
        client.close()
        return outcomes

    def run(work: Work) -> dict[str, float]:
        prompts = work.prompts()
        watch = Watch(work)
        outcomes = uvloop.run(clients(prompts, work.output))
        events: list[tuple[float, int, int]] = []
        for index, outcome in enumerate(outcomes):
            if outcome.failure is not None:
                raise SystemExit(f"{outcome.failure}: {outcome.detail}")
            # random tokens may need company to become text: the last event brings what is missing
            missing = outcome.output_tokens - len(outcome.event_s)
            events += [(at, index, 1) for at in outcome.event_s[:-1]]
            events.append((outcome.event_s[-1], index, 1 + missing))
        for at, index, count in sorted(events):
            watch.tokens(index, count, at)
        return watch.result()

    return run
