"""Environments of clients and tools: made from their pins, made again when the pins change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence as Seq
from pathlib import Path


def python_environment(folder: Path, *packages: str, constraints: Seq[str] = ()) -> Path:
    """Install packages into a virtual environment of their own; returns its folder of programs.

    Raises:
        CalledProcessError: they cannot be installed.
    """
    programs, wanted = folder / "bin", mark_of("\n".join([*packages, "-c", *constraints]))
    if not is_complete(folder, wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in constraints))
        install = [str(programs / "pip"), "install", "--quiet"]
        install += ["--constraint", str(folder / "constraints.txt")]
        subprocess.run([*install, *packages], check=True)
        complete(folder, wanted)
    return programs


def node_environment(folder: Path, pins: Path) -> Path:
    """Install what ``package-lock.json`` in ``pins`` names; returns the folder of programs.

    Raises:
        CalledProcessError: it cannot be installed.
    """
    names = ("package.json", "package-lock.json")
    wanted = mark_of("".join((pins / name).read_text() for name in names))
    if not is_complete(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in names:
            shutil.copy(pins / name, folder)
        # Scripts of packages download things; none of these packages needs its own.
        subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"],
            cwd=folder, check=True,
        )  # fmt: skip
        complete(folder, wanted)
    return folder / "node_modules" / ".bin"


def mark_of(pins: str) -> str:
    return hashlib.sha256(pins.encode()).hexdigest()


def is_complete(folder: Path, wanted: str) -> bool:
    """Whether an environment was finished, with these pins."""
    mark = folder / "complete"
    return mark.exists() and mark.read_text() == wanted


def complete(folder: Path, wanted: str) -> None:
    (folder / "complete").write_text(wanted)
