"""Which engines can serve encoders: models that read a text in both directions."""

from __future__ import annotations

from dataclasses import replace

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.core.resolved import ResolvedConfig
from weft.core.settings import settings_of
from weft.engine.devices import is_cpu
from weft.kernels.interface import OpTable
from weft.models.spec import ModelSpec

DEFAULT_STEP = settings_of(EngineConfig)["max_num_batched_tokens"].default


def step_tokens(resolved: ResolvedConfig, spec: ModelSpec) -> ResolvedConfig:
    """Settle how many tokens a step has: of an encoder, at least those of its longest text."""
    longest = resolved.max_model_len - 1
    if spec.encoder is None or longest <= resolved.max_num_batched_tokens:
        return resolved
    return replace(resolved, max_num_batched_tokens=longest)


def check_encodes(config: EngineConfig, spec: ModelSpec, ops: OpTable, device: str) -> None:
    """Check that an engine can compute an encoder, if the model is one.

    Raises:
        ConfigError: a setting needs what encoders do not have; the message says what to set.
        KernelError: there is no kernel for them here.
    """
    if spec.encoder is None:
        return
    if not is_cpu(device):
        raise KernelError(
            f"There are no kernels for encoders on GPUs yet, and {ops.names['paged_attention']} "
            "ones attend to what precedes a token only; set device to cpu."
        )
    wanted = {
        "tensor_parallel": (config.tensor_parallel > 1, "cut over ranks", "1"),
        "pipeline_parallel": (config.pipeline_parallel > 1, "split into stages", "1"),
        "host_kv_memory": (config.host_kv_memory is not None, "swapped", None),
        "kv_disk": (config.kv_disk is not None, "kept on a disk", None),
        "scheduler": (config.scheduler not in ("auto", "fcfs"), "planned by time", "fcfs"),
    }
    for name, (is_set, what, value) in wanted.items():
        if is_set:
            raise ConfigError(
                f"This model is an encoder, whose texts are computed whole and are not {what}; set "
                f"{name} to {value}.",
                param=name,
            )
    most = spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"This model has positions for texts of {most - 1} tokens, so max_model_len is at most "
            f"{most}.",
            param="max_model_len",
        )
    longest, step = (config.max_model_len or most) - 1, config.max_num_batched_tokens
    if longest > step and step != DEFAULT_STEP:
        raise ConfigError(
            f"This model is an encoder, which computes a text of up to {longest} tokens in one "
            f"step, and max_num_batched_tokens is {step}; set that to {longest}, or max_model_len "
            f"to {step + 1}.",
            param="max_num_batched_tokens",
        )
