"""Tries deploy/ with the programs that read it: Prometheus, promtool and systemd-analyze.

    python tests/deploy/programs.py [prometheus|alerts|unit ...]

Programs that are not installed come from Debian's packages, unpacked into ``build/programs``.

- ``prometheus`` scrapes a real server that has traffic of several classes, a batch, and an engine
  that is killed. Every query of the dashboard must have a result there, but for those of `EMPTY`.
- ``alerts``: promtool checks the rules, and runs their tests.
- ``unit``: systemd-analyze verifies the unit, and rates how exposed the service is.

Exit code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1])])
import httpx
import yaml
from metrics_named import DEPLOY, alert_queries, annotation_queries, dashboard, panel_queries

import live

PROGRAMS = DEPLOY.parent / "build" / "programs"
SCRAPE_S = 1
WINDOW = "20s"  # of rates, which Grafana makes of the time that is shown
PATIENCE_S = 240.0
MOST_EXPOSED = 2.0  # of 10, as systemd-analyze rates
EMPTY = {
    "Drafts accepted": "a share of 0 drafts: speculation is off",
    "Take-overs": "changes of the last minute, once that is over",
}
"""Queries that may have no result, by the title of the panel, and why."""


class FaultError(Exception):
    """What is wrong."""


def program(name: str, package: str) -> Path:
    """A program that is installed, or of a package. Raises FaultError if there is none."""
    if found := shutil.which(name):
        return Path(found)
    for there in (*PROGRAMS.glob(f"usr/bin/{name}"), *PROGRAMS.glob(f"bin/{name}")):
        return there
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fetched = subprocess.run(
            ["apt-get", "download", package],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        files = list(Path(folder).glob("*.deb"))
        if fetched.returncode or not files:
            raise FaultError(
                f"{name} is not installed, and Debian's package {package} cannot be fetched (after "
                f"apt-get update?): {fetched.stderr.strip()}"
            )
        subprocess.run(["dpkg-deb", "--extract", files[0], PROGRAMS], check=True)
    return program(name, package)


def call(*command: str | Path, **options: Any) -> str:
    """What a program prints. Raises FaultError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise FaultError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check_alerts() -> str:
    """The rules are right, and their tests pass."""
    promtool = program("promtool", "prometheus")
    call(promtool, "check", "rules", DEPLOY / "alerts.yml")
    call(promtool, "test", "rules", DEPLOY / "alerts_test.yml")
    with tempfile.TemporaryDirectory() as folder:  # a test that cannot fail is none
        for name in ("alerts.yml", "alerts_test.yml"):
            text = (DEPLOY / name).read_text().replace("< 0.9", "< 0.3")
            (Path(folder) / name).write_text(text)
        with contextlib.suppress(FaultError):
            call(promtool, "test", "rules", Path(folder) / "alerts_test.yml")
            raise SystemExit("the tests of alerts pass with a rule that is broken")
    return f"{len(list(alert_queries()))} alerts"


def check_unit() -> str:
    """The unit is right, and the service that it describes hardly exposed."""
    analyze = program("systemd-analyze", "systemd")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "weft.service"
        text = (DEPLOY / "weft.service").read_text()
        unit.write_text(text.replace("/opt/weft/bin/weft", shutil.which("true") or "/bin/true"))
        if told := call(analyze, "verify", "--man=no", unit).strip():
            raise FaultError(f"systemd-analyze verify: {told}")
        told = call(analyze, "security", "--offline=true", unit)
    (line,) = [line for line in told.splitlines() if "Overall exposure" in line]
    exposure = float(line.split(":")[1].split()[0])
    if exposure > MOST_EXPOSED:
        raise FaultError(f"exposed to {exposure} of 10: {told}")
    return f"exposure {exposure} of 10"


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes a server, with the rules of deploy/; yields its address."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{SCRAPE_S}s")
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = live.free_port()
    command = [program("prometheus", "prometheus"), f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, query: str) -> list[Any]:
    """The result of a query. Raises FaultError if Prometheus does not understand it."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=30).json()
    if answer["status"] != "success":
        raise FaultError(f"{query}: {answer['error']}")
    return list(answer["data"]["result"])


def has_value(result: list[Any]) -> bool:
    """Whether there is anything to draw: a number."""
    return any(series["value"][1] != "NaN" for series in result)


def filled(query: str) -> str:
    """A query as Grafana sends it: with its variables' values."""
    for name, value in {"__rate_interval": WINDOW, "instance": ".*", "model": ".*"}.items():
        query = query.replace(f"${name}", value)
    return query


