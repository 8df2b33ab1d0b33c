"""``weft bench serve`` against servers that answer, refuse, break and hang."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakeserver import EXTRA, PER_WORD, fake_server

from weft import cli
from weft.bench.client import LoadClient
from weft.bench.options import ServeBench
from weft.bench.report import format_serve
from weft.bench.serve import bench_serve
from weft.core.errors import ConfigError, WeftError

FAST = {"arrivals": "closed", "requests": 12, "output_tokens": "3", "warmup": 0}


def bench(url: str, **settings):
    return bench_serve(ServeBench(url=url, **{**FAST, **settings}))


def test_tokens_are_counted_and_prompts_have_their_length():
    with fake_server() as server:
        (run,) = bench(server.url, clients=(4,), input_tokens="87")["runs"]
        assert (run["requests"], run["completed"], run["failures"]) == (12, 12, {})
        assert run["output_tokens"] == 36
        words = (87 - EXTRA) // PER_WORD
        sent = [body["prompt"] for body in server.bodies[2:]]  # two learn what a word costs
        assert {len(prompt.split()) for prompt in sent} == {words}
        assert run["input_tokens"] == 12 * 87
        assert len(set(sent)) == 12
        assert len(server.connections) <= 5  # they are kept
        assert all(body["stream"] and body["ignore_eos"] for body in server.bodies)
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99.9"] <= run["e2e_ms"]["max"]


def test_chat_and_ids():
    with fake_server() as server:
        bench(server.url, endpoint="chat", ignore_eos=False, input_tokens="47")
        body = server.bodies[-1]
        assert len(body["messages"][0]["content"].split()) == 20
        assert "ignore_eos" not in body
        (run,) = bench(server.url, prompts="ids", input_tokens="9")["runs"]
        assert len(server.bodies[-1]["prompt"]) == 9
        assert run["input_tokens"] == 12 * 9


@pytest.mark.parametrize(
    ("behaviour", "failure", "detail"),
    [
        ("busy", "http 429", "come back later"),
        ("cut", "closed before the end", ""),
        ("unfinished", "stream without [DONE]", ""),
        ("failing", "error event: broken", "it broke"),
        ("silent", "no text", ""),
        ("hanging", "timeout", ""),
        ("garbage", "not HTTP", ""),
    ],
)
def test_failures_are_counted_by_reason(behaviour, failure, detail):
    with fake_server(f"good,{behaviour}") as server:
        settings = {"prompts": "ids", "requests": 4, "timeout_s": 3.0, "slo_ttft_ms": 60000.0}
        result = bench(server.url, **settings)
        (run,) = result["runs"]
        assert run["completed"] == 2
        (reason,) = run["failures"]
        assert reason.startswith(failure)
        assert run["failures"][reason] == 2
        assert detail in run["failure_examples"][reason]
        assert run["attainment"] == 0.5
        assert f"2 failed: {reason}" in format_serve(result)


def test_an_answer_may_end_with_its_connection():
    with fake_server("unbounded") as server:
        (run,) = bench(server.url, prompts="ids")["runs"]
        assert run["completed"] == 12
        assert run["short_answers"] == 12
        assert run["output_tokens"] == 12  # counted here, as the server does not


def test_the_sweep_has_a_run_for_each_rate_in_order():
    with fake_server() as server:
        result = bench(
            server.url, arrivals="poisson", rate="400,100,200,800", requests=6, slo_e2e_ms=60000.0
        )
        assert [run["load"] for run in result["runs"]] == [100, 200, 400, 800]
        assert "saturation" in result
        assert result["serviceable_load"] == 800
        text = format_serve(result)
        assert "serviceable load (95% within SLOs): 800" in text
        assert "of a core" in text


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"at_s": 5 + i / 100, "input_tokens": 6 + i, "output_tokens": 1 + i} for i in range(5)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    with fake_server() as server:
        settings = {"arrivals": "trace", "trace": str(trace), "prompts": "ids", "requests": None}
        (run,) = bench(server.url, speed=2.0, samples=True, **settings)["runs"]
        assert sorted(body["max_tokens"] for body in server.bodies) == [1, 2, 3, 4, 5]
        assert sorted(len(body["prompt"]) for body in server.bodies) == [6, 7, 8, 9, 10]
        due = [sample["due_s"] for sample in run["samples"]]
        assert sorted(due) == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02])
        assert all(sample["sent_s"] >= sample["due_s"] for sample in run["samples"])
        assert run["output_tokens"] == 15


def test_the_command_prints_and_writes(tmp_path, capsys):
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    with fake_server() as server, pytest.raises(SystemExit) as end:
        cli.main([
            "bench", "serve", "--url", f"{server.url}/v1/", "--rate", "100,200", "--requests",
            "5", "--output-tokens", "2", "--slo-ttft-ms", "60000", "--api-key", "secret",
            "--output", str(file), "--plots", str(plots),
        ])  # fmt: skip
    assert end.value.code == 0
    written = json.loads(file.read_text())
    assert [run["completed"] for run in written["runs"]] == [5, 5]
    assert "secret" not in file.read_text()
    assert "serviceable load" in capsys.readouterr().out
    assert {path.name for path in plots.iterdir()} == {"latencies.png", "throughput.png"}


def test_a_server_that_answers_nothing_well_is_an_error(capsys):
    with fake_server("busy") as server:
        with pytest.raises(WeftError, match="http 429: come back later"):
            bench(server.url)
        command = ["bench", "serve", "--url", server.url, "--prompts", "ids", "--warmup", "0"]
        with pytest.raises(SystemExit) as end:
            cli.main([*command, "--requests", "3", "--rate", "100"])
    assert end.value.code == 1
    assert "3 failed: http 429" in capsys.readouterr().out


def test_no_server_no_model_no_url():
    with fake_server() as server:
        gone = server.url
        server.models.clear()
        with pytest.raises(WeftError, match="lists no model"):
            bench(server.url)
    with pytest.raises(WeftError, match=r"No server answers at .*cannot connect"):
        bench(gone)
    for url in ("", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://["):
        with pytest.raises(ConfigError, match="not a server's address"):
            bench(url)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rate", "fast"], "rate must be"),
        (["--rates", "1"], "Did you mean '--rate'"),
        (["--trace", "/nowhere", "--arrivals", "trace"], "Cannot read '/nowhere'"),
        (["--output", "/nowhere/x.json"], "Cannot write"),
        (["--clients", "two"], "clients must be"),
        (["--clients", "8"], "--clients needs --arrivals closed"),
        (["--samples"], "file of --output"),
        (["--url", "nowhere"], "not a server's address"),
    ],
)
def test_wrong_uses_are_answered_with_one_sentence(arguments, word, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "serve", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


def test_a_connection_that_the_server_gave_up_is_replaced():
    async def go(url: str) -> int:
        client = LoadClient(url, None, 5.0)
        await client.request("GET", "/models")
        (kept,) = client._idle
        kept.transport.abort()
        answer = await client.request("GET", "/models")
        client.close()
        return answer.status

    with fake_server() as server:
        assert asyncio.run(go(server.url)) == 200
