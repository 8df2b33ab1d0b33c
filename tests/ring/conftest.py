"""A ring for each test that wants one, and the C++ programs of the ring tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.ring.segment import create_ring

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src" / "weft" / "ring"
sys.path.insert(0, str(HERE))


@pytest.fixture
def ring():
    fds = create_ring(64, 1 << 20)
    yield fds
    fds.close()


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Compile one of the C++ programs beside this file; skips where there is no compiler."""
    folder = tmp_path_factory.mktemp("programs")

    def compile_program(name: str, *flags: str) -> Path:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("g++ is not installed")
        target = folder / "-".join([name, *(flag.strip("-=") for flag in flags)])
        if not target.exists():
            command = [compiler, "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
            command += [f"-I{HEADERS}", str(HERE / f"{name}.cpp"), "-o", str(target), "-pthread"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode and "cannot find" in done.stderr and "tsan" in done.stderr:
                pytest.skip("libtsan is not installed")
            assert done.returncode == 0, done.stderr
        return target

    return compile_program
