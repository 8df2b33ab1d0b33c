"""Attention in C++ alone, under the sanitizers: random calls against plain loops in double."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import builds
from depth import deep

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src" / "weft" / "kernels" / "cpu"
SOURCES = [KERNELS / f"{name}.cpp" for name in ("attention", "check", "pool")]
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wno-psabi", "-ffp-contract=fast", f"-I{KERNELS}"]


@deep
@pytest.mark.parametrize(("sanitizer", "cases"), [("address,undefined", 12), ("thread", 5)])
def test_the_sanitizers_find_nothing(sanitizer: str, cases: int) -> None:
    """The machine's own instructions, as one instruction set."""
    flags = [*FLAGS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    inner = [*flags, "-march=native", "-DWEFT_ISA=baseline", "-c", KERNELS / "tile.cpp"]
    tile = builds.program(inner, [KERNELS])
    outer = [*flags, HERE / "attention_fuzz.cpp", *SOURCES, tile]
    done = subprocess.run(
        [str(builds.program(outer, [HERE, KERNELS])), str(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is unknown to libtsan")
    if done.stdout == "tiles are forbidden\n":
        pytest.skip("this machine has tiles and Linux, or a filter, forbids them")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} cases" in done.stdout
