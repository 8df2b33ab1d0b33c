"""``weft batch`` as a user runs it: its own engine, a real server, kills, Ctrl-C, wrong uses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from live import START_S, WEFT, eventually, refused, run
from weft.core.config import EngineConfig
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.costs import profile_key
from weft.engine.model import find_model

SMALL = ["--threads", "1", "--kv-memory", "32MiB", "--max-num-seqs", "8"]
OPEN = 16  # requests: twice what these engines compute at once


def completion(name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "builtin", "prompt": f"def {name}(x):", "max_tokens": 8, "temperature": 0}
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {**body, **fields},
    }


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    """Results by custom_id, each of which must be there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def texts(path: Path) -> dict[str, str]:
    """The text of each completion."""
    return {
        name: line["response"]["body"]["choices"][0]["text"] for name, line in read(path).items()
    }


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WEFT, "batch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_endpoint_and_every_wrong_line(tmp_path):
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "What is a list?"}]}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    formed = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    lines = [
        completion("plain"),
        completion("many", n=3, temperature=1, seed=5),
        completion("stopped", prompt="for i in range(", stop=[")"]),
        {**completion("chat"), "url": "/v1/chat/completions", "body": {**chat, "max_tokens": 6}},
        {
            **completion("json"),
            "url": "/v1/chat/completions",
            "body": {**chat, "response_format": formed},
        },
        {
            **completion("vectors"),
            "url": "/v1/embeddings",
            "body": {"model": "builtin", "input": [f"text {i}" for i in range(70)]},
        },
        {
            **completion("response"),
            "url": "/v1/responses",
            "body": {"model": "builtin", "input": "Hi", "max_output_tokens": 4},
        },
        "",
        "{not json",
        completion("plain"),
        completion("long", prompt="x " * 5000),
        completion("hot", temperature="hot"),
        completion("other", model="gpt-4"),
        completion("streamed", stream=True),
        {
            **completion("stored"),
            "url": "/v1/responses",
            "body": {"model": "builtin", "input": "Hi", "store": True},
        },
        {**completion("where"), "url": "/v1/images"},
        {"custom_id": "half"},
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = run("batch", str(source), "-o", str(out), *SMALL)
    assert done.returncode == 3, done.stderr
    assert "16 lines: 7 answered, 9 with an error." in done.stdout
    assert f"Results: {out}" in done.stdout
    assert f"Errors: {tmp_path / 'out.errors.jsonl'}" in done.stdout
    results = {name: line["response"]["body"] for name, line in read(out).items()}
    assert set(results) == {
        "plain", "many", "stopped", "chat", "json", "vectors", "response",
    }  # fmt: skip
    assert len({choice["text"] for choice in results["many"]["choices"]}) > 1
    assert ")" not in results["stopped"]["choices"][0]["text"]
    assert results["stopped"]["choices"][0]["finish_reason"] == "stop"
    assert set(json.loads(results["json"]["choices"][0]["message"]["content"])) == {"a"}
    assert len(results["vectors"]["data"]) == 70
    assert results["response"]["usage"]["output_tokens"] == 4
    errors = [json.loads(x) for x in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert {line["error"]["line"]: line["error"]["code"] for line in errors} == {
        9: "invalid_json",
        10: "duplicate_custom_id",
        11: "context_length_exceeded",
        12: "invalid_parameter",
        13: "model_not_found",
        14: "unsupported_parameter",
        15: "unsupported_parameter",
        16: "unknown_url",
        17: "missing_required_parameter",
    }
    again = run("batch", str(source), "-o", str(out), *SMALL)
    assert again.returncode == 3
    assert "16 of them were done before this run." in again.stdout
    assert again.stderr == ""  # no engine was started


def test_a_server_answers_the_same(tmp_path, server):
    lines = [completion(f"f{i}") for i in range(12)] + [completion("hot", temperature=1000)]
    source = write(tmp_path / "in.jsonl", lines)
    own, asked = tmp_path / "own.jsonl", tmp_path / "asked.jsonl"
    assert run("batch", str(source), "-o", str(own), *SMALL).returncode == 3
    url = ["--url", f"{server.url}/v1", "--service-tier", "flex", "--concurrency", "4"]
    done = run("batch", str(source), "-o", str(asked), *url)
    assert done.returncode == 3, done.stderr
    assert "13 lines: 12 answered, 1 with an error." in done.stdout
    assert texts(own) == texts(asked)
    assert all(r["response"]["body"]["service_tier"] == "flex" for r in read(asked).values())
    [wrong] = read(tmp_path / "asked.errors.jsonl").values()
    [own_wrong] = read(tmp_path / "own.errors.jsonl").values()
    assert wrong["error"] == own_wrong["error"]
    assert wrong["error"]["param"] == "temperature"
    assert wrong["response"]["status_code"] == 400


def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path):
    """Greedy and seeded lines, also by base_seed, end as those of a run that nobody disturbed."""
    lines = [completion(f"f{i}", max_tokens=24, ignore_eos=True) for i in range(30)]
    lines += [completion(f"g{i}", temperature=1, max_tokens=24) for i in range(6)]
    source = write(tmp_path / "in.jsonl", [*lines, "{"])
    calm, rough = tmp_path / "calm.jsonl", tmp_path / "rough.jsonl"
    settings = [*SMALL, "--base-seed", "7"]
    assert run("batch", str(source), "-o", str(calm), *settings).returncode == 3
    before = 0
    for _ in range(2):
        process = start(str(source), "-o", str(rough), *settings)
        eventually(lambda: num_lines(rough) >= before + 3, START_S)  # noqa: B023
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        before = num_lines(rough)
        assert not psutil.wait_procs(family, timeout=START_S)[1]
    assert before < 36
    with rough.open("a") as file:
        file.write('{"id":"batch_req_')  # as a write that was cut short leaves it
    done = run("batch", str(source), "-o", str(rough), *settings)
    assert done.returncode == 3, done.stderr
    assert texts(rough) == texts(calm)
    assert len(texts(rough)) == 36
    assert num_lines(tmp_path / "rough.errors.jsonl") == 1


@pytest.mark.usefixtures("modelled_engines")
def test_an_engine_that_dies_is_replaced_and_only_one_writes_an_output(tmp_path):
    lines = [completion(f"f{i}", max_tokens=200, ignore_eos=True) for i in range(24)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(str(source), "-o", str(out), *SMALL)
    eventually(lambda: num_lines(out) >= 1, START_S)
    children = psutil.Process(process.pid).children()
    [engine] = [child for child in children if child.name() == "weft-engine"]
    engine.kill()
    process.send_signal(signal.SIGSTOP)  # or it might have ended before
    refused(run("batch", str(source), "-o", str(out)), "Another weft batch is writing", code=1)
    process.send_signal(signal.SIGCONT)
    printed, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "24 lines: 24 answered." in printed
    assert "the next one takes over" in told
    assert len(texts(out)) == 24


@pytest.mark.usefixtures("modelled_engines")
def test_ctrl_c_finishes_what_is_open_and_the_second_leaves(tmp_path, server):
    lines = [completion(f"f{i}", max_tokens=60, ignore_eos=True) for i in range(400)]
    source = write(tmp_path / "in.jsonl", lines)
    for name, asked in (("own", SMALL), ("server", ["--url", server.url, "--concurrency", "16"])):
        out = tmp_path / f"{name}.jsonl"
        process = start(str(source), "-o", str(out), *asked)
        eventually(lambda: num_lines(out) >= 5, START_S)  # noqa: B023
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=START_S)
        assert process.returncode == 130, told
        [open_now] = re.findall("finishing ([0-9]+) open requests; Ctrl-C again leaves", told)
        assert 0 < int(open_now) <= OPEN
        done = num_lines(out)
        assert 5 + int(open_now) <= done < 400
        assert f"400 lines: {done} answered, {400 - done} left." in printed
        assert "Run the same command again to continue." in printed
        if name == "server":
            break
        process = start(str(source), "-o", str(out), *asked)
        eventually(lambda: num_lines(out) >= done + 5, START_S)  # noqa: B023
        process.send_signal(signal.SIGINT)
        told = process.stderr.readline()
        while "finishing" not in told:
            told = process.stderr.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 130
        process.communicate()
        assert not psutil.wait_procs(family, timeout=START_S)[1]
        assert len(texts(out)) < 400
    eventually(server.idle, START_S)


@pytest.mark.usefixtures("modelled_engines")
def test_ctrl_c_while_the_engine_starts(tmp_path):
    source = write(tmp_path / "in.jsonl", [completion("a")])
    process = start(str(source), "-o", str(tmp_path / "out.jsonl"), *SMALL)
    eventually(lambda: bool(psutil.Process(process.pid).children()), START_S)
    process.send_signal(signal.SIGINT)
    printed, told = process.communicate(timeout=START_S)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "1 line: 0 answered, 1 left." in printed


@pytest.mark.usefixtures("modelled_engines")
def test_another_input_is_refused_until_restart_here_by_a_config_file(tmp_path):
    source, out = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    assert run("batch", str(source), "-o", str(out), *SMALL).returncode == 0
    assert not (tmp_path / "out.errors.jsonl").exists()
    write(source, [completion("b"), completion("c", model="gpt-4")])
    done = run("batch", str(source), "-o", str(out), *SMALL)
    refused(done, "is not the input that", "1 lines", "now 2 lines", "--restart", code=1)
    assert set(texts(out)) == {"a"}
    names = "served_model_name: [gpt-4, builtin]\n"
    (tmp_path / "batch.yaml").write_text(
        f"{names}output: {out}\nrestart: true\nthreads: 1\nkv_memory: 32MiB\n"
    )
    done = run("batch", str(source), "--config", str(tmp_path / "batch.yaml"))
    assert done.returncode == 0, done.stderr
    assert set(texts(out)) == {"b", "c"}
    assert read(out)["c"]["response"]["body"]["model"] == "gpt-4"


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["in.jsonl"], ["Name a file for the results", "-o results.jsonl"], 2),
        (["no.jsonl", "-o", "x"], ["Cannot read 'no.jsonl'", "No such file"], 2),
        (["empty.jsonl", "-o", "x"], ["'empty.jsonl' has no lines"], 2),
        (["in.jsonl", "-o", "in.jsonl"], ["both input and output"], 2),
        (["in.jsonl", "-o", "in.jsonl", "--restart"], ["both input and output"], 2),
        (
            ["in.jsonl", "-o", "empty.jsonl", "--errors", "empty.jsonl"],
            ["cannot be both output and errors"],
            2,
        ),
        (["in.jsonl", "-o", "other"], ["'other' exists already", "--restart"], 2),
        (["in.jsonl", "-o", "no/x"], ["Cannot write 'no/x", "No such file or directory"], 1),
        (["in.jsonl", "-o", "x", "--order", "best"], ["order", "blend, dfs, fcfs"], 2),
        (["in.jsonl", "-o", "x", "--hardware", "a100"], ["hardware is for order blend"], 2),
        (["in.jsonl", "-o", "x", "--order", "blend", "--hardware", "b100"], ["a100", "b100"], 2),
        (
            ["in.jsonl", "-o", "x", "--url", "http://a", "--order", "blend", "--hardware", "a100"],
            ["--shape NAME"],
            2,
        ),
        (["in.jsonl", "-o", "x", "--url", "nowhere"], ["'nowhere' is not a server's address"], 2),
        (["in.jsonl", "-o", "x", "--url", "http://127.0.0.1:9"], ["No server answers"], 1),
        (["in.jsonl", "-o", "x", "--url", "http://a", "--model", "m"], ["model", "--url"], 2),
        (["in.jsonl", "-o", "x", "--retries", "-1"], ["retries"], 2),
        (["in.jsonl", "-o", "x", "--service-tier", "flex"], ["give its --url"], 2),
        (["in.jsonl", "-o", "x", "--model", "./nothing"], ["nothing"], 1),
        (["in.jsonl", "-o", "x", "--consurrency", "3"], ["Did you mean '--concurrency'"], 2),
    ],
)
def test_wrong_uses_are_one_sentence(call, tmp_path, monkeypatch, arguments, words, code):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [completion("a")])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "other").write_text("precious")
    refused(call("batch", *arguments), *words, code=code)
    assert (tmp_path / "other").read_text() == "precious"
    assert json.loads((tmp_path / "in.jsonl").read_text())["custom_id"] == "a"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> str:
    """A profile of the engine of these batches, measured nowhere."""
    config = EngineConfig(model="builtin", threads=1)
    key = profile_key(config, find_model(config))
    costs = {**dict.fromkeys(FEATURES, 0.0), "prefill_area": 1e-9, "decode_context": 1e-7}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    Fitted(key, 6, Curve((1, 1024), (0.01, 0.11)), costs).save(path)
    return str(path)


