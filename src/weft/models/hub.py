"""Finds the folder of a model: on disk, in the package, or on the Hugging Face hub. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.errors import ModelNotFoundError

BUILTIN = "builtin"
SUFFIX = ".gguf"
ALLOWED = ["*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.jinja"]
# Other formats beside the one that is read; folders with a number are sentence-transformers'.
IGNORED = ["[!0-9]*/*", "consolidated*"]


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
    exists) is never sent to the hub. ``builtin`` is the model that ships with weft.

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
    return _with_config(_download(name, options), name)


def local_source(name: str) -> Path | None:
    """The folder or GGUF file of a model that is not on the hub, if there is one; else None."""
    if name == BUILTIN:
        import importlib.resources  # takes longer than all else here

        return Path(str(importlib.resources.files("weft") / BUILTIN))
    return Path(name).expanduser() if _is_path(name) else None


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _existing(folder: Path, name: str) -> Path:
    if folder.is_file() and folder.suffix != SUFFIX:
        raise ModelNotFoundError(
            f"model '{name}' is a file; give the folder that holds config.json, or a .gguf file"
        )
    if folder.is_file():
        return folder
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


def _download(name: str, options: dict[str, Any]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(name, allow_patterns=ALLOWED, ignore_patterns=IGNORED, **options)
        return Path(found)
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
        if options["local_files_only"] or constants.HF_HUB_OFFLINE:
            why = "is not in the local cache and offline mode is on; download it once while online"
        else:
            why = "is not cached and the hub cannot be reached; check the network or give a folder"
        raise ModelNotFoundError(f"model '{name}' {why}") from error
    except Exception as error:  # the HTTP client behind the hub library differs by version
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(
            f"model '{name}' could not be downloaded: {message[0]}; try again or give a folder"
        ) from error
