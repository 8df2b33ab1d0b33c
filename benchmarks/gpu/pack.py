"""Packs the kernels that Triton has compiled, so that another run here need not compile them.

Only what is loaded: binaries, their descriptions and launchers. They fit the same Python, Triton,
driver stubs and sources of kernels. ``cat triton-cache.tar.gz.* | tar xz -C DIR`` unpacks them;
``TRITON_CACHE_DIR=DIR`` uses them.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
from pathlib import Path

from figures import figure, note

PIECE_BYTES = 15 * 2**20
MOST_BYTES = 2 * PIECE_BYTES
KEPT = (".cubin", ".json", ".so")


def packed(folder: Path) -> bytes:
    """A compressed archive of what is loaded of a cache."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=3) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in KEPT:
                archive.add(path, path.relative_to(folder))
    return target.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if not folder.is_dir():
        note("Triton has compiled nothing that could be packed")
        return
    figure("compiled kernels", len(list(folder.rglob("*.cubin"))))
    found = packed(folder)
    figure("packed", len(found) / 2**20, "MiB")
    if len(found) > MOST_BYTES:
        note("the packed kernels are too large to be kept")
        return
    for old in options.out.glob("triton-cache.tar.gz.*"):
        old.unlink()
    for number, start in enumerate(range(0, len(found), PIECE_BYTES)):
        piece = options.out / f"triton-cache.tar.gz.{number:02}"
        piece.write_bytes(found[start : start + PIECE_BYTES])


if __name__ == "__main__":
    main()
