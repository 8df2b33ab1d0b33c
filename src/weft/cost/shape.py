"""Model shapes: the numbers of a decoder that costs depend on, and a catalogue of known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.core.errors import UnsupportedModelError, look_up
from weft.cost.recurrent import CONV, DELTA, Recurrent, read_recurrent

# Of how many layers one has no window, where a config does not say it (Hugging Face's defaults).
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
# Types of models with a gate for each number of attention's output.
GATED = ("afmoe", "muse_glimmer_text")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs and grouped-query attention.

    Attributes:
        intermediate: width of the MLP; of one expert where there are experts.
        experts, experts_per_token: routed ones; 0 for a dense model.
        shared: width of the shared experts of a layer together; 0 without such.
        tied: the head uses the embedding's matrix.
        window: tokens that a sliding layer looks back; None without such layers.
        window_layers: how many layers slide.
        gated: attention's output is multiplied by a gate, which is a projection as large as that of
            Q. Sinks, one number a head, cost nothing.
        recurrent: layers that have a state in the place of attention; None for attention alone.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    shared: int = 0
    tied: bool = False
    window: int | None = None
    window_layers: int = 0
    gated: bool = False
    recurrent: Recurrent | None = None

    @property
    def attention_layers(self) -> int:
        """Layers that attend and have KV."""
        return self.layers - (0 if self.recurrent is None else self.recurrent.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot of recurrent state; 0 without."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes

    @property
    def recurrent_more(self) -> int:
        """Weights that recurrent layers have more, all together, than if they attended."""
        if self.recurrent is None:
            return 0
        attending = self.attention_parameters - self.hidden * self.experts
        return self.recurrent.layers * (self.recurrent.parameters - attending)

    @property
    def attention_width(self) -> int:
        """Query values of a token in one layer."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Key values of a token in one layer (as many are values)."""
        return self.kv_heads * self.head_size

    @property
    def attention_parameters(self) -> int:
        """Weights of the Q, K, V and O projections of one layer, of a gate, and the router's."""
        wide = (3 if self.gated else 2) * self.attention_width
        projections = self.hidden * (wide + 2 * self.kv_width)
        return projections + self.hidden * self.experts

    @property
    def expert_parameters(self) -> int:
        """Weights of one MLP: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        """Weights of the shared experts of one layer, which multiply every token."""
        return 3 * self.hidden * self.shared

    @property
    def dense_parameters(self) -> int:
        """Weights of one layer that multiply every token: all but those of experts, or the MLP."""
        return self.attention_parameters + self.shared_parameters

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer; norms and biases, far below 0.1 %, are left out."""
        return self.dense_parameters + max(1, self.experts) * self.expert_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that multiply a token."""
        return self.dense_parameters + max(1, self.experts_per_token) * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Weights in all, as they lie in memory."""
        tables = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.recurrent_more + tables

    @property
    def active_parameters(self) -> int:
        """Weights that multiply a token whose logits are wanted: P of BlendServe section 4.1."""
        layers = self.layers * self.active_layer_parameters + self.recurrent_more
        return layers + self.head_parameters

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V of one token in all layers, sliding ones too while it is in reach."""
        return 2 * self.kv_width * self.attention_layers

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> ModelShape:
        """Read the shape from a checkpoint's ``config.json``.

        Raises:
            UnsupportedModelError: a field that the shape needs is missing.
        """
        config = config.get("text_config", config)
        name = name or str(config.get("_name_or_path") or config.get("model_type", "unnamed"))

        def need(*keys: str) -> int:
            for key in keys:
                if config.get(key) is not None:
                    return int(config[key])
            raise UnsupportedModelError(f"the config of {name} has no '{keys[0]}'")

        def may(*keys: str) -> int:
            return next((int(config[key]) for key in keys if config.get(key) is not None), 0)

        layers, hidden, heads = (
            need("num_hidden_layers"),
            need("hidden_size"),
            need("num_attention_heads"),
        )
        experts = may("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        inner = ("moe_intermediate_size",) if experts and "moe_intermediate_size" in config else ()
        window, window_layers = _window(config, layers)
        kind = config.get("model_type")
        dense = kind == "granitemoehybrid" and not experts
        width = ("shared_intermediate_size",) if dense else (*inner, "intermediate_size")
        return cls(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=may("num_key_value_heads") or heads,
            head_size=may("head_dim") or hidden // heads,
            intermediate=need(*width),
            vocab=need("vocab_size"),
            experts=experts,
            experts_per_token=need("num_experts_per_tok", "moe_k") if experts else 0,
            shared=_shared_width(config) if experts else 0,
            tied=bool(config.get("tie_word_embeddings", kind in CONV)),
            window=window,
            window_layers=window_layers,
            gated=kind in GATED or kind in DELTA,
            recurrent=read_recurrent(config, layers, hidden),
        )


def _shared_width(config: Mapping[str, Any]) -> int:
    """Width of the shared experts of a layer together, however a config says it."""
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(key) is not None:
            return int(config[key])
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    count = next((int(config[key]) for key in counts if config.get(key) is not None), 0)
    return count * int(config.get("moe_intermediate_size") or 0)


def _window(config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """The window and how many layers have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None, 0
    types, sliding = config.get("layer_types"), layers
    every = config.get("sliding_window_pattern") or PATTERNS.get(config.get("model_type", ""))
    if types is not None:
        sliding = sum(kind == "sliding_attention" for kind in types)
    elif every:
        sliding = layers - layers // every
    return (int(window), sliding) if sliding else (None, 0)


