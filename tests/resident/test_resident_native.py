"""The resident loop in C++ alone: lanes, leases between threads, and a compile for a device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import builds
from cuda_toolkit import toolkit
from depth import deep

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src" / "weft"
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-pthread", f"-I{HEADERS}"]
ENDS = 6


def run(source: str, words: list[int], *flags: str) -> subprocess.CompletedProcess[str]:
    program = builds.program([*FLAGS, *flags, HERE / source], [HERE, HEADERS / "resident"])
    done = subprocess.run(
        [str(program), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is unknown to libtsan")
    return done


def lanes(count: int, cases: int, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("lanes.cpp", [count, cases], *flags)


@pytest.mark.parametrize(("count", "cases"), [(3, 150), (32, 40), (256, 4)])
def test_many_lanes_give_what_one_gives(count: int, cases: int) -> None:
    done = lanes(count, cases)
    assert done.returncode == 0, done.stdout + done.stderr
    if cases > 100:
        assert all(map(int, done.stdout.split()[:ENDS])), "a kind of end was never met"


def test_a_port_without_barriers_is_found() -> None:
    assert lanes(8, 300, "-DWEFT_TORN").returncode != 0


@deep
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(sanitizer: str) -> None:
    done = lanes(16, 60, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lease_is_granted_or_recalled_at_any_moment() -> None:
    """Not granted, recalled amid its steps, and granted to its end."""
    done = run("lease.cpp", [4000], "-fsanitize=thread")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(map(int, done.stdout.split())), done.stdout


def test_a_host_that_goes_on_writing_is_found() -> None:
    assert "data race" in run("lease.cpp", [4000], "-fsanitize=thread", "-DWEFT_TORN").stderr


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_loop_compiles_for_the_device(architecture: str) -> None:
    cuda = toolkit()
    words = ["-std=c++20", f"-arch={architecture}", "-Werror", "all-warnings"]
    words += [f"-I{HEADERS}", f"-I{cuda / 'include'}", "-c", HERE / "device.cu"]
    nvcc = str(cuda / "bin" / "nvcc")
    assert builds.compiled(nvcc, words, [HERE, HEADERS / "resident"]).stat().st_size > 0
