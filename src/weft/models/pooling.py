"""Reads how a checkpoint pools: sentence-transformers' modules, prompts, and rerankers' marks.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from weft.core.errors import UnsupportedModelError, short
from weft.core.json_files import read_object
from weft.models.config_reader import ConfigReader
from weft.models.encoder_spec import DenseSpec, EncoderSpec
from weft.models.modules_file import DENSE, MODULES, listed_modules
from weft.models.spec import ModelSpec

PROMPTS = "config_sentence_transformers.json"
MOST_PROMPTS, MOST_PROMPT_CHARS = 64, 10_000
SIGMOID = "Sigmoid"
UNREAD = {"Transformer"}  # modules that are the model itself
# Modes of pooling with ``ModelSpec.pooled``. States of a decoder but the last one know a part of
# the text only.
POOLED = {"lasttoken": "last", "cls": "first", "mean": "mean"}
# Classes of torch with ``DenseSpec.activation``.
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu"}
_SERVE_BARE = f"remove {MODULES} to serve the model without its modules"


@dataclass(frozen=True)
class Modules:
    """What modules beside the model say.

    Attributes:
        pooled: which states make vectors of texts, see ``ModelSpec.pooled``; empty: they make none.
        dense: products that these go through.
        unit: they are scaled to length 1 then.
        answers: token ids of yes and no, whose logits make a score.
        prompts, default_prompt: see `weft.core.pooling.Pooling`.
    """

    pooled: str = ""
    dense: tuple[DenseSpec, ...] = ()
    unit: bool = False
    answers: tuple[int, int] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_modules(folder: Path) -> Modules | None:
    """Read the modules of a model folder; None if it has no ``modules.json``.

    Raises:
        UnsupportedModelError: a file is not what it should be, or a module is one that weft does
            not implement: another kind of pooling, or a further layer.
    """
    listed = listed_modules(folder)
    if not listed:
        return None
    prompts, default = _prompts(folder)
    found = Modules(prompts=prompts, default_prompt=default)
    for kind, path in listed:
        if kind == "Pooling":
            found = replace(found, pooled=_pooled(_config(folder, path), path, prompts))
        elif kind == DENSE and found.pooled and not found.unit:
            found = replace(found, dense=(*found.dense, _dense(_config(folder, path), path)))
        elif kind == "Normalize":
            found = replace(found, unit=True)
        elif kind == "LogitScore":
            found = replace(found, answers=_answers(_config(folder, path), path))
        elif kind not in UNREAD:
            raise UnsupportedModelError(
                f"{MODULES}: the module '{short(kind)}' is not supported"
                f"{' there' if kind == DENSE else ''}; {_SERVE_BARE}.",
                param=MODULES,
            )
    return found


def read_activation(config: ConfigReader) -> bool:
    """Whether scores of a reranker go through a sigmoid, as they do unless its config says else.

    Cross encoders of sentence-transformers name the class of their activation.

    Raises:
        UnsupportedModelError: it is neither a sigmoid nor the identity.
    """
    key = "sentence_transformers"
    section = config.section(key)
    named = [] if section is None else [section.value("activation_fn", None)]
    named.append(config.value("sbert_ce_default_activation_function", None))
    name = next((one for one in named if one is not None), SIGMOID)
    kind = name.rpartition(".")[2] if isinstance(name, str) else ""
    if kind not in (SIGMOID, "Identity"):
        config.refuse(key, name, f"the activation of scores must be {SIGMOID} or Identity")
    return kind == SIGMOID


def with_modules(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec of a model that its modules make an embedding model, as which it has no head."""
    modules = read_modules(folder)
    if modules is None or not modules.pooled:
        return spec
    if spec.encoder is None and modules.pooled != "last":
        mode = next(name for name, pooled in POOLED.items() if pooled == modules.pooled)
        raise UnsupportedModelError(
            f"{MODULES}: pooling by '{mode}' is supported of encoders, and of this model only by "
            f"'lasttoken'; {_SERVE_BARE}.",
            param="pooling_mode",
        )
    width = spec.hidden_size
    for one in modules.dense:
        if one.inputs != width:
            raise UnsupportedModelError(
                f"{one.folder}/config.json: in_features is {one.inputs}, but it is given {width} "
                "numbers; download the folder again.",
                param="in_features",
            )
        width = one.outputs
    return replace(
        without_head(spec, "none"),
        unit_states=modules.unit,
        pooled=modules.pooled,
        dense=modules.dense,
    )


