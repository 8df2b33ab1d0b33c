"""Step plans and results: frozen values between scheduler and executor, to print and replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from weft.core.errors import WeftError
from weft.core.images import PromptImage
from weft.core.types import FinishReason, SamplingParams, Sequence, TokenLogprob

# How long a step that only carries piggybacked rows waits for a result: new requests wait with it.
PIGGYBACK_WAIT_S = 0.01


class Tier(StrEnum):
    """The tier of KV; at commit boundaries all of a sequence's KV is in one tier."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class RowAdd:
    """Put a sequence into an executor row, with everything that the row needs.

    Attributes:
        tokens: prompt and output so far (a resumed sequence brings its output along).
        num_prompt: how many of them are prompt.
        tables: block ids for each KV group; -1 where a sliding group holds no block.
        tier: the tier of those blocks.
        embed: the hidden state after the last token is wanted instead of a next token.
        stop_ids: ids that are masked while fewer than ``sampling.min_tokens`` are generated.
        images: of the prompt, encoded.
    """

    row: int
    sequence_id: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    tables: tuple[tuple[int, ...], ...]
    embed: bool = False
    tier: Tier = Tier.DEVICE
    images: tuple[PromptImage, ...] = ()


class RowExtend(NamedTuple):
    """Append block ids to the row's table of one KV group, in the tier where the row's KV lies."""

    row: int
    group: int
    blocks: tuple[int, ...]


class PlaceSession(NamedTuple):
    """A connection to a host that keeps KV; place 0 is the device's own host, and has only one.

    What lies with a remote place is gone with the connection, so the next one has another number.
    """

    place: int = 0
    number: int = 0


OWN_HOST = PlaceSession()


class PlaceStatus(NamedTuple):
    """What a remote place offers now.

    Attributes:
        session: number of the latest connection to it; 0 for none yet.
        blocks: KV blocks of each group; empty while it is not connected.
        busy: it has more KV to take in than it should have, so no sequence should be sent there.
    """

    session: int
    blocks: tuple[int, ...] = ()
    busy: bool = False


class KVMove(NamedTuple):
    """Copy the KV of a row into the other tier, where its table is ``target`` from then on.

    Attributes:
        to: the tier that the KV goes to.
        source, target: tables of the row for each KV group, old and new; they are equally long and
            have -1 at the same places, where a sliding group holds no block.
        after_layer: the KV of a layer may go once this step has computed that layer, with what the
            step has written (NEO section 3.1, layer-wise swapping), and all of it is gone when the
            step has ended; else all of it goes before the step computes, and the row computes in
            the tier that it has come to.
        host: where in the host tier ``target`` is. If that session is over, the row is lost there.
        state: slots of the row's recurrent state, old and new; None for a model without.
    """

    row: int
    to: Tier
    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]
    after_layer: bool = False
    host: PlaceSession = OWN_HOST
    state: tuple[int, int] | None = None

    @property
    def num_blocks(self) -> int:
        """KV blocks of all groups that are copied."""
        return sum(block >= 0 for blocks in self.source for block in blocks)


NO_STATE = -1  # in place of a slot: zeros


class LentSlots(NamedTuple):
    """Slots of recurrent state of a row for steps under a lease, after what the step writes.

    Each step writes the last of ``spare``, in whose place comes the slot that it read, unless that
    is kept.

    Attributes:
        spare: slots that may be written.
        kept: whether the state that the planned step writes is kept.
        every: states after multiples of so many tokens are kept, each until the next one is; 0:
            none is.
    """

    spare: tuple[int, ...]
    kept: bool
    every: int


