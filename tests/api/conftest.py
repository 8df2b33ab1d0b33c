"""The packaged model's tokeniser and template, hand-made updates, and OpenAI's own schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import weft
from weft.api import Builder, ModelCard
from weft.text import ChatTemplate, Tokenizer

FOLDER = Path(weft.__file__).parent / "builtin"
DESCRIPTION = Path(__file__).parents[3] / "shared" / "data" / "openai" / "openapi.yaml"
CARD = ModelCard(
    served_names=("builtin", "org/other"),
    vocab_size=4096,
    max_model_len=256,
    eos_token_ids=(1, 6),
    sampling_defaults={"temperature": 0.5},
    created=1,
    hidden_size=8,
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="session")
def builder(tokenizer: Tokenizer) -> Builder:
    return Builder(tokenizer, ChatTemplate.load(FOLDER), CARD)


@pytest.fixture(scope="session")
def valid() -> Callable[[str, Any], None]:
    """Checks an object against a schema of OpenAI's API description."""
    if not DESCRIPTION.is_file():
        pytest.skip("OpenAI's API description does not lie beside the repository")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(DESCRIPTION.read_text(encoding="utf-8"), loader)
    schemas = {"components": {"schemas": _nullable(document["components"]["schemas"])}}

    def check(name: str, instance: Any) -> None:
        schema = {**schemas, "$ref": f"#/components/schemas/{name}"}
        jsonschema.Draft202012Validator(schema).validate(instance)

    return check


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
