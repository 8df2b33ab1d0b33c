"""Tickets of launched steps, and the results of a step while its sub-batches come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import compress
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import (
    InvariantError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    WeftError,
)
from weft.core.memory import is_out_of_memory
from weft.core.plan import LeasedTokens, PlaceStatus, PromptLogprobs, StepResult, SubBatch
from weft.core.ports import Lease
from weft.core.types import TokenLogprob
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import StepInputs
from weft.exec.logprobs import SCORED_TOKENS_AT_ONCE, token_logprobs
from weft.exec.sample import Sampled
from weft.kernels.arrays import Array, to_numpy
from weft.kernels.cpu.decode import Decoded
from weft.kernels.sampling import count_taken
from weft.models.decoder import Decoder


class ToldOfGuests(Protocol):
    """What ``exec.lease.Guests`` has to say when a lease has ended."""

    withheld: NDArray[np.bool_]
    logprobs: list[dict[int, TokenLogprob]]
    faults: Mapping[int, WeftError]


class StepTicket:
    """A launched step.

    Args:
        wait: returns what the step gave, or raises what broke it.

    Attributes:
        lease: of a step that may go on; None for others.
    """

    def __init__(
        self, step_id: int, wait: Callable[[], StepResult], lease: Lease | None = None
    ) -> None:
        self.step_id = step_id
        self.lease = lease
        self._wait: Callable[[], StepResult] | None = wait

    def result(self) -> StepResult:
        """Wait for what the step gave. Raises InvariantError when called a second time."""
        if self._wait is None:
            raise InvariantError(f"step {self.step_id} was collected twice")
        wait, self._wait = self._wait, None
        return wait()

    def __del__(self) -> None:
        if self._wait is not None:
            raise InvariantError(f"step {self.step_id} was never collected")


class StepOutput:
    """Results of a step while its sub-batches come in; the rows get their tokens at once.

    Attributes:
        piggyback_layers, lost, places: see ``StepResult``.
    """

    def __init__(self, table: InputBatch, decoder: Decoder) -> None:
        self.piggyback_layers: tuple[int, ...] = ()
        self.lost: tuple[int, ...] = ()
        self.places: tuple[PlaceStatus, ...] = ()
        self._table = table
        self._decoder = decoder
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: dict[int, TokenLogprob] = {}
        self._faults: dict[int, WeftError] = {}
        self._accepted: dict[int, tuple[tuple[int, TokenLogprob | None], ...]] = {}
        self._embeddings: dict[int, bytes] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._piggybacked: list[tuple[int, int]] = []
        self._leased: LeasedTokens | None = None

    def result(self, step_id: int) -> StepResult:
        """The result of the step."""
        return StepResult(
            step_id,
            tuple(self._ids),
            tuple(self._tokens),
            self._logprobs,
            self._prompt_logprobs,
            self._faults,
            self._accepted,
            self._embeddings,
            tuple(self._piggybacked),
            self.piggyback_layers,
            self.lost,
            self.places,
            self._leased,
        )

    def take(
        self,
        batch: SubBatch,
        rows: NDArray[np.int64],
        sampled: Sampled,
        state: Callable[[int], Array],
    ) -> None:
        """Take the tokens of a sub-batch, and of drafts those that came out as guessed.

        Args:
            rows: [S] the sampled rows, one with a draft of d tokens d + 1 times.
            state: returns the hidden state [C] that sample i came of.
        """
        table = self._table
        special = batch.drafts or table.embedding or sampled.logprobs or sampled.faults
        if not special and not self._faults and sampled.finite.all():
            self._deliver_all(rows, sampled.tokens)
            return
        tokens, finite = sampled.tokens.tolist(), sampled.finite.tolist()
        first = 0
        for row, samples in zip(batch.rows, batch.samples, strict=True):
            if not samples:
                continue
            sequence_id, draft = table.sequence_ids[row], batch.drafts.get(row, ())
            here = slice(first, first + len(draft) + 1)
            self._deliver(row, tokens[first])
            if first in sampled.logprobs and row not in table.embedding:
                self._logprobs[sequence_id] = sampled.logprobs[first]
            if sequence_id in self._faults:
                pass  # it ends before this token
            elif not finite[first]:
                self._faults[sequence_id] = not_finite()
            elif row in sampled.faults:
                self._faults[sequence_id] = sampled.faults[row]
            elif row in table.embedding:
                scored = sampled.logprobs.get(first)
                self._embeddings[sequence_id] = (
                    pooled(self._decoder, state(first))
                    if scored is None
                    else named_logprobs(scored, table.named[row])
                )
            elif draft:
                taken = int(sampled.taken[first])
                taken = taken or count_taken(tokens[here], finite[here], draft)
                more = range(first + 1, first + taken)
                for i in more:
                    table.append_token(row, tokens[i])
                self._accepted[sequence_id] = tuple(
                    (tokens[i], sampled.logprobs.get(i)) for i in more
                )
            first = here.stop

    def leasable_tokens(self, count: int) -> list[int] | None:
        """The tokens of the step if there are so many, and it gave nothing else.

        Log probabilities belong to the tokens.
        """
        more = self._prompt_logprobs or self._faults or self._accepted or self._embeddings
        if more or self._piggybacked or len(self._tokens) != count:
            return None
        return self._tokens

    def go_on(self, batch: SubBatch, decoded: Decoded, guests: ToldOfGuests) -> None:
        """Take what was computed after the step under a lease; the rows have their tokens."""
        if len(decoded.given) == 1:
            return
        *earlier, self._tokens = decoded.given
        ids = self._ids
        published = frozenset(compress(ids, ~guests.withheld) if decoded.published else ())
        logprobs = [self._logprobs, *guests.logprobs] if guests.withheld.any() else []
        self._leased = LeasedTokens(tuple(map(tuple, earlier)), published, tuple(logprobs[:-1]))
        self._logprobs = logprobs[-1] if logprobs else {}
        for row, finite in zip(batch.rows, decoded.finite, strict=True):
            if not finite:
                self.fault(row, guests.faults.get(row) or not_finite())

    def take_piggybacked(
        self, rows: NDArray[np.int32], tokens: NDArray[np.int64], finite: NDArray[np.bool_]
    ) -> None:
        """Take the tokens [F] of piggybacked rows [F] that have come through the last layer."""
        for row, token, good in zip(rows.tolist(), tokens.tolist(), finite.tolist(), strict=True):
            if not good:
                self.fault(row, not_finite())
            self._end_piggybacked(row, token)

    def fail_piggybacked(self, row: int, error: WeftError) -> None:
        """End the sequence of a row whose token was on its way."""
        self.fault(row, error)
        self._end_piggybacked(row, 0)

    def _end_piggybacked(self, row: int, token: int) -> None:
        self._table.append_token(row, token)
        self._piggybacked.append((self._table.sequence_ids[row], token))

    def score(self, row: int, scores: PromptLogprobs | None) -> None:
        """Collect the log probabilities of a row's prompt tokens, if there are any."""
        if scores is not None:
            self._prompt_logprobs[self._table.sequence_ids[row]] = scores

    def fault(self, row: int, error: WeftError) -> None:
        """End the sequence of a row."""
        self._faults[self._table.sequence_ids[row]] = error

    def out_of_memory(self, batch: SubBatch) -> None:
        """End the sequence of a sub-batch of one row, for which there is no memory."""
        (row,) = batch.rows
        self.fault(row, no_memory(batch.counts[0]))
        if batch.samples[0]:
            self._deliver(row, 0)

    def _deliver_all(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """``_deliver`` for rows that have only a token."""
        self._table.append_tokens(rows, tokens)
        ids = self._table.sequence_ids
        self._ids += [ids[row] for row in rows.tolist()]
        self._tokens += tokens.tolist()

    def _deliver(self, row: int, token: int) -> None:
        self._table.append_token(row, token)
        self._ids.append(self._table.sequence_ids[row])
        self._tokens.append(token)


def score_prompt(
    decoder: Decoder, table: InputBatch, inputs: StepInputs, index: int, hidden: Array
) -> PromptLogprobs | None:
    """Log probabilities of the prompt tokens that follow each computed token of row ``index``.

    None if that is not wanted or there are none.

    Args:
        hidden: [T, C] of the step.
    """
    row, start = int(inputs.rows[index]), int(inputs.starts[index])
    params = table.params[row]
    stop = min(start + int(inputs.counts[index]), int(table.num_prompt[row]) - 1)
    if params is None or params.prompt_logprobs is None or stop <= start:
        return None
    first = int(inputs.counts[:index].sum())
    entries: list[TokenLogprob] = []
    for low in range(start, stop, SCORED_TOKENS_AT_ONCE):
        high = min(low + SCORED_TOKENS_AT_ONCE, stop)
        logits = decoder.logits(hidden[first + low - start : first + high - start])
        logprobs = decoder.ops.log_softmax(logits)  # [P, V]
        following = table.tokens[row, low + 1 : high + 1].astype(np.int64)
        counts = [params.prompt_logprobs] * (high - low)
        entries += token_logprobs(logprobs, following, counts, decoder.ops.top_k)
    return PromptLogprobs(start + 1, tuple(entries))


def pooled_states(
    kind: str, hidden: Array, ends: Array, counts: Seq[int]
) -> Callable[[int], Array]:
    """Return what gives the state [C] of a text by its place among those of a step.

    Args:
        kind: see ``ModelSpec.pooled``; not ``last``.
        hidden: [T, C] of the step, in which texts are whole.
        ends, counts: [S] the last token of each text, and how many it has.
    """

    def state(number: int) -> Array:
        stop = int(ends[number]) + 1
        rows = hidden[stop - counts[number] : stop]
        return rows[0] if kind == "first" else to_numpy(rows).astype(np.float64).mean(0)

    return state


def pooled(decoder: Decoder, state: Array) -> bytes:
    """What a model makes of a hidden state [C], as float32 bytes.

    A classifier the number of its one label, before any activation; others the state, or what their
    products make of it, at length one if the model's vectors have that.
    """
    vector = to_numpy(state).astype(np.float64)
    for layer in decoder.dense:
        vector = layer(vector)
    if decoder.score is not None:
        vector = to_numpy(decoder.score).astype(np.float64) @ vector  # [1]
    elif decoder.spec.unit_states:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-30)
    return vector.astype(np.float32).tobytes()


