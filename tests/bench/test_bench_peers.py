"""The comparison with peers: why something cannot be installed, and wrong uses, in one sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
