"""Servers of checkpoint A, alike in rows and threads: weft, vLLM's CPU build and llama.cpp."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import install
from install import Setup
from serving import START_S

ROWS = 16  # that each engine computes at once
CONTEXT = 512  # tokens of a request


@dataclass(frozen=True)
class Engine:
    """How an engine is served.

    Attributes:
        command: without the port.
        urgent, lax: fields of the bodies of interactive requests and of best effort.
        settle: waits until the server is as it will be.
    """

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    urgent: Mapping[str, Any] = field(default_factory=dict)
    lax: Mapping[str, Any] = field(default_factory=dict)
    settle: Callable[[int], None] | None = None


def weft(setup: Setup, folder: Path, scheduler: str) -> Engine:
    command = [sys.executable, "-m", "weft.cli", "serve", "--model", str(setup.model("A"))]
    command += ["--served-model-name", "model", "--threads", str(setup.threads), "--no-standby"]
    command += ["--max-num-seqs", str(ROWS), "--kv-memory", "2GiB", "--no-prefix-caching"]
    command += ["--dtype", "bfloat16", "--profile", str(folder / "profile.json")]
    command += ["--scheduler", scheduler]
    settle = until_slo if scheduler == "auto" else None
    return Engine(command, lax={"service_tier": "flex"}, settle=settle)


def until_slo(port: int) -> None:
    """Wait until the server has measured itself."""
    end = time.monotonic() + START_S
    url = f"http://127.0.0.1:{port}/server_info"
    while httpx.get(url).json()["engine"]["scheduling"]["policy"] != "slo":
        if time.monotonic() > end:
            raise SystemExit("the server has not measured itself")
        time.sleep(0.5)


def vllm(setup: Setup) -> Engine:
    prepared = install.vllm(setup, "A", "bf16")
    # The command `vllm` looks for a package of that name, and the CPU build has another one.
    command = [prepared.command[0], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.model("A")), "--served-model-name", "model"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT * 4)]
    command += ["--max-num-seqs", str(ROWS), "--no-enable-prefix-caching"]
    command += ["--scheduling-policy", "priority"]
    threads = f"0-{setup.threads - 1}"
    environment = {
        **prepared.environment,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Engine(command, environment, {"priority": 0}, {"priority": 10})


def llamacpp(setup: Setup) -> Engine:
    prepared = install.llamacpp(setup, "A", "bf16")
    gguf, folder = prepared.command[2], prepared.command[-1]
    command = [f"{folder}/llama-server", "-m", gguf, "--alias", "model", "-t", str(setup.threads)]
    command += ["-np", str(ROWS), "-c", str(ROWS * CONTEXT), "--no-webui"]
    return Engine(command)