def named_logprobs(scored: TokenLogprob, ids: NDArray[np.int64]) -> bytes:
    """The log probabilities of tokens [N], in their order, as float32 bytes."""
    found = dict(scored.top)
    return np.array([found[token] for token in ids.tolist()], np.float32).tobytes()


def no_memory(tokens: int) -> OutOfMemoryError:
    """The failure of a request whose tokens find no memory."""
    return OutOfMemoryError(
        f"There is not enough memory to compute {tokens} tokens of this request."
    )


def not_finite() -> NonFiniteLogitsError:
    """The failure of a request whose logits mean nothing."""
    return NonFiniteLogitsError("The model produced logits that are not finite for this request.")


class OutOfMemoryGuard:
    """Ends a block quietly if memory runs out in it; all that it took is free again then.

    Where several ranks compute the step it raises OutOfMemoryError, as none goes on without others.

    Attributes:
        ran_out: whether memory did.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.ran_out = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        self.ran_out = error is not None and is_out_of_memory(error)
        if self.ran_out and self._ranks > 1:
            raise OutOfMemoryError(
                "There is not enough memory to compute a step, and no rank can go on without the "
                "others."
            ) from error
        return self.ran_out


def split_rows(batch: SubBatch) -> list[SubBatch]:
    """Return one sub-batch for each row of the batch, without drafts."""
    return [
        SubBatch(
            (row,),
            (start,),
            (count,),
            (samples,),
            batch.tiers[i : i + 1],
            states=batch.states[i : i + 1],
        )
        for i, (row, start, count, samples) in enumerate(
            zip(batch.rows, batch.starts, batch.counts, batch.samples, strict=True)
        )
    ]
