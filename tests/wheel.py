"""Builds a wheel and tries it as a user would: in a fresh environment, without torch.

    python tests/wheel.py [--python INTERPRETER]

Needs a registry of packages within reach. It fails if the wheel or the environment is too large, if
sources are in the wheel, or if the installed weft generates nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]
MOST_WHEEL_BYTES = 30_000_000
MOST_ENVIRONMENT_BYTES = 250_000_000
NEEDED = (
    "weft/builtin/model.safetensors",
    "weft/py.typed",
    "weft/ring/_native.",
    "weft/kernels/cpu/_native.",
)
SOURCES = (".cpp", ".hpp", ".cu", ".h", ".a", ".o", ".cmake")


def check_contents(wheel: Path) -> None:
    """Raises SystemExit if a file is missing or too much."""
    names = zipfile.ZipFile(wheel).namelist()
    unwanted = [n for n in names if PurePath(n).suffix in SOURCES or "test" in PurePath(n).parts[0]]
    missing = [wanted for wanted in NEEDED if not any(name.startswith(wanted) for name in names)]
    if unwanted or missing:
        raise SystemExit(f"{wheel.name} lacks {missing} and should not have {unwanted}")
    at_most(wheel.name, wheel.stat().st_size, MOST_WHEEL_BYTES)


def at_most(name: str, size: int, limit: int) -> None:
    print(f"{name}: {size / 1e6:.1f} MB (at most {limit / 1e6:.0f})", flush=True)
    if size > limit:
        raise SystemExit(f"{name} is too large")


def disk_bytes(folder: Path) -> int:
    """What files of a folder take, each link counted as itself."""
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter to try")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory(prefix="weft-wheel-") as name:
        folder = Path(name)
        environment = folder / "environment"
        subprocess.run([python, "-m", "venv", environment], check=True)
        own = environment / "bin" / "python"
        pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # not where the set-up builds, whose folder belongs to its interpreter
        build = ["--no-deps", "--wheel-dir", folder, f"--config-settings=build-dir={folder}/build"]
        subprocess.run([*pip, "wheel", *build, ROOT], check=True)
        wheel = next(folder.glob("weft-*.whl"))
        check_contents(wheel)
        subprocess.run([*pip, "install", wheel], check=True)
        subprocess.run([own, ROOT / "scripts" / "check_install.py"], check=True)
        at_most("the environment", disk_bytes(environment), MOST_ENVIRONMENT_BYTES)


if __name__ == "__main__":
    main()
