"""``/v1/embeddings``: turns a checked body into a job, and vectors into the answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace as changed

from weft.api.bodies import KEPT_ELSEWHERE, Name, Prompts
from weft.api.card import ModelCard
from weft.api.choices import ended_badly
from weft.api.classes import USUAL_POOLED
from weft.api.completions import Prompt, check_ids, prompts_of
from weft.api.errors import UnsupportedParameterError
from weft.api.jobs import Builder, Job, new_id, now
from weft.api.rules import NULL, Refused
from weft.api.sampling import check_model, fit_context, truncated
from weft.core.errors import InvariantError, ParameterError
from weft.core.plan import Update
from weft.core.types import NEUTRAL, FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_INPUTS = 2048
WAVE = 64  # inputs that are with the engine at once; more would fill the ring for one client

Format = Literal["float", "base64"]


class EmbeddingBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    model: Name
    input: str | Prompts
    dimensions: int | None = None
    encoding_format: Format | None = None
    user: Annotated[Name | None, KEPT_ELSEWHERE] = None
    # Extensions.
    cache_salt: Name | None = None
    service_tier: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    normalize: bool | None = None
    prompt_name: Name | None = None
    input_type: Name | None = None
    add_special_tokens: Annotated[Raw, Refused("they belong to the input", (True,))] = NULL
    metadata: Annotated[Raw, KEPT_ELSEWHERE] = NULL
    request_id: Annotated[Raw, KEPT_ELSEWHERE] = NULL


def embedding_job(body: EmbeddingBody, builder: Builder) -> Job:
    """Check a body and return what it asks for: one sequence for each input.

    Raises:
        WeftError: a typed error that names the parameter; nothing has been started.
    """
    card = builder.card
    model = check_model(body.model, card)
    rank, _ = builder.classes.choose(body.service_tier, body.priority, USUAL_POOLED)
    check_dimensions(body.dimensions, card.hidden_size)
    inputs = prompts_of(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise ParameterError(
            f"There are {len(inputs)} inputs; one request may have {MAX_INPUTS}.", param="input"
        )
    card.pooling.check_embeds(model)
    _check_normalize(body, card)
    inputs = _with_prompt(inputs, body, card)
    builder.check_texts([text for text in inputs if isinstance(text, str)], "input")
    prompts = [_encode(text, body, builder) for text in inputs]
    sampling = SamplingParams(**NEUTRAL, max_tokens=1, seed=0)
    salt = (body.cache_salt or "").encode()
    return Job(
        "embedding",
        new_id("embd"),
        now(),
        model,
        card.system_fingerprint,
        tuple(
            Request(number, prompt, sampling, (), rank, salt, embed=True)
            for number, prompt in zip(builder.numbers(len(prompts)), prompts, strict=True)
        ),
    )


def waves(job: Job) -> Iterator[Job]:
    """The job in pieces of at most ``WAVE`` sequences, to be run one after the other."""
    for start in range(0, len(job.requests), WAVE):
        yield replace(job, requests=job.requests[start : start + WAVE])


class VectorCollector:
    """Gathers the vectors of a job until all are there.

    Attributes:
        left: inputs whose vectors are missing.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._vectors: dict[int, bytes] = {}
        self.left = len(job.requests)

    @property
    def done(self) -> bool:
        return self.left == 0

    def push(self, updates: Seq[Update]) -> list[int]:
        """Apply updates; return no ids, as there are no stop strings.

        Raises:
            WeftError: an input failed; the answer cannot be completed.
        """
        for update in updates:
            if update.finish is None:
                continue
            if update.finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                raise ended_badly(update)
            if update.embedding is None:
                raise InvariantError(f"input {update.sequence_id} ended without its embedding")
            self._vectors[update.sequence_id] = update.embedding
            self.left -= 1
        return []


class EmbeddingCollector(VectorCollector):
    """Gathers vectors for the answer of ``/v1/embeddings``.

    Args:
        unit: the model's vectors have length 1, and so have parts of them.
    """

    def __init__(self, job: Job, body: EmbeddingBody, unit: bool = True) -> None:
        super().__init__(job)
        self._dimensions = body.dimensions
        self._base64 = body.encoding_format == "base64"
        self._unit = unit or body.normalize is True

    def body(self) -> bytes:
        """The answer as JSON, once all inputs have ended."""
        job = self._job
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(request)}
            for index, request in enumerate(job.requests)
        ]
        tokens = job.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        whole = {"object": "list", "data": data, "model": job.model, "usage": usage}
        return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)

    def _shown(self, request: Request) -> Any:
        vector = shortened(self._vectors[request.id], self._dimensions, unit=self._unit)
        return base64.b64encode(vector.tobytes()).decode() if self._base64 else vector


def shortened(
    embedding: bytes, dimensions: int | None, *, unit: bool = True
) -> NDArray[np.float32]:
    """The first ``dimensions`` float32 numbers of a vector, scaled to length 1 if ``unit``.

    So Matryoshka representations are cut (Kusupati et al. 2022).
    """
    import numpy as np  # few servers are asked for embeddings

    if not unit:
        return np.frombuffer(embedding, dtype="<f4")[:dimensions]
    vector = np.frombuffer(embedding, dtype="<f4")[:dimensions].astype(np.float64)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4")


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raise ParameterError if vectors of so many numbers cannot be cut to some."""
    if dimensions is not None and not 1 <= dimensions <= most:
        raise ParameterError(
            f"dimensions must be from 1 to {most}, not {dimensions}.", param="dimensions"
        )


def _check_normalize(body: EmbeddingBody, card: ModelCard) -> None:
    if body.normalize is False and card.pooling.unit:
        raise UnsupportedParameterError("normalize", " The vectors of this model have length 1.")


def _with_prompt(inputs: list[Prompt], body: EmbeddingBody, card: ModelCard) -> list[Prompt]:
    """The inputs, texts with a prompt of the checkpoint before them: the one asked for or default.

    Raises:
        ParameterError: there is no such prompt, or inputs are token ids.
    """
    before = card.pooling.prompt(body.prompt_name, body.input_type)
    asked = {"prompt_name": body.prompt_name, "input_type": body.input_type}
    param = next((name for name, value in asked.items() if value is not None), None)
    if param is not None and not all(isinstance(text, str) for text in inputs):
        raise ParameterError("A prompt goes before texts, not before token ids.", param=param)
    return [before + text if isinstance(text, str) and text else text for text in inputs]


def _encode(text: Prompt, body: EmbeddingBody, builder: Builder) -> tuple[int, ...]:
    marks: Seq[int] = ()
    if isinstance(text, str):
        ids: Seq[int] = builder.tokenizer.encode(text) if text else ()
        if body.truncate_prompt_tokens is not None:
            marks = builder.tokenizer.encode("")
            if body.truncation_side is None and builder.card.pooling.pooled != "last":
                body = changed(body, truncation_side="right")  # as encoders were trained
    else:
        check_ids(text, builder.card.vocab_size, "input")
        ids = text
    if not ids:
        raise ParameterError("An input is empty; give at least one token.", param="input")
    ids = truncated(ids, body, builder.card, None, marks)
    fit_context(len(ids), None, builder.card, "input")
    return tuple(ids)
