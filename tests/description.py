"""OpenAI's API description, where it lies beside the repository."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FILE = Path(__file__).parents[2] / "shared" / "data" / "openai" / "openapi.yaml"


def need() -> None:
    """Skip the test if the file is not there; fail it if ``WEFT_TEST_DATA`` says "required"."""
    if FILE.is_file():
        return
    message = "OpenAI's API description does not lie beside the repository"
    if os.environ.get("WEFT_TEST_DATA") == "required":
        pytest.fail(message)
    pytest.skip(message)


@cache
def description() -> dict[str, Any]:
    """The whole document, in plain JSON Schema. Raises FileNotFoundError."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document: dict[str, Any] = _nullable(yaml.load(FILE.read_text(encoding="utf-8"), loader))
    return document


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Checks objects against one of the description's schemas."""
    schemas = {"components": {"schemas": description()["components"]["schemas"]}}
    reference = {"$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator({**schemas, **reference})


def _nullable(node: Any) -> Any:
    """Write OpenAPI 3.0's ``nullable`` as JSON Schema does."""
    if isinstance(node, list):
        return [_nullable(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _nullable(value) for key, value in node.items()}
    if plain.pop("nullable", False) is True:
        return {"anyOf": [plain, {"type": "null"}]}
    return plain