class StateRow(NamedTuple):
    """Slots of recurrent state of a row: none is read by a step that writes it.

    Attributes:
        read: the state before the row's tokens; ``NO_STATE`` before the first one.
        write: gets the state after them, drafts included.
        marks: (tokens of the sequence, slot) that gets the state after so many, in their order. Of
            a row with drafts one is behind its certain tokens.
        lent: for leased steps that follow.
    """

    read: int
    write: int
    marks: tuple[tuple[int, int], ...] = ()
    lent: LentSlots | None = None


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Rows that run through the layers together; the tuples are parallel.

    Row ``rows[i]`` computes tokens ``[starts[i], starts[i] + counts[i])``; where ``samples[i]``,
    its last logits give the next token.

    Attributes:
        tiers: by row, where its KV lies; empty if all of it is on the device. On the device
            attention is computed there. On the host a single token's attention is computed by the
            CPU; that of more tokens by the device, to which the KV before them is brought layer by
            layer, and from which each layer's new KV leaves as soon as it is computed.
        drafts: by row, guesses of the tokens after the last one that it computes. They are computed
            as well, and those that come out as guessed are kept.
        states: by row, of a model with recurrent layers; else empty.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    tiers: tuple[Tier, ...] = ()
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    states: tuple[StateRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.counts) + sum(len(draft) for draft in self.drafts.values())

    @property
    def row_tiers(self) -> tuple[Tier, ...]:
        """The KV tier of each row."""
        return self.tiers or (Tier.DEVICE,) * len(self.rows)


BlockCopy: TypeAlias = tuple[int, int, bytes]  # a group, a block of it, the hash of its content
TierCopy: TypeAlias = tuple[int, int, int]  # a group, a block of one tier, a block of the other one


