"""``weft cache``: shows and removes packed weights that are kept."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError, WeftError
from weft.core.flags import named_model
from weft.core.settings import format_bytes
from weft.models.hub import resolve_model
from weft.models.kept_weights import checkpoint_identity
from weft.models.packed_cache import KeptFile, clear, kept_files, packed_folder
from weft.models.weight_files import weight_files


def add_arguments(cache: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    kinds = cache.add_subparsers(dest="kind", required=True, metavar="list|clear")
    for name, text in (("list", "show them, last used first"), ("clear", "remove them")):
        parser = kinds.add_parser(name, help=text)
        parser.set_defaults(run=run_cache, parser=parser)
    parser.add_argument("named", nargs="?", metavar="MODEL", help="only those of this model")
    parser.add_argument("--model", default=argparse.SUPPRESS, help="the same")


def run_cache(options: Mapping[str, Any]) -> int:
    """List the files, or clear them, all or those of a model; returns the exit status.

    Raises:
        ConfigError: there is nothing of the model, or the folder cannot be read or changed.
    """
    kind, model = options["kind"], named_model(options)
    folder = packed_folder()
    try:
        files = kept_files(folder)
    except OSError as error:
        raise ConfigError(f"Cannot read '{folder}': {error.strerror}.") from None
    if kind == "list":
        for file in reversed(files):
            print(_line(file))
        print(f"{_total(files)} in {folder}")
        return 0
    source = None if model is None else _source(model, files)
    try:
        removed = clear(folder, source)
    except OSError as error:
        raise ConfigError(f"Cannot clear '{folder}': {error.strerror}.") from None
    print(f"removed {_total(removed)} from {folder}")
    return 0


def _source(model: str, files: list[KeptFile]) -> str:
    """The path of a model as the files name it: a folder, a hub id, or a path that is gone."""
    known = {file.source for file in files}
    names = [model]
    with contextlib.suppress(WeftError):  # it may have been removed, unlike its files
        names.append(str(resolve_model(model, offline=True).resolve()))
    for name in names:
        if name in known:
            return name
    raise ConfigError(f"No packed weights of '{model}' are kept; see weft cache list.")


def _line(file: KeptFile) -> str:
    """Its last use, size, model and settings, and whether it is of use still."""
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
    settings = ", ".join(f"{name} {value}" for name, value in file.settings.items())
    size, name = f"{format_bytes(file.nbytes):>10}", file.source or file.path.name
    return f"{used}  {size}  {name}  {settings}{_fate(file)}"


def _fate(file: KeptFile) -> str:
    source = Path(file.source or "")
    if file.source is None or not os.path.exists(source):
        return "" if file.source is None else "; the model is gone"
    try:
        now = checkpoint_identity(source, weight_files(source))
    except (OSError, WeftError):
        return "; the model cannot be read"
    return "" if now == file.checkpoint else "; the model has changed since"


def _total(files: list[KeptFile]) -> str:
    plural = "" if len(files) == 1 else "s"
    return f"{len(files)} file{plural}, {format_bytes(sum(file.nbytes for file in files))}"
