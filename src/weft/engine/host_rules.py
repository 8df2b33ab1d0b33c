"""Which models the host attends for beside a device, and who does it there."""

from __future__ import annotations

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.schedulers import SCHEDULERS
from weft.kernels.interface import OpTable
from weft.kernels.lanes import MOST_ROWS
from weft.models.spec import ModelSpec


def check_attends_on_host(config: EngineConfig, spec: ModelSpec, ops: OpTable) -> None:
    """Check that the host can attend to rows of a model, if it is to.

    Raises:
        ConfigError: it cannot.
    """
    if not config.attends_on_host:
        return
    kernel = ops.describe()["paged_attention"]
    if spec.states is not None:
        why = "rows of the host would need the states of its recurrent layers there"
    elif spec.latent is not None:
        why = "all heads of its attention read one latent row (MLA), which the host does not know"
    elif config.piggybacks and not spec.rows_exchangeable:
        why = "its per-layer inputs belong to the step in which a token begins"
    elif kernel == "triton" and config.attend:
        why = "lanes of captured steps reach no remote places yet; leave attend out"
    elif kernel == "triton" and config.tensor_parallel > 1:
        why = "lanes of captured steps do not agree over ranks yet"
    elif kernel == "triton" and config.host_process:
        why = "memory that a process attends in is not pinned for a GPU yet; turn host_process off"
    elif kernel == "triton" and config.piggybacks and config.max_num_seqs > MOST_ROWS:
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
    attends = "attends" if count == 1 else "attend"
    others = f", then {' and '.join(config.attend)}" if config.attend else ""
    return f"{who} on the host: {threads} of {where} {attends} there{others}"
