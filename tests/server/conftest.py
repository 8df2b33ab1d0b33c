"""Fixtures of the server tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted import ScriptedClient
from serving import Running, serving

from weft.api import ModelCard
from weft.core.config import EngineConfig
from weft.engine.build import Engine, build_engine
from weft.engine.describe import describe_served
from weft.engine.local import EngineThread
from weft.text import ChatTemplate, Tokenizer

LIMIT = 256  # tokens of the context in these tests
CONFIG = EngineConfig(max_model_len=LIMIT, max_num_seqs=16, threads=1, dtype="float32")


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[Engine, EngineThread]]:
    """The packaged model on a thread."""
    built = build_engine(CONFIG)
    thread = EngineThread(built.scheduler, built.executor, built.grammars)
    yield built, thread
    thread.close()


@pytest.fixture(scope="session")
def text(engine: tuple[Engine, EngineThread]) -> tuple[Tokenizer, ChatTemplate, ModelCard]:
    model = engine[0].model
    card = ModelCard(
        served_names=("builtin", "org/other"),
        vocab_size=model.spec.vocab_size,
        max_model_len=LIMIT,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        created=int(time.time()),
        hidden_size=model.spec.hidden_size,
        weights=ModelCard.of(describe_served(CONFIG, engine[0])).weights,
    )
    return Tokenizer.load(model.folder), ChatTemplate.load(model.folder), card


@pytest.fixture(scope="session")
def real(engine: tuple[Engine, EngineThread], text: Any) -> Iterator[Running]:
    """A server before the packaged model."""
    with serving(engine[1].inbox, text) as running:
        yield running


@pytest.fixture(scope="module")
def client(real: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(text: Any) -> Iterator[Running]:
    """A server before a `ScriptedClient`."""
    with serving(ScriptedClient(), text, drain_timeout_s=0.5) as running:
        yield running
