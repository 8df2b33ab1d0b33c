"""``config.json`` or a GGUF file -> ``ModelSpec``, by the family that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.errors import UnsupportedModelError, short
from weft.core.json_files import check_depth, read_object
from weft.models.bounds import MOST_LAYER_EXPERTS
from weft.models.config_reader import SHOWN, ConfigReader
from weft.models.families import BY_ARCHITECTURE, BY_MODEL_TYPE
from weft.models.family import CLASSIFIER
from weft.models.gguf import GgufFile
from weft.models.missing import missing_mechanism, supported_instead
from weft.models.pooling import read_activation, with_modules, without_head
from weft.models.quant_config import read_stored_weights
from weft.models.spec import ModelSpec
from weft.models.vision import prepared_as
from weft.models.weight_files import is_gguf


def read_spec(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    """Read ``config.json`` of a model folder, or a GGUF file; see ``spec_from_config``."""
    if is_gguf(folder):
        file = GgufFile(folder)
        spec = spec_from_config(file.config(), max_model_len)
        return file.adapted(spec)
    config = read_object(folder / "config.json", UnsupportedModelError)
    check_depth(config, "config.json", UnsupportedModelError)
    config = {**_quantised_beside(folder), **config}
    return _with_preparation(with_modules(spec_from_config(config, max_model_len), folder), folder)


def _with_preparation(spec: ModelSpec, folder: Path) -> ModelSpec:
    """What the files of a folder say of how images are prepared."""
    if spec.vision is None:
        return spec
    try:
        return replace(spec, vision=prepared_as(spec.vision, folder))
    except UnsupportedModelError as error:
        return replace(spec, vision=None, no_vision=error.message)


def _quantised_beside(folder: Path) -> dict[str, Any]:
    """What NVIDIA's ModelOpt says in a file of its own, as ``config.json`` would say it."""
    name = "hf_quant_config.json"
    if not (folder / name).exists():
        return {}
    found = read_object(folder / name, UnsupportedModelError).get("quantization")
    if not isinstance(found, dict) or found.get("quant_algo") is None:
        return {}
    return {"quantization_config": {"quant_method": "modelopt", **found}}


def spec_from_config(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Return what the model is.

    Args:
        max_model_len: the longest sequence that will be served, in tokens; fixes the factors of a
            longrope. None: what the config allows.

    Raises:
        UnsupportedModelError: the architecture, a key or a value that weft does not implement.
    """
    architectures = config.get("architectures") or []
    listed = isinstance(architectures, list) and architectures
    name = short(architectures[0] if listed else config.get("model_type", ""), SHOWN)
    name, head = _decoder_of(name)
    if name not in BY_ARCHITECTURE and name.replace("_", "") in BY_ARCHITECTURE:
        name = name.replace("_", "")  # as transformers saves Kimi_K25
    found = BY_ARCHITECTURE.get(name) or (None if architectures else BY_MODEL_TYPE.get(name))
    if found is None:
        raise UnsupportedModelError(_unsupported(name), param="architectures")
    reader = ConfigReader(config)
    family, read = found
    spec = read(reader, max_model_len)
    stored = read_stored_weights(reader) or spec.stored_weights
    spec = replace(spec, family=family.name, stored_weights=stored)
    spec = replace(spec, sigmoid_scores=read_activation(reader))
    if "score" in (head, spec.head):
        _check_labels(reader)
    reader.finish()
    _check_experts(reader, spec)
    if head != "tokens":
        spec = without_head(spec, head)
    return _without_idle_windows(spec, max(spec.max_position_embeddings, max_model_len or 0))


def _unsupported(architecture: str) -> str:
    mechanism = missing_mechanism(architecture)
    why = "" if mechanism is None else f": weft lacks {mechanism}"
    named = f"config.json: architecture '{architecture}' is not supported{why}"
    return f"{named}. {supported_instead(architecture, BY_ARCHITECTURE)}"


def _decoder_of(name: str) -> tuple[str, str]:
    """The architecture that has an output head, and what this one has; see ``ModelSpec.head``."""
    for suffix, head in ((CLASSIFIER, "score"), ("TextModel", "none"), ("Model", "none")):
        decoder = name.removesuffix(suffix) + "ForCausalLM"
        if name.endswith(suffix) and decoder in BY_ARCHITECTURE:
            return decoder, head
    return name, "tokens"


def _check_labels(config: ConfigReader) -> None:
    labels = config.value("id2label", {})
    count = config.value("num_labels", (len(labels) if isinstance(labels, dict) else 0) or 2)
    if count != 1:
        config.refuse("num_labels", count, "a model that scores pairs has 1")


def _check_experts(config: ConfigReader, spec: ModelSpec) -> None:
    if spec.moe is None:
        return
    layers = sum(layer.moe for layer in spec.layers)
    if layers * spec.moe.num_experts > MOST_LAYER_EXPERTS:
        total = f"{MOST_LAYER_EXPERTS} in all {layers} layers together are"
        config.refuse("num_experts", spec.moe.num_experts, total)
    if spec.moe.top_k > spec.moe.num_experts:
        config.refuse("num_experts_per_tok", spec.moe.top_k, f"only {spec.moe.num_experts} exist")
    try:
        spec.moe.routing.check(spec.moe.num_experts)
    except ValueError as error:
        config.refuse("n_group", spec.moe.n_group, str(error))


def _without_idle_windows(spec: ModelSpec, longest: int) -> ModelSpec:
    """Drop the windows that no sequence can outgrow."""
    layers = tuple(
        replace(layer, window=None) if layer.window and layer.window >= longest else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)
