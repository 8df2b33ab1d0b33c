"""The page in a real Chromium, as people use it; prints a line for each check.

    python tests/referees/page/run.py [--only CHECK ...] [--chromium PROGRAM] [--pictures FOLDER]

``drive.mjs`` drives the browser through playwright-core, and needs Node, npm and its registry: the
packages of ``package-lock.json`` are kept in ``build/clients``. It meets three servers: request
planes before an engine whose answers stand in the prompts (`script`), one of them with keys, and a
whole server with the built-in model, whose engine is killed while it answers. What the driver wants
done to a server, such as that, it writes as a line of JSON; a check is such a line, too.

Exit code 1 if a check fails, or if the browser asked any other host for anything. With
``--pictures`` the pictures of the documentation are made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[2] / name) for name in ("", "server", "referees")])
sys.path.append(str(Path(__file__).parents[1] / "clients" / "common"))
import environments
from script import script_server

import live

HERE = Path(__file__).parent
LIMIT_S = 300.0
KEYS = """\
keys:
  - {name: reader, key: the-right-key, classes: [interactive, flex]}
  - {name: operator, key: another-key}
"""


@contextlib.contextmanager
def whole_server(folder: Path) -> Iterator[live.Server]:
    """A server with the built-in model, which measures its steps while it is idle."""
    given = ["--data-dir", str(folder / "data"), "--disk-reserve-bytes", "0"]
    given += ["--kv-memory", "128MiB", "--self-profile-s", "4"]  # so that steps are predicted
    with live.serving(folder, *given) as server:
        yield server


def obey(order: str, server: live.Server) -> None:
    """Do to the whole server what the driver asks for."""
    if order != "kill engine":
        raise SystemExit(f"the driver asks for something unknown: {order}")
    server.children()["weft-engine"].kill()


def drive(arguments: argparse.Namespace, environment: dict[str, str], server: live.Server) -> bool:
    """Run the driver to its end; whether every check passed."""
    # Node looks for packages beside the program
    programs = environments.node_environment(arguments.environment, HERE)
    driver = shutil.copy(HERE / "drive.mjs", programs.parents[1])
    command = ["node", driver, *(arguments.only or ())]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    passed = told = 0
    started = time.monotonic()
    try:
        for line in process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "order" in said:
                obey(said["order"], server)
                continue
            took, started = time.monotonic() - started, time.monotonic()
            fault = said["fault"]
            told, passed = told + 1, passed + (fault is None)
            verdict = "ok" if fault is None else "FAULT"
            print(
                f"{said['check']:12} {verdict:6} ({took:.1f} s) {fault or ''}".rstrip(), flush=True
            )
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    print(f"{told} checks, {told - passed} faults")
    return code == 0 and told == passed > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CHECK")
    parser.add_argument("--chromium", default=shutil.which("chromium"), metavar="PROGRAM")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    kept = HERE.parents[2] / "build" / "clients" / "page"
    parser.add_argument("--environment", type=Path, default=kept)
    arguments = parser.parse_args()
    if arguments.chromium is None or shutil.which("npm") is None:
        sys.exit("this needs chromium and npm: apt-get install chromium npm")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "keys.yaml").write_text(KEYS)
        script = stack.enter_context(script_server(reasoning_parser="think"))
        guarded = {"api_key_file": str(folder / "keys.yaml"), "metrics_key": ("operator",)}
        keyed = stack.enter_context(script_server(data_dir=str(folder / "keyed"), **guarded))
        server = stack.enter_context(whole_server(folder))
        environment = {
            "WEFT_SCRIPT": script,
            "WEFT_KEYED": keyed,
            "WEFT_WHOLE": server.url,
            "CHROMIUM": arguments.chromium,
            "PICTURES": str(arguments.pictures.resolve()) if arguments.pictures else "",
        }
        sys.exit(0 if drive(arguments, environment, server) else 1)


if __name__ == "__main__":
    main()
