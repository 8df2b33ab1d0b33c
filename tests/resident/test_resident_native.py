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


@pytest.mark.parametrize(("count", "cases"), [(8, 200), (256, 40)])
def test_the_loop_of_a_gpu_gives_what_a_host_gives(count: int, cases: int) -> None:
    """On a device that stands in, by both drivers, and through several executions."""
    done = run("device_loop.cpp", [count, cases])
    assert done.returncode == 0, done.stdout + done.stderr
    *ends, executions = map(int, done.stdout.split())
    assert all(ends), "a kind of end was never met"
    assert executions > 2


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("-DWEFT_TORN", "case 0: "),
        ("-DWEFT_LAUNCHES=121", "on the device 120 steps, end 6"),
        ("-DWEFT_EXECUTABLES=1", "on the device 1 steps, end 6"),
    ],
    ids=["barriers", "launches", "executables"],
)
def test_a_wrong_loop_of_a_gpu_is_found(wrong: str, found: str) -> None:
    """Without barriers, with a launch too many in an execution, and with a graph launched anew."""
    done = run("device_loop.cpp", [32, 40], wrong)
    assert done.returncode == 1
    assert found in done.stdout


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
def test_the_loop_compiles_for_a_gpu(architecture: str) -> None:
    """To machine code, in which nothing is left to link."""
    cuda, resident = toolkit(), HEADERS / "resident"
    words = ["-std=c++20", f"-arch={architecture}", "-Werror", "all-warnings"]
    words += [f"-I{HEADERS}", f"-I{cuda / 'include'}", "-cubin", resident / "cuda_loop.cu"]
    nvcc = str(cuda / "bin" / "nvcc")
    assert builds.compiled(nvcc, words, [resident]).stat().st_size > 0
