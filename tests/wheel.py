"""Builds the source archive and a wheel from it, and tries them as users do: in fresh environments.

    python tests/wheel.py [--python INTERPRETER]

Needs a registry of packages within reach. Pinned packages build it. One environment gets what the
wheel requires, another one the pinned packages with their hashes, as the images do. It fails if
something is missing in archive or wheel, or there that should not be, if wheel or environment is
too large, if the installed weft generates nothing, or if there is no valid bill of materials.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]
MOST_WHEEL_BYTES = 30_000_000
MOST_ENVIRONMENT_BYTES = 250_000_000
NEEDED = (
    "weft/builtin/model.safetensors",
    "weft/py.typed",
    "weft/server/page/index.html",
    "weft/server/page/vendor/preact/preact.js",
    "weft/ring/_native.",
    "weft/kernels/cpu/_native.",
)
PINNED = ("--only-binary", ":all:", "--require-hashes", "--requirement")
SOURCES = (".cpp", ".hpp", ".cu", ".h", ".a", ".o", ".cmake")
ARCHIVED = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
ARCHIVED |= {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy", "docs", "src"}


def check_contents(wheel: Path) -> None:
    """Raises SystemExit if a file is missing or too much."""
    names = zipfile.ZipFile(wheel).namelist()
    unwanted = [n for n in names if PurePath(n).suffix in SOURCES or "test" in PurePath(n).parts[0]]
    missing = [wanted for wanted in NEEDED if not any(name.startswith(wanted) for name in names)]
    if unwanted or missing:
        raise SystemExit(f"{wheel.name} lacks {missing} and should not have {unwanted}")
    at_most(wheel.name, wheel.stat().st_size, MOST_WHEEL_BYTES)


def check_archive(archive: Path) -> None:
    """Raises SystemExit if the source archive has not just what it must have."""
    with tarfile.open(archive) as opened:
        names = [PurePath(member.name).parts[1:] for member in opened if member.isfile()]
    tops = {name[0] for name in names}
    built = [name for name in names if name[-1].endswith((".so", ".pyc"))]
    if tops != ARCHIVED or built:
        odd, missing = sorted(tops - ARCHIVED), sorted(ARCHIVED - tops)
        raise SystemExit(f"{archive.name} lacks {missing} and should not have {[*odd, *built]}")
    at_most(archive.name, archive.stat().st_size, MOST_WHEEL_BYTES)


def at_most(name: str, size: int, limit: int) -> None:
    print(f"{name}: {size / 1e6:.1f} MB (at most {limit / 1e6:.0f})", flush=True)
    if size > limit:
        raise SystemExit(f"{name} is too large")


def disk_bytes(folder: Path) -> int:
    """What files of a folder take, each link counted as itself."""
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))


def environment(python: str, folder: Path) -> tuple[Path, list[str | Path]]:
    """Make a virtual environment; its Python, and the command that installs into it."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = folder / "bin" / "python"
    return own, [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]


def build(python: str, folder: Path) -> tuple[Path, str]:
    """Build the source archive, and a wheel from that; the wheel and nanobind's version."""
    own, install = environment(python, folder / "building")
    subprocess.run([*install, *PINNED, ROOT / "deploy" / "constraints-build.txt"], check=True)
    subprocess.run([*install, "build"], check=True)
    command = [own, "-m", "build", "--no-isolation", "--outdir", folder]
    subprocess.run([*command, "--sdist", ROOT], check=True, stdout=subprocess.DEVNULL)
    archive = next(folder.glob("weft-*.tar.gz"))
    check_archive(archive)
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    source = next((folder / "unpacked").iterdir())
    # not where the set-up builds, whose folder belongs to its interpreter
    words = ["--wheel", f"--config-setting=build-dir={folder}/build", source]
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
    asked = "import importlib.metadata as m; print(m.version('nanobind'))"
    version = subprocess.run([own, "-c", asked], check=True, capture_output=True, text=True)
    return next(folder.glob("weft-*.whl")), version.stdout.strip()


def check_installed(own: Path) -> None:
    subprocess.run([own, ROOT / "scripts" / "check_install.py"], check=True)


def check_bill(python: str, folder: Path, described: Path, nanobind: str) -> None:
    """Make a bill of materials; raises SystemExit if it lacks a package or a part."""
    own, install = environment(python, folder / "bill")
    subprocess.run([*install, "cyclonedx-bom[json-validation]"], check=True)
    out = folder / "bill.json"
    command = [own, ROOT / "tools" / "sbom.py", described, "--nanobind", nanobind, "--out", out]
    subprocess.run(command, check=True)
    bill = json.loads(out.read_text())
    names = {component["name"] for component in bill["components"]}
    missing = {"numpy", "tokenizers", "nanobind", "robin-map"} - names
    if missing or bill["metadata"]["component"]["name"] != "weft":
        raise SystemExit(f"the bill of materials lacks {sorted(missing)}")
    print(f"bill of materials: {len(names)} components", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter to try")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory(prefix="weft-wheel-") as name:
        folder = Path(name)
        wheel, nanobind = build(python, folder)
        check_contents(wheel)
        own, install = environment(python, folder / "environment")
        subprocess.run([*install, wheel], check=True)
        check_installed(own)
        at_most("the environment", disk_bytes(folder / "environment"), MOST_ENVIRONMENT_BYTES)
        own, install = environment(python, folder / "pinned")
        subprocess.run([*install, *PINNED, ROOT / "deploy" / "constraints.txt"], check=True)
        subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)
        subprocess.run([own, "-m", "pip", "check"], check=True)
        check_installed(own)
        check_bill(python, folder, folder / "pinned", nanobind)


if __name__ == "__main__":
    main()
