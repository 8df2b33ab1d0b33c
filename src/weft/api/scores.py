"""Scores of pairs of texts: jobs for ``/v1/rerank`` and ``/v1/score``, and their answers.

A reranker reads both texts in one prompt, so a pair is one sequence; the documents of a query share
its beginning. An embedding model reads each text alone, and the score is the cosine of two vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import orjson

from weft.api.classes import USUAL_POOLED
from weft.api.embeddings import VectorCollector
from weft.api.jobs import Builder, Job, new_id, now
from weft.api.rules import Notes
from weft.api.sampling import check_model, cut_between, fit_context, truncated
from weft.api.score_bodies import RankedDocument, RerankBody, ScoreBody, ScoringBody, TextsBody
from weft.core.errors import ParameterError, PromptTooLongError, UnsuitableModelError
from weft.core.plan import Update
from weft.core.types import NEUTRAL, Request, SamplingParams
from weft.text import Tokenizer
from weft.text.pairs import QWEN3_RERANKER, WEB_SEARCH, JoinedPair, PairTemplate

KEPT = 8  # templates, and ids of answers

Answer = Callable[[list[float]], dict[str, Any] | list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class ScoringJob:
    """A job whose answer is made of one score for each pair.

    Attributes:
        pairs: places among the requests of the two vectors of each pair; None where each request
            is a pair of its own.
        activated: scores of rerankers are from 0 to 1; else differences of logits.
        answer: of the scores, without what the job says itself; a list stands alone.
    """

    job: Job
    pairs: tuple[tuple[int, int], ...] | None
    activated: bool
    answer: Answer


def rerank_job(body: RerankBody, builder: Builder, notes: Notes) -> ScoringJob:
    """Check a body and return what it asks for.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    texts = [one.text if isinstance(one, RankedDocument) else one for one in body.documents]
    if not texts:
        raise ParameterError("The list of documents is empty.", param="documents")

    def answer(scores: list[float]) -> dict[str, Any]:
        order = _best_first(scores)[: body.top_n or None]
        results = [
            {"index": at, "relevance_score": scores[at]}
            | ({} if body.return_documents is False else {"document": {"text": texts[at]}})
            for at in order
        ]
        return {"results": results}

    left = [body.query]
    return _job("rerank", body, (left, "query"), (texts, "documents"), builder, notes, answer)


def texts_job(body: TextsBody, builder: Builder, notes: Notes) -> ScoringJob:
    """As `rerank_job`, in the form of text-embeddings-inference."""
    if not body.texts:
        raise ParameterError("The list of texts is empty.", param="texts")

    def answer(scores: list[float]) -> list[dict[str, Any]]:
        return [
            {"index": at, "score": scores[at]}
            | ({"text": body.texts[at]} if body.return_text else {})
            for at in _best_first(scores)
        ]

    same = ScoringBody(
        model=body.model,
        truncation=body.truncate,
        use_activation=False if body.raw_scores else None,
    )
    left = [body.query]
    return _job("rerank", same, (left, "query"), (body.texts, "texts"), builder, notes, answer)


