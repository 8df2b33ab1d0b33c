"""The comparison with peers: why something cannot be installed, and wrong uses, in one sentence."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakeserver import server_process

from weft.workload.plots import plot_compared

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = BENCHMARKS / "peers"


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def install():
    return loaded(PEERS / "install.py")


def test_prompts_share_what_they_are_told_to():
    work = loaded(PEERS / "driving.py").Work
    prompts = work(3, 40, 1, seed=7, shared=32).prompts()
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 3
    others = work(3, 40, 1, seed=8, shared=32).prompts()
    assert others[0][:32] != prompts[0][:32]  # or a round would find the prefixes of the last one


def test_processes_are_looked_at_when_they_are_at_rest():
    """A child that computes for a while: it is waited for, and its pages are its own."""
    processes = loaded(BENCHMARKS / "processes.py")
    child = "import time; held = bytes(range(256)) * 2**18; sum(range(10**7)); time.sleep(600)"
    server = subprocess.Popen([sys.executable, "-c", child])
    try:
        processes.wait_until_at_rest(server.pid)
        (title, found), *others = processes.memory(server.pid).items()
        assert not others
        assert title.startswith("python")
        assert 64 * 2**20 <= found["private"] <= found["pss"] < 256 * 2**20
        spent = processes.cpu_seconds(server.pid)
        assert spent == processes.cpu_seconds(server.pid)
        assert spent[title] > 0
    finally:
        server.kill()
        server.wait()


def test_a_step_that_fails_says_why(install, tmp_path):
    setup = install.Setup(tmp_path, 2)
    install._run(setup, "peer", [sys.executable, "-c", "print('all is well')"])
    failing = "print('ERROR: No matching distribution'); print('[notice] a newer pip'); exit(3)"
    with pytest.raises(install.InstallError, match=r"^ERROR: No matching distribution \(see .*log"):
        install._run(setup, "peer", [sys.executable, "-c", failing])
    with pytest.raises(install.InstallError, match=r"^the last word"):
        install._run(setup, "peer", [sys.executable, "-c", "print('the last word'); exit(1)"])
    with pytest.raises(install.InstallError, match=r"^it said nothing"):
        install._run(setup, "peer", [sys.executable, "-c", "exit(1)"])
    with pytest.raises(install.InstallError, match=r"^cannot run no-such-cmake: No such file"):
        install._run(setup, "peer", ["no-such-cmake", "--build"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cells", "a"], "unknown cell 'a'; they are a:A"),
        (["--cells", "a:A:int8:more"], "unknown cell 'a:A:int8:more'"),
        (["--cells", "a:A:int2"], "unknown cell 'a:A:int2'"),
        (["--peers", "nobody"], "unknown peers nobody; they are openvino"),
        (["--pairs", "0"], "--pairs must be at least 1"),
    ],
)
def test_wrong_uses(tmp_path, arguments, words):
    command = [sys.executable, str(PEERS / "run.py"), "--envs", str(tmp_path / "envs"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(words)
    assert not (tmp_path / "envs").exists()


@pytest.fixture(scope="module")
def sweep():
    before, other = [*sys.path], sys.modules.pop("serving", None)  # a module of other tests
    sys.path[:0] = [str(PEERS), str(BENCHMARKS)]
    yield loaded(PEERS / "sweep.py")
    sys.path[:] = before
    sys.modules.pop("serving")
    if other is not None:
        sys.modules["serving"] = other


def test_a_sweep_measures_each_engine_while_the_others_rest(sweep, tmp_path):
    options = SimpleNamespace(seconds=0.4, input_tokens="8", output_tokens="4", rates="", points=3)
    with server_process() as (port, pid, _), server_process() as (other_port, other_pid, child):
        urls = {"one": (port, pid), "two": (other_port, other_pid)}
        served = {
            name: sweep.Served(f"http://127.0.0.1:{port}", pid)
            for name, (port, pid) in urls.items()
        }
        os.kill(child, signal.SIGSTOP)  # it would be busy beside the other engine's requests
        for one in served.values():
            one.load = partial(one.load, model="good")
        for rate in (20.0, 40.0):
            for name in served:
                sweep.measure(served, name, rate, 0, options)
    results = {name: sweep.result_of(one) for name, one in served.items()}
    for result in results.values():
        assert [run["load"] for run in result["runs"]] == [20.0, 40.0]
        assert all(run["completed_in_time"] > 0.3 for run in result["runs"])
        assert all(run["ttft_ms"]["p99.9"] > 0 for run in result["runs"])
    assert results["two"]["runs"][0]["others_cores"] > results["one"]["runs"][0]["others_cores"]
    assert sweep.table(results).count("serviceable up to") == 2
    assert plot_compared(results, str(tmp_path)).stat().st_size > 1000


def test_a_load_is_serviceable_if_its_requests_complete_in_time(sweep):
    one = sweep.Served("", 0)
    latency = {"p50": 1.0}
    for rate, kept in ((1.0, 1.0), (2.0, 0.96), (3.0, 0.9), (4.0, 0.99)):
        run = {"load": rate, "unit": "requests/s", "requests": 10, "completed": 10}
        run |= {"requests_per_s": rate * kept, "output_tokens_per_s": 1.0, "others_cores": 0.0}
        run |= {"completed_in_time": kept, "client": {}, "server": {}}
        one.runs[rate] = [run | dict.fromkeys(sweep.LATENCIES, latency)]
    assert sweep.result_of(one)["serviceable_load"] == 2.0


def test_rates_of_a_sweep_go_beyond_the_best_engine(sweep):
    served = {"a": sweep.Served("", 0, capacity=2.0), "b": sweep.Served("", 0, capacity=4.0)}
    options = SimpleNamespace(rates="", points=3)
    assert sweep.rates_of(options, served) == [2.0, 4.0, 6.0]
    options.rates = "3,1.5"
    assert sweep.rates_of(options, served) == [1.5, 3.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "weft,nobody"], "unknown engines nobody; they are weft, vllm, llamacpp"),
        (["--points", "0"], "must be at least 1"),
        (["--rates", "fast"], "rate"),
    ],
)
def test_wrong_uses_of_the_sweep(sweep, monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--envs", str(tmp_path), *words])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert message in f"{ended.value} {capsys.readouterr().err}"
