"""Builds the native parts for the Python that runs this, and puts them beside their sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from figures import figure, note

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("weft.kernels.cpu._native", "weft.ring._native")


def missing_tools() -> list[str]:
    """What a build needs and this machine lacks."""
    missing = [name for name in ("cmake", "ninja", "c++") if shutil.which(name) is None]
    return missing + ["nanobind"] * (importlib.util.find_spec("nanobind") is None)


def there() -> bool:
    """Whether modules of an earlier build are there for this Python."""
    code = "import " + ", ".join(MODULES)
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def build(folder: Path) -> None:
    """Build and install beside the sources. Raises CalledProcessError."""
    installed = folder / "installed"
    (folder / "CMakeCache.txt").unlink(missing_ok=True)  # may be for another Python
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options],
        ["--build", str(folder), "-j", str(os.cpu_count())],
        ["--install", str(folder), "--prefix", str(installed)],
    ):
        subprocess.run(["cmake", *command], check=True)
    for module in installed.rglob("_native*.so"):
        place = ROOT / "src" / module.relative_to(installed)
        shutil.copy2(module, place)
        print(place.relative_to(ROOT))


def main() -> None:
    missing = missing_tools()
    if missing and there():
        note(f"not built, as there is no {', '.join(missing)}: an earlier build is used")
        return
    if missing:
        raise SystemExit(
            f"cannot build the native parts without {', '.join(missing)}; install them (pip has "
            "cmake, ninja and nanobind), or copy modules built for this Python beside their sources"
        )
    started = time.perf_counter()
    build(Path(sys.argv[1]))
    figure("native parts, built", time.perf_counter() - started, "s")


if __name__ == "__main__":
    main()
