"""A file for a batch: its upload, and the batch process until its first line may be asked.

    python benchmarks/batch_input.py [--megabytes 1000] [--lines 100000] [--out FILE]

Starts ``weft serve``, uploads a file of that size by HTTP, makes a batch of it, and cancels that
when it is in progress. Of the request plane and the batch process it reports wall seconds, CPU
seconds, and the most memory that was resident. CPU seconds of the batch process include its start,
which is also measured, with a batch of one line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil

import report
from serve import start_server

GOAL_MB_PER_CORE_S = 30
GOAL_RESIDENT_MIB = 150
PIECE_BYTES = 2**20
BOUNDARY = "----------weft"
PATIENCE_S = 600.0


def write_lines(path: Path, size: int, lines: int) -> None:
    """A file of chat requests, each with about the same number of bytes."""
    words = 'the quick brown fox jumps over the lazy dog and says "hello" to ü '
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            messages = [{"role": "user", "content": f"{number} "}]
            body = {"model": "model", "messages": messages, "max_tokens": 8}
            line = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            missing = size // lines - len(json.dumps(line)) - 1
            encoded = json.dumps(words, ensure_ascii=False)[1:-1]
            length = len(encoded.encode())
            messages[0]["content"] += words * max(0, missing // length)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def upload(port: int, path: Path) -> str:
    """Send a form with a file; the file's id. Memory of this process stays small, too."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    ).encode()
    tail = f"\r\n--{BOUNDARY}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
        yield tail

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    length = len(head) + path.stat().st_size + len(tail)
    headers = {
        "Content-Type": f"multipart/form-data; boundary={BOUNDARY}",
        "Content-Length": str(length),
    }
    connection.request("POST", "/v1/files", pieces(), headers)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"the upload was refused: {said}")
    return str(said["id"])


def cpu_name() -> str:
    """What the kernel calls the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line for line in lines if line.startswith("model name")]
    return named[0].partition(":")[2].strip() if named else platform.machine()


def process_of(supervisor: int, title: str) -> psutil.Process:
    """A process of the server, as soon as it has its title."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for child in psutil.Process(supervisor).children(recursive=True):
            words = child.cmdline()
            if words and words[0].startswith(title):
                return child
        time.sleep(0.005)
    raise SystemExit(f"there is no {title}")


def peak_mib(process: psutil.Process) -> float:
    """The most memory of a process that was resident so far."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def validated(client: openai.OpenAI, supervisor: int, file_id: str) -> dict[str, float]:
    """Make a batch, wait until its lines have been read, and cancel it."""
    began = time.perf_counter()
    batch = client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    process = process_of(supervisor, "weft-batches")
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.02)
    figures = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": cpu_s(process),
        "peak_mib": peak_mib(process),
    }
    client.batches.cancel(batch.id)
    while client.batches.retrieve(batch.id).status not in ("cancelled", "completed", "failed"):
        time.sleep(0.05)
    assert client.batches.retrieve(batch.id).status != "failed"
    figures["peak_at_end_mib"] = peak_mib(process)
    process.kill()  # the next batch starts another one
    process.wait(PATIENCE_S)
    return figures


def measure(size: int, lines: int) -> dict[str, Any]:
    """All figures of a file."""
    with tempfile.TemporaryDirectory(prefix="weft-batch-") as name:
        folder = Path(name)
        path, small = folder / "in.jsonl", folder / "small.jsonl"
        write_lines(path, size, lines)
        write_lines(small, 1000, 1)
        arguments = ("--data-dir", str(folder / "data"), "--frontends", "1")
        server, port = start_server("builtin", *arguments, "--disk-reserve-bytes", "0")
        pid = server.pid
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            start = validated(client, pid, upload(port, small))
            plane = process_of(pid, "weft-frontend")
            before_mib, before_s, began = peak_mib(plane), cpu_s(plane), time.perf_counter()
            file_id = upload(port, path)
            uploading = {
                "wall_s": time.perf_counter() - began,
                "cpu_s": cpu_s(plane) - before_s,
                "peak_mib": peak_mib(plane),
                "peak_before_mib": before_mib,
            }
            reading = validated(client, pid, file_id)
        finally:
            server.terminate()
            server.wait(PATIENCE_S)
        megabytes = path.stat().st_size / 1e6
    return {
        "megabytes": megabytes,
        "lines": lines,
        "upload": {**uploading, "mb_per_core_s": megabytes / uploading["cpu_s"]},
        "validation": {
            **reading,
            "start_cpu_s": start["cpu_s"],
            "start_peak_mib": start["peak_mib"],
            "mb_per_core_s": megabytes / (reading["cpu_s"] - start["cpu_s"]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    figures = measure(int(given.megabytes * 1e6), given.lines)
    figures["cpu"] = f"{cpu_name()}, {os.cpu_count()} cores"
    print(json.dumps(figures, indent=2))
    if given.out:
        report.save(given.out, **figures)
    reading = figures["validation"]
    fast, small = reading["mb_per_core_s"], reading["peak_mib"]
    print(f"validation: {fast:.0f} MB/s of a core (goal: {GOAL_MB_PER_CORE_S})")
    print(f"batch process: at most {small:.0f} MiB resident (goal: {GOAL_RESIDENT_MIB})")


if __name__ == "__main__":
    main()
