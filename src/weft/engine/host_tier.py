"""The host tier of an engine: the memory of its KV, and the worker that attends there."""

from __future__ import annotations

from collections.abc import Callable

from weft.attend.link import PlaceAccess
from weft.core.addresses import leads_to_loopback, parse_address
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.resolved import ResolvedConfig
from weft.core.sealed import read_key
from weft.core.topology import this_machine
from weft.engine.threads import plan_threads
from weft.exec.host_attention import HostAttention, WorkerThreads, shared_store
from weft.exec.input_batch import InputBatch
from weft.exec.places import link_places
from weft.exec.store import KVStore
from weft.exec.tiers import HostTier
from weft.kernels.cpu.blocks import copy_blocks
from weft.kv.pool import fullest
from weft.kv.tiers import TieredCache
from weft.models.decoder import Decoder


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
        host = store.like(resolved.host_blocks)
        if store.states is not None:
            host.states = store.states.like(resolved.host_slots)
        return HostTier(store, host, copy_blocks)
    threads = _worker_threads(config, decoder.ops.ranks.rank)
    accesses = _accesses(config)
    if config.host_process:
        host, memory = shared_store(store, resolved.host_blocks)
        attention = HostAttention(decoder, host, table, threads, memory)
    else:
        host = store.like(resolved.host_blocks)
        attention = HostAttention(decoder, host, table, threads)
    if accesses:
        attention.places = link_places(accesses, decoder, store, table, attention.mailbox)
    return HostTier(store, host, copy_blocks, attention, overlaps=config.overlaps)


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


def _accesses(config: EngineConfig) -> list[PlaceAccess]:
    """How remote places are reached.

    Raises:
        ConfigError: the key cannot be read, or lacks where it is needed.
    """
    key = read_key(config.attend_key_file)
    for address in () if key else config.attend:
        if not leads_to_loopback(parse_address(address)[0]):
            raise ConfigError(
                f"Place {address} is on another machine, so it must prove that it knows a key; "
                "name one with attend_key_file.",
                param="attend_key_file",
            )
    return [PlaceAccess(address, key, config.attend_timeout_s) for address in config.attend]


def counted(attention: HostAttention, tiers: TieredCache) -> dict[str, int]:
    """What a host worker and remote places have done, as the info page has it."""
    counters = attention.mailbox.counters()
    return {
        "host_queue": attention.mailbox.waiting,
        "host_calls": counters.calls,
        "host_jobs": counters.jobs,
        "host_busy_us": counters.busy_ns // 1000,
        "host_round_trip_us": counters.round_trip_ns // 1000,
        "host_restarts": attention.restarts,
        **_counted_places(attention, tiers),
    }


def _counted_places(attention: HostAttention, tiers: TieredCache) -> dict[str, int]:
    found: dict[str, int] = {}
    pools = {pool.session.place: pool.cache.pools for pool in tiers.hosts.connected()}
    for index, link in enumerate(() if attention.places is None else attention.places.links):
        status = link.status()
        found[f"place_up_{index}"] = int(bool(status.blocks))
        if index + 1 in pools:
            pool = fullest(pools[index + 1])
            found[f"place_blocks_{index}"] = pool.num_blocks
            found[f"place_free_blocks_{index}"] = pool.available
        found[f"place_jobs_{index}"] = link.jobs
        found[f"place_round_trip_us_{index}"] = link.round_trip_ns // 1000
        found[f"place_sent_bytes_{index}"] = link.sent_bytes
        found[f"place_sessions_{index}"] = status.session
    return found
