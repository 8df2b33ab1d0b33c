"""Fetches the libraries of the page again, or another version of one, as ``versions.json`` says.

    python tools/vendor_page.py [PACKAGE=VERSION ...]

Needs npm and its registry within reach. A file is taken as it lies in the package; the list keeps
its SHA-256, which a test compares, and npm's digest of the whole package, which is compared here.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "src" / "weft" / "server" / "page" / "vendor"
LIST = FOLDER / "versions.json"


def package(name: str, version: str, folder: Path) -> tuple[Path, str]:
    """Download a package; its archive and npm's digest of it."""
    command = ["npm", "pack", "--json", "--pack-destination", str(folder), f"{name}@{version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)[0]
    archive = folder / told["filename"]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if told["integrity"] != f"sha512-{digest}":
        raise SystemExit(f"{name} {version} is not what the registry says that it is")
    return archive, told["integrity"]


def vendor(row: dict[str, Any]) -> None:
    """Replace the files of a package, and note their digests in its row."""
    with tempfile.TemporaryDirectory() as folder:
        archive, integrity = package(row["package"], row["version"], Path(folder))
        if row.get("integrity", integrity) != integrity:
            raise SystemExit(f"{row['package']} {row['version']} has changed in the registry")
        row["integrity"] = integrity
        with tarfile.open(archive) as opened:
            for target, file in row["files"].items():
                member = opened.extractfile(f"package/{file['from']}")
                assert member is not None, file
                data = member.read()
                path = FOLDER / target
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                file["sha256"] = hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="PACKAGE=VERSION")
    wanted = dict(word.rsplit("=", 1) for word in parser.parse_args().versions)
    rows = json.loads(LIST.read_text())
    for row in rows:
        if row["package"] in wanted:
            row["version"] = wanted[row["package"]]
            row.pop("integrity", None)
        vendor(row)
    LIST.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
