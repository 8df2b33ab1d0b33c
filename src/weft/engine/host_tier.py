"""The host tier of an engine: the memory of its KV, and the worker that attends there."""

from __future__ import annotations

from collections.abc import Callable

from weft.core.config import EngineConfig, ResolvedConfig
from weft.core.errors import ConfigError
from weft.core.schedulers import SCHEDULERS
from weft.core.topology import this_machine
from weft.engine.threads import plan_threads
from weft.exec.host_attention import HostAttention, WorkerThreads, shared_store
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier
from weft.kernels.cpu.blocks import copy_blocks
from weft.kernels.interface import OpTable
from weft.kernels.lanes import MOST_ROWS
from weft.models.decoder import Decoder
from weft.models.spec import ModelSpec


def check_attends_on_host(config: EngineConfig, spec: ModelSpec, ops: OpTable) -> None:
    """Check that the host can attend to rows of a model, if it is to.

    Raises:
        ConfigError: it cannot.
    """
    if not config.attends_on_host:
        return
    kernel = ops.describe()["paged_attention"]
    if config.piggybacks and not spec.rows_exchangeable:
        why = "its per-layer inputs belong to the step in which a token begins"
    elif kernel == "triton" and not config.piggybacks:
        why = "steps of a GPU have no overlapped sub-batches yet"
    elif kernel == "triton" and config.tensor_parallel > 1:
        why = "lanes of captured steps do not agree over ranks yet"
    elif kernel == "triton" and config.host_process:
        why = "memory that a process attends in is not pinned for a GPU yet; turn host_process off"
    elif kernel == "triton" and config.max_num_seqs > MOST_ROWS:
        why = f"steps of a GPU look through {MOST_ROWS} sequences; lower max_num_seqs"
    elif kernel not in ("cpu", "triton"):
        why = f"its attention is computed by kernels {kernel}, that of the host by kernels cpu"
    else:
        return
    raise ConfigError(
        f"Scheduler {config.scheduler} cannot serve this model here: {why}. Choose scheduler "
        f"{SCHEDULERS[config.scheduler].policy}.",
        param="scheduler",
    )


def cpu_tier(
    config: EngineConfig,
    resolved: ResolvedConfig,
    decoder: Decoder,
    store: KVStore,
    table: InputBatch,
) -> HostTier | None:
    """Return the host tier beside a store on a CPU; None where there is none.

    Raises:
        ConfigError: there is no memory for it that processes can share.
        HostWorkerError: the worker cannot be started.
    """
    if not resolved.host_blocks:
        return None
    if not config.attends_on_host:
        return HostTier(store, store.like(resolved.host_blocks), copy_blocks)
    threads = _worker_threads(config, decoder.ops.ranks.rank)
    if config.host_process:
        host, memory = shared_store(store, resolved.host_blocks)
        attention = HostAttention(decoder, host, table, threads, memory)
    else:
        host = store.like(resolved.host_blocks)
        attention = HostAttention(decoder, host, table, threads)
    return HostTier(store, host, copy_blocks, attention, overlaps=not config.piggybacks)


def device_attention(
    config: EngineConfig, decoder: Decoder, table: InputBatch
) -> Callable[[KVStore], HostAttention] | None:
    """Return what starts the worker that attends beside a GPU; None where nobody does."""
    if not config.attends_on_host:
        return None
    threads = _worker_threads(config, decoder.ops.ranks.rank)
    return lambda host: HostAttention(decoder, host, table, threads)


def _worker_threads(config: EngineConfig, rank: int) -> WorkerThreads:
    plan = plan_threads(config, this_machine(), rank)
    return WorkerThreads(plan.host, plan.host_cpus)


def describe_host_attention(config: EngineConfig) -> str:
    """Who attends on the host, as a sentence; empty if nobody does."""
    if not config.attends_on_host:
        return ""
    count = config.num_host_threads
    threads = f"{count} thread{'' if count == 1 else 's'}"
    where = "process weft-host" if config.host_process else "the engine's process"
    if config.tensor_parallel > 1:
        where = "a process weft-host of each rank" if config.host_process else "each rank's process"
    who = "best effort that gives way decodes" if config.piggybacks else "what gives way decodes"
    return f"{who} on the host: {threads} of {where} attend{'s' if count == 1 else ''} there"


def counted(attention: HostAttention) -> dict[str, int]:
    """What a host worker has done, as the info page has it."""
    counters = attention.mailbox.counters()
    return {
        "host_queue": attention.mailbox.waiting,
        "host_calls": counters.calls,
        "host_jobs": counters.jobs,
        "host_busy_us": counters.busy_ns // 1000,
        "host_round_trip_us": counters.round_trip_ns // 1000,
        "host_restarts": attention.restarts,
    }
