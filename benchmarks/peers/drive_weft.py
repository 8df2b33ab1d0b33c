"""Drives weft: in process through ``weft.LLM``, or over HTTP with streaming clients.

python drive_weft.py MODEL THREADS FORMAT [--http] [--prefix-caching]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from driving import CACHING, Watch, Work, drive

SETTINGS = {"kv_memory": "2GiB", "max_num_seqs": 64}
LIVES = contextlib.ExitStack()  # until the driver ends


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
    """The same through a server, which lives as long as this process."""
    from serving import running, streamed

    command = [sys.executable, "-m", "weft.cli", "serve", "--model", model]
    # Another scheduler measures the costs of steps while the server is idle: as others are timed.
    command += ["--served-model-name", "m", "--no-standby", "--scheduler", "fcfs"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        on = "--" if value else "--no-"
        command += [f"{on}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    _, port = LIVES.enter_context(running(command, ready="/ready"))
    return streamed(port, "m")


def main() -> None:
    model, threads, weights = sys.argv[1:4]
    settings: dict[str, Any] = {**SETTINGS, "threads": int(threads)}
    settings["prefix_caching"] = CACHING in sys.argv
    if weights != "bf16":
        settings["quantize"] = weights
    start = over_http if "--http" in sys.argv else in_process

    def version() -> str:
        import weft

        return weft.__version__

    with LIVES:
        drive(lambda: start(model, settings), version)


if __name__ == "__main__":
    main()
