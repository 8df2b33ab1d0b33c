"""All endpoints whose answer the engine computes: a row for each.

Routes of servers, urls of batches and the page of parameters derive from the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Raw, Struct

from weft.api.asked import Asked
from weft.api.bodies import ChatBody, CompletionBody
from weft.api.chat import chat_job
from weft.api.chunks import EventStream
from weft.api.completions import completion_job
from weft.api.decoding import Body, decode_body
from weft.api.embeddings import EmbeddingBody, EmbeddingCollector, embedding_job
from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder, Job
from weft.api.logprobs import TokenTexts
from weft.api.message_answers import MessageCollector, MessageWriter
from weft.api.message_body import MessageBody
from weft.api.messages import message_job
from weft.api.ollama import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ollama_chat_job,
    ollama_generate_job,
    unloads,
)
from weft.api.ollama_answers import (
    OllamaCollector,
    OllamaWriter,
    Said,
    chat_said,
    generate_said,
    loaded,
)
from weft.api.ollama_embeddings import (
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaVectors,
    ollama_embed,
    ollama_embeddings,
)
from weft.api.response_answers import ResponseCollector, ResponseWriter
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_items import read_items
from weft.api.responses import Collector
from weft.api.rules import NULL, Notes, is_neutral
from weft.api.score_bodies import RerankBody, ScoreBody, TextsBody
from weft.api.scores import ScoreCollector, ScoringJob, rerank_job, score_job, texts_job

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"

AtOnce = dict[str, Any]  # an answer for which nothing has to be computed
Read = Callable[[bytes, Builder, TokenTexts, Notes], Asked | AtOnce]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that is asked by ``POST``.

    Attributes:
        body: what a body may have; None where it is one of another endpoint.
        read: checks a body; a typed error names the parameter that is wrong.
        renders: whether it may render a chat template.
        in_batches: whether lines of batches may ask it.
        stored: whether servers keep the answers; they have a handler of their own then.
        content_type: of its streams.
        repeats: whether short bodies may make long prompts, as a query with many documents does.
    """

    path: str
    body: type[Struct] | None
    read: Read
    renders: bool = True
    in_batches: bool = False
    stored: bool = False
    content_type: str = EVENT_STREAM
    repeats: bool = False


