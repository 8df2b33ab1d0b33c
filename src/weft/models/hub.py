"""Finds the folder of a model: on disk, in the package, or on the Hugging Face hub. Torch-free."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.core.errors import ModelNotFoundError
from weft.core.starting import bar_class, told_at_start
from weft.models.weight_files import SUFFIX, is_gguf, is_later_part, part_names, split_files

BUILTIN = "builtin"
ALLOWED = ["*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.jinja"]
# Other formats beside the one that is read; folders with a number are sentence-transformers'.
IGNORED = ["[!0-9]*/*", "consolidated*"]
QUANT = "Q4_K_M"  # the type of GGUF files that is taken where none is asked for
NOTHING = "no file"  # as a pattern: for the folder of what is kept, however little that is
OTHER_PARTS = re.compile(r"(^|/)mmproj|imatrix|(^|/)mtp-", re.IGNORECASE)  # of vision, and so on


def resolve_model(
    name: str,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the local folder of a model, or its GGUF file, downloading it if it is a hub id.

    A name that looks like a path (it starts with ``.``, ``/`` or ``~``, has more than one slash, or
    exists) is never sent to the hub. ``builtin`` is the model that ships with weft. Of a repository
    of GGUF files ``owner/repo:QUANT`` takes the file of a type, such as ``Q6_K``, or of a name;
    without one, that of Q4_K_M or else the first is taken.

    Args:
        revision: branch, tag or commit on the hub.
        token: hub token; None: ``HF_TOKEN`` or the stored login.
        offline: use only what is in the cache; None: as ``HF_HUB_OFFLINE`` says.
        cache_dir: where downloads go; None: the hub's own cache.
        endpoint: address of the hub; None: ``HF_ENDPOINT`` or the public one.

    Raises:
        ModelNotFoundError: with one sentence that says what to do.
    """
    here = local_source(name)
    if here is not None:
        return _with_config(_existing(here, name), name)
    options = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "local_files_only": bool(offline),
    }
    repository, _, wanted = name.partition(":")
    folder = None if wanted else _download(name, options)
    if folder is None or not any(folder.glob("*.safetensors")):
        found = _gguf_of(repository, wanted or None, name, options)
        if found is not None:
            return found
    assert folder is not None  # else what was asked for was found or refused
    return _with_config(folder, name)


def _gguf_of(
    repository: str, wanted: str | None, name: str, options: dict[str, Any]
) -> Path | None:
    """Return the GGUF file of a repository, all of whose parts are fetched.

    Args:
        wanted: the type or name; None: the usual one, or none if there is no GGUF file.
    """
    files = _listed(repository, name, options)
    chosen = choose_gguf(files, wanted)
    if chosen is None:
        if wanted is None:
            return None
        there = ", ".join(sorted(Path(file).name for file in files)) or "none at all"
        raise ModelNotFoundError(
            f"model '{repository}' has no GGUF file of the type '{wanted}'; its files: {there}"
        )
    folder = _download(repository, options, name=name, patterns=chosen)
    return split_files(folder / chosen[0])[0]


def choose_gguf(files: Sequence[str], wanted: str | None) -> list[str] | None:
    """Return the GGUF file to take of a repository, with all of its parts; None: there is none.

    Args:
        files: their names, without other ones.
        wanted: the type, in any case, or the name of a file; None: Q4_K_M, or else the first file.
    """
    first = sorted(file for file in files if not is_later_part(file))
    kind = re.escape(wanted or QUANT)
    pattern = re.compile(rf"(^|[-./]){kind}([-./]|$)", re.IGNORECASE)
    found = [file for file in first if wanted in (file, Path(file).name)]
    found += [file for file in first if pattern.search(file.removesuffix(SUFFIX))]
    if not found and wanted is None:
        found = first
    if not found:
        return None
    return part_names(found[0])