def as_encoder(spec: ModelSpec, encoder: EncoderSpec) -> ModelSpec:
    """The spec of a model that reads a text in both directions, and gives the mean of its states.

    The token that engines choose behind each text, and pass over, needs no position.
    """
    longest = spec.max_position_embeddings + 1
    spec = replace(without_head(spec, "none"), encoder=encoder, pooled="mean")
    return replace(spec, max_position_embeddings=longest)


def without_head(spec: ModelSpec, head: str) -> ModelSpec:
    """The spec of a model whose output head, if the checkpoint has one, is left unread.

    Executors multiply with a head, for which the embedding stands.

    Args:
        head: see ``ModelSpec.head``.
    """
    layout = replace(spec.layout, ignored=(*spec.layout.ignored, r"(.*\.)?lm_head\.weight"))
    return replace(spec, head=head, tied_embeddings=True, layout=layout)


def _config(folder: Path, path: str) -> dict[str, Any]:
    """The configuration of a module; a typed error if its folder did not come along."""
    return read_object(folder / path / "config.json", UnsupportedModelError)


def _dense(config: Mapping[str, Any], path: str) -> DenseSpec:
    """A module that multiplies: sentence-transformers' Dense."""
    reader = ConfigReader(config, f"{path}/config.json")
    for key in ("module_input_name", "module_output_name"):
        reader.choice(key, "sentence_embedding", ("sentence_embedding",))
    named = str(reader.value("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = named.rpartition(".")[2]
    if kind not in DENSE_ACTIVATIONS:
        reader.refuse("activation_function", named, f"supported: {', '.join(DENSE_ACTIVATIONS)}")
    found = DenseSpec(
        "linear",
        reader.positive("in_features"),
        reader.positive("out_features"),
        bias=reader.flag("bias", True),
        activation=DENSE_ACTIVATIONS[kind],
        folder=PurePosixPath(path).as_posix(),
    )
    reader.finish()
    return found


def _pooled(config: Mapping[str, Any], path: str, prompts: Mapping[str, str]) -> str:
    """Which states a module of pooling takes; see ``ModelSpec.pooled``."""
    modes = config.get("pooling_mode")
    if modes is None:
        flags = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
        ends = ("_tokens", "_token")
        modes = [name.removeprefix("pooling_mode_") for name in flags]
        modes = [mode.removesuffix(ends[0]).removesuffix(ends[1]) for mode in modes]
    names = modes if isinstance(modes, list) else [modes]
    if len(names) != 1 or str(names[0]) not in POOLED:
        named = short(", ".join(map(str, names)) or "none", 80)
        raise UnsupportedModelError(
            f"{path}/config.json: pooling by '{named}' is not supported, only by one of "
            f"{', '.join(POOLED)}; {_SERVE_BARE}.",
            param="pooling_mode",
        )
    pooled = POOLED[str(names[0])]
    if pooled == "mean" and prompts and config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{path}/config.json: a mean without the tokens of prompts is not supported; "
            f"{_SERVE_BARE}.",
            param="include_prompt",
        )
    return pooled


def _answers(config: Mapping[str, Any], path: str) -> tuple[int, int]:
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise UnsupportedModelError(
            f"{path}/config.json: true_token_id and false_token_id must be token ids.",
            param="true_token_id",
        )
    yes, no = ids
    return int(yes or 0), int(no or 0)


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """The prompts by name, and the name of the default one."""
    if not (folder / PROMPTS).is_file():
        return {}, ""
    config = read_object(folder / PROMPTS, UnsupportedModelError)
    prompts = config.get("prompts") or {}
    whole = isinstance(prompts, dict) and len(prompts) <= MOST_PROMPTS
    if not whole or not all(
        isinstance(text, str) and len(text) <= MOST_PROMPT_CHARS for text in prompts.values()
    ):
        raise UnsupportedModelError(
            f"{PROMPTS}: prompts must be up to {MOST_PROMPTS} texts of up to {MOST_PROMPT_CHARS} "
            "characters, by name.",
            param="prompts",
        )
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise UnsupportedModelError(
            f"{PROMPTS}: default_prompt_name is '{short(default)}', but prompts has no such text.",
            param="default_prompt_name",
        )
    return prompts, default
