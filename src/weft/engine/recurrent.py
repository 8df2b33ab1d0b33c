"""Which engines can serve models with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.engine.devices import is_cpu
from weft.kernels.interface import OpTable
from weft.models.spec import ModelSpec, StateSpec


def check_recurrent(config: EngineConfig, spec: ModelSpec, ops: OpTable, device: str) -> None:
    """Check that an engine can keep the states of a model, if it has any.

    Raises:
        ConfigError: a setting needs what states do not have yet; the message says what to set.
        KernelError: there is no kernel for the layers here.
    """
    if spec.states is None:
        return
    on_gpu = not is_cpu(device)
    wanted = {
        "tensor_parallel": (config.tensor_parallel > 1, "cut over ranks", "1"),
        "pipeline_parallel": (config.pipeline_parallel > 1, "split into stages", "1"),
        "host_kv_memory": (
            on_gpu and config.host_kv_memory is not None,
            "moved from a GPU to the host",
            None,
        ),
        "kv_disk": (on_gpu and config.kv_disk is not None, "moved from a GPU to the disk", None),
        "overlap": (config.overlap == "on", "computed in two halves of a step", "auto"),
        "resident": (on_gpu and config.resident == "on", "advanced by replayed steps", "auto"),
    }
    for name, (is_set, what, value) in wanted.items():
        if is_set:
            raise ConfigError(
                f"This model has recurrent layers, whose states cannot be {what} yet; set {name} "
                f"to {value}.",
                param=name,
            )
    if ops.names["paged_attention"] == "cpu":
        for layer in spec.layers:
            if layer.state is not None and (why := _refusal(layer.state)):
                raise KernelError(
                    f"No CPU kernel computes recurrent layers with {why}; set kernels to reference "
                    "(slow)."
                )


def _refusal(state: StateSpec) -> str:
    """Why the native kernels do not compute a recurrent layer; empty if they do."""
    from weft.kernels.cpu import conv, delta, mamba2

    kernels: dict[str, Callable[[Any], str]] = {
        "delta": delta.refusal,
        "conv": conv.refusal,
        "mamba2": mamba2.refusal,
    }
    return kernels[state.kind](state.shape)