def _delta(layers: int, hidden: int, value_heads: int) -> Recurrent:
    """The recurrent layers of a Qwen 3.6: 16 heads of keys, all heads of 128."""
    values, keys = 128 * value_heads, 128 * 16
    channels = 2 * keys + values
    weights = hidden * (channels + values + 2 * value_heads) + values * hidden
    return Recurrent(layers, weights, 128 * values, 3 * channels)


def _shapes() -> dict[str, ModelShape]:
    """The catalogue, from each model's config.json on the Hugging Face hub."""
    llama_7b = ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000)
    llama_8b = ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256)
    llama_70b = ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000)
    shapes = [
        llama_7b,
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        llama_70b,
        llama_8b,
        replace(llama_8b, name="llama-3.1-8b"),
        replace(llama_70b, name="llama-3-70b", vocab=128256),
        replace(llama_70b, name="llama-3.1-70b", vocab=128256),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("yi-34b", 60, 7168, 56, 8, 128, 20480, 64000),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, window=4096, window_layers=32),
        ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, experts=128, experts_per_token=8
        ),
        ModelShape(
            "qwen3.6-27b",
            64,
            5120,
            24,
            4,
            256,
            17408,
            248320,
            gated=True,
            recurrent=_delta(48, 5120, 48),
        ),
        ModelShape(
            "qwen3.6-35b-a3b",
            40,
            2048,
            16,
            2,
            256,
            512,
            248320,
            experts=256,
            experts_per_token=8,
            shared=512,
            gated=True,
            recurrent=_delta(30, 2048, 32),
        ),
        ModelShape("deepseek-67b", 95, 8192, 64, 8, 128, 22016, 102400),
        ModelShape("phi-4", 40, 5120, 40, 10, 128, 17920, 100352),
        ModelShape("weft-builtin", 6, 256, 4, 2, 64, 704, 4096, tied=True),
    ]
    return {shape.name: shape for shape in shapes}


SHAPES: Mapping[str, ModelShape] = _shapes()


def model_shape(name: str) -> ModelShape:
    """The shape of a catalogued model.

    Raises:
        ConfigError: no such name; the message lists the known ones.
    """
    return look_up(name, SHAPES, "model")
