"""The header itself: hand-offs between processes, the sanitizer, every interleaving, the device."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import builds
from cuda_toolkit import toolkit
from depth import deep

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src" / "weft" / "ring"
SCENARIOS = 11


def run(program: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def check_tally(done: subprocess.CompletedProcess[str], handoffs: int) -> None:
    """Contents and order are right, and no slot or byte of the arena is lost, or it has failed."""
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout)
    print(tally)
    assert tally["handoffs"] > handoffs
    assert tally["cancelled"] > 0
    assert tally["refused"] > 0


@pytest.mark.parametrize("mode", ["processes", "threads", "relayed"])
def test_handoffs(build, mode):
    check_tally(run(build("handoff", "-O2"), mode, "100", "20000"), 40_000)


@deep
def test_handoffs_between_two_processes_until_time_is_up(build):
    check_tally(run(build("handoff", "-O2"), "processes", "8", "1000000"), 10_000)


@deep
@pytest.mark.parametrize("mode", ["threads", "relayed"])
def test_the_thread_sanitizer_finds_nothing(build, mode):
    program = build("handoff", "-fsanitize=thread")
    done = run(program, mode, "5", "100000", TSAN_OPTIONS="halt_on_error=1")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is unknown to libtsan")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["handoffs"] > 1000


def interleavings(output: str) -> dict[str, int]:
    """Scenario -> violations."""
    lines = [line.split(" states ") for line in output.splitlines()]
    return {
        head.rsplit(maxsplit=1)[0].strip(): int(rest.split("violations")[0].split()[-1])
        for head, rest in lines
    }


def test_every_interleaving_of_atomic_steps(build):
    """No double ownership, no lost request, no write through a stale handle, no lost wake-up."""
    done = run(build("interleave"))
    print(done.stdout)
    found = interleavings(done.stdout)
    assert len(found) == SCENARIOS
    assert not any(found.values()), done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("broken", "scenarios"),
    [
        ("TORN_EXCHANGE", {"two writers", "two engines", "zombie engine", "leased steps"}),
        ("HASTY_HOST", {"leased steps"}),
        ("HASTY_RECLAIM", {"dead request plane"}),
        ("EARLY_GROWTH", {"growing output"}),
        ("SHARED_BELL", {"wake-ups"}),
        ("HASTY_READER", {"log of steps"}),
    ],
)
def test_the_explorer_can_fail(build, broken, scenarios):
    """It must find what goes wrong with exchanges torn into a load and a store, an epoch that is
    read too early, a piece that is announced too early, two writers of one bell, a reader that does
    not look again at what it has read, and a host that does not wait for the loop that it has lent
    its rows.
    """
    done = run(build("interleave", f"-D{broken}"))
    assert done.returncode == 1
    found = interleavings(done.stdout)
    assert {name for name, violations in found.items() if violations} == scenarios, done.stdout


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_headers_compile_for_the_device(architecture):
    cuda = toolkit()
    words = ["-std=c++20", f"-arch={architecture}", "-Werror", "all-warnings"]
    words += [f"-I{HEADERS}", f"-I{cuda / 'include'}", "-c", HERE / "device.cu"]
    nvcc = str(cuda / "bin" / "nvcc")
    assert builds.compiled(nvcc, words, [HERE, HEADERS]).stat().st_size > 0
