"""Writes the bill of materials of an installed weft, in CycloneDX's form.

    python tools/sbom.py ENVIRONMENT --nanobind VERSION [--out FILE]

ENVIRONMENT is a virtual environment in which the wheel of a release is installed, as by
``deploy/constraints.txt``. cyclonedx-bom must be installed beside the Python that runs this, which
describes the packages; the parts of ``deploy/parts.toml``, the packages of npm that a
``vendor/versions.json`` lists, and all other files of folders called ``vendor`` are added to those.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "deploy" / "parts.toml"
SCHEMA = "1.6"


def packages(environment: Path) -> dict[str, Any]:
    """The bill of an environment's packages. Raises SystemExit if it cannot be made."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    if not program.exists():
        raise SystemExit(f"{program} is not there; pip install cyclonedx-bom brings it.")
    command = [str(program), "environment", str(environment), "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", SCHEMA]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cyclonedx-py has failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    text = (ROOT / "src" / "weft" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', text)
    assert version is not None
    found["metadata"]["component"]["version"] = version[1]
    return found


def parts(version_of: dict[str, str]) -> list[dict[str, Any]]:
    """Components that no package's metadata names.

    Args:
        version_of: versions of the packages with which the wheel was built, by name.

    Raises:
        SystemExit: a part's files or version are not there.
    """
    listed = tomllib.loads(PARTS.read_text(encoding="utf-8"))["part"]
    described = [_described(part, version_of) for part in listed]
    named = {path for part in listed for path in _files(part)}
    for listing in sorted(ROOT.glob("src/weft/**/vendor/versions.json")):
        for package in json.loads(listing.read_text(encoding="utf-8")):
            files = [listing.parent / name for name in package["files"]]
            described.append(_copied(package, files))
            named |= {listing, *files}
    vendored = (path for path in sorted(ROOT.glob("src/weft/**/vendor/**/*")) if path.is_file())
    return described + [_file(path) for path in vendored if path not in named]


def _copied(package: dict[str, Any], files: list[Path]) -> dict[str, Any]:
    """A package of npm of which files are in the wheel."""
    name, version, licence = package["package"], package["version"], package["licence"]
    one = licence.replace("-", "").replace(".", "").isalnum()
    return {
        "type": "library",
        "bom-ref": f"npm-{name}",
        "name": name,
        "version": version,
        "licenses": [{"license": {"id": licence}} if one else {"expression": licence}],
        "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
        "components": [_file(path) for path in files],
    }


def _described(part: dict[str, Any], version_of: dict[str, str]) -> dict[str, Any]:
    version = part.get("version") or version_of.get(part.get("version-of", ""))
    if version is None:
        raise SystemExit(f"{part['name']} of {PARTS.name} has no version.")
    own = part.get("version-of") in (None, part["name"])
    if not own:  # its own version is not told
        version = f"of {part['version-of']} {version}"
    component = {
        "type": "library",
        "bom-ref": f"part-{part['name']}",
        "name": part["name"],
        "version": version,
        "description": part["description"],
        "licenses": [{"license": {"id": part["licence"]}}],
    }
    if "purl" in part:
        component["purl"] = f"{part['purl']}@{version}" if own else part["purl"]
    if inside := [_file(path) for path in _files(part)]:
        component["components"] = inside
    return component


def _files(part: dict[str, Any]) -> list[Path]:
    if "files" not in part:
        return []
    found = sorted(ROOT.glob(part["files"]))
    if not found:
        raise SystemExit(f"{part['name']} of {PARTS.name} has no files {part['files']}.")
    return found


def _file(path: Path) -> dict[str, Any]:
    name = str(path.relative_to(ROOT / "src"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "file", "bom-ref": f"file-{name}", "name": name, "hashes": hashes}


def add_parts(bill: dict[str, Any], added: list[dict[str, Any]]) -> None:
    """Add components that are within weft itself, and that it depends on."""
    root = bill["metadata"]["component"]["bom-ref"]
    bill.setdefault("components", []).extend(added)
    needed = [component["bom-ref"] for component in added]
    for row in bill["dependencies"]:
        if row["ref"] == root:
            row["dependsOn"] = sorted([*row.get("dependsOn", []), *needed])
    bill["dependencies"] += [{"ref": name} for name in needed]


def check(text: str) -> None:
    """Raise SystemExit if a bill breaks the rules of CycloneDX."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    version = SchemaVersion.from_version(SCHEMA)
    if (fault := JsonStrictValidator(version).validate_str(text)) is not None:
        raise SystemExit(f"The bill of materials is not valid: {fault}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, help="virtual environment with the wheel")
    parser.add_argument("--nanobind", required=True, help="version with which the wheel was built")
    parser.add_argument("--out", type=Path, help="file to write; standard output by default")
    asked = parser.parse_args()
    bill = packages(asked.environment)
    add_parts(bill, parts({"nanobind": asked.nanobind}))
    text = json.dumps(bill, indent=1) + "\n"
    check(text)
    if asked.out is None:
        print(text, end="")
    else:
        asked.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
