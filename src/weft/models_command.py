"""``weft models``: lists the models that lie on this machine, and how each is served."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from weft.core.settings import format_bytes
from weft.models.found import FoundModel, found_models


def run_models(*, as_json: bool) -> int:
    """Print a line for each model, or JSON; returns the exit status."""
    found = found_models(Path.home(), os.environ)
    if as_json:
        print(json.dumps([_facts(model) for model in found], indent=1))
        return 0
    for model in found:
        print(_line(model))
    if not found:
        print(
            "no models in the folders of Ollama and LM Studio, nor in the hub's cache; weft serve "
            "OWNER/REPO fetches one"
        )
    return 0


def _facts(model: FoundModel) -> dict[str, object]:
    return {
        "store": model.store,
        "name": model.name,
        "path": str(model.path),
        "bytes": model.nbytes,
        "problem": model.problem(),
    }


def _line(model: FoundModel) -> str:
    size = format_bytes(model.nbytes)
    problem = model.problem()
    name = shlex.quote(model.name)
    command = f"weft serve {shlex.quote(str(model.path))} --served-model-name {name}"
    return f"{model.store:<9} {size:>10}  {model.name}\n    {problem or command}"
