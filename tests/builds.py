"""Compiled test programs, cached in ``build/tests`` by the hash of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "build" / "tests"
SOURCES = (".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".py")
UNUSED_S = 14 * 86_400  # what no run has used for so long is removed


class CompileError(AssertionError):
    """What the compiler said."""


def kept(parts: Iterable[str | Path], make: Callable[[Path], object], suffix: str = "") -> Path:
    """Return the file that ``make`` wrote for equal parts, in this run or an earlier one.

    Args:
        parts: all that the file depends on: words, and files or folders, of which the path and the
            content of every source count.
        make: writes the file to the path that it gets, or raises.
    """
    target = FOLDER / (_hash(parts) + suffix)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            os.utime(target)
            return target
        _remove_unused()
        unfinished = target.with_suffix(".new")
        make(unfinished)
        unfinished.replace(target)
    return target


def source(text: str, suffix: str) -> Path:
    """Return a file with a text, whose path is the same for equal texts."""
    return kept([text], lambda target: target.write_text(text), suffix)


def compiled(compiler: str, words: Sequence[str | Path], reads: Sequence[Path]) -> Path:
    """Return the output of a compiler, which is called with ``-o`` for the last words.

    Args:
        reads: the sources and the folders of all headers that are not the compiler's own.

    Raises:
        CompileError: the compiler failed.
    """
    command = [compiler, *map(str, words)]

    def make(target: Path) -> None:
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stdout + done.stderr)

    machine = _instructions() if "-march=native" in command else ""
    return kept([_version(compiler), machine, *command, *reads], make)


def program(words: Sequence[str | Path], reads: Sequence[Path]) -> Path:
    """Return a C++ program; skips where there is no compiler, or no library of the sanitizer."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    try:
        return compiled(compiler, [*words, "-pthread"], reads)
    except CompileError as error:
        if re.search("cannot find.*[at]san", str(error)):
            pytest.skip("the library of the sanitizer is not installed")
        raise


def _hash(parts: Iterable[str | Path]) -> str:
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            words = [part.encode()]
        else:
            every = sorted(part.rglob("*")) if part.is_dir() else [part]
            files = [file for file in every if file.suffix in SOURCES]
            words = [word for file in files for word in (str(file).encode(), file.read_bytes())]
        for word in (str(len(words)).encode(), *words):
            found.update(len(word).to_bytes(8, "big") + word)
    return found.hexdigest()[:32]


@cache
def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _instructions() -> str:
    """What ``-march=native`` depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("vendor_id", "cpu family", "model", "flags", "CPU", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _remove_unused() -> None:
    for file in FOLDER.iterdir():
        if file.stat().st_mtime < time.time() - UNUSED_S:
            file.unlink(missing_ok=True)
