"""Whole answers: maps a path to its job builder and its answer collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from weft.api.bodies import ChatBody, CompletionBody
from weft.api.chat import chat_job
from weft.api.completions import completion_job
from weft.api.decoding import decode_body
from weft.api.embeddings import EmbeddingBody, EmbeddingCollector, embedding_job, waves
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import Builder, Job
from weft.api.logprobs import TokenTexts
from weft.api.response_answers import ResponseCollector
from weft.api.response_body import ResponseBody, response_job
from weft.api.response_items import read_items
from weft.api.responses import Collector
from weft.api.rules import Notes
from weft.core.plan import Update


class Whole(Protocol):
    """Gathers the updates of a job; ``push`` returns ids that a stop string has ended."""

    @property
    def done(self) -> bool: ...

    def push(self, updates: Seq[Update]) -> list[int]: ...

    def body(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request: its job, and what its updates go into."""

    job: Job
    whole: Whole

    def parts(self) -> Iterator[Job]:
        """The job in pieces that are run one after the other; only embeddings have several."""
        return waves(self.job) if self.job.endpoint == "embedding" else iter((self.job,))


def read_request(path: str, data: bytes, builder: Builder, texts: TokenTexts) -> Asked:
    """Check the body of a request to one of ``ENDPOINTS`` that is to be answered as a whole.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    notes = Notes()
    asked = ENDPOINTS[path](data, builder, texts, notes)
    notes.log()
    if asked.job.stream:
        raise UnsupportedParameterError("stream", " Answers here are whole; leave it out.")
    return asked


def _chat(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked:
    job = chat_job(decode_body(ChatBody, data, notes=notes), builder, notes)
    return Asked(job, Collector(job, builder.tokenizer, texts))


def _completion(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked:
    job = completion_job(decode_body(CompletionBody, data, notes=notes), builder, notes)
    return Asked(job, Collector(job, builder.tokenizer, texts))


def _embedding(data: bytes, builder: Builder, _: TokenTexts, notes: Notes) -> Asked:
    body = decode_body(EmbeddingBody, data, notes=notes)
    job = embedding_job(body, builder)
    return Asked(job, EmbeddingCollector(job, body))


def _response(data: bytes, builder: Builder, texts: TokenTexts, notes: Notes) -> Asked:
    body = decode_body(ResponseBody, data, notes=notes)
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            raise UnsupportedParameterError(name, " No responses are stored here.")
    job = response_job(body, read_items(body.input, notes=notes), builder, notes)
    return Asked(job, ResponseCollector(job, body, builder.tokenizer, texts))


ENDPOINTS: Mapping[str, Callable[[bytes, Builder, TokenTexts, Notes], Asked]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
    "/v1/responses": _response,
}
