"""The record of a model family, and what families share when they read ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.models.bounds import MOST_NUMBER
from weft.models.config_reader import ConfigReader
from weft.models.gguf_form import GgufForm
from weft.models.quant_config import read_stored_weights
from weft.models.rope_config import RopeContext
from weft.models.spec import LayerSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
MULTIMODAL_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
OTHER_TOWERS = (
    r"(model\.)?(visual|vision_tower|vision_adapter|vision_projection|audio_tower|"
    r"multi_modal_projector|mm_projector|embed_vision|embed_audio)\..*"
)
CLASSIFIER = "ForSequenceClassification"  # the end of names of architectures with such a head
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# From a config, and the longest sequence that will be served if one is set, to the model.
Reader = Callable[[ConfigReader, int | None], ModelSpec]


@dataclass(frozen=True)
class Multimodal:
    """Checkpoints of a family that also read images or sound; their text model is served."""

    architecture: str
    model_type: str
    read: Reader


@dataclass(frozen=True)
class Family:
    """A model family: all that has to be known to serve it.

    Attributes:
        name: ``ModelSpec.family``.
        architecture, model_type: what ``config.json`` calls it.
        read: reads its configs; leaves ``ModelSpec.family`` open.
        multimodal: kinds of its checkpoints that have further towers.
        aliases: other architectures that ``config.json`` may call it.
        classifier: reads its checkpoints that score pairs of texts; None: they are read as others,
            and the head of tokens is replaced.
        gguf: how files of llama.cpp store it; None where they are not read.
        unsound_kv: types of KV under which results do not stay what they are, and why.
    """

    name: str
    architecture: str
    model_type: str
    read: Reader
    multimodal: tuple[Multimodal, ...] = ()
    gguf: GgufForm | None = None
    unsound_kv: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    classifier: Reader | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes that every family states."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    max_position: int
    served: int  # the longest sequence that will be served

    def layer(self, **differences: Any) -> LayerSpec:
        """Return a layer of these sizes."""
        sizes = {
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
        }
        return LayerSpec(**(sizes | differences))

    def rope_context(self, **differences: Any) -> RopeContext:
        """Return what a rotary embedding of these sizes starts from, base 10000."""
        values = {
            "head_dim": self.head_dim,
            "theta": 10_000.0,
            "max_position": self.max_position,
            "max_model_len": self.served,
        }
        return RopeContext(**(values | differences))


def read_sizes(config: ConfigReader, limit: int | None) -> Sizes:
    """Read the sizes; ``limit`` is the longest sequence that will be served, if one is set."""
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", kv_heads, f"it must divide the {heads} query heads")
    max_position = config.positive("max_position_embeddings")
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.positive("head_dim", hidden // heads),
        intermediate=config.positive("intermediate_size"),
        layers=config.positive("num_hidden_layers"),
        max_position=max_position,
        served=limit or max_position,
    )


def read_common(
    config: ConfigReader,
    sizes: Sizes,
    *,
    activation: str = "hidden_act",
    known: Mapping[str, str] = ACTIVATIONS,
) -> dict[str, Any]:
    """Return the ModelSpec fields that every family reads the same way.

    Args:
        activation: the key of the activation function.
        known: names of those that the family may have, with ``ModelSpec.activation``.
    """
    dtype = config.value("dtype", config.value("torch_dtype", None))
    bos = config.integers("bos_token_id")
    return {
        "vocab_size": config.positive("vocab_size"),
        "hidden_size": sizes.hidden,
        "num_heads": sizes.heads,
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": known[config.choice(activation, next(iter(known)), known)],
        "max_position_embeddings": sizes.max_position,
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "eos_token_ids": config.integers("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
        "dtype": str(dtype).removeprefix("torch.") if dtype else None,
    }


def read_text_part(read: Reader, config: ConfigReader, limit: int | None) -> ModelSpec:
    """Return the text model of a multimodal checkpoint, whose other towers are left unread."""
    text = config.section("text_config")
    if text is None:
        config.refuse("text_config", None, "it must describe the text model")
    spec = replace(read(text, limit), stored_weights=read_stored_weights(text))
    text.finish()
    ignore_towers(config)
    bos = config.integers("bos_token_id")
    return replace(
        with_towers(spec),
        tied_embeddings=config.flag("tie_word_embeddings", spec.tied_embeddings),
        eos_token_ids=config.integers("eos_token_id") or spec.eos_token_ids,
        bos_token_id=bos[0] if bos else spec.bos_token_id,
        dtype=spec.dtype or config.value("dtype", config.value("torch_dtype", None)),
    )


def with_towers(spec: ModelSpec) -> ModelSpec:
    """Return a model whose checkpoint has other towers beside it."""
    ignored = (*spec.layout.ignored, OTHER_TOWERS)
    layout = replace(spec.layout, prefixes=MULTIMODAL_PREFIXES, ignored=ignored)
    return replace(spec, layout=layout)


def ignore_towers(config: ConfigReader) -> None:
    """Pass over what a multimodal checkpoint says of its other towers."""
    config.ignore("vision_config")
    for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio", "vision"):
        config.ignore(f"{token}_token_id", f"{token}_token_index")
    config.ignore("vision_start_token_id", "vision_end_token_id")


def read_window(config: ConfigReader) -> int | None:
    """Read the sliding window, None where it is switched off."""
    return None if config.switched_off("sliding_window") else config.positive("sliding_window")


def read_kinds(
    config: ConfigReader, key: str, sizes: Sizes, default: Sequence[str], kinds: Sequence[str]
) -> list[str]:
    """Read a list that says of each layer which of several kinds it is."""
    found = config.value(key, list(default))
    if not isinstance(found, list) or any(kind not in kinds for kind in found):
        config.refuse(key, found, f"supported: lists of {' and '.join(kinds)}")
    if len(found) != sizes.layers:
        config.refuse(key, found, f"{sizes.layers} entries are needed, one a layer")
    return list(found)


def read_layer_types(config: ConfigReader, sizes: Sizes, default: Sequence[str]) -> list[str]:
    """Read which layers attend fully and which within the sliding window."""
    return read_kinds(config, "layer_types", sizes, default, (FULL, SLIDING))


def read_windows(
    config: ConfigReader, sizes: Sizes, default: Sequence[str], window: int | None
) -> list[int | None]:
    """Read the window of each layer, None for one that attends fully; sliding ones need one."""
    kinds = read_layer_types(config, sizes, default)
    if window is None and SLIDING in kinds:
        config.refuse("layer_types", kinds, "sliding layers need sliding_window")
    return [window if kind == SLIDING else None for kind in kinds]


def read_layer_bases(config: ConfigReader, sizes: Sizes, default: Sequence[float]) -> list[float]:
    """Read the rotary base of each layer, 0 for one that is not rotated.

    The embedding of a layer is otherwise that of the model.
    """
    found = config.value("layer_rope_theta", list(default))
    good = isinstance(found, list) and all(
        isinstance(base, int | float) and not isinstance(base, bool) and 0 <= base < MOST_NUMBER
        for base in found
    )
    if not good or len(found) != sizes.layers:
        config.refuse("layer_rope_theta", found, f"{sizes.layers} numbers are needed, one a layer")
    return [float(base) for base in found]
