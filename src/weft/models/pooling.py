"""Reads how a checkpoint pools: sentence-transformers' modules, prompts, and rerankers' marks.

The files: https://sbert.net/docs/sentence_transformer/usage/custom_models.html. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from weft.core.errors import UnsupportedModelError, short
from weft.core.json_files import read_object, read_text
from weft.models.config_reader import ConfigReader
from weft.models.spec import ModelSpec

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
MOST_MODULES, MOST_PROMPTS, MOST_PROMPT_CHARS = 16, 64, 10_000
SIGMOID = "Sigmoid"
UNREAD = {"Transformer"}  # modules that are the model itself
# Modes of pooling with ``ModelSpec.pooled``. States of a decoder but the last one know a part of
# the text only.
POOLED = {"lasttoken": "last", "cls": "first", "mean": "mean"}
_SERVE_BARE = f"remove {MODULES} to serve the model without its modules"


@dataclass(frozen=True)
class Modules:
    """What modules beside the model say.

    Attributes:
        pooled: which states make vectors of texts, see ``ModelSpec.pooled``; empty: they make none.
        unit: these are scaled to length 1.
        answers: token ids of yes and no, whose logits make a score.
        prompts, default_prompt: see `weft.core.pooling.Pooling`.
    """

    pooled: str = ""
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
    if not (folder / MODULES).is_file():
        return None
    found = Modules()
    for kind, path in _listed(folder):
        if kind == "Pooling":
            found = replace(found, pooled=_pooled(_config(folder, path), path))
        elif kind == "Normalize":
            found = replace(found, unit=True)
        elif kind == "LogitScore":
            found = replace(found, answers=_answers(_config(folder, path), path))
        elif kind not in UNREAD:
            raise UnsupportedModelError(
                f"{MODULES}: the module '{short(kind)}' is not supported; {_SERVE_BARE}.",
                param=MODULES,
            )
    prompts, default = _prompts(folder)
    return replace(found, prompts=prompts, default_prompt=default)


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
    return replace(without_head(spec, "none"), unit_states=modules.unit, pooled=modules.pooled)


def without_head(spec: ModelSpec, head: str) -> ModelSpec:
    """The spec of a model whose output head, if the checkpoint has one, is left unread.

    Executors multiply with a head, for which the embedding stands.

    Args:
        head: see ``ModelSpec.head``.
    """
    layout = replace(spec.layout, ignored=(*spec.layout.ignored, r"(.*\.)?lm_head\.weight"))
    return replace(spec, head=head, tied_embeddings=True, layout=layout)


def _listed(folder: Path) -> list[tuple[str, str]]:
    """The class and folder of each module."""
    text = read_text(folder / MODULES, UnsupportedModelError)
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    whole = isinstance(listed, list) and 0 < len(listed) <= MOST_MODULES
    if not whole or not all(_is_module(one) for one in listed):
        raise UnsupportedModelError(
            f"{MODULES} is not a list of up to {MOST_MODULES} modules with type and path; download "
            "the file again.",
            param=MODULES,
        )
    return [(one["type"].rpartition(".")[2], one.get("path", "")) for one in listed]


def _is_module(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    path = value.get("path", "")
    if not isinstance(path, str):
        return False
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


def _config(folder: Path, path: str) -> dict[str, Any]:
    """The configuration of a module; a typed error if its folder did not come along."""
    return read_object(folder / path / "config.json", UnsupportedModelError)


def _pooled(config: Mapping[str, Any], path: str) -> str:
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
    return POOLED[str(names[0])]


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
