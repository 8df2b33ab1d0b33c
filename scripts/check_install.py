"""Check the weft that is installed beside this Python: it generates text, without torch.

    python scripts/check_install.py

cibuildwheel runs it on each wheel that it builds (``tool.cibuildwheel`` in pyproject.toml).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

WEFT = Path(sys.executable).with_name("weft")


def weft(*arguments: str) -> str:
    """What a command prints, run far from the sources. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [WEFT, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"weft {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{name} is installed; the check is of weft without it")
    print(weft("info"))
    prompt = ("def fibonacci(n):", "--max-tokens", "32", "--temperature", "0")
    text, again = weft("generate", *prompt), weft("generate", *prompt)
    if not text.strip() or text != again:
        raise SystemExit(f"the same prompt should have the same text, not {text!r} and {again!r}")
    print(text)


if __name__ == "__main__":
    main()