def test_every_order_gives_the_same_answers(tmp_path, server, profiled):
    lines = [completion(f"f{i}", prompt="x = " + "1" * (1 + i % 3) + f"\ny{i}") for i in range(24)]
    source = write(tmp_path / "in.jsonl", [*lines, "{"])
    sheet = ["--order", "blend", "--hardware", "xeon-8462y"]
    url = ["--url", server.url, "--concurrency", "4"]
    ways = {
        "fcfs": SMALL,
        "dfs": [*SMALL, "--order", "dfs"],
        "sheet": [*SMALL, *sheet],
        "profile": [*SMALL, "--order", "blend", "--profile", profiled],
        "server": [*url, *sheet, "--shape", "llama-3.1-8b"],
    }
    found = {}
    for name, way in ways.items():
        done = run("batch", str(source), "-o", str(tmp_path / name), *way)
        assert done.returncode == 3, done.stderr
        assert "25 lines: 24 answered, 1 with an error." in done.stdout
        assert (f"weighed by the profile {profiled}" in done.stderr) == (name == "profile")
        found[name] = texts(tmp_path / name)
    assert all(answers == found["fcfs"] for answers in found.values())


CHUNKED = """
import sys, weft.cli, weft.offline
weft.offline.WHOLE_BYTES = 0
sys.argv = ["weft", *sys.argv[1:]]
weft.cli.main()
"""


