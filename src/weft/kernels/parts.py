"""Parts of a layer that fused kernels are bound to: norms, biases, shape, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norms:
    """Weights of the norms of a layer of hidden size C, None where it has none.

    ``qk_norm`` has one weight per head: [H + Hkv, D].
    """

    input_norm: Tensor  # [C]
    mlp_norm: Tensor  # [C]
    qk_norm: Tensor | None
    post_attention_norm: Tensor | None  # [C]
    post_mlp_norm: Tensor | None  # [C]


@dataclass(frozen=True)
class Biases:
    """Biases of the products of a layer, None where it has none."""

    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class LayerShape:
    """A layer's shape and constants, without its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    norm_plus_one: bool  # norms multiply by 1 + weight
    activation: str  # ``silu`` or ``gelu_tanh``


class Packed(Protocol):
    """A packed matrix: outputs and inputs, and the dtype of the activations it multiplies."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


def check_parts(
    shape: LayerShape, matrices: Mapping[str, Packed], norms: Norms, biases: Biases
) -> None:
    """Raise ValueError if the parts of a layer do not fit together."""
    hidden, dtype = matrices["qkv"].shape[1], matrices["qkv"].dtype
    size = matrices["down"].shape[1] if "down" in matrices else 0
    heads, dim = shape.heads, shape.head_dim
    qkv = (heads + 2 * shape.kv_heads) * dim
    wanted = {
        "qkv": (qkv, hidden),
        "output": (hidden, heads * dim),
        "gate_up": (2 * size, hidden),
        "down": (hidden, size),
        "qkv_bias": (qkv,),
        "output_bias": (hidden,),
        "gate_up_bias": (2 * size,),
        "down_bias": (hidden,),
        "qk_norm": (heads + shape.kv_heads, dim),
        **dict.fromkeys(
            ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"), (hidden,)
        ),
    }
    for name, given in {**matrices, **vars(norms), **vars(biases)}.items():
        if given is not None and (tuple(given.shape) != wanted[name] or given.dtype != dtype):
            raise ValueError(
                f"{name} {list(given.shape)} of {given.dtype}: expected {list(wanted[name])} of "
                f"{dtype}"
            )