def _best_first(scores: Seq[float]) -> list[int]:
    """Places of scores, the highest first; of equal ones in their order."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def score_job(body: ScoreBody, builder: Builder, notes: Notes) -> ScoringJob:
    """As `rerank_job`: text_1 and text_2 are paired in turn, or one text_1 with every text_2."""
    left, right = (
        [given] if isinstance(given, str) else given for given in (body.text_1, body.text_2)
    )
    for texts, param in ((left, "text_1"), (right, "text_2")):
        if not texts:
            raise ParameterError(f"The list of {param} is empty.", param=param)
    if len(left) not in (1, len(right)):
        raise ParameterError(
            f"text_1 has {len(left)} texts and text_2 has {len(right)}; give one text_1 for all, "
            "or as many of each.",
            param="text_1",
        )

    def answer(scores: list[float]) -> dict[str, Any]:
        rows = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        return {"object": "list", "data": rows}

    return _job("score", body, (left, "text_1"), (right, "text_2"), builder, notes, answer)


class ScoreCollector(VectorCollector):
    """Gathers the vectors of a job until its scores can be computed."""

    def __init__(self, scoring: ScoringJob) -> None:
        super().__init__(scoring.job)
        self._scoring = scoring

    def body(self) -> bytes:
        """The answer as JSON, once all texts have ended."""
        answer = self._scoring.answer(self.scores())
        if isinstance(answer, list):
            return orjson.dumps(answer)
        job, tokens = self._job, self._job.prompt_tokens
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        whole = {"id": job.id, "created": job.created, "model": job.model, "usage": usage}
        if job.endpoint == "rerank":  # Cohere's clients read the tokens here
            whole["meta"] = {"tokens": {"input_tokens": tokens, "output_tokens": 0}}
        return orjson.dumps(whole | answer)

    def scores(self) -> list[float]:
        """One for each pair, once all texts have ended."""
        import numpy as np  # few servers are asked for scores

        found = [
            np.frombuffer(self._vectors[one.id], "<f4").astype(np.float64)
            for one in self._job.requests
        ]
        if self._scoring.pairs is not None:
            unit = [vector / (np.linalg.norm(vector) or 1.0) for vector in found]
            return [float(unit[a] @ unit[b]) for a, b in self._scoring.pairs]
        logits = [float(one[0] - one[1]) if len(one) > 1 else float(one[0]) for one in found]
        return [_sigmoid(logit) for logit in logits] if self._scoring.activated else logits


def scores_of(
    ask: dict[str, Any],
    builder: Builder,
    ids: Iterator[int],
    updates_of: Callable[[Seq[Request]], Iterator[Update]],
) -> list[float]:
    """The scores of a query's documents, in their order.

    Args:
        ask: the fields of a `RerankBody`.
        ids: numbers that no other request has.
        updates_of: submits requests.

    Raises:
        WeftError: see `rerank_job`; or the engine could not compute a pair.
    """
    body = RerankBody(**{**ask, "documents": list(ask["documents"])})
    scoring = rerank_job(body, builder, Notes())
    requests = tuple(replace(one, id=next(ids)) for one in scoring.job.requests)
    collector = ScoreCollector(replace(scoring, job=replace(scoring.job, requests=requests)))
    for update in updates_of(requests):
        collector.push([update])
    return collector.scores()


def _sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)): of two answers' logits, the softmax of the first."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


Named = tuple[list[str], str]  # texts, and the parameter that has them


def _job(
    endpoint: Literal["rerank", "score"],
    body: ScoringBody,
    left: Named,
    right: Named,
    builder: Builder,
    notes: Notes,
    answer: Answer,
) -> ScoringJob:
    """A job for pairs of texts, each of the left ones or the only one with one of the right."""
    card = builder.card
    model = check_model(body.model, card)
    card.pooling.check_scores(model)
    scoring = card.pooling.scoring
    _check_body(body)
    rank, _ = builder.classes.choose(body.service_tier, body.priority, USUAL_POOLED)
    wish = body.use_activation if body.activation is None else body.activation
    activated = card.pooling.sigmoid if wish is None else wish
    count, one = len(right[0]), len(left[0]) == 1
    repeated = builder.check_texts(left[0], left[1])
    repeated *= count if one and scoring != "similarity" else 1
    builder.check_texts(right[0], right[1], repeated)
    if scoring == "similarity":
        _check_similarity(body, wish is False, notes)
        prompts = [
            _single(text, body, builder, param) for texts, param in (left, right) for text in texts
        ]
        first = len(left[0])
        pairs = tuple((0 if one else at, first + at) for at in range(count))
    else:
        prompts = _pairs(left, right, body, builder)
        pairs = None
    sampling, salt = _sampling(builder), (body.cache_salt or "").encode()
    requests = tuple(
        Request(number, prompt, sampling, (), rank, salt, embed=True)
        for number, prompt in zip(builder.numbers(len(prompts)), prompts, strict=True)
    )
    job = Job(endpoint, new_id(endpoint), now(), model, card.system_fingerprint, requests)
    return ScoringJob(job, pairs, activated, answer)


def _check_body(body: ScoringBody) -> None:
    if body.truncate_prompt_tokens is not None and body.truncation is not None:
        raise ParameterError(
            "Give either truncation or truncate_prompt_tokens.", param="truncation"
        )
    if body.truncate_prompt_tokens == 0:
        raise ParameterError(
            "truncate_prompt_tokens leaves nothing of the prompt.", param="truncate_prompt_tokens"
        )
    if None not in (body.use_activation, body.activation):
        raise ParameterError("Give either use_activation or activation.", param="activation")


def _check_similarity(body: ScoringBody, wants_logits: bool, notes: Notes) -> None:
    """What embedding models have no use for."""
    if body.instruction is not None:
        raise ParameterError(
            "An embedding model reads the query alone; put the instruction into the query.",
            param="instruction",
        )
    if wants_logits:
        notes.ignore("use_activation" if body.activation is None else "activation")


def _sampling(builder: Builder) -> SamplingParams:
    """Of an answer yes or no the log probabilities of both, yes first; else a vector."""
    values: dict[str, Any] = {**NEUTRAL, "max_tokens": 1, "seed": 0}
    if builder.card.pooling.scoring == "yes-no":
        ids = builder.card.pooling.answers or _answers(builder.tokenizer)
        values |= {"logprobs": len(ids), "logprob_token_ids": ids}
    sampling = SamplingParams(**values)
    sampling.check_vocabulary(builder.card.vocab_size)
    return sampling


@lru_cache(KEPT)
def _answers(tokenizer: Tokenizer) -> tuple[int, int]:
    yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise UnsuitableModelError(
            "This model cannot answer yes or no with one token: its tokeniser has none for "
            f"'{'yes' if len(yes) != 1 else 'no'}'.",
            param="model",
        )
    return yes[0], no[0]


@lru_cache(KEPT)
def _template(text: str, joined: str, tokenizer: Tokenizer) -> PairTemplate | JoinedPair:
    if joined:
        return JoinedPair(tokenizer, typed=joined == "typed")
    return PairTemplate(text or QWEN3_RERANKER, tokenizer)


def _pairs(left: Named, right: Named, body: ScoringBody, builder: Builder) -> list[tuple[int, ...]]:
    """The prompt of each pair."""
    pooling = builder.card.pooling
    template = _template(pooling.template, pooling.joined, builder.tokenizer)
    if body.instruction is not None and not template.instructed:
        raise ParameterError(
            "The prompt of this reranker has no place for an instruction.", param="instruction"
        )
    most = body.truncate_prompt_tokens
    if most == -1 or body.truncation:
        most = builder.card.max_model_len - 1
    queries = left[0] * (len(right[0]) if len(left[0]) == 1 else 1)
    prompts = []
    for query, document in zip(queries, right[0], strict=True):
        instruction = WEB_SEARCH if body.instruction is None else body.instruction
        values = {"instruction": instruction, "query": query, "document": document}
        ids = template.encode(values, body.max_tokens_per_doc, most)
        _check_fits(len(ids), builder, right[1])
        prompts.append(tuple(ids))
    return prompts


def _single(text: str, body: ScoringBody, builder: Builder, param: str) -> tuple[int, ...]:
    """The prompt of one text of an embedding model."""
    ids: Seq[int] = builder.tokenizer.encode(text) if text else ()
    if not ids:
        raise ParameterError("A text is empty; give at least one token.", param=param)
    most = None if param == "query" else body.max_tokens_per_doc
    keep = -1 if body.truncation else body.truncate_prompt_tokens
    marks = () if most is None and keep is None else builder.tokenizer.encode("")
    if most is not None:
        ids = cut_between(ids, most + len(marks), marks, right=True)
    if keep is not None:
        ids = truncated(ids, _Cut(keep), builder.card, None, marks)
    _check_fits(len(ids), builder, param)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Texts of embedding models lose their end."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None = "right"


def _check_fits(tokens: int, builder: Builder, param: str) -> None:
    try:
        fit_context(tokens, None, builder.card, param)
    except PromptTooLongError as error:
        raise PromptTooLongError(
            f"{error.message} With truncate_prompt_tokens=-1 the server cuts it.", param=param
        ) from None
