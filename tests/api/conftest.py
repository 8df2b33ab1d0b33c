"""The packaged model's tokeniser and template, hand-made updates, and OpenAI's own schemas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import description
import weft
from weft.api import Builder, ModelCard
from weft.text import ChatTemplate, Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

FOLDER = Path(weft.__file__).parent / "builtin"
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
    description.need()
    return lambda name, instance: description.validator(name).validate(instance)
