"""``weft bench`` as a user runs it: on a real server, a real engine, and the kernels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

WEFT = [sys.executable, "-m", "weft.cli"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT, "bench", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_serve_measures_a_real_server(server, tmp_path):
    loads = {
        "completions": ["--rate", "20,40", "--slo-e2e-ms", "60000"],
        "chat": ["--endpoint", "chat", "--arrivals", "closed", "--clients", "1,4"],
        "ids": ["--prompts", "ids", "--arrivals", "gamma", "--rate", "40"],
    }
    common = ["--requests", "8", "--input-tokens", "40..60", "--output-tokens", "6"]
    for name, arguments in loads.items():
        file = tmp_path / f"{name}.json"
        done = bench("serve", "--url", server.url, *arguments, *common, "--output", str(file))
        assert done.returncode == 0, done.stderr
        result = json.loads(file.read_text())
        for run in result["runs"]:
            assert run["failures"] == {}
            assert run["completed"] == 8
            assert run["output_tokens"] == 48
            # texts have about the length that was asked for, ids exactly
            assert 8 * 34 <= run["input_tokens"] <= 8 * 66
    assert "TTFT" in done.stdout


def test_energy_tells_engine_and_request_plane_apart(server, tmp_path):
    file = tmp_path / "result.json"
    done = bench(
        "energy", "--url", server.url, "--requests", "6", "--rate", "20", "--output-tokens", "20",
        "--rest-s", "0.2", "--output", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_text())["runs"]
    planes = {name: found["cpu_s"] for name, found in run["server"]["planes"].items()}
    assert planes["engine"] > 0
    assert planes["request plane"] > 0
    assert "joules/token" in done.stdout


def test_throughput_measures_an_engine(tmp_path):
    file = tmp_path / "result.json"
    done = bench(
        "throughput", "--prompts", "3", "--input-tokens", "20", "--output-tokens", "8",
        "--repeats", "1", "--threads", "1", "--kv-memory", "16MiB", "--max-num-seqs", "8",
        "--output", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["decode_tokens_per_s"]["median"] > 0
    assert result["cpu_s_per_output_token"]["median"] > 0
    assert "decode tokens/s" in done.stdout


def test_kernels_are_measured(tmp_path):
    file = tmp_path / "result.json"
    arguments = ["--only", "decode bfloat16 1 x", "--seconds", "0.01", "--threads", "1"]
    done = bench("kernels", *arguments, "--output", str(file))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["kernels"]
    assert row["bound"] == "memory"
    assert row["read_bytes_per_s"] > 0
    assert "attention decode bfloat16" in done.stdout


def test_loops_are_measured_beside_neighbours(tmp_path):
    file = tmp_path / "result.json"
    done = bench(
        "interfere", "--sequences", "2", "--requests", "4", "--output-tokens", "30", "--repeats",
        "1", "--neighbours", "compress", "--kv-memory", "16MiB", "--output", str(file),
    )  # fmt: skip
    if len(os.sched_getaffinity(0)) < 2:
        assert "needs two processors" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert set(result["loops"]) == {"planned", "resident", "one thread"}
    for found in result["loops"].values():
        assert found["alone"]["itl_ms"]["p50"] > 0
        assert found["with neighbours"]["ttft_ms"]["p99"] > 0
    assert "the loop on processor" in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="loops need two processors")
def test_loops_that_are_interrupted_end_at_once():
    command = [*WEFT, "bench", "interfere", "--repeats", "1000", "--kv-memory", "16MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        time.sleep(4)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["throughput", "--prompts", "0"], "prompts must be"),
        (["throughput", "--input-tokens", "long"], "input_tokens must be a length"),
        (["throughput", "--model", "/nowhere"], "/nowhere"),
        (["kernels", "--only", "nothing of this name"], "nothing of this name"),
        (["everything"], "everything"),
        (["interfere", "--neighbours", "noise"], "There is no neighbour 'noise'"),
        (["interfere", "--kernels", "reference"], "no resident loop to measure"),
        (["interfere", "--input-tokens", "100000"], "the context takes"),
        ([], "serve|energy|throughput|interfere|kernels"),
    ],
)
def test_wrong_uses(call, arguments, word):
    done = call("bench", *arguments)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert "Traceback" not in done.stderr
