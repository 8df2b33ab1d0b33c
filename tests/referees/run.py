"""Runs third-party clients and tools, each in its own environment, against a server.

    python tests/referees/run.py [--only lm-eval ...] [--environments FOLDER] [--out FILE]

Environments are made where they are missing and kept in FOLDER. Each referee gets a fresh server;
what it found goes into a table and a JSON file. Exit code 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")])
import lm_eval_task
from environments import python_environment

import report
import weft
from live import serving

HERE = Path(__file__).parent
MODEL_FOLDER = Path(weft.__file__).parent / "builtin"
TORCH = "torch==2.13.0"  # the build for CPUs, where something wants torch
LIMIT_S = 600
REQUESTS, CLIENTS = 64, 8


@dataclass(frozen=True)
class Run:
    """One run of a referee: its environment's programs, the server, and a folder to write in."""

    programs: Path
    url: str
    folder: Path

    def call(self, program: str, *arguments: str) -> str:
        """Run a program of the environment; its output. Raises if it fails."""
        command = [str(self.programs / program), *arguments]
        environment = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.folder)}
        environment |= {"OPENAI_API_KEY": "none", "WEFT_URL": self.url}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout


@dataclass(frozen=True)
class Referee:
    """What to install, how to serve, and what to do."""

    packages: tuple[str, ...]
    run: Callable[[Run], dict[str, Any]]
    serve: tuple[str, ...] = ()


def lm_eval(run: Run) -> dict[str, Any]:
    """Log-likelihoods of a local task through the API, against those of transformers."""
    lm_eval_task.write(run.folder, MODEL_FOLDER)
    given = f"model=builtin,base_url={run.url}/v1/completions,tokenizer={MODEL_FOLDER}"
    run.call(
        "lm_eval", "run", "--model", "local-completions", "--tasks", lm_eval_task.NAME,
        "--model_args", f"{given},num_concurrent=4,max_length=2048",
        "--include_path", str(run.folder), "--log_samples", "--output_path", str(run.folder),
    )  # fmt: skip
    found = lm_eval_task.compare(run.folder, MODEL_FOLDER)
    if found["worst_difference"] > 1e-3 or found["greedy_disagreements"]:
        raise RuntimeError(f"not the numbers of transformers: {found}")
    return found


def aiperf(run: Run) -> dict[str, Any]:
    """A short load with all of its own measures."""
    run.call(
        "aiperf", "profile", "-m", "builtin", "-u", run.url, "--endpoint-type", "completions",
        "--streaming", "--tokenizer", str(MODEL_FOLDER), "--concurrency", str(CLIENTS),
        "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "64",
        "--output-tokens-mean", "32", "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--output-artifact-dir", str(run.folder), "--ui", "simple",
    )  # fmt: skip
    found = json.loads((run.folder / "profile_export_aiperf.json").read_text())
    if found["request_count"]["avg"] != REQUESTS or found.get("error_summary"):
        raise RuntimeError(f"{found['request_count']}, {found.get('error_summary')}")
    return {
        "requests": REQUESTS,
        "clients": CLIENTS,
        "requests_per_s": found["request_throughput"]["avg"],
        "tokens_per_s": found["output_token_throughput"]["avg"],
        "ttft_p50_ms": found["time_to_first_token"]["p50"],
        "itl_p50_ms": found["inter_token_latency"]["p50"],
    }


def guidellm(run: Run) -> dict[str, Any]:
    """A short load over chat completions."""
    run.call(
        "guidellm", "run", "--backend", f"kind=openai_http,target={run.url},model=builtin",
        "--profile", f"kind=concurrent,streams={CLIENTS}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--tokenizer", f"kind=hf_auto,model={MODEL_FOLDER}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--output", "kind=json,path=guidellm.json", "--disable-console-interactive",
    )  # fmt: skip
    (found,) = json.loads((run.folder / "guidellm.json").read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    if totals["successful"] != REQUESTS or totals["errored"]:
        raise RuntimeError(str(totals))
    return {
        "requests": REQUESTS,
        "clients": CLIENTS,
        "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
        "tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_p50_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "itl_p50_ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def script(name: str) -> Callable[[Run], dict[str, Any]]:
    """A referee that is a program of this folder and prints one line of JSON."""

    def run_script(run: Run) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run.call("python", str(HERE / name)).splitlines()[-1])
        return found

    return run_script


REFEREES = {
    "lm-eval": Referee(("lm_eval[api]", "transformers"), lm_eval, ("--dtype", "float32")),
    "guidellm": Referee(("guidellm", TORCH), guidellm),
    "aiperf": Referee(("aiperf",), aiperf),
    "openai-agents": Referee(("openai-agents",), script("agents_loop.py")),
}


def versions(programs: Path, referee: Referee) -> dict[str, str]:
    """Installed versions of what was asked for."""
    names = [package.split("[")[0].split("==")[0] for package in referee.packages]
    code = "import importlib.metadata as m, sys; print(*[m.version(n) for n in sys.argv[1:]])"
    found = subprocess.run(
        [str(programs / "python"), "-c", code, *names], capture_output=True, text=True, check=True
    )
    return dict(zip(names, found.stdout.split(), strict=True))


def judge(name: str, environments: Path) -> dict[str, Any]:
    """Run one referee; ``fault`` tells what went wrong."""
    referee = REFEREES[name]
    programs = python_environment(environments / name, *referee.packages, constraints=(TORCH,))
    result: dict[str, Any] = {"versions": versions(programs, referee)}
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as own,
        tempfile.TemporaryDirectory() as theirs,
        serving(Path(own), *referee.serve) as server,
    ):
        try:
            result |= referee.run(Run(programs, server.url, Path(theirs)))
        except (RuntimeError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            result["fault"] = f"{type(error).__name__}: {error}"
    return result | {"seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=REFEREES, default=list(REFEREES))
    parser.add_argument("--environments", type=Path, default=Path("build/referees"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.environments.mkdir(parents=True, exist_ok=True)
    results = {name: judge(name, given.environments.resolve()) for name in given.only}
    for name, result in results.items():
        print(f"{name:18} {'FAULT' if 'fault' in result else 'ok':6} {result}")
    if given.out:
        report.save(given.out, **results)
    sys.exit(any("fault" in result for result in results.values()))


if __name__ == "__main__":
    main()