def test_a_long_file_is_put_in_order_in_chunks(tmp_path):
    """In the order that is the default; then again with half of it done."""
    lines = [completion(f"f{i}", prompt="x = " + "1" * 80 * (i % 2) + f"\ny{i}") for i in range(40)]
    source, out = write(tmp_path / "in.jsonl", [*lines, "{"]), tmp_path / "out.jsonl"
    command = [sys.executable, "-c", CHUNKED, "batch", str(source), "-o", str(out), *SMALL]
    for left in (41, 20):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 3, done.stderr
        assert "order dfs: steps do not overlap" in done.stderr
        assert "reading all prompts" not in done.stderr
        assert f"This run: {left} in " in done.stdout
        assert set(texts(out)) == {f"f{i}" for i in range(40)}
        kept = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(kept[:20]))


def test_a_blend_without_a_sheet_or_profile_names_both_ways_out(tmp_path, server):
    source = write(tmp_path / "in.jsonl", [completion("a")])
    out = ["-o", str(tmp_path / "out.jsonl"), "--order", "blend"]
    for asked, way in ((SMALL, "(--hardware NAME)"), (["--url", server.url], "--shape NAME)")):
        done = run("batch", str(source), *out, *asked, "--restart", XDG_CACHE_HOME=str(tmp_path))
        refused(done, way, "There is no profile of costs", "weft profile --model builtin", code=2)
        assert str(tmp_path) in done.stderr
