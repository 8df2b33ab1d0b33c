"""Programs that people use today, each driving a small task against weft; prints a table.

    python tests/referees/clients/run.py [--only codex ...] [--server script builtin] [--out FILE]

Each client is a folder beside this file: its pins (``requirements.txt``, or ``package.json`` and
``package-lock.json``) and a program ``drive.py`` or ``drive.mjs`` that prints a line of JSON for
each of ``CHECKS``, or of ``BATCH_CHECKS``. It runs in an environment of its own, kept in
``build/clients``, against

- ``script``: weft's request plane before an engine whose answers stand in the prompts (`script`),
  so that what the client makes of them is known;
- ``builtin``: a whole server with the built-in model, its positions stretched for long prompts. Its
  answers mean nothing: the client must take them, and all of them must end.

The official clients drive files and batches, which only a whole server answers.

Exit code 1 if a check fails, if the server refused anything that a client went on without, or if a
request goes on whose client has left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[2] / name) for name in ("", "server", "referees")])
sys.path.extend(
    [str(Path(__file__).parent / "common"), str(Path(__file__).parents[3] / "benchmarks")]
)
import environments
import httpx
from script import MODEL, MODEL_FOLDER, script_server

import live
import report

HERE = Path(__file__).parent
CONTEXT = 131072  # tokens; the built-in vocabulary is small, so prompts have many
CHECKS = ("first", "tools", "stream", "second", "cancel")
BATCH_CHECKS = ("create", "list", "results", "cancel", "delete")
LIMIT_S = 600.0
IDLE_S = 60.0
CLIENTS = sorted(program.parent.name for program in HERE.glob("*/drive.*"))
OFFICIAL = ("anthropic-node", "anthropic-python", "openai-node", "openai-python")
NODE = sorted(pins.parent.name for pins in HERE.glob("*/package.json"))


@dataclass(frozen=True)
class Target:
    """A server to drive.

    Attributes:
        known: the client's answers are known.
        log: what the server writes to standard error, where that is a file.
    """

    url: str
    known: bool
    log: Path | None = None

    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._sum("weft:num_requests_running", "weft:num_requests_waiting")

    def refused(self) -> int:
        """Requests that were refused so far."""
        return int(self._sum("weft:request_rejected_total"))

    def _sum(self, *names: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=IDLE_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


@dataclass(frozen=True)
class Row:
    """How one check went; ``fault`` is None where it passed."""

    client: str
    version: str
    server: str
    check: str
    fault: str | None


@contextlib.contextmanager
def scripted() -> Iterator[Target]:
    """Weft's request plane before an engine that answers by the script in the prompt."""
    with script_server(2 * CONTEXT) as url:
        yield Target(url, True)


