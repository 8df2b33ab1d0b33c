"""Ollama's descriptions of the served model: ``/api/tags``, ``/api/ps`` and ``/api/show``."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar

import orjson
from msgspec import Raw, Struct

from weft.api.bodies import Name
from weft.api.card import ModelCard
from weft.api.errors import MissingParameterError
from weft.api.jobs import Builder
from weft.api.ollama_answers import timestamp
from weft.api.rules import NULL, Ignored
from weft.api.sampling import LATEST, check_model

# The version of Ollama whose API these routes follow; clients compare it with what they need.
OLLAMA_VERSION = "0.12.11"

_FOREVER_S = 100 * 365 * 24 * 3600  # from the start; the model is never unloaded
_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


NOT_CHANGED = Ignored("the model is shown as it is", ("", {}))


class ModelBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """A body that names a model, by the present or the former name of the field."""

    OPEN: ClassVar[bool] = True

    model: Name | None = None
    name: Name | None = None
    stream: bool | None = None
    # Not honoured.
    insecure: Annotated[Raw, Ignored("nothing is fetched")] = NULL
    options: Annotated[Raw, NOT_CHANGED] = NULL
    system: Annotated[Raw, NOT_CHANGED] = NULL
    template: Annotated[Raw, NOT_CHANGED] = NULL
    verbose: Annotated[Raw, Ignored("the answer is always the same", (False,))] = NULL

    def named(self, card: ModelCard) -> str:
        """The name. Raises MissingParameterError or UnknownModelError."""
        name = self.model or self.name
        if not name:
            raise MissingParameterError("model")
        return check_model(name, card)


def list_models(card: ModelCard) -> dict[str, Any]:
    """The answer of ``/api/tags``: the model by each of its names."""
    return {
        "models": [
            {**_entry(name, card), "modified_at": timestamp(card.created)}
            for name in card.served_names
        ]
    }


def running_models(card: ModelCard) -> dict[str, Any]:
    """The answer of ``/api/ps``."""
    on_device = 0 if card.weights.device == "cpu" else card.weights.num_bytes
    more = {
        "expires_at": timestamp(card.created + _FOREVER_S),
        "size_vram": on_device,
        "context_length": card.max_model_len,
    }
    return {"models": [{**_entry(name, card), **more} for name in card.served_names]}


def show_model(name: str, builder: Builder) -> dict[str, Any]:
    """The answer of ``/api/show``."""
    card, template = builder.card, builder.chat_template
    family = card.weights.family
    defaults = sorted(card.sampling_defaults.items())
    return {
        "modelfile": f"FROM {_tagged(name)}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in defaults),
        "template": "" if template is None else template.sources["default"],
        "details": _details(card),
        "model_info": {
            "general.architecture": family,
            "general.basename": name.removesuffix(LATEST),
            "general.parameter_count": card.weights.parameters,
            f"{family}.context_length": card.max_model_len,
            f"{family}.embedding_length": card.hidden_size,
            f"{family}.vocab_size": card.vocab_size,
        },
        "capabilities": capabilities(builder),
        "modified_at": timestamp(card.created),
    }


def capabilities(builder: Builder) -> list[str]:
    """Capabilities of the model in chats, in Ollama's words."""
    template, dialect = builder.chat_template, builder.dialect
    shows_tools = template is not None and "tools" in template.variables
    found = ["completion"]
    if shows_tools and dialect.tools is not None:
        found.append("tools")
    if template is not None and dialect.reasoning is not None:
        found.append("thinking")
    return found


def _entry(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "name": _tagged(name),
        "model": _tagged(name),
        "size": card.weights.num_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _tagged(name: str) -> str:
    """The name with a tag, as clients of Ollama expect it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _details(card: ModelCard) -> dict[str, Any]:
    weights = card.weights
    return {
        "parent_model": "",
        "format": "weft",
        "family": weights.family,
        "families": [weights.family],
        "parameter_size": _short(weights.parameters),
        "quantization_level": _FLOATS.get(weights.stored, weights.stored.split(" ")[0].upper()),
    }


def _short(number: int) -> str:
    """``7615616512`` -> ``7.6B``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _digest(card: ModelCard) -> str:
    """Stands for Ollama's digest of a model's files; the same after a restart with that model."""
    weights = card.weights
    facts = [card.served_names[0], card.system_fingerprint, card.vocab_size, card.hidden_size]
    facts += [weights.family, weights.parameters, weights.num_bytes, weights.stored]
    return hashlib.sha256(orjson.dumps(facts)).hexdigest()
