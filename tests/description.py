"""OpenAI's API description, where it lies beside the repository."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema
import yaml

import shareddata

NAME = "openai/openapi.yaml"
FILE = shareddata.SHARED / NAME


def need() -> None:
    """Skip the test if the file is not there; fail it if ``WEFT_TEST_DATA`` says "required"."""
    shareddata.need(NAME)


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