@contextlib.contextmanager
def builtin() -> Iterator[Target]:
    """A whole server with the built-in model, its positions stretched to ``CONTEXT``."""
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as folder:
        stretched = Path(shutil.copytree(MODEL_FOLDER, Path(folder) / MODEL))
        config = json.loads((stretched / "config.json").read_text())
        factor = CONTEXT / config["max_position_embeddings"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        config["max_position_embeddings"] = CONTEXT
        (stretched / "config.json").write_text(json.dumps(config))
        given = ("--model", str(stretched), "--served-model-name", MODEL, "--kv-memory", "1GiB")
        given += ("--data-dir", str(Path(own) / "data"), "--disk-reserve-bytes", "0")
        with live.serving(Path(own), *given) as server:
            yield Target(server.url, False, server.errors)


SERVERS = {"script": scripted, "builtin": builtin}


def install(client: str, folder: Path) -> Path:
    """The environment of a client; returns its folder of programs."""
    if client in NODE:
        return environments.node_environment(folder / client, HERE / client)
    return environments.python_environment(folder / client, *requirements(client))


def requirements(client: str) -> list[str]:
    """The pins of a Python client: its own packages, then what came with them."""
    lines = (HERE / client / "requirements.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def version_of(client: str) -> str:
    """The pinned version of a client: that of the first package."""
    if client in NODE:
        pins = json.loads((HERE / client / "package.json").read_text())["dependencies"]
        return str(next(iter(pins.values())))
    return requirements(client)[0].split("==")[1]


def command_of(client: str, programs: Path) -> list[str]:
    """The command that drives a client."""
    program = HERE / client / "drive.mjs"
    if program.exists():  # Node looks for packages beside the program
        return ["node", str(shutil.copy(program, programs.parents[1]))]
    own = programs / "python"
    return [str(own if own.exists() else sys.executable), str(HERE / client / "drive.py")]


def drive(client: str, programs: Path, target: Target, folder: Path) -> dict[str, str | None]:
    """Run a client's program in ``folder``; the fault, or None, of each check that it told."""
    environment = {
        "PATH": f"{programs}:{Path(shutil.which('node') or '/usr/bin/node').parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(HERE / "common"),
        "WEFT_COMMON": str(HERE / "common"),
        "WEFT_URL": target.url,
        "WEFT_MODEL": MODEL,
        "WEFT_ANSWERS": "known" if target.known else "unknown",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
    }
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            command_of(client, programs), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=out, stderr=errors, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        end_session(process)
        lines = [line for line in read(out) if line.startswith('{"check":')]
        told = {row["check"]: row["fault"] for row in map(json.loads, lines)}
        trouble = " | ".join(read(errors)[-12:])
    missing = f"not told; exit code {process.returncode}: {trouble}"
    wanted = BATCH_CHECKS if client in OFFICIAL else CHECKS
    return {check: told.get(check, missing) for check in wanted}


def read(file: Any) -> list[str]:
    file.seek(0)
    return [str(line) for line in file.read().splitlines()]


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a client and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(client: str, server: str, programs: Path, target: Target) -> list[Row]:
    """Drive a client against a server, and see whether all it asked for has ended."""
    with tempfile.TemporaryDirectory() as folder:
        found = drive(client, programs, target, Path(folder))
    try:
        live.eventually(target.idle, IDLE_S)
    except AssertionError:
        found["cancel"] = f"{found['cancel'] or ''} requests go on after the client has left"
    if (count := target.refused()) and not any(found.values()):
        found[next(iter(found))] = f"{count} requests were refused, without a word from the client"
    version = version_of(client)
    return [Row(client, version, server, check, fault) for check, fault in found.items()]


def tell(row: Row, seconds: float) -> None:
    verdict = "ok" if row.fault is None else "FAULT"
    words = f"{row.client:16} {row.version:9} {row.server:8} {row.check:7} {verdict:6}"
    print(words, f"({seconds:.1f} s) {row.fault or ''}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--environments", type=Path, default=HERE.parents[2] / "build" / "clients")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    for client in given.only:
        if client in NODE and shutil.which("npm") is None:
            print(f"{client:16} skipped: there is no npm")
            continue
        rows += run_client(client, given.environments.resolve(), given.server)
    if given.out:
        report.save(given.out, rows=[row.__dict__ for row in rows])
    faults = sum(row.fault is not None for row in rows)
    print(f"{len(rows)} checks, {faults} faults")
    sys.exit(faults > 0)


def run_client(client: str, folder: Path, servers: list[str]) -> list[Row]:
    """Drive a client against each server, printing as it goes."""
    programs, rows = install(client, folder), []
    for name in servers:
        if client in OFFICIAL and name == "script":
            continue
        started = time.monotonic()
        with SERVERS[name]() as target:
            found = judge(client, name, programs, target)
            if target.log is not None and any(row.fault for row in found):
                print(target.log.read_text()[-4000:], file=sys.stderr)
        for row in found:
            tell(row, time.monotonic() - started)
        rows += found
    return rows


if __name__ == "__main__":
    main()
