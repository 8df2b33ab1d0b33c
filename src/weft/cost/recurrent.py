"""The recurrent layers of a model, as far as costs depend on them, and how configs state them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import UnsupportedModelError

FLOAT_BYTES = 4  # of the numbers of a state, in any model
# Types of models with recurrent layers, and how their configs call those that are not.
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
CONV = ("lfm2", "lfm2_moe", "lfm3")
MAMBA2 = ("granitemoehybrid",)
UNKNOWN = ("nemotron_h", "kimi_linear", "bailing_hybrid")


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers whose state a step reads and writes whole, for each of its rows.

    Attributes:
        layers: how many of a model's are.
        parameters: weights of one in the place of attention's.
        matrix: numbers of the state of one layer that each token changes.
        inputs: numbers that its convolution keeps.
    """

    layers: int
    parameters: int
    matrix: int
    inputs: int

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot: the state of all these layers."""
        return FLOAT_BYTES * self.layers * (self.matrix + self.inputs)

    @property
    def token_flops(self) -> int:
        """Arithmetic of a token in all these layers: a number decays, is read and is added to."""
        return 6 * self.layers * self.matrix


def read_recurrent(config: Mapping[str, Any], layers: int, hidden: int) -> Recurrent | None:
    """Read the recurrent layers of a config; None for a model of attention alone.

    Raises:
        UnsupportedModelError: they are of a kind whose costs are not known, or a size is missing.
    """
    kind = str(config.get("model_type", ""))
    if kind in UNKNOWN:
        raise UnsupportedModelError(f"the costs of the recurrent layers of {kind} are not known")
    if kind not in (*DELTA, *CONV, *MAMBA2):
        return None
    count = sum(
        name not in ("full_attention", "sliding_attention", "attention")
        for name in _kinds(config, layers)
    )

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"the config of {kind} has no '{key}'")
        return int(value)

    if kind in CONV:
        return Recurrent(count, 4 * hidden * hidden, 0, (size("conv_L_cache", 3) - 1) * hidden)
    if kind in MAMBA2:
        heads, states = size("mamba_n_heads", 128), size("mamba_d_state", 256)
        values = size("mamba_expand", 2) * hidden
        channels, taps = values + 2 * size("mamba_n_groups", 1) * states, size("mamba_d_conv", 4)
        gates, matrix = heads, values * states
    else:
        heads, key_dim = size("linear_num_value_heads"), size("linear_key_head_dim")
        values = heads * size("linear_value_head_dim")
        channels = 2 * size("linear_num_key_heads") * key_dim + values
        gates, matrix, taps = 2 * heads, values * key_dim, size("linear_conv_kernel_dim", 4)
    parameters = hidden * (channels + values + gates) + values * hidden
    return Recurrent(count, parameters, matrix, (taps - 1) * channels)


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer is."""
    if config.get("layer_types") is not None:
        return [str(kind) for kind in config["layer_types"]]
    if config.get("full_attn_idxs") is not None:
        attending = {int(number) for number in config["full_attn_idxs"]}
        return ["full_attention" if i in attending else "conv" for i in range(layers)]
    every = int(config.get("full_attention_interval") or 4)
    return ["linear" if (i + 1) % every else "full_attention" for i in range(layers)]
