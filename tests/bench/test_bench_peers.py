"""The comparison with peers: why something cannot be installed, and wrong uses, in one sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("peers_install", PEERS / "install.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