def traffic(server: live.Server, over: threading.Event) -> None:
    """Requests of several classes, some refused, and a batch, until it is over."""
    client = server.client()
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions",
         "body": {"model": "builtin", "prompt": f"line {i}", "max_tokens": 16, "ignore_eos": True}}
        for i in range(200)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("batch.jsonl", text), purpose="batch")
    client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    turn = 0
    while not over.is_set():
        turn += 1
        tier = ("default", "priority", "flex")[turn % 3]
        body = {"model": "builtin", "prompt": "def f(x):" * 20, "max_tokens": 12}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(
                f"{server.url}/v1/completions", json={**body, "service_tier": tier}, timeout=60
            )
            wrong = {**body, "temperature": -1}
            httpx.post(f"{server.url}/v1/completions", json=wrong, timeout=60)
        time.sleep(0.05)


def check_prometheus() -> str:
    """Every query has a result on a server with traffic."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = ("--data-dir", str(folder / "files"), "--disk-reserve-bytes", "0")
        with live.serving(folder, "--kv-disk", str(folder / "kv"), *data) as server:
            over = threading.Event()
            busy = threading.Thread(target=traffic, args=(server, over))
            busy.start()
            try:
                with prometheus(folder, server.url.removeprefix("http://")) as url:
                    return _check_queries(server, url)
            finally:
                over.set()
                busy.join()


def _check_queries(server: live.Server, url: str) -> str:
    live.eventually(lambda: bool(_answers(url, 'up{job="weft"} == 1')), PATIENCE_S)
    server.children()["weft-engine"].send_signal(signal.SIGKILL)
    asked = (*panel_queries(), *annotation_queries(), *alert_queries())
    queries = [(title, filled(query)) for title, query in asked]
    may_be_empty = {*EMPTY, *(title for title, _ in alert_queries())}
    left = dict.fromkeys((query for _, query in queries))
    end = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < end:
        left = {query: None for query in left if not has_value(ask(url, query))}
        missing = [title for title, query in queries if query in left]
        if set(missing) <= may_be_empty:
            break
        time.sleep(SCRAPE_S)
    if lacking := sorted(set(missing) - may_be_empty):
        raise FaultError(f"without a result: {lacking}")
    unhealthy = [rule for rule in _rules(url) if rule["health"] != "ok"]
    if unhealthy:
        raise FaultError(f"rules that cannot be evaluated: {unhealthy}")
    number = len(list(panel_queries()))
    return f"{number} queries of {len(dashboard()['panels'])} panels, empty: {sorted(set(missing))}"


def _answers(url: str, query: str) -> list[Any]:
    """The same as ``ask``; nothing as long as Prometheus does not answer."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        return ask(url, query)
    return []


def _rules(url: str) -> list[Any]:
    groups = httpx.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


CHECKS = {"alerts": check_alerts, "unit": check_unit, "prometheus": check_prometheus}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", choices=[[], *CHECKS], metavar="CHECK")
    failed = False
    for name in parser.parse_args().checks or CHECKS:
        try:
            print(f"{name:12} ok: {CHECKS[name]()}", flush=True)
        except FaultError as fault:
            failed = True
            print(f"{name:12} FAULT: {fault}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
