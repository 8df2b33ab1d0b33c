"""Weights of a model from the cache of packed files, or from its checkpoint and then kept there."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from weft import __version__
from weft.kernels.interface import PackedMatrices
from weft.models.packed_cache import PackedCache, PackedKey, identity_of
from weft.models.packed_writer import PackedWriter
from weft.models.parameter import Parameter
from weft.models.shard import Shard

logger = logging.getLogger("weft")

PACKING = 2  # raised by whoever packs other weights of the same checkpoint
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


class KeptWeights:
    """Finds the packed weights of one model, and keeps those that were not found.

    Args:
        settings: all that packed bytes depend on beside the checkpoint and the kernels.
        patience_s: with another process that writes the file just now.

    Attributes:
        state: ``mapped`` if the weights were found, ``packed`` if they were not and are to be kept:
            ``write`` begins with that.
    """

    def __init__(
        self,
        cache: PackedCache,
        settings: Mapping[str, str],
        *,
        verify: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        self._cache, self._verify, self._patience_s = cache, verify, patience_s
        self._settings = dict(settings)
        self._key: PackedKey | None = None
        self.state = ""
        self._writer: PackedWriter | None = None

    def find(
        self,
        source: Path,
        files: Sequence[Path],
        parameters: Sequence[Parameter],
        shard: Shard,
        dtype: str,
        matrices: PackedMatrices,
        stage: str = "",
    ) -> dict[str, Any] | None:
        """Return the mapped weights, or None.

        Args:
            files: of the checkpoint; neither they nor their headers are read.
            parameters: of the part of the model that is wanted, which ``shard`` is.
            stage: the layers of which it is a part, if not of all.
        """
        self._source, self._files = source.resolve(), tuple(files)
        part = f"rank {shard.rank} of {shard.size}{stage}"
        self._settings |= {
            "dtype": dtype,
            "part": part,
            "kernels": matrices.layout(),
            "weft": f"{__version__} packing {PACKING}",
        }
        self._key = key = self._current()
        self._cache.wait(key, self._patience_s)
        found = self._cache.find(key, matrices.mapped, verify=self._verify)
        if found is None:
            return None
        wanted = {parameter.name: tuple(parameter.shape) for parameter in parameters}
        if {name: _shape(weight) for name, weight in found.items()} != wanted:
            logger.warning("The packed weights of %s are not those of its config.json.", source)
            self._cache.drop(key)
            return None
        self.state = "mapped"
        return found

    def keep(self, weights: Mapping[str, Any]) -> None:
        """Prepare to write weights that were not found.

        Nothing is kept of kernels whose weights were not looked for.
        """
        if self._key is not None:
            self.state = "packed"
            self._writer = PackedWriter(self._cache, self._key, weights, self._current)

    def write(self) -> None:
        """Begin to write weights that are to be kept, beside an engine that serves."""
        if self._writer is not None:
            self._writer.start()

    def make_way(self) -> None:
        """The engine computes: write slowly for a moment."""
        if self._writer is not None:
            self._writer.make_way()

    def join(self, timeout_s: float) -> bool:
        """Wait until all is written or given up; whether that was so in time."""
        return self._writer is None or self._writer.join(timeout_s)

    def stop(self) -> None:
        """Give up what is not written yet."""
        if self._writer is not None:
            self._writer.stop()

    def _current(self) -> PackedKey:
        return PackedKey(
            self._source, checkpoint_identity(self._source, self._files), self._settings
        )


def checkpoint_identity(source: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Return what changes where a checkpoint does, without reading its weights.

    Args:
        source: a model folder, or a GGUF file.
        files: of its weights.
    """
    described_by = [source / CONFIG, source / INDEX] if source.is_dir() else []
    return identity_of(files, described_by)


def checkpoint_digest(source: Path, files: Sequence[Path]) -> str:
    """Return the same in a few characters; see ``checkpoint_identity``."""
    text = json.dumps(checkpoint_identity(source, files), sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _shape(weight: Any) -> tuple[int, ...]:
    if isinstance(weight, tuple):
        return (len(weight), *_shape(weight[0]))
    return tuple(weight.shape)
