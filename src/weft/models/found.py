"""Models that lie on this machine already: of Ollama, of LM Studio, and of the hub's cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import WeftError
from weft.models.hub import OTHER_PARTS
from weft.models.weight_files import SUFFIX, is_later_part, weight_files

OLLAMA_WEIGHTS = "application/vnd.ollama.image.model"  # the media type of a manifest's GGUF file
MOST_MANIFEST_BYTES = 2**20
LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
OLLAMA_SYSTEM = Path("/usr/share/ollama/.ollama/models")  # of the service that its installer makes


@dataclass(frozen=True)
class FoundModel:
    """A model folder or GGUF file.

    Attributes:
        store: whose folder it lies in: ``Ollama``, ``LM Studio`` or ``hub``.
        name: as that store calls it.
        path: what ``weft serve`` takes.
    """

    store: str
    name: str
    path: Path

    @property
    def nbytes(self) -> int:
        """Bytes of its weights; 0 if they cannot be found."""
        try:
            return sum(file.stat().st_size for file in weight_files(self.path))
        except (OSError, WeftError):
            return 0

    def problem(self) -> str:
        """Why weft does not serve it; empty if its config is one that weft runs."""
        from weft.models.spec_reader import read_spec  # knows all families; often nothing is found

        try:
            read_spec(self.path)
        except (OSError, WeftError) as error:
            return error.message if isinstance(error, WeftError) else str(error)
        return ""


def found_models(home: Path, environment: Mapping[str, str]) -> list[FoundModel]:
    """Return all models in the folders of Ollama and LM Studio and in the hub's cache.

    Args:
        home: the home folder of the user.
        environment: of the process: ``OLLAMA_MODELS``, ``HF_HUB_CACHE``, ``HF_HOME`` move folders.
    """
    moved = environment.get("OLLAMA_MODELS")
    roots = [Path(moved)] if moved else [home / ".ollama/models", OLLAMA_SYSTEM]
    hub = environment.get("HF_HUB_CACHE") or Path(
        environment.get("HF_HOME") or home / ".cache/huggingface", "hub"
    )
    found = [model for root in roots for model in ollama_models(root)]
    found += [model for place in LM_STUDIO for model in _lm_studio_models(home / place)]
    return found + list(_hub_models(Path(hub)))


def ollama_models(root: Path) -> Iterator[FoundModel]:
    """Yield the models of an Ollama folder, whose manifests name files by their SHA-256."""
    library = root / "manifests"
    for manifest in _files(library):
        digest = _weights_of(manifest)
        if digest is None:
            continue
        blob = root / "blobs" / digest.replace(":", "-")
        if blob.is_file():
            *_, owner, name = manifest.parent.relative_to(library).parts or ("",)
            whole = name if owner in ("library", name) else f"{owner}/{name}"
            yield FoundModel("Ollama", f"{whole}:{manifest.name}", blob)


def _weights_of(manifest: Path) -> str | None:
    """The digest of a manifest's one GGUF file; None if it is no manifest of a model."""
    try:
        if manifest.stat().st_size > MOST_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [one["digest"] for one in layers if one["mediaType"] == OLLAMA_WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    good = len(digests) == 1 and isinstance(digests[0], str) and os.sep not in digests[0]
    return digests[0] if good else None


def _lm_studio_models(root: Path) -> Iterator[FoundModel]:
    for path in _files(root):
        whole = path.suffix == SUFFIX and not is_later_part(path.name)
        if whole and not OTHER_PARTS.search(path.name):
            yield FoundModel("LM Studio", path.relative_to(root).as_posix(), path)


def _hub_models(cache: Path) -> Iterator[FoundModel]:
    """Yield the newest snapshot of each repository with a model, or each GGUF file of it."""
    for repository in sorted(cache.glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        snapshots = sorted(repository.glob("snapshots/*"), key=lambda one: one.stat().st_mtime)
        for snapshot in snapshots[-1:]:
            if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
                yield FoundModel("hub", name, snapshot)
            for one in _lm_studio_models(snapshot):
                yield FoundModel("hub", f"{name}/{one.name}", one.path)


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder in order; none of a folder that cannot be read."""
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except OSError:
        return []
