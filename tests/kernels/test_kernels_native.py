"""The native kernels without Python, under the address and the thread sanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import builds
from depth import deep

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "weft" / "kernels" / "cpu"
NAMES = ("sample", "dispatch", "layer", "matrix", "panel", "pool", "quant", "quant_tile", "scan")
FLAGS = ["-std=c++20", "-O1", "-g", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]


def built(main: str, names: tuple[str, ...], *flags: str) -> Path:
    files = [HERE / main, *(SOURCES / f"{name}.cpp" for name in names)]
    return builds.program([*FLAGS, *flags, f"-I{SOURCES}", *files], [HERE, SOURCES])


def check(program: Path, rounds: int) -> None:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program), str(rounds)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **options},
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is unknown to libtsan")
    assert done.stdout == "good\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_the_pool_under_the_thread_sanitizer() -> None:
    check(built("pool.cpp", ("pool",), "-fsanitize=thread"), 100)


@deep
@pytest.mark.parametrize(
    ("sanitizer", "isa", "rounds"),
    [("address,undefined", "-march=native", 60), ("thread", "-march=x86-64", 25)],
)
def test_pool_and_layers_under_a_sanitizer(sanitizer, isa, rounds) -> None:
    """The widest vectors for the first; they are no matter of the second, which is slow."""
    flags = (f"-fsanitize={sanitizer}", isa, "-DWEFT_ISA=baseline")
    check(built("layers.cpp", NAMES, *flags), rounds)