@dataclass(frozen=True, slots=True)
class LeasedTokens:
    """Tokens of steps that were computed under a lease before the one that a result is about.

    Attributes:
        steps: of each step a token for each sequence of the result, the oldest step first.
        published: the sequences whose tokens are with the request plane already.
        logprobs: of the tokens of each step, by sequence id; none if nobody wants any.
    """

    steps: tuple[tuple[int, ...], ...]
    published: frozenset[int]
    logprobs: tuple[Mapping[int, TokenLogprob], ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The executor applies saves, zero, abort, spills, told, drop, add, moves, extend,
    fills and loads, then computes.

    Layer-wise moves take place while it computes, so their rows are extended before they move.

    Attributes:
        batches: one, or two whose layers take turns on the device, so that the attention of one on
            the host overlaps with what the other does on the device (NEO section 3.1). None, if
            nothing is computed; each has a row.
        zero: (group, block) pairs of the device to fill with zeros before anything is written.
        zero_host: the same of the host.
        zero_places: the same of remote places, each with its session.
        piggybacked: rows of the host tier whose next token begins: its embedding and the first
            layer's QKV are piggybacked; the token comes with the result of a later step.
        piggyback_limits: for each layer, how many results of attention that the host has finished
            may be piggybacked through that layer (OmniServe, piggybacking); empty if none may.
        abort: rows whose token on its way is dropped, before this step carries piggybacked rows;
            ignored where an earlier step has ended the token. The row stays until it is dropped.
        saves: blocks of the device whose content the prefix cache on disk is to get before
            anything is written.
        loads: blocks of the device that get content from there before anything is computed.
        spills: blocks of the device whose content a block of the host is to get before anything
            else is written, for the prefix cache there.
        fills: blocks of the host whose content a block of the device is to get before anything is
            computed.
        lease: so many more steps the executor may compute of the same rows, one token of each, on
            its own: nothing else is planned meanwhile, and the rows have blocks for them.
        told: (sequence id, tokens) that others have chosen for rows since the last plan; of a stage
            of a pipeline that chooses none.
    """

    step_id: int
    batches: tuple[SubBatch, ...]
    drop: tuple[int, ...] = ()
    add: tuple[RowAdd, ...] = ()
    extend: tuple[RowExtend, ...] = ()
    zero: tuple[tuple[int, int], ...] = ()
    moves: tuple[KVMove, ...] = ()
    zero_host: tuple[tuple[int, int], ...] = ()
    zero_places: tuple[tuple[PlaceSession, int, int], ...] = ()
    piggybacked: tuple[int, ...] = ()
    piggyback_limits: tuple[int, ...] = ()
    abort: tuple[int, ...] = ()
    saves: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()
    spills: tuple[TierCopy, ...] = ()
    fills: tuple[TierCopy, ...] = ()
    lease: int = 0
    told: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def needs_host(self) -> bool:
        """Whether only an executor with a host tier can compute the step."""
        copies = self.moves or self.spills or self.fills or self.zero_host or self.zero_places
        return bool(copies or self.piggybacks or self.attends_on_host)

    @property
    def piggybacks(self) -> bool:
        """Whether the step begins, carries or drops tokens of piggybacked rows."""
        return bool(self.piggybacked or self.piggyback_limits or self.abort)

    @property
    def writes_host(self) -> bool:
        """Whether KV of the own host is written: no worker may be writing to those blocks."""
        arrives = self.spills or any(
            move.to is Tier.HOST and not move.host.place for move in self.moves
        )
        return bool(arrives or self.zero_host or self.piggybacked)

    @property
    def attends_on_host(self) -> bool:
        """Whether a sub-batch has rows whose KV lies with the host."""
        return any(batch.tiers for batch in self.batches) or any(
            add.tier is Tier.HOST for add in self.add
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens ``[start, start + len(entries))``."""

    start: int
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: ``tokens[i]`` is the next token of ``sequence_ids[i]``.

    The sequences that sample come in the order of the plan.

    A sequence named in ``faults`` or ``embeddings`` got no token; the others are not affected.

    Attributes:
        accepted: by sequence with drafts, the tokens after its first one that this step gave too,
            with their log probabilities where they are wanted.
        embeddings: by sequence, its vector or scores as float32 bytes; see ``Request.embed``.
        piggybacked_results: (sequence id, next token) of piggybacked rows of earlier steps that
            came through the last layer in this one.
        piggyback_layers: for each layer, how many piggybacked rows wait for it or for its
            attention.
        lost: sequences whose KV was at a remote place that is gone, and whose token on its way, if
            there was one, is dropped. Each is named once, and computes nothing until it is dropped.
        places: what each remote place offers since this step; empty where there are none.
        leased: where others followed the step under its lease: the tokens before those of the last
            one, about which everything else is.
    """

    step_id: int
    sequence_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    faults: Mapping[int, WeftError] = field(default_factory=dict)
    accepted: Mapping[int, tuple[tuple[int, TokenLogprob | None], ...]] = field(
        default_factory=dict
    )
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    piggybacked_results: tuple[tuple[int, int], ...] = ()
    piggyback_layers: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    places: tuple[PlaceStatus, ...] = ()
    leased: LeasedTokens | None = None


class Update(NamedTuple):
    """News of one sequence that is more than a plain token: an end, log probabilities, an error.

    Attributes:
        cached_tokens: prompt tokens that came from the prefix cache.
        scheduled_ns, prefilled_ns: with the end: when the sequence first ran and when its prompt
            was computed, on the monotonic clock; 0 for never.
        embedding: with the end of an embedding request: its vector as float32 bytes.
    """

    sequence_id: int
    token: int | None
    logprob: TokenLogprob | None = None
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: WeftError | None = None
    prompt_logprobs: PromptLogprobs | None = None
    scheduled_ns: int = 0
    prefilled_ns: int = 0
    embedding: bytes | None = None


class CommittedStep(NamedTuple):
    """What a committed step was, for the log of steps.

    Attributes:
        step_id: of the last step, where others followed under a lease.
        began_s, ended_s: on the scheduler's clock, of all of them together.
        predicted_s: how long the policy expected one to take; 0 if it does not say.
        steps: this one and those that followed it under its lease, which had the same rows.
        split: whether it was computed in two halves.
        drafts: tokens that were guessed and checked.
        host_tokens: output tokens that came in with it whose attention the host has computed.
        sequences, counts: its rows and the tokens of each that were computed.
    """

    step_id: int
    began_s: float
    ended_s: float
    predicted_s: float
    steps: int
    split: bool
    drafts: int
    host_tokens: int
    sequences: list[Sequence]
    counts: list[int]


class StepOutputs(NamedTuple):
    """The outputs of a committed step, as the loop publishes them.

    Attributes:
        tokens: (sequence id, new token) of every sequence about which there is nothing else to say.
        updates: the others; each new token stands in exactly one of the two lists.
        step: what the step was; None if these are of no step, or nobody knows the time.
    """

    tokens: list[tuple[int, int]]
    updates: list[Update]
    step: CommittedStep | None = None
