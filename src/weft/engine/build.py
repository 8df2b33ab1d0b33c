"""Builds an engine from its settings; no other module does."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.core.config import EngineConfig
from weft.core.grammar import grammar_tokenizer
from weft.core.kv_types import cache_dtype
from weft.core.logs import notice
from weft.core.ports import Executor
from weft.core.resolved import ResolvedConfig
from weft.core.schedulers import SCHEDULERS, scheduler_name
from weft.core.settings import format_bytes
from weft.core.starting import told_at_start
from weft.core.topology import this_machine
from weft.core.types import Request
from weft.cost.fit import Fitted
from weft.engine.channel import Task
from weft.engine.costs import describe_host_costs, measured_costs
from weft.engine.devices import (
    Stopwatch,
    allocating,
    device_name,
    is_cpu,
    pick_device,
    pipelined_steps,
)
from weft.engine.executors import describe_executor, kv_memory, make_executor, may_lease
from weft.engine.halves import choose_halves
from weft.engine.host_experts import kept_settings, predicted_lines
from weft.engine.host_tier import counted
from weft.engine.idle import IdleMemory
from weft.engine.images import ImageEncoder, load_encoder
from weft.engine.kept_kv import KeptKV, KVFile, map_kept_kv
from weft.engine.model import (
    Model,
    check_host_memory,
    find_model,
    resolve_settings,
)
from weft.engine.prefix_disk import PrefixSaver, open_prefix_disk
from weft.engine.rank_leader import ParallelExecutor, build_parallel
from weft.engine.rank_meeting import Ways, meet
from weft.engine.rank_role import Role, role_of
from weft.engine.self_profile import choose_policy as choose_policy
from weft.engine.threads import ThreadPlan, plan_threads
from weft.exec.eager import EagerExecutor
from weft.exec.grammar import GrammarRows, Grammars
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.states import StateStore
from weft.exec.store import KVStore
from weft.kernels.cpu.host import HostMailbox
from weft.kv.cache import GroupSpec
from weft.kv.disk_cache import DiskCache
from weft.kv.tiers import TieredCache
from weft.models.kept_weights import KeptWeights
from weft.models.layout import storage_of
from weft.models.loader import load_model
from weft.models.packed_cache import PackedCache
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources, TargetPolicy
from weft.sched.scheduler import Limits, Scheduler
from weft.sched.targets import TargetSettings

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("weft")

# What to do where there is no memory for a part of an engine.
LEASE_STEPS = 64  # that blocks are taken for beforehand; 0.1 s ends most leases before
FOR_WEIGHTS = (
    "set quantize, or cut the model over more GPUs with tensor_parallel or pipeline_parallel"
)
FOR_KV = "set kv_memory to less"
FOR_STEPS = "lower max_num_seqs, max_num_batched_tokens or kv_memory"


@dataclass
class Engine:
    """A loaded model with its scheduler and executor.

    Attributes:
        resources: what the scheduler is made of, but for costs and derived targets.
        idle_memory: gives the memory of the KV back; None where this process does not have it.
        kept: keeps the weights for later starts; None where it does not.
        start_s: seconds of each part of the start, and of all under ``ready``.
        started: the same in words.
        saver: saves cached prefixes to disk; None without a disk.
        host_costs: which costs of the host tier are planned with; empty if none are.
        kept_kv: the memory of KV that outlives this engine; None where it does not.
        halves: whether steps are computed in halves and why; empty if nobody asks.
        images: encodes the images of requests; None where none are read.
    """

    model: Model
    resolved: ResolvedConfig
    resources: Resources
    scheduler: Scheduler
    executor: Executor
    grammars: Grammars
    idle_memory: IdleMemory | None
    kept: KeptWeights | None
    start_s: Mapping[str, float]
    started: str = ""
    saver: PrefixSaver | None = None
    host_costs: str = ""
    kept_kv: KeptKV | None = None
    halves: str = ""
    images: ImageEncoder | None = None
    started_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def encode(self) -> Callable[[Request], Future[Request]] | None:
        """What encodes the images of a request; None where none are read."""
        return None if self.images is None else self.images.encode

    def keep_weights(self) -> None:
        """Begin to write weights that were packed and not found in the cache."""
        if self.kept is not None:
            self.kept.write()

    def writes_weights(self) -> bool:
        """Whether weights that are to be kept are still being written."""
        return self.kept is not None and not self.kept.join(0)

    def adopt_kv(self) -> None:
        """Find the KV of the engine before this one, which must be dead, and leave one's own."""
        if self.kept_kv is not None:
            self.kept_kv.adopt(self.scheduler.cache)

    def start_disk(self, arrived: Callable[[], None]) -> None:
        """Use the prefix cache on disk from now on, if there is one.

        Args:
            arrived: ends a wait for requests, on any thread.
        """
        if self.resources.disk is not None:
            self.resources.disk.start(arrived)

    def start_places(self) -> None:
        """Connect to remote places: not before, as each serves one engine, and no standby."""
        tier = self.executor.tier if isinstance(self.executor, EagerExecutor) else None
        if tier is not None and tier.attention is not None and tier.attention.places is not None:
            tier.attention.places.start()

    def has_unsaved_prefixes(self) -> bool:
        """Whether cached prefixes are to be saved to disk before blocks are used for else."""
        return self.idle_memory is not None and not self.idle_memory.saved

    def save_prefixes(self) -> None:
        """Save cached prefixes to disk at the end, with nothing in flight."""
        if self.saver is not None:
            self.saver.close()

    def close(self) -> None:
        """End the executor, and give up what is not written yet."""
        if self.kept is not None:
            self.kept.stop()
        if self.images is not None:
            self.images.close()
        self.executor.close()

    @property
    def _attention(self) -> HostAttention | None:
        executor = self.executor
        executor = executor.inner if isinstance(executor, ParallelExecutor) else executor
        tier = getattr(executor, "tier", None)
        return None if tier is None else tier.attention

    @property
    def mailbox(self) -> HostMailbox | None:
        """Of the worker that attends on the host; None where nobody does."""
        return None if self._attention is None else self._attention.mailbox

    def host_attention(self) -> dict[str, int]:
        """What the info page says of attention on the host: of rank 0, if there are several."""
        kv = self.scheduler.memory.kv
        if self._attention is None or not isinstance(kv, TieredCache):
            return {}
        return counted(self._attention, kv)

    def rest(self) -> bool:
        """Use a moment without work; whether there is more to do at once."""
        if self.idle_memory is None or not self.scheduler.idle:
            return False
        kv = self.scheduler.memory.kv
        host = kv.host.pools if isinstance(kv, TieredCache) else ()
        return self.idle_memory.idle(self.scheduler.cache.pools, host)

    @property
    def settled(self) -> bool:
        """Whether nothing is to be looked at soon, unless a request comes."""
        watches_ranks = isinstance(self.executor, ParallelExecutor)
        resting = self.idle_memory is None or self.idle_memory.settled
        return self.scheduler.idle and resting and not watches_ranks and not self.writes_weights()

    def worked(self) -> None:
        """Steps have been computed."""
        if self.idle_memory is not None:
            self.idle_memory.busy()
        if self.kept is not None:
            self.kept.make_way()

    def measured(self) -> None:
        """Steps have been computed that leave no prefixes."""
        if self.idle_memory is not None:
            self.idle_memory.wrote()

    def check_ranks(self) -> None:
        """Raise EngineDeadError if another rank of a model that is cut has ended."""
        if isinstance(self.executor, ParallelExecutor):
            self.executor.check()


