"""Stands for ``weft.engine.build`` in engines of tests: no device, no weights, no torch.

Scheduler, KV cache and rings are the real ones; tokens come from the modelled executor, which
needs every block to be what it should be. Steps take a while, so that streams do not end at once.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from weft.core.config import EngineConfig
from weft.core.served import ServedModel
from weft.kv.cache import GroupSpec
from weft.models.generation import read_generation_defaults
from weft.models.hub import resolve_model
from weft.models.spec_reader import read_spec
from weft.sched.registry import make_scheduler
from weft.sched.resources import Resources
from weft.sched.scheduler import Limits
from weft.sim.executor import ModelledExecutor, ModelledTicket

STEP_S = 0.004
BLOCKS, BLOCK_SIZE = 2560, 16  # room for every row at full length


class CpuStack:
    """Stands for that of ``weft.kernels.cpu.stack``, of which no modelled engine has one."""


class OverlappedForward:
    """Stands for that of ``weft.exec.overlap``, of which no modelled engine has one."""


class SlowExecutor(ModelledExecutor):
    """The modelled executor, whose steps take a while."""

    def collect(self, ticket: ModelledTicket) -> Any:
        time.sleep(STEP_S)
        return super().collect(ticket)


def build_engine(
    config: EngineConfig,
    returning_bytes: int = 0,  # noqa: ARG001
    patience_s: float = 0.0,  # noqa: ARG001
    *,
    kv_file: Any = None,  # noqa: ARG001
) -> Any:
    """What ``weft.engine.process`` asks of an engine."""
    folder = resolve_model(config.model, offline=True)
    spec = read_spec(folder, config.max_model_len)
    longest = config.max_model_len or spec.max_position_embeddings
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, longest)
    groups = (GroupSpec("full", BLOCK_SIZE, BLOCKS),)
    ends = read_generation_defaults(folder).eos_token_ids or spec.eos_token_ids
    resources = Resources(groups, limits, config.service_classes())
    executor = SlowExecutor(groups, spec.vocab_size)
    return SimpleNamespace(
        model=SimpleNamespace(spec=spec, folder=folder, eos_token_ids=ends),
        resolved=SimpleNamespace(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
        ),
        resources=resources,
        scheduler=make_scheduler("fcfs", resources),
        executor=executor,
        grammars=SimpleNamespace(compile=_compile),
        encode=None,
        started_ns=time.monotonic_ns(),
        check_ranks=lambda: None,
        close=executor.close,
        keep_weights=lambda: None,
        rest=lambda: False,
        settled=True,
        worked=lambda: None,
        start_disk=lambda arrived: None,  # noqa: ARG005
        adopt_kv=lambda: None,
        kept_kv=None,
        start_places=lambda: None,
        save_prefixes=lambda: None,
        host_attention=dict,
    )


def choose_policy(config: EngineConfig, engine: Any) -> None:
    """It plans by FCFS."""


def _compile(_: str) -> Future[None]:
    """No grammar is followed here."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def describe_served(config: EngineConfig, engine: Any) -> ServedModel:
    """What the request plane needs to know."""
    spec = engine.model.spec
    return ServedModel(
        name=config.model,
        folder=str(engine.model.folder),
        family=spec.family,
        parameters=1,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_model_len=engine.resolved.max_model_len,
        max_num_seqs=engine.resolved.max_num_seqs,
        block_size=BLOCK_SIZE,
        dtype="float32",
        eos_token_ids=engine.model.eos_token_ids,
        sampling_defaults={},
        batch_invariant=True,
        kernels={},
        kv_blocks={"full": BLOCKS},
        weight_bytes=0,
        kv_memory=2**25,
        profile_key={},
        classes=config.service_classes(),
    )
