"""The set-up installs torch where weft needs it, and nowhere else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# Stands for pip: notes how it is called, plans what PLAN says, and fails where FAIL says.
PIP = """
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "--dry-run" in sys.argv:
    plan = [{"metadata": dict(zip(("name", "version"), found.split("=="), strict=True))}
            for found in os.environ["PLAN"].split()]
    print(json.dumps({"install": plan}))
sys.exit(any(word in sys.argv for word in os.environ["FAIL"].split()))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The Python of an environment without torch, whose pip installs nothing."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (site / "site-packages" / "pip.py").write_text(PIP)
    info = site / "site-packages" / "pip-25.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pip\nVersion: 25.0\n")
    return folder / "bin" / "python"


@pytest.fixture
def install(environment, tmp_path):
    """Run the script on a machine with or without a GPU: its status, output, and calls of pip."""
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    tools.mkdir()

    def run(*arguments, gpu=False, plan="torch==2.13.0", fail=""):
        calls.write_text("")
        smi = tools / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\n{'echo GPU 0: one' if gpu else 'exit 9'}\n")
        smi.chmod(0o755)
        done = subprocess.run(
            [environment, ROOT / "scripts" / "install_torch.py", *arguments],
            env={"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), "PLAN": plan,
                 "FAIL": fail},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done, [json.loads(call) for call in calls.read_text().splitlines()]

    return run


no_gpu_here = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")


@no_gpu_here
def test_without_a_gpu_nothing_is_installed(install):
    status, done, calls = install("--device=auto")
    assert (status, calls) == (0, [])
    assert "without torch" in done.stdout


def test_a_gpu_brings_the_extra(install):
    status, _, calls = install("--device=auto", gpu=True)
    assert (status, calls) == (0, [["install", *extra("cuda")]])
    assert any(requirement.startswith("torch>=") for requirement in extra("cuda"))


def test_the_device_can_be_forced(install):
    assert install("--device=cpu", gpu=True)[2] == []
    assert install("--device=cuda")[2] == [["install", *extra("cuda")]]
    assert install("--device=tpu")[0] == 2


@no_gpu_here
def test_tests_get_a_build_without_cuda(install):
    status, _, calls = install("--required")
    assert status == 0
    assert [call[:2] for call in calls] == [["install", "--dry-run"], ["install", "torch==2.13.0"]]


@no_gpu_here
def test_cuda_packages_are_not_installed_unasked(install):
    """Where pip would bring them uv is asked for a CPU build; if that fails, so does the set-up."""
    plan = "torch==2.13.0 nvidia-cublas==13.0"
    status, done, calls = install("--required", plan=plan, fail="uv")
    assert status == 1
    assert "TORCH_SPEC" in done.stderr
    assert ["install", "torch==2.13.0"] not in calls


def test_a_named_build_is_installed_as_it_is(install):
    assert install("--spec=torch==2.12.0", "--pip-args=--pre")[2] == [
        ["install", "torch==2.12.0", "--pre"]
    ]


def extra(name):
    return project()["optional-dependencies"][name]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_a_cpu_needs_no_torch():
    """Neither by itself nor through a package that requires it."""
    needed = closure(project()["dependencies"])
    assert {"numpy", "tokenizers", "anyio"} <= needed
    assert not [n for n in needed if n.startswith(("torch", "triton", "nvidia", "transformers"))]


def closure(requirements):
    """The names of packages that are installed with these, by what is installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        wanted = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for text in importlib.metadata.requires(requirement.name) or []:
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate(w) for w in wanted):
                further.marker = None
                waiting.append(further)
    return found


def test_requirements_are_those_of_the_project():
    printed = requirements("run")
    assert printed.stdout.splitlines() == project()["dependencies"]
    unknown = requirements("nothing")
    assert unknown.returncode == 1
    assert "no requirements of 'nothing'" in unknown.stderr


def requirements(of):
    command = [sys.executable, ROOT / "scripts" / "requirements.py", of]
    return subprocess.run(command, capture_output=True, text=True, check=False)