def build_engine(
    config: EngineConfig,
    returning_bytes: int = 0,
    patience_s: float = 0.0,
    *,
    kv_file: KVFile | None = None,
    unprofiled: bool = False,
) -> Engine:
    """Load the model and put scheduler and executor around it.

    Args:
        returning_bytes: memory that another engine gives back before this one is used.
        patience_s: with another engine that writes the packed weights just now.
        kv_file: for KV that is to outlive the engine.
        unprofiled: schedule as FCFS, whatever is set, as there are no costs yet.

    Raises:
        WeftError: a typed error for everything that can be wrong with settings, model or memory.
    """
    watch = Stopwatch()
    model, resolved = resolve_settings(config, returning_bytes)
    halves = choose_halves(config, model)
    if halves.rule is not None:
        model, resolved = resolve_settings(config, returning_bytes, halves=True)
        resolved = halves.applied(resolved)
    check_host_memory(config, model, resolved)
    size = format_bytes(model.facts.weight_bytes)
    told_at_start(f"loading {config.model} in {model.dtype}: {size} of weights")
    for line in predicted_lines(config, model, device_name(model.device)):
        notice(line)
    if resolved.limited_by_memory:
        logger.warning(
            "The KV memory holds %d tokens, so max_model_len is %d instead of the model's %d; "
            "raise kv_memory for more.",
            resolved.max_model_len,
            resolved.max_model_len,
            model.spec.max_position_embeddings,
        )
    for key in model.generation.unhonoured:
        logger.warning("generation_config.json sets '%s', which weft does not apply.", key)
    disk = open_prefix_disk(config, resolved, model)
    resources = replace(_resources(config, resolved, model), disk=disk, halves=halves.rule)
    name = "fcfs" if unprofiled or config.scheduler == "auto" else config.scheduler
    cost = measured_costs(config, model) if SCHEDULERS[name].needs_cost else None
    scheduler = _scheduler(config, name, resources, cost)
    grammars = Grammars(lambda: _grammar_tokenizer(config, model))
    rows = GrammarRows(grammars)
    threads = plan_threads(config, this_machine())
    kept = _kept_weights(config, model, threads, patience_s)
    with allocating(f"KV ({format_bytes(resolved.kv_bytes)})", FOR_KV):
        kept_kv = map_kept_kv(kv_file, config, resolved, model, threads.spread)
    executor: Executor
    if config.processes == 1:
        executor = _executor(config, resolved, model, rows, watch, kept, threads, disk, kept_kv)
    else:
        decided = replace(
            config,
            model=str(model.source),
            revision=None,
            device=model.device.partition(":")[0],
            dtype=model.dtype,
            max_model_len=resolved.max_model_len,
        )
        executor = build_parallel(
            decided,
            resolved,
            model.device,
            lambda ways: _executor(
                config, resolved, _among(model, ways), rows, watch, kept, threads
            ),
        )
    with allocating("the tower for images", FOR_WEIGHTS):
        images = load_encoder(model)
    if model.no_images:
        logger.info("Images are not read: %s.", model.no_images)
    if may_lease(executor):
        limits = replace(resources.limits, lease_steps=LEASE_STEPS)
        resources, scheduler.limits = replace(resources, limits=limits), limits
    watch.ready()
    logger.info("The engine, %s, is %s.", describe_executor(executor), watch.describe())
    if is_cpu(model.device) or model.host is not None:
        logger.info("Compute: %s.", threads.describe())
    idle = saver = None
    if isinstance(executor, EagerExecutor):
        lower = scheduler.cache.lower
        if disk is not None and lower is not None and executor.disk is not None:
            saver = PrefixSaver(lower, disk, executor.disk)
        save = None if saver is None else saver.save
        idle = IdleMemory(executor.store, config.kv_idle_s, save=save)
    return Engine(
        model, resolved, resources, scheduler, executor, grammars, idle, kept, watch.seconds,
        watch.describe(), saver, describe_host_costs(cost), kept_kv, halves.why, images,
    )  # fmt: skip


