"""How files of llama.cpp store a family: what a row of ``Family`` says of them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.gguf_header import GgufTensor


@dataclass(frozen=True)
class GgufFacts:
    """What a file says of its model.

    Attributes:
        found: the metadata of the architecture, without its name in front.
        layers: their number, without those that guess further tokens.
        tensors: by the names that the file has for them.
    """

    found: ConfigReader
    layers: int
    tensors: Mapping[str, GgufTensor]

    def has(self, part: str, layer: int | None = None) -> bool:
        """Whether a layer, or any of them, has a tensor."""
        numbers = range(self.layers) if layer is None else (layer,)
        return any(f"blk.{number}.{part}" in self.tensors for number in numbers)

    def kinds(self, part: str, those: str, others: str) -> list[str]:
        """Which kind each layer is: ``those`` that have a tensor, or ``others``."""
        return [those if self.has(part, number) else others for number in range(self.layers)]

    def each(self, key: str) -> list[int]:
        """Return an integer of each layer, which is stated once or in a list."""
        stated = self.found.value(key)
        numbers = list(self.found.integers(key))
        if not isinstance(stated, list):
            return numbers * self.layers
        if len(numbers) < self.layers:
            self.found.refuse(key, stated, f"{self.layers} entries are needed, one a layer")
        return numbers[: self.layers]

    def common(self, key: str, default: int | None = None) -> int:
        """Return a positive integer that all layers share which have any, stated once or in a
        list with zeros of the others."""
        if default is not None and key not in self.found:
            return default
        if not isinstance(self.found.value(key), list):
            return self.found.positive(key)
        numbers = set(self.each(key)) - {0}
        if len(numbers) != 1:
            self.found.refuse(key, self.found.value(key), "one number for all layers is supported")
        return numbers.pop()

    def windows(self) -> list[str]:
        """Which layers have the window, and which attend fully, by a list of flags."""
        key = "attention.sliding_window_pattern"
        flags = self.found.value(key)
        if not isinstance(flags, list) or len(flags) < self.layers:
            self.found.refuse(key, flags, f"a list of {self.layers} flags is needed")
        windows = flags[: self.layers]  # others are of layers that guess further tokens
        return ["sliding_attention" if flag else "full_attention" for flag in windows]

    def numbers(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Return the flags and numbers of some keys that the file has, under other names.

        A number of 0 stands for none, but where it counts experts or layers.
        """
        values: dict[str, Any] = {}
        for stored, name in keys.items():
            value = self.found.value(stored, None)
            if isinstance(value, bool):
                values[name] = value
            elif isinstance(value, float) and value:
                values[name] = self.found.number(stored)
            elif value is not None and (value or stored.startswith(("expert", "leading"))):
                values[name] = self.found.count(stored)
        return values


@dataclass(frozen=True)
class GgufForm:
    """How files of llama.cpp store a family.

    Attributes:
        name: of the architecture there; empty: the family's.
        aliases: further names.
        biases: keys of ``config.json`` that are true where a layer has a tensor, with its name.
        rotated_by_pairs: rows of Q and K are stored in the order of interleaved rotation.
        norms_plus_one: norms are stored with the 1 that the model adds.
        scaled_by_width: layers of the one size whose queries are scaled by hidden / heads.
        partly_rotated: heads are rotated in their first dimensions, whose number is stated.
        post_norms: norms stand behind attention and MLP, too.
        tiled_heads: of the delta rule, value head h reads key head h modulo their number.
        names: of tensors of a layer that differ, and what ``layout`` calls them.
        layout: fields of ``CheckpointLayout`` that differ from the family's checkpoints.
        scoring: what experts' weights are made by; empty: ``more`` looks.
        numbers: keys of the metadata with those of ``config.json`` that they stand for.
        stated: what ``config.json`` says where the metadata do not.
        scaling: the same of the scaling of the rotation.
        unused: keys of the metadata that do not change the result.
        more: further keys of ``config.json``, from all that the file says.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    rotated_by_pairs: bool = False
    norms_plus_one: bool = False
    scaled_by_width: int | None = None
    partly_rotated: bool = False
    post_norms: bool = False
    tiled_heads: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    scoring: str = "softmax"
    numbers: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    more: Callable[[GgufFacts], dict[str, Any]] | None = None


ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}  # of ``GgufForm.biases``
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}  # of ``GgufForm.names``
# Of ``GgufForm.numbers``: keys of GGUF's metadata, with those of config.json.
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LOCAL_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
DEEPSEEK_EXPERTS = {
    **EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Of ``GgufForm.unused``: of models that see; positions in text are one number.
VISION = ("rope.dimension_sections", "n_deepstack_layers")
# Of ``GgufForm.stated``.
PLAIN_SHARES = {
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
}
