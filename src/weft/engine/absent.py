"""The launches of an engine that captures its steps, found without its GPU or its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from weft.core.config import EngineConfig
from weft.core.kv_types import cache_dtype
from weft.core.resolved import ResolvedConfig
from weft.engine.executors import make_executor
from weft.engine.model import ABSENT, find_model, resolve_settings
from weft.exec.input_batch import InputBatch
from weft.exec.states import StateStore
from weft.exec.store import KVStore
from weft.kernels.arrays import Array
from weft.kernels.gpus import Gpu
from weft.models.empty import empty_model
from weft.models.layout import storage_of

if TYPE_CHECKING:
    from weft.exec.graphs import GraphExecutor
    from weft.kernels.triton.launches import Launches


@dataclass
class _AbsentRanks:
    """Stands for the other ranks: sums and gathers have their shapes, and no numbers."""

    rank: int
    size: int

    def sum(self, x: Array) -> Array:
        return x

    def gather(self, x: Array) -> Array:
        import torch

        return torch.cat([x] * self.size, 1)

    def splits(self, x: Array) -> bool:
        """No: kernels are the same for the rows of one rank."""
        del x
        return False

    def sum_rows(self, x: Array) -> Array:
        return x[: len(x) // self.size]

    def gather_rows(self, x: Array) -> Array:
        import torch

        return torch.cat([x] * self.size)

    def own(self, x: Array) -> Array:
        return x

    def enter(self, x: Array) -> Array:
        return x


def capture_absent(
    config: EngineConfig, gpu: Gpu, resolved: ResolvedConfig | None = None, rank: int = 0
) -> tuple[GraphExecutor, Launches]:
    """Prepare captured steps on a GPU that is absent; return them and what was launched.

    For a process that does nothing else: it launches nothing afterwards.

    Args:
        config: in it, ``device`` has no meaning.
        resolved: as the engine has it; None: as the memory of the GPU allows.

    Raises:
        WeftError: as ``build_engine``.
    """
    from weft.kernels.triton.launches import note_launches

    launches = note_launches(gpu)
    # Nobody attends on the host, so threads at rest stand for who would.
    config = replace(config, host_process=False, attend=(), attend_key_file=None, cpu_pinning="off")
    if resolved is None:
        model, resolved = resolve_settings(config, absent=gpu)
    else:
        model = find_model(replace(config, max_model_len=resolved.max_model_len), absent=gpu)
    ops = model.ops
    if config.tensor_parallel > 1:
        ops = replace(ops, ranks=_AbsentRanks(rank, config.tensor_parallel))
    decoder = empty_model(
        model.source,
        model.dtype,
        resolved.max_model_len,
        ops,
        partial(storage_of, quantize=config.quantize, group=config.quantize_group),
    )
    groups = model.rank_spec.kv_groups
    from weft.exec.device import tensor_memory

    # Kernels do not ask how many blocks the host has, and its memory is real.
    resolved = replace(resolved, host_blocks=tuple(1 for _ in resolved.host_blocks))
    kv_dtype = cache_dtype(config.kv_name(model.dtype))
    store = KVStore(
        groups, resolved.group_blocks, resolved.block_size, kv_dtype, tensor_memory(ABSENT)
    )
    if model.rank_spec.states is not None:
        memory = tensor_memory(ABSENT)
        store.states = StateStore(model.rank_spec, resolved.state_slots, memory)
    blocks = -(-resolved.max_model_len // resolved.block_size)
    table = InputBatch(resolved.max_num_seqs, resolved.max_model_len, [blocks] * len(groups))
    executor = make_executor(config, resolved, decoder, store, table)
    return executor, launches  # type: ignore[return-value]
