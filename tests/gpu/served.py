"""Engines without a request plane, their outputs, and the reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from paged import PagedRunner
from torch import Tensor

import where
from weft.core.config import EngineConfig
from weft.core.errors import OutOfMemoryError, WeftError
from weft.core.plan import PromptLogprobs, StepOutputs, Update
from weft.core.ports import Lease
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.model import resolve_settings
from weft.kernels.ops import select_ops
from weft.models.loader import load_model

CPU = torch.device("cpu")
DEVICE = torch.device(where.NAME)
LENGTH = 112  # tokens of the longest sequence that is served


@dataclass
class Answer:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: WeftError | None = None
    embedding: bytes | None = None


class Crowd:
    """An inbox that hands out all requests at once, and keeps the answers."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self.answers = {request.id: Answer() for request in requests}

    def receive(self) -> tuple[list[Request], list[Any]]:
        requests, self._requests = self._requests, []
        return requests, []

    def computing(self, sequence_ids: Seq[int]) -> None:
        """Nothing outlives the test."""

    def lend(self, lease: Lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        for update in (*(Update(*pair) for pair in outputs.tokens), *outputs.updates):
            answer = self.answers[update.sequence_id]
            if update.token is not None:
                answer.tokens.append(update.token)
            if update.prompt_logprobs is not None:
                answer.prompt_logprobs.append(update.prompt_logprobs)
            answer.cached_tokens += update.cached_tokens
            answer.finish, answer.error = update.finish, update.error
            answer.embedding = update.embedding

    def wait(self) -> None:
        """There is always something to do."""


class Stopped:
    """A clock that stands, so that plans do not depend on the machine."""

    def now(self) -> float:
        return 0.0


def settings_for(folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of an engine for a checkpoint: float32, few sequences, and ``more``."""
    common = {"dtype": "float32", "threads": 1, "kv_memory": 2**22, "max_num_seqs": 8}
    common |= {"max_num_batched_tokens": 48, "max_model_len": LENGTH, "block_size": 8}
    return {**common, "model": str(folder), "device": where.NAME, **more}


def tight(folder: Path, **more: Any) -> int:
    """The least KV memory that holds one longest sequence, so that others give way."""
    memory = 2**12
    while True:
        try:
            resolve_settings(EngineConfig(**settings_for(folder, **more, kv_memory=memory)))
        except OutOfMemoryError:
            memory = memory * 17 // 16
        else:
            return memory


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[Engine]:
    """An engine with ``settings_for`` a checkpoint."""
    engine = build_engine(EngineConfig(**settings_for(folder, **settings)))
    try:
        yield engine
    finally:
        engine.executor.close()


def serve(engine: Engine, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
    """Answer requests through the loop, all of which come at once."""
    requests = [
        Request(number, tuple(tokens), asked.with_defaults({"max_tokens": 8}))
        for number, (tokens, asked) in enumerate(zip(prompts, params, strict=True))
    ]
    return answers_to(engine, requests)


def answers_to(engine: Engine, requests: Seq[Request]) -> list[Answer]:
    """The same for requests of any kind."""
    crowd = Crowd(list(requests))
    EngineLoop(engine.scheduler, engine.executor, crowd, Stopped()).run_until_idle()
    return list(crowd.answers.values())


class Truth:
    """A checkpoint in plain torch on the CPU, in float32."""

    def __init__(self, folder: Path, rounding: Any = None) -> None:
        ops = select_ops("cpu", "float32", "reference")
        more = () if rounding is None else (rounding,)
        self._decoder = load_model(folder, "float32", LENGTH, ops, *more)

    def logits(self, tokens: Seq[int]) -> Tensor:
        """Logits [n, V] after each of the tokens, computed in one piece."""
        found = PagedRunner(self._decoder).step([("only", list(tokens))])[0]
        assert found.std() > 0.3, "logits too flat to tell models apart"
        return found

    def miss(self, prompt: Seq[int], answer: Answer) -> float:
        """By how much a token of a greedy answer is below the likeliest, at the most."""
        assert answer.error is None
        logits = self.logits([*prompt, *answer.tokens[:-1]])[len(prompt) - 1 :]  # [n, V]
        chosen = logits.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
        return float((logits.amax(1) - chosen).max())

    def gap(self, prompt: Seq[int], answer: Answer) -> float:
        """The largest difference from the log probabilities of a prompt."""
        found = told(answer)
        return float((found - self.logprobs(prompt)).abs().max())

    def logprobs(self, prompt: Seq[int]) -> Tensor:
        """The log probabilities [n - 1] of a prompt's tokens but the first."""
        table = self.logits(prompt)[:-1].log_softmax(-1)
        return table.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)


def told(answer: Answer) -> Tensor:
    """The log probabilities [n - 1] of the tokens of a prompt that an engine gives."""
    entries = [entry for part in answer.prompt_logprobs for entry in part.entries]
    return torch.tensor([entry.logprob for entry in entries])
