"""A folder of compiled kernels: who has filled it, and which kernels a start needs. Torch-free.

Beside the kernels, which Triton names by hashes, lie two kinds of JSON files: ``weft-makers/`` has
one for each version of weft and Triton that has compiled for it, ``weft-starts/`` one for each kind
of start, with the files that it has used. So a start that finds these all there needs no look at
what it will launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAKERS, STARTS = "weft-makers", "weft-starts"
GROUP = "__grp__"  # before the name of a kernel's metadata: the file that lists its files

KernelFile = Sequence[str]  # the folder of a kernel, and the name of its metadata


@dataclass(frozen=True)
class KernelFolder:
    """See the module docstring. What it cannot write is left out: it saves time alone."""

    path: Path

    def foreign(self, maker: Mapping[str, str]) -> list[str]:
        """Return who has filled the folder, if ``maker`` has not: versions in words."""
        found = []
        for path in sorted((self.path / MAKERS).glob("*.json")):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                other = json.loads(path.read_bytes())
                if other == maker:
                    return []
                found.append(", ".join(f"{name} {value}" for name, value in other.items()))
        return found

    def note_maker(self, maker: Mapping[str, str]) -> None:
        """Note who fills the folder."""
        self._write(MAKERS, digest(json.dumps(maker)), maker)

    def has(self, files: Sequence[KernelFile]) -> bool:
        """Whether all of these kernels are here."""
        return all(is_complete(self.path / key, name) for key, name in files)

    def kept(self, start: str) -> int | None:
        """Return how many kernels a start needs, if all are there; else None."""
        try:
            files = json.loads((self.path / STARTS / f"{start}.json").read_bytes())
            return len(files) if files and self.has(files) else None
        except (OSError, ValueError, TypeError):
            return None

    def note_start(self, start: str, files: Sequence[KernelFile]) -> None:
        """Note which kernels a start needs."""
        self._write(STARTS, start, files)

    def _write(self, kind: str, name: str, content: object) -> None:
        path = self.path / kind / f"{name}.json"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{uuid.uuid4().hex}")
            temporary.write_text(json.dumps(content), encoding="utf-8")
            os.replace(temporary, path)


def is_complete(folder: Path, metadata: str) -> bool:
    """Whether all files of a kernel are in its folder."""
    try:
        names = json.loads((folder / f"{GROUP}{metadata}").read_bytes())["child_paths"]
        return all((folder / name).stat().st_size for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def digest(text: str) -> str:
    """Return a short hash of a text, for the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
