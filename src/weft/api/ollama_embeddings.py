"""Ollama's ``/api/embed`` and ``/api/embeddings``: bodies to jobs, and vectors to answers."""

from __future__ import annotations

import time
from typing import Any

import orjson
from msgspec import Raw, Struct

from weft.api.bodies import NULL, Name
from weft.api.embeddings import EmbeddingBody, EmbeddingCollector, embedding_job
from weft.api.jobs import Builder, Job
from weft.api.ollama import read_options
from weft.api.sampling import check_model
from weft.api.translate import renamed
from weft.core.errors import WeftError


class OllamaEmbedBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/embed``."""

    model: Name
    input: str | list[str]
    dimensions: int | None = None
    keep_alive: Raw = NULL
    options: Raw = NULL
    truncate: bool | None = None


class OllamaEmbeddingsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/embeddings``, the former name of ``/api/embed``."""

    model: Name
    prompt: str = ""
    keep_alive: Raw = NULL
    options: Raw = NULL


class OllamaEmbedding(EmbeddingCollector):
    """Gathers vectors for the answer of ``/api/embed``."""

    def __init__(self, job: Job, body: EmbeddingBody) -> None:
        super().__init__(job, body)
        self._start_ns = time.monotonic_ns()

    def body(self) -> bytes:
        """The answer as JSON, once all inputs have ended; times are in nanoseconds."""
        job = self._job
        whole = {
            "model": job.model,
            "embeddings": [self._shown(request) for request in job.requests],
            "total_duration": max(time.monotonic_ns() - self._start_ns, 1),
            "load_duration": 0,
            "prompt_eval_count": job.prompt_tokens,
        }
        return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)


class OllamaOnlyEmbedding(EmbeddingCollector):
    """Gathers the one vector for the answer of ``/api/embeddings``."""

    def body(self) -> bytes:
        """The answer as JSON, once the prompt has ended."""
        [request] = self._job.requests
        whole = {"embedding": self._shown(request)}
        return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)


Asked = tuple[Job, EmbeddingCollector] | dict[str, Any]


def ollama_embed(body: OllamaEmbedBody, builder: Builder) -> Asked:
    """Check a body; return its job and what gathers its vectors, or the answer without any.

    Inputs that are too long for the context lose their end, unless ``truncate`` is false.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    model = check_model(body.model, builder.card)
    read_options(body.options)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if texts in ([], [""]):
        return {"model": model, "embeddings": []}
    inputs: list[str | int | list[int]] = list(texts)
    if body.truncate is not False:
        inputs = [_cut(text, builder) for text in texts]
    whole = EmbeddingBody(model=model, input=inputs, dimensions=body.dimensions)
    job = embedding_job(whole, builder)
    return job, OllamaEmbedding(job, whole)


def ollama_embeddings(body: OllamaEmbeddingsBody, builder: Builder) -> Asked:
    """As `ollama_embed`, for one prompt; without one there is no vector."""
    model = check_model(body.model, builder.card)
    read_options(body.options)
    if not body.prompt:
        return {"embedding": []}
    try:
        whole = EmbeddingBody(model=model, input=[_cut(body.prompt, builder)])
        job = embedding_job(whole, builder)
    except WeftError as error:
        raise renamed(error, {"input": "prompt"}) from None
    return job, OllamaOnlyEmbedding(job, whole)


def _cut(text: str, builder: Builder) -> list[int]:
    """The tokens of a text, as many as the context holds."""
    builder.check_size(len(text.encode()), "input")
    return builder.tokenizer.encode(text)[: builder.card.max_model_len - 1] if text else []
