"""Ollama's ``/api/embed`` and ``/api/embeddings``: turns bodies into jobs, vectors into answers."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar

import orjson
from msgspec import Meta, Raw, Struct

from weft.api.bodies import MAX_IDS, Name
from weft.api.embeddings import EmbeddingBody, EmbeddingCollector, embedding_job
from weft.api.jobs import Builder, Job
from weft.api.ollama import STAYS_LOADED, read_options
from weft.api.rules import NULL, Notes
from weft.api.sampling import check_model
from weft.api.translate import renamed
from weft.core.errors import WeftError


class OllamaEmbedBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/embed``."""

    OPEN: ClassVar[bool] = True

    model: Name
    input: str | Annotated[list[str], Meta(max_length=MAX_IDS)]
    dimensions: int | None = None
    options: Raw = NULL
    truncate: bool | None = None
    keep_alive: Annotated[Raw, STAYS_LOADED] = NULL


class OllamaEmbeddingsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /api/embeddings``, the former name of ``/api/embed``."""

    OPEN: ClassVar[bool] = True

    model: Name
    prompt: str = ""
    options: Raw = NULL
    keep_alive: Annotated[Raw, STAYS_LOADED] = NULL


class OllamaEmbedding(EmbeddingCollector):
    """Gathers vectors for the answer of ``/api/embed``."""

    def __init__(self, job: Job, body: EmbeddingBody, unit: bool = True) -> None:
        super().__init__(job, body, unit)
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


OllamaVectors = tuple[Job, EmbeddingCollector] | dict[str, Any]


def ollama_embed(body: OllamaEmbedBody, builder: Builder, notes: Notes) -> OllamaVectors:
    """Check a body; return its job and what gathers its vectors, or the answer without any.

    Inputs that are too long for the context lose their end, unless ``truncate`` is false.

    Args:
        notes: take what is ignored.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    model = check_model(body.model, builder.card)
    read_options(body.options, notes)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if texts in ([], [""]):
        return {"model": model, "embeddings": []}
    truncate = body.truncate is not False
    whole = _whole(model, texts, truncate=truncate, dimensions=body.dimensions)
    job = embedding_job(whole, builder)
    return job, OllamaEmbedding(job, whole, builder.card.pooling.unit)


def ollama_embeddings(body: OllamaEmbeddingsBody, builder: Builder, notes: Notes) -> OllamaVectors:
    """As `ollama_embed`, for one prompt; without one there is no vector."""
    model = check_model(body.model, builder.card)
    read_options(body.options, notes)
    if not body.prompt:
        return {"embedding": []}
    whole = _whole(model, [body.prompt], truncate=True)
    try:
        job = embedding_job(whole, builder)
    except WeftError as error:
        raise renamed(error, {"input": "prompt"}) from None
    return job, OllamaOnlyEmbedding(job, whole, builder.card.pooling.unit)


def _whole(
    model: str, texts: Seq[str], *, truncate: bool, dimensions: int | None = None
) -> EmbeddingBody:
    """The body of ``/v1/embeddings`` that asks for the same."""
    inputs: list[str | int | list[int]] = [*texts]
    return EmbeddingBody(
        model=model,
        input=inputs,
        dimensions=dimensions,
        truncate_prompt_tokens=-1 if truncate else None,
        truncation_side="right" if truncate else None,
    )
