"""Drives weft: in process through ``weft.LLM``, or over HTTP with streaming clients.

python drive_weft.py MODEL THREADS FORMAT [--http]
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from driving import Watch, Work, drive

SETTINGS = {"prefix_caching": False, "kv_memory": "2GiB", "max_num_seqs": 64}
START_S = 120.0


def in_process(model: str, settings: dict[str, Any]) -> Callable[[Work], dict[str, float]]:
    from weft import LLM, SamplingParams

    llm = LLM(model, **settings)

    def run(work: Work) -> dict[str, float]:
        params = SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True)
        prompts = work.prompts()
        watch = Watch(work)
        for index, _ in llm.token_iter(prompts, params):
            watch.tokens(index)
        return watch.result()

    return run


def over_http(model: str, settings: dict[str, Any]) -> Callable[[Work], dict[str, float]]:
    """The same from a client for each request, by the events that come out of the socket."""
    import uvloop

    from weft.bench.asking import ask
    from weft.bench.client import LoadClient
    from weft.bench.stats import Outcome

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "weft.cli", "serve", "--model", model, "--port", str(port)]
    command += ["--served-model-name", "m", "--no-standby"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        command += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    server = subprocess.Popen(command)
    atexit.register(server.terminate)
    wait(server, port)
    body: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}

    async def clients(prompts: list[list[int]], output: int) -> list[Outcome]:
        client = LoadClient(f"http://127.0.0.1:{port}", None, 600.0)
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


def wait(server: subprocess.Popen[bytes], port: int) -> None:
    import httpx

    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.02)
    raise SystemExit("the server did not start")


def main() -> None:
    model, threads, weights = sys.argv[1:4]
    settings: dict[str, Any] = {**SETTINGS, "threads": int(threads)}
    if weights != "bf16":
        settings["quantize"] = weights
    start = over_http if "--http" in sys.argv else in_process

    def version() -> str:
        import weft

        return weft.__version__

    drive(lambda: start(model, settings), version)


if __name__ == "__main__":
    main()