def local_source(name: str) -> Path | None:
    """The folder or GGUF file of a model that is not on the hub, if there is one; else None."""
    if name == BUILTIN:
        import importlib.resources  # takes longer than all else here

        return Path(str(importlib.resources.files("weft") / BUILTIN))
    return Path(name).expanduser() if _is_path(name) else None


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _existing(folder: Path, name: str) -> Path:
    if folder.is_file() and not is_gguf(folder):
        raise ModelNotFoundError(
            f"model '{name}' is a file; give the folder that holds config.json, or a GGUF file"
        )
    if folder.is_file():
        return split_files(folder)[0]
    if not folder.is_dir():
        kind = "file" if folder.suffix == SUFFIX else "folder"
        raise ModelNotFoundError(f"model {kind} '{name}' does not exist; check the path")
    return folder


def _with_config(folder: Path, name: str) -> Path:
    if not folder.is_file() and not (folder / "config.json").is_file():
        if found := sorted(folder.glob(f"*{SUFFIX}")):
            raise ModelNotFoundError(
                f"model '{name}' has no config.json, but GGUF files; give one of them, such as "
                f"'{found[0]}'"
            )
        raise ModelNotFoundError(
            f"model '{name}' has no config.json; give a Hugging Face model folder: config.json, "
            "safetensors weights and tokenizer.json"
        )
    return folder


def _listed(repository: str, name: str, options: dict[str, Any]) -> list[str]:
    """Return the names of a repository's GGUF models.

    Offline, or where the hub cannot be reached, those that are kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if _is_offline(options):
        files = _kept(repository, name, options)
    else:
        api = HfApi(endpoint=options["endpoint"], token=options["token"])
        with _refused(name, options):
            try:
                files = api.list_repo_files(repository, revision=options["revision"])
            except (HfHubHTTPError, HFValidationError):  # the hub answers
                raise
            except Exception:
                files = []
                with suppress(ModelNotFoundError):
                    files = _kept(repository, name, {**options, "local_files_only": True})
                if not files:
                    raise
    return [file for file in files if file.endswith(SUFFIX) and not OTHER_PARTS.search(file)]


def _kept(repository: str, name: str, options: dict[str, Any]) -> list[str]:
    """Return the names of a repository's GGUF files that the cache has."""
    folder = _download(repository, options, name=name, patterns=[NOTHING])
    return [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}")]


def _download(
    repository: str,
    options: dict[str, Any],
    *,
    name: str | None = None,
    patterns: Sequence[str] | None = None,
) -> Path:
    """Fetch a repository's files.

    Args:
        name: of the model, for messages.
        patterns: of the files; None: those of a model folder.
    """
    from huggingface_hub import snapshot_download

    ignored = IGNORED if patterns is None else None
    allowed = list(ALLOWED if patterns is None else patterns)
    fetch = partial(snapshot_download, repository, allow_patterns=allowed, ignore_patterns=ignored)
    with _refused(name or repository, options), _without_warnings():
        if not _is_offline(options) and not _is_kept(fetch, options):
            told_at_start(f"downloading {name or repository} from the hub")
        return Path(fetch(tqdm_class=bar_class(), **options))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What the hub's library warns of, such as patterns that match nothing, is told by errors."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_offline(options: Mapping[str, Any]) -> bool:
    from huggingface_hub import constants

    return bool(options["local_files_only"] or constants.HF_HUB_OFFLINE)


def _is_kept(fetch: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether the cache has a snapshot with these files, newest or not."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        fetch(**{**options, "local_files_only": True})
    except LocalEntryNotFoundError:
        return False
    return True


@contextmanager
def _refused(name: str, options: dict[str, Any]) -> Iterator[None]:
    """Turn what the hub's library raises into one sentence that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        why = "is neither a folder nor a hub id such as 'owner/name'; check the spelling"
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except GatedRepoError as error:
        why = (
            "is gated; accept its terms on its hub page and set HF_TOKEN to a token of that account"
        )
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except RepositoryNotFoundError as error:
        why = "is not on the hub, or is private; check the name, or set HF_TOKEN to allow access"
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except RevisionNotFoundError as error:
        why = f"has no revision '{options['revision']}'; give a branch, tag or commit that exists"
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except LocalEntryNotFoundError as error:
        if _is_offline(options):
            why = "is not in the local cache and offline mode is on; download it once while online"
        else:
            why = "is not cached and the hub cannot be reached; check the network or give a folder"
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except Exception as error:  # the HTTP client behind the hub library differs by version
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(
            f"model '{name}' could not be downloaded: {message[0]}; try again or give a folder"
        ) from error
