"""Bodies of ``/v1/rerank`` and ``/v1/score``, as vLLM, Jina and Cohere define them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from weft.api.bodies import KEPT_ELSEWHERE, Name
from weft.api.rules import NULL, Ignored, Refused

MAX_PAIRS = 2048  # of texts, of one request

Texts = Annotated[list[str], Meta(max_length=MAX_PAIRS)]


class RankedDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    """A document as an object."""

    text: str


class ScoringBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both share.

    Attributes:
        use_activation, activation: two names of the same: whether scores of rerankers are from 0
            to 1.
        instruction: the task, for rerankers whose prompt has a place for it.
        truncation: cut documents to what the context holds.
    """

    model: Name | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    instruction: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: Name | None = None
    user: Annotated[Name | None, KEPT_ELSEWHERE] = None
    metadata: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    request_id: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    max_chunks_per_doc: Annotated[Raw, Ignored("a document is not split")] = NULL
    softmax: Annotated[Raw, Refused("use use_activation, which replaced it", (True,))] = NULL
    mm_processor_kwargs: Annotated[Raw, Refused("weft processes text only", ({},))] = NULL


class RerankBody(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/rerank``."""

    query: str
    documents: Annotated[list[str | RankedDocument], Meta(max_length=MAX_PAIRS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    rank_fields: Annotated[
        Raw, Refused("documents have a text and nothing else", (["text"], []))
    ] = NULL


class TextsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /rerank`` in the form of Hugging Face's text-embeddings-inference."""

    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Annotated[Raw, Refused("texts lose their end", ("Right", "right"))] = NULL
    model: Name | None = None


class ScoreBody(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/score``."""

    text_1: str | Texts
    text_2: str | Texts
    encoding_format: Literal["float"] | None = None
