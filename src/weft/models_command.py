"""``weft models``: lists the models on this machine, fetches others from the hub, removes some."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, ModelNotFoundError, OutOfMemoryError, WeftError, suggest
from weft.core.settings import format_bytes
from weft.core.starting import show_start
from weft.models.found import FoundModel, found_models
from weft.models.hub import local_source, resolve_model
from weft.models.weight_files import split_files

ROUNDED = ("int8", "int4")  # in which weights may fit that do not as they are
ELSEWHERE = {
    "Ollama": "is Ollama's; remove it with: ollama rm {name}",
    "LM Studio": "is LM Studio's; remove it there, under My Models",
}


def add_arguments(models: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    as_json = {"action": "store_true", "help": "print JSON"}
    models.set_defaults(run=run_models, parser=models, kind="list", json=False)
    models.add_argument("--json", **as_json)  # type: ignore[arg-type]
    kinds = models.add_subparsers(dest="kind", metavar="list|pull|remove")
    for name, text, usage in (
        ("list", "show the models on this machine, and which fit", "[--json]"),
        ("pull", "fetch a model from the hub, to be served later", "NAME [--revision NAME]"),
        ("remove", "remove a model of the hub's cache, and what is packed of it", "NAME [--yes]"),
    ):
        parser = kinds.add_parser(name, help=text, usage=f"weft models {name} {usage}")
        parser.set_defaults(run=run_models, parser=parser)
        if name == "list":
            parser.add_argument("--json", default=argparse.SUPPRESS, **as_json)  # type: ignore[arg-type]
        elif name == "pull":
            parser.add_argument("name", help="OWNER/REPO, of GGUF files OWNER/REPO:Q4_K_M")
            parser.add_argument("--revision", help="branch, tag or commit")
        else:
            parser.add_argument("name", help="as the list has it, or OWNER/REPO")
            parser.add_argument("--yes", action="store_true", help="do not ask")


def run_models(options: Mapping[str, Any]) -> int:
    """Run one of the commands; returns the exit status.

    Raises:
        ConfigError: there is no such model, or it is not weft's to remove.
        ModelNotFoundError: it cannot be fetched.
    """
    if options["kind"] == "pull":
        return _pull(options["name"], options["revision"])
    found = found_models(Path.home(), os.environ)
    if options["kind"] == "remove":
        return _remove(options["name"], found, asks=not options["yes"])
    return _list(found, as_json=options["json"])


def _list(found: Sequence[FoundModel], *, as_json: bool) -> int:
    facts = [_facts(model) for model in found]
    if as_json:
        print(json.dumps(facts, indent=1))
        return 0
    for model, fact in zip(found, facts, strict=True):
        print(f"{model.store:<9} {format_bytes(model.nbytes):>10}  {model.name}{_words(fact)}")
        if line := fact["problem"] or _command(model, fact):
            print(f"    {line}")
    if not found:
        print(
            "no models in the folders of Ollama and LM Studio, nor in the hub's cache; weft models "
            "pull OWNER/REPO fetches one, and weft serve OWNER/REPO serves it at once"
        )
    return 0


def _facts(model: FoundModel) -> dict[str, Any]:
    problem = model.problem()
    fits, reason, longest = (None, problem, None) if problem else _fit(model.path)
    rounded = ""
    for quantize in ROUNDED if fits is False else ():
        if (found := _fit(model.path, quantize))[0]:
            rounded, longest = quantize, found[2]
            break
    return {
        "store": model.store,
        "name": model.name,
        "path": str(model.path),
        "bytes": model.nbytes,
        "problem": reason if fits is None else "",
        "fits": fits,
        "reason": reason if fits is False else "",
        "fits_rounded_to": rounded,
        "max_model_len": longest,
    }


def _fit(source: Path, quantize: str = "none") -> tuple[bool | None, str, int | None]:
    """Whether a model fits here, else why not, and its longest sequence.

    None: it cannot be served for another reason.
    """
    from weft.engine.fitting import memory_facts
    from weft.engine.model import find_model

    config = EngineConfig(model=str(source), offline=True, quantize=quantize)
    try:
        facts = memory_facts(config, find_model(config))
    except OutOfMemoryError as error:
        return False, error.message, None
    except (OSError, WeftError) as error:
        return None, error.message if isinstance(error, WeftError) else str(error), None
    return facts["fits"], facts.get("reason", ""), facts.get("max_model_len")


def _words(fact: Mapping[str, Any]) -> str:
    if fact["fits"] is None:
        return ""
    if fact["fits"]:
        return f", fits: sequences of {fact['max_model_len']} tokens"
    return f", does not fit: {fact['reason']}"


def _command(model: FoundModel, fact: Mapping[str, Any]) -> str:
    """The command that serves a model; empty where nothing helps."""
    rounded = fact["fits_rounded_to"]
    if fact["fits"] is False and not rounded:
        return ""
    name = shlex.quote(model.name)
    command = f"weft serve {name}"
    if model.store != "hub" or not model.path.is_dir():
        command = f"weft serve {shlex.quote(str(model.path))} --served-model-name {name}"
    if rounded:
        command += f" --quantize {rounded}  # fits: sequences of {fact['max_model_len']} tokens"
    return command


def _pull(name: str, revision: str | None) -> int:
    if local_source(name) is not None:
        raise ConfigError(
            f"'{name}' lies on this machine already; serve it with: weft serve {shlex.quote(name)}"
        )
    show_start("lines")
    source = resolve_model(name, revision=revision)
    size = format_bytes(FoundModel("hub", name, source).nbytes)
    fits, reason, longest = _fit(source)
    print(f"{name}: {size} in {source}")
    if fits:
        command = f"weft serve {shlex.quote(name)}"
        command += "" if revision is None else f" --revision {shlex.quote(revision)}"
        print(f"fits, with sequences of {longest} tokens: {command}")
        return 0
    print(f"does not fit: {reason}" if fits is False else f"is not served: {reason}")
    return 0


def _remove(name: str, found: Sequence[FoundModel], *, asks: bool) -> int:
    chosen = [m for m in found if m.name == name or m.name.startswith(f"{name}/")]
    chosen = [m for m in chosen if m.store == "hub"] or chosen
    if not chosen:
        known = [model.name for model in found]
        raise ConfigError(
            f"There is no model '{name}' here.{suggest(name, known)} See weft models."
        )
    if (store := chosen[0].store) != "hub":
        raise ConfigError(f"'{name}' {ELSEWHERE[store].format(name=shlex.quote(chosen[0].name))}.")
    repository = _repository(chosen[0].path)
    whole = all(model.name == name or model.path.is_file() for model in chosen) and not any(
        _repository(m.path) == repository and m not in chosen for m in found if m.store == "hub"
    )
    size = format_bytes(_bytes_below(repository) if whole else sum(m.nbytes for m in chosen))
    if asks:
        if not sys.stdin.isatty():
            raise ConfigError(f"This removes {name} ({size}); say --yes, as nobody can be asked.")
        if input(f"Remove {name} ({size}) from {repository}? [y/N] ").strip().lower() != "y":
            print("nothing is removed")
            return 1
    from weft.models.packed_cache import clear, packed_folder

    for model in chosen:
        clear(packed_folder(), str(model.path.resolve()))
    try:
        if whole:
            shutil.rmtree(repository)
        else:
            for model in chosen:
                _remove_files(model.path, repository)
    except OSError as error:
        raise ConfigError(f"Cannot remove '{error.filename}': {error.strerror}.") from None
    print(f"removed {name} ({size})")
    return 0


def _repository(path: Path) -> Path:
    """The folder of a repository in the hub's cache, in which a model lies."""
    for folder in path.parents:
        if folder.name.startswith("models--"):
            return folder
    raise ModelNotFoundError(f"'{path}' does not lie in the hub's cache")


def _remove_files(path: Path, repository: Path) -> None:
    """Remove a GGUF file with its parts, and their blobs where no other snapshot has them."""
    for part in split_files(path):
        blob = part.resolve()
        part.unlink()
        linked = {one.resolve() for one in repository.glob("snapshots/**/*") if one.is_symlink()}
        if blob not in linked and blob.is_relative_to(repository):
            blob.unlink(missing_ok=True)


def _bytes_below(folder: Path) -> int:
    """Bytes of the files in a folder; links count once."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
