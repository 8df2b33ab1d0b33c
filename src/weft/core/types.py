"""Requests, sequences, sampling parameters and the table of service classes.

A sequence has no phases. It has tokens that are *known*, tokens that are *computed* (their KV is
committed), tokens that are *pending* (in a launched step), and a length at which it ends. Prefill,
chunk, decode, resume after preemption and prefix hit are all "compute the next k tokens".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any, Protocol

from weft.core.errors import InvariantError, ParameterError, WeftError
from weft.core.images import PromptImage
from weft.core.settings import Kind, Setting, check_settings, setting, settings_of

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 2**14
MAX_BAD_SEQUENCES = 2048
MAX_BAD_TOKENS = 64  # of one sequence
MAX_SEED = 2**63 - 1
MAX_SPECULATION = 16
NEVER = 2**62  # a length that no sequence reaches

_TOKEN_ID = Setting("stop_token_ids", "int", None, "", low=0, high=2**31 - 1)
_BIASED_ID = Setting("logit_bias", "int", None, "", low=0, high=2**31 - 1)
_BIAS = Setting("logit_bias", "float", None, "", low=-100, high=100)


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
    """One row of the class table: a lower ``priority`` is served first."""

    name: str
    priority: int
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def has_target(self) -> bool:
        """Whether it is latency-sensitive; the others are best effort."""
        return self.ttft_s is not None or self.tpot_s is not None


DEFAULT_CLASSES: tuple[ServiceClass, ...] = (
    ServiceClass("priority", 0, ttft_s=1.0, tpot_s=0.1),
    ServiceClass("interactive", 1, ttft_s=3.0, tpot_s=0.2),
    ServiceClass("flex", 2),
    ServiceClass("batch", 3),
)

# The tiers of OpenAI's API that stand for a class; "auto" stands for none.
CLASS_OF_TIER: Mapping[str, str] = {
    "default": "interactive",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",
}


def _optional(kind: Kind, help: str, low: float, high: float, **further: Any) -> Any:
    return setting(kind, None, help, low=low, high=high, **further)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``None`` in a field with a neutral value, and in ``max_tokens``, means "the model's own default"
    (its ``generation_config.json``), else the neutral value, or the end of the context.

    A field is declared here and nowhere else: request bodies, command line, the ring and the
    executor's rows take numbers and switches from ``NUMBERS``.

    Raises:
        ParameterError: a value is malformed or out of bounds; it names the parameter.
    """

    temperature: float | None = _optional(
        "float",
        "0 takes the likeliest token; higher is more random; unset follows the model",
        0,
        MAX_TEMPERATURE,
        neutral=1.0,
        everyday=True,
    )
    top_k: int | None = _optional(
        "int", "keep the k likeliest tokens; 0 or -1 keeps all", -1, 2**31 - 1, neutral=0
    )
    top_p: float | None = _optional(
        "float",
        "keep the likeliest tokens whose probabilities sum to this",
        0,
        1,
        above=True,
        neutral=1.0,
        everyday=True,
    )
    min_p: float | None = _optional(
        "float", "drop tokens less likely than this share of the likeliest one", 0, 1, neutral=0.0
    )
    repetition_penalty: float | None = _optional(
        "float",
        "above 1 makes tokens of prompt and output less likely",
        0,
        100,
        above=True,
        neutral=1.0,
    )
    max_tokens: int | None = _optional(
        "int", "tokens to generate at most", 1, 2**31 - 1, everyday=True
    )
    presence_penalty: float = setting(
        "float", 0.0, "subtracted from the logits of tokens that the output has", low=-2, high=2
    )
    frequency_penalty: float = setting(
        "float", 0.0, "subtracted once for each time the output has the token", low=-2, high=2
    )
    logit_bias: Mapping[int, float] = setting(
        "map", {}, "token id -> value from -100 to 100 added to its logit", high=MAX_LOGIT_BIAS
    )
    min_tokens: int = setting(
        "int",
        0,
        "end and stop ids are impossible before so many tokens; stop strings still end the text",
        low=0,
        high=2**31 - 1,
    )
    stop: tuple[str, ...] = setting(
        "strings",
        (),
        "strings that end the text and are cut off",
        high=MAX_STOP_STRINGS,
        everyday=True,
    )
    stop_token_ids: tuple[int, ...] = setting(
        "ints",
        (),
        "token ids that end the sequence, beside the model's; the text keeps the token unless it "
        "is a control token",
        high=MAX_STOP_TOKEN_IDS,
    )
    ignore_eos: bool = setting("bool", False, "do not stop at the model's end-of-sequence ids")
    seed: int | None = _optional(
        "int",
        "the same seed draws the same numbers whatever else is in the batch",
        0,
        MAX_SEED,
        everyday=True,
    )
    logprobs: int | None = _optional(
        "int", "return log probabilities with so many alternatives a token", 0, MAX_LOGPROBS
    )
    prompt_logprobs: int | None = _optional(
        "int", "the same for each prompt token but the first", 0, MAX_LOGPROBS
    )
    grammar: str | None = setting(
        "str", None, "grammar in llguidance's form that the output must follow"
    )
    speculation: int | None = _optional(
        "int", "tokens to guess ahead from the text so far; 0 is off", 0, MAX_SPECULATION
    )
    allowed_token_ids: tuple[int, ...] = setting(
        "ints",
        (),
        "the only token ids that may be sampled, an end of the sequence among them only if it is "
        "named; empty for all",
        high=MAX_ALLOWED_TOKENS,
    )
    bad_token_sequences: tuple[tuple[int, ...], ...] = setting(
        "lists", (), "sequences of token ids that the output never has", high=MAX_BAD_SEQUENCES
    )
    logprob_token_ids: tuple[int, ...] = setting(
        "ints",
        (),
        "token ids whose log probabilities are returned instead of the likeliest ones'",
        high=MAX_LOGPROBS,
    )
    include_stop: bool = setting("bool", False, "keep the stop string at the end of the text")
    skip_special_tokens: bool = setting("bool", True, "leave control tokens out of the text")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        if self.grammar is not None and self.ignore_eos:
            raise ParameterError(
                "ignore_eos cannot be combined with structured output, which says where the "
                "output ends.",
                param="ignore_eos",
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise ParameterError(
                    f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters.",
                    param="stop",
                )
        for token in self.stop_token_ids:
            _TOKEN_ID.check(token)
        self._check_restrictions()
        if self.logprob_token_ids:
            object.__setattr__(self, "logprobs", len(self.logprob_token_ids))
        bias = {_BIASED_ID.check(token): _BIAS.check(x) for token, x in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)

    def _check_restrictions(self) -> None:
        for sequence in self.bad_token_sequences:
            if not 0 < len(sequence) <= MAX_BAD_TOKENS:
                raise ParameterError(
                    f"A bad word must have 1 to {MAX_BAD_TOKENS} tokens.", param="bad_words"
                )
        for name, ids in self._named_ids():
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise ParameterError(f"{name} has ids that no token can have.", param=name)

    def _named_ids(self) -> list[tuple[str, Seq[int]]]:
        """Token ids that may or may not be sampled, or are scored, by parameter."""
        bad: list[tuple[str, Seq[int]]] = [("bad_words", ids) for ids in self.bad_token_sequences]
        return [
            ("allowed_token_ids", self.allowed_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            *bad,
        ]

    @property
    def restricted(self) -> bool:
        """Whether there are tokens that may not be sampled."""
        return bool(self.allowed_token_ids or self.bad_token_sequences)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill fields that are ``None`` from ``defaults``, then from ``NEUTRAL``."""
        chosen = {
            name: defaults.get(name, NEUTRAL.get(name))
            for name in (*NEUTRAL, "max_tokens")
            if getattr(self, name) is None
        }
        return replace(self, **chosen) if chosen else self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError if a token id is outside the vocabulary."""
        named = (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids))
        for name, ids in (*named, *self._named_ids()):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(
                        f"{name} names token id {token}, but the vocabulary has {vocab_size}.",
                        param=name,
                    )


NUMBERS: Mapping[str, Setting] = {
    name: declared
    for name, declared in settings_of(SamplingParams).items()
    if declared.kind in ("int", "float", "bool")
}
NEUTRAL: Mapping[str, Any] = {
    name: declared.neutral for name, declared in NUMBERS.items() if declared.neutral is not None
}


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
        id: unique among live requests, and the same for each engine that computes it.
        prompt: token ids, at least one.
        sampling: resolved parameters (no ``None`` where ``NEUTRAL`` has a value), seed set.
        eos_token_ids: the model's end-of-sequence ids.
        service_class: name of a row of the class table.
        cache_salt: sequences share cached prefixes only under equal salts.
        embed: compute the prompt's embedding instead of generating: its vector; of a classifier its
            score; with ``logprob_token_ids`` their log probabilities after the prompt.
        output: tokens that a process which died has already given out; they count as output.
        crashes: engines that died with this request in flight.
        memory_kills: engines that were killed because memory ran out with it in flight.
        images: in the order of their tokens.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    service_class: str = "interactive"
    cache_salt: bytes = b""
    embed: bool = False
    output: tuple[int, ...] = ()
    crashes: int = 0
    memory_kills: int = 0
    images: tuple[PromptImage, ...] = ()

    def stop_ids(self) -> frozenset[int]:
        """Token ids that end this sequence."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *self.sampling.stop_token_ids))


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def promising(self, tokens: Seq[int]) -> bool:
        """Whether there may be a draft now or soon, so that waiting for the last token pays."""

    def propose(self, tokens: Seq[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow, or none."""

    def searched_in_vain(self) -> int:
        """Return how many tokens to go on without drafts when nothing was found."""

    def learn(self, drafted: int, accepted: int) -> int:
        """Take in how a draft fared; return how many tokens to go on without one."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request: its tokens and how far they are computed.

    Invariant while it has not ended: ``0 <= computed <= planned <= known``.

    Attributes:
        tokens: prompt and output tokens that the host knows.
        end: length at which the sequence ends at the latest.
        order: (priority of the class, arrival number); smaller goes first.
        known: tokens that exist on host or device; the last ones may still be in flight.
        computed: tokens whose KV is committed.
        planned: tokens whose KV is committed or being computed by a launched step.
        capacity: tokens that can be planned before the scheduler must look: at its blocks, or at
            ``synchronous_from``.
        synchronous_from: from this length on a token is planned only when the one before it is on
            the host, as drafts demand.
        drafter: of a sequence with speculation.
        leasable: whether it is to have one token after the other, so that steps may be leased.
        block_full_at: ``computed`` value at which the next KV block is full.
        row: the executor's row while running, else -1.
        cached: prompt tokens found in the prefix cache at first admission; -1 before it.
        prompt_scored: prompt tokens whose log probabilities were delivered.
        reused: tokens that the prefix cache gave at the latest admission.
        scheduled_ns, prefilled_ns: when it first got a row, and when its prompt was computed; on
            the scheduler's clock, 0 for not yet.
        due_s: when its first token is promised, on the scheduler's clock; infinity for no promise.
        waiting_on: content hash of a block that another sequence is about to compute, or b"".
    """

    request: Request
    id: int
    tokens: list[int]
    end: int
    order: tuple[int, int]
    stop_ids: frozenset[int]
    known: int
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    planned: int = 0
    capacity: int = 0
    synchronous_from: int = NEVER
    drafter: Drafter | None = None
    leasable: bool = False
    block_full_at: int = 0
    row: int = -1
    cached: int = -1
    prompt_scored: int = 0
    reused: int = 0
    due_s: float = math.inf
    waiting_on: bytes = b""
    preemptions: int = 0
    scheduled_ns: int = 0
    prefilled_ns: int = 0
    finish: FinishReason | None = None
    error: WeftError | None = None

    @property
    def pending(self) -> int:
        """Tokens in launched steps."""
        return self.planned - self.computed

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    # Only these methods write the counters, and for their speed two loops that run for each token:
    # `schedule_single_tokens` and `Committer._advance`.

    def start(self, row: int, hit: int) -> None:
        """Take a row, with the KV of the first ``hit`` tokens from the prefix cache."""
        self.row = row
        self.computed = self.planned = self.reused = hit
        self.block_full_at = hit + 1

    def stop(self) -> None:
        """Give back the row and all KV, with nothing in flight."""
        self.row, self.capacity = -1, 0
        self.computed = self.planned = 0

    def cover(self, capacity: int) -> None:
        """Note that blocks are there for so many tokens."""
        self.capacity = min(capacity, self.synchronous_from)

    def schedule(self, count: int) -> bool:
        """Plan the next ``count`` tokens; whether the last of them gives a new token."""
        planned = self.planned = self.planned + count
        if planned != self.known:
            return False
        self.known = planned + 1
        return True

    def commit(self, count: int) -> int:
        """Count tokens that were computed; return how many are."""
        computed = self.computed = self.computed + count
        return computed

    def follow(self, steps: int) -> None:
        """Count steps that the executor has computed of its own after a planned one."""
        self.computed += steps
        self.planned += steps
        self.known += steps

    def abort(self) -> None:
        """Take back what is pending: the executor has dropped it."""
        self.planned = self.computed

    def roll_back(self) -> None:
        """Take back what is pending, as ``abort``, of a sequence that goes on."""
        self.abort()
        self.known = len(self.tokens)

    def keep(self, count: int) -> None:
        """Count only so many tokens as computed, with nothing in flight; the others come again."""
        self.computed = self.planned = count

    def accept(self, token: int) -> None:
        """Append a drafted token that came out right: it was computed with the one before it."""
        self.computed += 1
        self.planned += 1
        self.known += 1
        self.tokens.append(token)

    def move_to(self, state: SequenceState) -> None:
        """Change the state; a change that ``TRANSITIONS`` does not list is a bug."""
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"sequence {self.id}: {self.state.name} -> {state.name}")
        self.state = state
