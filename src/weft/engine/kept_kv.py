"""KV on a CPU that the next engine of a server finds where the one before it was killed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from weft.core.config import EngineConfig
from weft.core.kv_types import cache_dtype
from weft.core.logs import notice
from weft.core.placement import interleave
from weft.core.resolved import ResolvedConfig
from weft.engine.devices import is_cpu
from weft.engine.kv_file import HEADER_BYTES, IDENTITY_BYTES, fits, make_fit
from weft.engine.model import Model
from weft.engine.prefix_disk import kv_identity
from weft.exec.memory import Arena, map_file
from weft.exec.store import tensor_shapes
from weft.kernels.arrays import address, numpy_dtype
from weft.kv.cache import KVCache
from weft.kv.record import BlockRecord


@dataclass(frozen=True)
class KVFile:
    """The file for KV that the supervisor gives.

    Attributes:
        fd: see ``engine.kv_file``.
        in_use: another engine uses it at present.
    """

    fd: int
    in_use: bool


@dataclass(frozen=True)
class KeptKV:
    """Memory for KV in such a file, with the records of its blocks.

    Attributes:
        arena: for the KV.
    """

    arena: Arena
    records: Sequence[BlockRecord]

    def adopt(self, cache: KVCache) -> None:
        """Find in a new cache what the engine before this one has left, which must be dead."""
        if found := cache.keep(self.records):
            notice(f"{found} blocks of KV are kept from the engine before")


def map_kept_kv(
    file: KVFile | None,
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: Model,
    nodes: Sequence[int] = (),
) -> KeptKV | None:
    """Map the file for the KV of an engine.

    None where KV does not outlive engines: on a GPU, with several ranks, without a prefix cache, by
    which it is found, with the reference kernels, with recurrent layers, and where another engine
    uses the file for other KV.

    Args:
        nodes: NUMA nodes on which the pages lie in turns.

    Raises:
        OSError: there is not so much memory.
    """
    on_numpy = is_cpu(model.device) and model.ops.describe()["paged_attention"] == "cpu"
    kept = config.prefix_caching and not resolved.state_slots
    if file is None or not kept or not on_numpy or config.processes > 1:
        return None
    dtype = cache_dtype(config.kv_name(model.dtype))
    item = numpy_dtype(dtype).itemsize
    shapes = tensor_shapes(
        model.rank_spec.kv_groups, resolved.group_blocks, resolved.block_size, dtype
    )
    record_sizes = [BlockRecord.nbytes(blocks) for blocks in resolved.group_blocks]
    first = HEADER_BYTES + Arena.room(record_sizes)
    size = first + Arena.room([item * math.prod(shape) for shape in shapes])
    text = f"{kv_identity(config, resolved, model).hex()} {resolved.group_blocks}"
    identity = blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()
    if not file.in_use:
        make_fit(file.fd, identity, size)
    elif not fits(file.fd, identity, size):
        return None
    memory = map_file(file.fd, size)
    interleave(address(memory), size, nodes)
    place = Arena(memory[HEADER_BYTES:first])
    records = [
        BlockRecord(place((nbytes,), "uint8").data, blocks)
        for nbytes, blocks in zip(record_sizes, resolved.group_blocks, strict=True)
    ]
    return KeptKV(Arena(memory[first:]), records)
