"""The files of a checkpoint's weights: of an index, a single one, or a GGUF file. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from weft.core.errors import CheckpointError, short
from weft.core.json_files import read_object
from weft.models.bounds import MOST_INDEX_BYTES
from weft.models.modules_file import DENSE, listed_modules

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".gguf"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # of the parts of a GGUF file
MAGIC = b"GGUF"
LISTED = 8  # names shown in an error that concerns many files


def is_gguf(path: Path) -> bool:
    """Whether a path is a file of GGUF, by its name or, as Ollama's have none, by how it begins."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of the index, or the single one.

    Behind them those of sentence-transformers' modules that have weights. A GGUF file stands for
    itself and the parts that it is split into.
    """
    if folder.is_file():
        return split_files(folder)
    found = _indexed_files(folder) if (folder / INDEX).is_file() else [_single_file(folder)]
    modules = [path for kind, path in listed_modules(folder) if kind == DENSE]
    return [*found, *(_single_file(folder / path) for path in modules)]


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only in pickle files ({', '.join(pickles[:3])}), which can "
            "run code and are never read; convert them to safetensors"
        )
    raise CheckpointError(
        f"{folder} has no weights that weft reads: neither {SINGLE} nor {INDEX}; "
        "fetch or convert them as safetensors"
    )


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a GGUF file, the first one first, by the name of one."""
    found = _SPLIT.fullmatch(file)
    if found is None:
        return [file]
    stem, _, count = found.groups()
    return [f"{stem}-{number:05}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]


def is_later_part(file: str) -> bool:
    """Whether a file, by its name, is a part of a GGUF file behind the first one."""
    found = _SPLIT.fullmatch(file)
    return found is not None and int(found[2]) > 1


def split_files(path: Path) -> list[Path]:
    """Return the parts of a GGUF file that is split, the first one with the metadata first.

    Raises:
        CheckpointError: a part is not there.
    """
    names = part_names(path.name)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing and len(names) > 1:
        raise CheckpointError(
            f"{path} is one of {len(names)} parts, of which are not there: "
            f"{', '.join(missing[:LISTED])}; fetch them again"
        )
    return [path.parent / name for name in names]


def _indexed_files(folder: Path) -> list[Path]:
    path = folder / INDEX
    weight_map = read_object(path, CheckpointError, MOST_INDEX_BYTES).get("weight_map")
    named = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    names = sorted({name for name in named if isinstance(name, str)})
    if len(names) == 0 or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"{path} has no weight_map of names of files; fetch it again")
    there = {file.name for file in folder.iterdir() if file.is_file()}
    absent = [name for name in names if name not in there]
    if absent:
        raise CheckpointError(
            f"{path} names files that are not in the folder: "
            f"{', '.join(short(name) for name in absent[:LISTED])}; fetch them again"
        )
    return [folder / name for name in names]
