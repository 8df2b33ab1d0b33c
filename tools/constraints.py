"""Writes the pinned packages of weft, with hashes: ``python tools/constraints.py [--upgrade]``.

Needs uv and a registry of packages within reach. ``deploy/constraints.txt`` has what weft requires
and the extra ``fast``, for every Python and every machine that weft supports;
``deploy/constraints-cuda.txt`` has the extra ``cuda`` as well, and ``deploy/constraints-build.txt``
what compiles weft. What is installed beside the Python that runs this, and so is what the tests run
with, keeps its version, unless ``--upgrade`` is given.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "pyproject.toml"
SMALL, LARGE = "deploy/constraints.txt", "deploy/constraints-cuda.txt"
BUILD = "deploy/constraints-build.txt"
CMAKE = ("cmake", "ninja")  # which scikit-build-core asks for where the machine has none


def compile_pins(target: str, source: str, purpose: str, *words: str) -> None:
    """Resolve the requirements of a file and write another one. Raises CalledProcessError."""
    command = ["uv", "pip", "compile", source, "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-emit-index-url"]
    command += ["--no-build", "--custom-compile-command", "python tools/constraints.py"]
    command += ["--no-annotate", "--output-file", target, *words]
    path = ROOT / target
    path.unlink(missing_ok=True)  # whose versions would be kept
    subprocess.run(command, cwd=ROOT, check=True)
    text = path.read_text(encoding="utf-8")
    if found := re.search(r"\S+://\S+", text):
        raise SystemExit(f"{target} names {found[0]}, which is of this machine's set-up alone")
    first = f"# Pinned packages {purpose}, for pip's --require-hashes.\n"
    path.write_text(first + text, encoding="utf-8")


def installed() -> str:
    """The packages beside this Python, as constraints; local parts of versions are left out.

    What comes with torch for CUDA follows from the version of torch.
    """
    found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
    kept = (each for each in found if not each[0].startswith(("weft", "nvidia-", "triton")))
    names = {name: version.split("+")[0] for name, version in kept}
    return "".join(f"{name}=={version}\n" for name, version in sorted(names.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
        kept.write("" if upgrade else installed())
        kept.flush()
        extras = ("--extra", "fast", "--extra", "cuda")
        purpose = "of weft with the extras fast and cuda"
        compile_pins(LARGE, PROJECT, purpose, *extras, "--constraint", kept.name)
        with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
            named = [sys.executable, ROOT / "scripts" / "requirements.py", "build"]
            built = subprocess.run(named, check=True, capture_output=True, text=True).stdout
            wanted.write("\n".join((built, *CMAKE)))
            wanted.flush()
            compile_pins(BUILD, wanted.name, "that compile weft", "--constraint", kept.name)
    # The versions of the larger file, so that both can be installed one after the other.
    purpose = "of weft with the extras fast"
    compile_pins(SMALL, PROJECT, purpose, "--extra", "fast", "--constraint", LARGE)


if __name__ == "__main__":
    main()
