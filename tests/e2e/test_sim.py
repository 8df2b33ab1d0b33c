"""``weft sim`` as a user runs it: real processes, their tables, files and mistakes."""

from __future__ import annotations

import json

import pytest

from live import run


def test_a_sweep_with_best_effort_requests(tmp_path):
    out = tmp_path / "new" / "results"
    done = run(
        "sim",
        "--hardware", "a100", "--rate", "1,8,16,32", "--requests", "60", "--slo-ttft-ms", "500",
        "--input-tokens", "1000+-10%", "--output-tokens", "20..40", "--be-trace", "synthetic",
        "--be-open", "8", "--out", str(out), "--chrome-trace", str(tmp_path / "t.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    assert [one["load"] for one in result["runs"]] == [1.0, 8.0, 16.0, 32.0]
    for one in result["runs"]:
        assert one["classes"]["interactive"]["completed"] == 60
        assert one["classes"]["batch"]["output_tokens"] > 0
        assert one["failed"] == 0
    # what is left to best effort shrinks with the load
    given = [one["classes"]["batch"]["output_tokens_per_s"] for one in result["runs"]]
    assert given[0] > given[-1]
    names = {path.name for path in out.iterdir()}
    assert {"latencies.png", "throughput.png", "run-1.png", "run-32.png"} <= names
    assert json.loads((tmp_path / "t-8.json").read_text())["traceEvents"]
    assert "TTFT 500 ms" in done.stdout
    assert "batch" in done.stdout


def test_a_trace_is_replayed_alike_each_time(call, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 200 * i, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, i + 2]}
        for i in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    runs = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        way = run if name == "a" else call  # the same in two processes
        done = way("sim", "--trace", str(trace), "--seed", seed, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / name / "result.json").read_text())
        runs.append(result["runs"])
    assert runs[0] == runs[1] != runs[2]
    (one,) = runs[0]
    assert one["load"] == pytest.approx(30 / 5.8)
    # the two shared blocks are computed once; who comes while they are waits for them
    assert one["cached_tokens"] == 29 * 1024


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-3.1-70b", "--rate", "1"], "bytes short"),
        (["--model", "lama-3.1-8b", "--rate", "1"], "Did you mean 'llama-3.1-8b'?"),
        (["--hardware", "tpu", "--rate", "1"], "Unknown hardware 'tpu'. Known: a100"),
        (["--rate", "1", "--slo-tpot-ms", "2"], "No load can meet the tpot target"),
        (["--trace", "TRACE"], "trace.csv:3: not a row"),
        (["--rate", "1", "--chrome-trace", "/nowhere/t.json"], "Cannot write '/nowhere/t.json'"),
        (["--rates", "1"], "Did you mean '--rate'?"),
    ],
)
def test_wrong_uses(call, tmp_path, arguments, words):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,8,1\nx,y,z\n")
    done = call("sim", *[str(trace) if word == "TRACE" else word for word in arguments])
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
