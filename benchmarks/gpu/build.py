"""Builds the native parts for the Python that runs this, and puts them beside their sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    build = Path(sys.argv[1])
    installed = build / "installed"
    (build / "CMakeCache.txt").unlink(missing_ok=True)  # may be for another Python
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options],
        ["--build", str(build), "-j", str(os.cpu_count())],
        ["--install", str(build), "--prefix", str(installed)],
    ):
        subprocess.run(["cmake", *command], check=True)
    for module in installed.rglob("_native*.so"):
        place = ROOT / "src" / module.relative_to(installed)
        shutil.copy2(module, place)
        print(place.relative_to(ROOT))


if __name__ == "__main__":
    main()