def _chunked(
    path: str,
    body: type[Body],
    job_of: Callable[[Body, Builder, Notes], Job],
    *,
    renders: bool = True,
) -> Endpoint:
    """Bodies that are answered with an object of choices or its chunks."""

    def read(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked:
        job = job_of(decode_body(body, data, notes=notes), builder, notes)
        tokenizer = builder.tokenizer
        return Asked(
            job,
            lambda: Collector(job, tokenizer, texts),
            lambda: EventStream(job, tokenizer, texts),
        )

    return Endpoint(path, body, read, renders, in_batches=True)


def _embedding(data: bytes, builder: Builder, _: TokenTexts, notes: Notes) -> Asked:
    body = decode_body(EmbeddingBody, data, notes=notes)
    job = embedding_job(body, builder)
    return Asked(job, lambda: EmbeddingCollector(job, body, builder.card.pooling.unit))


def _scored(
    path: str,
    body: type[Body],
    job_of: Callable[[Body, Builder, Notes], ScoringJob],
    *,
    in_batches: bool = False,
) -> Endpoint:
    """Bodies that ask for scores of pairs of texts."""

    def read(data: bytes, builder: Builder, _: TokenTexts, notes: Notes) -> Asked:
        scoring = job_of(decode_body(body, data, notes=notes), builder, notes)
        return Asked(scoring.job, lambda: ScoreCollector(scoring))

    return Endpoint(path, body, read, renders=False, in_batches=in_batches, repeats=True)


def _message(data: bytes, builder: Builder, _: TokenTexts, notes: Notes) -> Asked:
    job = message_job(decode_body(MessageBody, data, notes=notes), builder, notes)
    tokenizer = builder.tokenizer
    return Asked(
        job, lambda: MessageCollector(job, tokenizer), lambda: MessageWriter(job, tokenizer)
    )


def answer_response(job: Job, body: ResponseBody, builder: Builder, texts: TokenTexts) -> Asked:
    """The response that a job makes."""
    tokenizer = builder.tokenizer
    return Asked(
        job,
        lambda: ResponseCollector(job, body, tokenizer, texts),
        lambda: ResponseWriter(job, body, tokenizer, texts),
    )


def _response(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked:
    """A response where none are stored; servers that store them read bodies themselves."""
    body = decode_body(ResponseBody, data, notes=notes)
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            raise UnsupportedParameterError(name, " No responses are stored here.")
    job = response_job(body, read_items(body.input, notes=notes), builder, notes)
    return answer_response(job, body, builder, texts)


class RerankShape(Struct):
    """The field that tells a body of text-embeddings-inference from one of the others."""

    texts: Raw = NULL


def _rerank(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked | AtOnce:
    """The path that text-embeddings-inference has as well, with a body and answer of its own."""
    if is_neutral(bytes(decode_body(RerankShape, data).texts)):
        return _RERANK.read(data, builder, texts, notes)
    return _TEXTS.read(data, builder, texts, notes)


class InvocationShape(Struct):
    """The field that tells what kind of body it is; the endpoint of that kind checks the rest."""

    messages: Raw = NULL
    prompt: Raw = NULL
    input: Raw = NULL
    query: Raw = NULL
    text_1: Raw = NULL


def _invocation(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked | AtOnce:
    """The one path that hosting platforms know: chats, completions, embeddings, scores."""
    shape = decode_body(InvocationShape, data)
    for part, read in (
        (shape.messages, _CHAT.read),
        (shape.prompt, _COMPLETION.read),
        (shape.query, _RERANK.read),
        (shape.text_1, _SCORE.read),
    ):
        if not is_neutral(bytes(part)):
            return read(data, builder, texts, notes)
    if not is_neutral(bytes(shape.input)):
        return _embedding(data, builder, texts, notes)
    raise MissingParameterError("messages")


def _ollama(
    path: str, body: type[Body], job_of: Callable[[Body, Builder, Notes], Job | None], said: Said
) -> Endpoint:
    """Bodies that ask for text, or for nothing but the model to be loaded."""

    def read(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked | AtOnce:
        asked = decode_body(body, data, notes=notes)
        job = job_of(asked, builder, notes)
        if job is None:
            assert isinstance(asked, OllamaBody)
            return loaded(asked.model, said, unload=unloads(asked))
        tokenizer = builder.tokenizer
        return Asked(
            job,
            lambda: OllamaCollector(job, tokenizer, texts, said),
            lambda: OllamaWriter(job, tokenizer, texts, said),
        )

    return Endpoint(path, body, read, content_type=JSON_LINES)


def _ollama_vectors(
    path: str, body: type[Body], vectors_of: Callable[[Body, Builder, Notes], OllamaVectors]
) -> Endpoint:
    """Bodies that ask for vectors."""

    def read(data: bytes, builder: Builder, _: TokenTexts, notes: Notes) -> Asked | AtOnce:
        found = vectors_of(decode_body(body, data, notes=notes), builder, notes)
        if isinstance(found, dict):
            return found
        job, collector = found
        return Asked(job, lambda: collector)

    return Endpoint(path, body, read, renders=False)


_CHAT = _chunked("/v1/chat/completions", ChatBody, chat_job)
_COMPLETION = _chunked("/v1/completions", CompletionBody, completion_job, renders=False)
_RERANK = _scored("/v1/rerank", RerankBody, rerank_job, in_batches=True)
_TEXTS = _scored("/rerank", TextsBody, texts_job)
_SCORE = _scored("/v1/score", ScoreBody, score_job, in_batches=True)

_ROWS = (
    _CHAT,
    _COMPLETION,
    Endpoint("/v1/embeddings", EmbeddingBody, _embedding, renders=False, in_batches=True),
    _RERANK,
    _SCORE,
    Endpoint("/rerank", RerankBody, _rerank, renders=False, repeats=True),
    _scored("/v2/rerank", RerankBody, rerank_job),
    _scored("/score", ScoreBody, score_job),
    Endpoint("/v1/responses", ResponseBody, _response, in_batches=True, stored=True),
    Endpoint("/v1/messages", MessageBody, _message, in_batches=True),
    Endpoint("/invocations", None, _invocation, repeats=True),
    _ollama("/api/chat", OllamaChatBody, ollama_chat_job, chat_said),
    _ollama("/api/generate", OllamaGenerateBody, ollama_generate_job, generate_said),
    _ollama_vectors("/api/embed", OllamaEmbedBody, ollama_embed),
    _ollama_vectors("/api/embeddings", OllamaEmbeddingsBody, ollama_embeddings),
)
ENDPOINTS = {row.path: row for row in _ROWS}
BATCH_ENDPOINTS = {path: row for path, row in ENDPOINTS.items() if row.in_batches}


def read_whole(path: str, data: bytes, builder: Builder, texts: TokenTexts) -> Asked:
    """Check the body of a request to one of ``BATCH_ENDPOINTS``, to be answered as a whole.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    notes = Notes()
    asked = BATCH_ENDPOINTS[path].read(data, builder, texts, notes)
    notes.log()
    assert isinstance(asked, Asked), "only Ollama's endpoints answer at once"
    if asked.job.stream:
        raise UnsupportedParameterError("stream", " There is nobody to stream to.")
    return asked
