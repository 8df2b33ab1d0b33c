"""The native kernels without Python, under the address and the thread sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "weft" / "kernels" / "cpu"
NAMES = ("choose", "dispatch", "layer", "matrix", "panel", "pool", "quant", "quant_tile", "scan")
FLAGS = ["-std=c++20", "-O1", "-g", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]


@pytest.mark.parametrize(
    ("sanitizer", "isa", "rounds"),
    [("address,undefined", "-march=native", 60), ("thread", "-march=x86-64", 25)],
)
def test_pool_and_layers_under_a_sanitizer(tmp_path, sanitizer, isa, rounds) -> None:
    """The widest vectors for the first; they are no matter of the second, which is slow."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    program = tmp_path / "layers"
    command = [compiler, *FLAGS, f"-fsanitize={sanitizer}", isa, "-DWEFT_ISA=baseline"]
    files = [str(HERE / "layers.cpp"), *(str(SOURCES / f"{name}.cpp") for name in NAMES)]
    command += [f"-I{SOURCES}", *files, "-o", str(program), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"the library of the {sanitizer} sanitizer is not installed")
    assert done.returncode == 0, done.stderr
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