def build_rank(config: EngineConfig, task: Task) -> Executor:
    """Load the part of a rank from 1 on, and put an executor around it.

    Args:
        config: with everything that rank 0 has decided.

    Raises:
        WeftError: a typed error; rank 0 has met most of them before.
    """
    device = pick_device(config.device, task.rank, config.processes)
    ways = meet(task.rank, config, task.meeting_point, device)
    model = find_model(config, rank=task.rank)
    grammars = Grammars(lambda: _grammar_tokenizer(config, model))
    # Only rank 0 finds grammars too costly, or who tells it results: by its clock, as no two ranks
    # need the same time.
    if role_of(task.rank, config) is Role.TELLS:
        rows = GrammarRows(grammars)
    else:
        rows = GrammarRows(grammars, clock=lambda: 0.0)
    if is_cpu(device):
        # Nothing is planned here, so nothing is gained by steps in flight on a CPU.
        config = replace(config, steps_in_flight=0)
    threads = plan_threads(config, this_machine(), task.rank)
    kept = _kept_weights(config, model, threads)
    executor = _executor(
        config, task.resolved, _among(model, ways), rows, Stopwatch(), kept, threads
    )
    if kept is not None:
        kept.write()
    return executor


def _kept_weights(
    config: EngineConfig, model: Model, threads: ThreadPlan, patience_s: float = 0.0
) -> KeptWeights | None:
    """Where the packed weights are kept; None where that is switched off."""
    if not config.packed_cache:
        return None
    return KeptWeights(
        PackedCache(config.packed_cache, nodes=threads.spread),
        kept_settings(config, model.host),
        verify=config.verify_weights,
        patience_s=patience_s,
    )


def _among(model: Model, ways: Ways) -> Model:
    """The model as one of several ranks computes it."""
    return replace(model, ops=ways.among(model.ops))


