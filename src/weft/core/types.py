"""Requests, sequences, sampling parameters and the table of service classes.

A sequence has no phases. It has tokens that are *known*, tokens that are *computed* (their KV is
committed), tokens that are *pending* (in a launched step), and a length at which it ends. Prefill,
chunk, decode, resume after preemption and prefix hit are all "compute the next k tokens".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from typing import Any

from weft.core.errors import InvariantError, ParameterError, WeftError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceState(Enum):
    """Where a sequence stands; ``TRANSITIONS`` lists every change that may happen."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSING = "pausing"  # preempted, but a launched step still touches its blocks
    PAUSED = "paused"  # preempted; computes again from its tokens when it is resumed
    FINISHED = "finished"


TRANSITIONS: Mapping[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset(
        {SequenceState.PAUSING, SequenceState.PAUSED, SequenceState.FINISHED}
    ),
    SequenceState.PAUSING: frozenset({SequenceState.PAUSED, SequenceState.FINISHED}),
    SequenceState.PAUSED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """One row of the class table: a lower ``rank`` is served first."""

    name: str
    rank: int
    ttft_s: float | None = None
    tpot_s: float | None = None


DEFAULT_CLASSES: tuple[ServiceClass, ...] = (
    ServiceClass("priority", 0, ttft_s=1.0, tpot_s=0.1),
    ServiceClass("interactive", 1, ttft_s=3.0, tpot_s=0.2),
    ServiceClass("flex", 2),
    ServiceClass("batch", 3),
)


def _bounded(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    integer: bool = False,
    above: bool = False,
) -> None:
    """Raise unless ``value`` is a finite number in [low, high] ((low, high] with ``above``)."""
    kind = "a whole number" if integer else "a number"
    wrong_type = isinstance(value, bool) or not isinstance(value, int if integer else (int, float))
    if wrong_type or not math.isfinite(value):
        raise ParameterError(f"{name} must be {kind}, not {value!r}.", param=name)
    if value < low or value > high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ParameterError(f"{name} must be {bounds}, not {value!r}.", param=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``None`` in the first six fields means "the model's own default" (its
    ``generation_config.json``), else the neutral value that ``NEUTRAL`` gives.

    Args:
        temperature: 0 is greedy; higher is more random.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to at least this.
        min_p: drop tokens less likely than this share of the likeliest one.
        repetition_penalty: divides positive (multiplies negative) logits of tokens seen in prompt
            or output; 1 is neutral.
        max_tokens: tokens to generate at most; ``None`` generates to the end of the context.
        presence_penalty: subtracted from logits of tokens that the output has.
        frequency_penalty: subtracted once for each time the output has the token.
        logit_bias: token id -> value added to its logit, -100 to 100.
        min_tokens: end-of-sequence and stop ids are impossible before so many tokens.
        stop: strings that end the text; they are cut off unless ``include_stop``.
        stop_token_ids: token ids that end the sequence, beside the model's own.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        seed: the same seed draws the same random numbers whatever else is in the batch.
        logprobs: also return this many likeliest alternatives a token (0: the chosen one only).
        prompt_logprobs: the same for each prompt token but the first.
        include_stop: keep the stop string at the end of the text.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        ParameterError: a value is malformed or out of bounds; it names the parameter.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_collections()

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise ParameterError(f"{name} must be a list, not {value!r}.", param=name)
            object.__setattr__(self, name, tuple(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def _check_numbers(self) -> None:
        optional: dict[str, tuple[float, float, bool, bool]] = {
            "temperature": (0, 100, False, False),
            "top_k": (0, 2**31 - 1, True, False),
            "top_p": (0, 1, False, True),
            "min_p": (0, 1, False, False),
            "repetition_penalty": (0, 100, False, True),
            "max_tokens": (1, 2**31 - 1, True, False),
            "seed": (0, MAX_SEED, True, False),
            "logprobs": (0, MAX_LOGPROBS, True, False),
            "prompt_logprobs": (0, MAX_LOGPROBS, True, False),
        }
        for name, (low, high, integer, above) in optional.items():
            value = getattr(self, name)
            if value is not None:
                _bounded(name, value, low, high, integer=integer, above=above)
        _bounded("presence_penalty", self.presence_penalty, -2, 2)
        _bounded("frequency_penalty", self.frequency_penalty, -2, 2)
        _bounded("min_tokens", self.min_tokens, 0, 2**31 - 1, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )

    def _check_collections(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}.",
                param="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise ParameterError(
                    f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters.",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _bounded("stop_token_ids", token, 0, 2**31 - 1, integer=True)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(
                f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers.",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _bounded("logit_bias", token, 0, 2**31 - 1, integer=True)
            _bounded("logit_bias", bias, -100, 100)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill fields that are ``None`` from ``defaults``, then from ``NEUTRAL``."""
        chosen = {
            name: defaults.get(name, neutral)
            for name, neutral in NEUTRAL.items()
            if getattr(self, name) is None
        }
        return replace(self, **chosen) if chosen else self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError if a token id is outside the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(
                        f"{name} names token id {token}, but the vocabulary has {vocab_size}.",
                        param=name,
                    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing a random number."""
        return self.temperature == 0


NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token and of the likeliest alternatives, likeliest first.

    Values are of the model's own distribution (float32 log-softmax of the raw logits), before
    temperature, penalties and filters.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to compute, as it arrives at the engine.

    Args:
        id: unique among live requests.
        prompt: token ids, at least one.
        sampling: resolved parameters (no ``None`` where ``NEUTRAL`` has a value), seed set.
        eos_token_ids: the model's end-of-sequence ids.
        service_class: name of a row of the class table.
        cache_salt: sequences share cached prefixes only under equal salts.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    service_class: str = "interactive"
    cache_salt: bytes = b""

    def stop_ids(self) -> frozenset[int]:
        """Token ids that end this sequence."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *self.sampling.stop_token_ids))


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request: its tokens and how far they are computed.

    Invariant: ``0 <= computed``, ``0 <= pending`` and ``computed + pending <= known``.

    Attributes:
        tokens: prompt and output tokens that the host knows.
        end: length at which the sequence ends at the latest.
        order: (rank of the class, arrival number); smaller goes first.
        computed: tokens whose KV is committed.
        pending: tokens in launched steps.
        samples_pending: output tokens that launched steps will deliver.
        capacity: tokens that the reserved KV blocks can hold.
        seal_at: ``computed`` value at which the next KV block is full.
        row: the executor's row while running, else -1.
        cached: prompt tokens found in the prefix cache at first admission; -1 before it.
        prompt_scored: prompt tokens whose log probabilities were delivered.
        reused: tokens that the prefix cache gave at the latest admission.
        waiting_on: content hash of a block that another sequence is about to compute, or b"".
    """

    request: Request
    tokens: list[int]
    end: int
    order: tuple[int, int]
    stop_ids: frozenset[int]
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    pending: int = 0
    samples_pending: int = 0
    capacity: int = 0
    seal_at: int = 0
    row: int = -1
    cached: int = -1
    prompt_scored: int = 0
    reused: int = 0
    waiting_on: bytes = b""
    preemptions: int = 0
    finish: FinishReason | None = None
    error: WeftError | None = None

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def known(self) -> int:
        """Tokens that exist on host or device: the last ones may still be in flight."""
        return len(self.tokens) + self.samples_pending

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def move_to(self, state: SequenceState) -> None:
        """Change the state; a change that ``TRANSITIONS`` does not list is a bug."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"sequence {self.id}: {self.state.name} -> {state.name}")
        self.state = state
