"""The prefix cache on disk of an engine: what its blocks depend on, and when they are saved."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from hashlib import blake2b
from pathlib import Path

from weft import __version__
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.resolved import ResolvedConfig
from weft.core.settings import format_bytes
from weft.engine.devices import is_cpu
from weft.engine.model import Model
from weft.exec.disk_blocks import DiskBlocks
from weft.kv.block_files import IDENTITY_BYTES, BlockFiles, file_bytes
from weft.kv.disk_cache import WRITING_BYTES, DiskCache
from weft.kv.lower_prefixes import LowerPrefixes
from weft.models.kept_weights import checkpoint_identity
from weft.models.spec_reader import read_spec
from weft.models.weight_files import weight_files

CLOSE_S = 2.0  # at most, to save prefixes at the end
RETRY_S = 0.005
STATES_WRITING = 4  # recurrent states, of tens of MiB each, that may wait to be written


def open_prefix_disk(
    config: EngineConfig, resolved: ResolvedConfig, model: Model
) -> DiskCache | None:
    """The prefix cache on disk, if a folder for it is set.

    Raises:
        ConfigError: the folder cannot be written, its size holds no block, or other settings
            exclude it.
    """
    if config.kv_disk is None:
        return None
    if not is_cpu(model.device):
        raise ConfigError(
            "kv_disk is for device cpu at present; leave it out on a GPU.", param="kv_disk"
        )
    sizes = [group.bytes_per_token * resolved.block_size for group in model.facts.groups]
    sizes += [model.facts.state_bytes] * bool(model.facts.state_bytes)
    if (most := file_bytes(max(sizes))) > config.kv_disk_size:
        raise ConfigError(
            f"kv_disk_size is {format_bytes(config.kv_disk_size)}, but a block of this model takes "
            f"{format_bytes(most)}; set it higher.",
            param="kv_disk_size",
        )
    files = BlockFiles(
        Path(config.kv_disk), config.kv_disk_size, kv_identity(config, resolved, model)
    )
    return DiskCache(files, sizes, writing_bytes=max(WRITING_BYTES, STATES_WRITING * max(sizes)))


def kv_identity(config: EngineConfig, resolved: ResolvedConfig, model: Model) -> bytes:
    """A digest of all that the KV of given tokens depends on."""
    parts = {
        "weft": __version__,
        "checkpoint": checkpoint_identity(model.source, weight_files(model.source)),
        "spec": repr(read_spec(model.source, resolved.max_model_len)),
        "dtype": model.dtype,
        "kv": config.kv_name(model.dtype),
        "quantize": [config.quantize, config.quantize_group],
        "block_size": resolved.block_size,
        "kernels": [model.ops.describe(), model.ops.isa],
    }
    text = json.dumps(parts, sort_keys=True)
    return blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


class PrefixSaver:
    """Saves cached prefixes of an engine at rest."""

    def __init__(self, prefixes: LowerPrefixes, disk: DiskCache, blocks: DiskBlocks) -> None:
        self._prefixes, self._disk, self._blocks = prefixes, disk, blocks

    def save(self) -> Generator[None, None, bool]:
        """Save what is not on disk, block by block; return whether all is saved, or cannot be."""
        self._blocks.save(self._prefixes.take_saves())  # of a step that was not launched
        return (yield from self._prefixes.save_cached(self._blocks.save))

    def close(self) -> None:
        """Save what is possible in a short time, and end."""
        end = time.monotonic() + CLOSE_S
        while not self._save_until(end) and time.monotonic() < end:
            time.sleep(RETRY_S)  # until something is written
        self._disk.close(max(0.0, end - time.monotonic()))

    def _save_until(self, end: float) -> bool:
        """Save block by block; return whether all is saved, cannot be, or the time is up."""
        pieces = self.save()
        while time.monotonic() < end:
            try:
                next(pieces)
            except StopIteration as ended:
                return bool(ended.value)
        return True
