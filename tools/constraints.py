"""Writes the pinned packages of weft, with hashes: ``python tools/constraints.py [--upgrade]``.

Needs uv and a registry of packages within reach. ``deploy/constraints.txt`` has what weft requires
and the extra ``fast``, for every Python and every machine that weft supports;
``deploy/constraints-cuda.txt`` has the extra ``cuda`` as well. What is installed beside the Python
that runs this, and so is what the tests run with, keeps its version, unless ``--upgrade`` is given.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL, LARGE = "deploy/constraints.txt", "deploy/constraints-cuda.txt"


def compile_pins(target: str, *words: str) -> None:
    """Resolve pyproject.toml and write a file. Raises CalledProcessError."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-emit-index-url"]
    command += ["--no-build", "--custom-compile-command", "python tools/constraints.py"]
    command += ["--no-annotate", "--output-file", target, *words]
    path = ROOT / target
    path.unlink(missing_ok=True)  # whose versions would be kept
    subprocess.run(command, cwd=ROOT, check=True)
    text = path.read_text(encoding="utf-8")
    if found := re.search(r"\S+://\S+", text):
        raise SystemExit(f"{target} names {found[0]}, which is of this machine's set-up alone")
    extras = " and ".join(word for at, word in enumerate(words) if words[at - 1] == "--extra")
    first = f"# Pinned packages of weft with the extras {extras}, for pip's --require-hashes.\n"
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
        compile_pins(LARGE, "--extra", "fast", "--extra", "cuda", "--constraint", kept.name)
    # The versions of the larger file, so that both can be installed one after the other.
    compile_pins(SMALL, "--extra", "fast", "--constraint", LARGE)


if __name__ == "__main__":
    main()