def _executor(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: Model,
    grammars: GrammarRows,
    watch: Stopwatch,
    kept: KeptWeights | None,
    threads: ThreadPlan,
    disk: DiskCache | None = None,
    kept_kv: KeptKV | None = None,
) -> Executor:
    """Load the model, or a rank's part of it, and put an executor around it.

    Raises:
        OutOfMemoryError: there is no memory for one of these, whatever was free before.
        KernelError: a kernel of a GPU cannot be compiled.
    """
    watch.mark("settings")
    ahead = None
    if not is_cpu(model.device):  # where there is nothing to compile, nor to import for it
        from weft.engine.kernels_ahead import compile_ahead

        ahead = compile_ahead(config, resolved, model, model.ops.ranks.rank)
    set_threads(threads, model)
    within = partial(allocating, ops=model.ops)
    with within(f"the weights ({format_bytes(model.facts.weight_bytes)})", FOR_WEIGHTS):
        decoder = load_model(
            model.source,
            dtype=model.dtype,
            max_model_len=resolved.max_model_len,
            ops=model.ops,
            rounding=partial(storage_of, quantize=config.quantize, group=config.quantize_group),
            kept=kept,
            host=model.host,
            layers=model.own_layers,
        )
    watch.mark("weights")
    if ahead is not None:
        ahead.wait()
        watch.mark("kernels")
    groups = model.rank_spec.kv_groups
    kv_dtype = cache_dtype(config.kv_name(model.dtype))
    with within(f"KV ({format_bytes(resolved.kv_bytes)})", FOR_KV):
        memory = kv_memory(decoder, threads.spread)
        file = None if kept_kv is None else kept_kv.arena
        sizes = resolved.group_blocks, resolved.block_size
        store = KVStore(groups, *sizes, kv_dtype, memory, file)
        if model.rank_spec.states is not None:
            store.states = StateStore(model.rank_spec, resolved.state_slots, memory)
    blocks_per_row = -(-resolved.max_model_len // resolved.block_size)
    with within("the buffers of steps", FOR_STEPS):
        table = InputBatch(
            resolved.max_num_seqs, resolved.max_model_len, [blocks_per_row] * len(groups), grammars
        )
        executor = make_executor(config, resolved, decoder, store, table, disk)
    watch.mark("KV and executor" if ahead is None else "KV and capture")
    if ahead is not None:
        watch.notes["kernels"] = ahead.describe()
    return executor


def _grammar_tokenizer(config: EngineConfig, model: Model) -> LLTokenizer:
    """The tokeniser that the request plane checks grammars with."""
    from weft.text.tokenizer import Tokenizer  # few engines ever need it

    tokenizer = Tokenizer.load(Path(config.tokenizer or model.folder))
    text = tokenizer.grammar_document()
    return grammar_tokenizer(text, model.spec.vocab_size, model.eos_token_ids)


def _resources(config: EngineConfig, resolved: ResolvedConfig, model: Model) -> Resources:
    """What schedulers are made of, but for costs and derived targets."""
    groups = [
        GroupSpec(group.name, resolved.block_size, blocks, group.window)
        for group, blocks in zip(model.facts.groups, resolved.group_blocks, strict=True)
    ]
    if resolved.state_slots:
        slots = resolved.state_slots
        groups.append(GroupSpec("state", resolved.block_size, slots, window=1, recurrent=True))
    limits = Limits(
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
        resolved.max_model_len,
        config.speculation,
        groups=pipelined_steps(config),
        whole_prompts=model.spec.encoder is not None,
    )
    return Resources(
        groups,
        limits,
        config.service_classes(),
        prefix_caching=config.prefix_caching and model.spec.encoder is None,
        targets=TargetPolicy(config.slo_admission, config.slo_margin, config.slo_patience_s),
        host_blocks=(*resolved.host_blocks, *([resolved.host_slots] * bool(resolved.host_slots))),
    )


def _scheduler(
    config: EngineConfig, name: str, resources: Resources, cost: Fitted | None
) -> Scheduler:
    """The scheduler of this name, with targets where it predicts step times."""
    if cost is not None:
        targets = TargetSettings(config.classes, config.interactivity)
        resources = targets.applied(resources, cost)
    return make_scheduler(scheduler_name(name, bool(resources.host_blocks)), resources)


def set_threads(plan: ThreadPlan, model: Model) -> None:
    """Give torch and the native kernels the same number of threads; torch does not pin its own."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(plan.threads)
    if model.ops.describe()["paged_attention"] == "cpu" or model.host is not None:
        from weft.kernels.cpu import attention

        attention.set_threads(plan.threads, plan.cpus, plan.nodes)
