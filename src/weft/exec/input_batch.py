"""The input batch: state of every running sequence on host and device, by row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.images import PromptImage
from weft.core.plan import KVMove, RowAdd, StepPlan, SubBatch
from weft.core.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, NEUTRAL, NUMBERS, SamplingParams
from weft.exec.grammar import GrammarRows
from weft.exec.restrict import Restrictions
from weft.kernels.sampling import EDIT, EDITED, HEADER, MASKED, PENALISED, PENALTIES, SETTINGS

# Token ids of a row whose logits the device changes: all that a request may name, and end ids.
MOST_EDITS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 32
TOKENS_AT_ONCE = 2**14  # that are brought to the device
SEAT_BYTES = 4 * HEADER + 4 * EDIT * MOST_EDITS + TOKENS_AT_ONCE * (4 + 8 + 4)  # while one is

_settings_of, _penalties_of = attrgetter(*SETTINGS), attrgetter(*PENALTIES)
NO_PENALTIES = tuple(NEUTRAL.get(name, NUMBERS[name].default) for name in PENALTIES)


@dataclass(slots=True)
class SamplingColumns:
    """Sampling parameters of all rows as arrays of length R, so that they can be gathered.

    Attributes:
        choice: [R, len(SETTINGS)], see ``kernels.sampling``.
        penalties: [R, len(PENALTIES)], see ``kernels.sampling``.
        changes: [R] what the device does to logits; see ``kernels.sampling``.
    """

    choice: NDArray[np.float64]
    penalties: NDArray[np.float32]
    seed: NDArray[np.int64]
    changes: NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int) -> SamplingColumns:
        return cls(
            choice=np.zeros((rows, len(SETTINGS)), np.float64),
            penalties=np.tile(np.array(NO_PENALTIES, np.float32), (rows, 1)),
            seed=np.zeros(rows, np.int64),
            changes=np.zeros(rows, np.int32),
        )

    def set(self, row: int, params: SamplingParams) -> None:
        """Store resolved parameters (no None where ``NEUTRAL`` has a value)."""
        for name in ("seed", *NEUTRAL):
            if getattr(params, name) is None:
                raise InvariantError(f"a request reached the executor with open {name}")
        self.choice[row] = _settings_of(params)
        self.penalties[row] = _penalties_of(params)
        self.seed[row] = params.seed or 0


class InputBatch:
    """Tokens, block tables and sampling state by row.

    Args:
        max_blocks: entries of a row's block table, for each group.
        embedding: rows whose hidden state is wanted instead of a next token.
        grammars: matchers of rows; None where no request has a grammar.

    Attributes:
        tokens: [R, max_model_len] int32, prompt and output.
        length: [R] int64, tokens that the row knows.
        tables: for each group [R, max_blocks] int32.
        penalised: rows with a repetition, presence or frequency penalty.
        scored: rows that want log probabilities, with the number of the likeliest tokens wanted.
        named: rows that want log probabilities of some tokens instead, as ids [N].
        restrictions: what rows may not sample.
        bias: rows with a logit bias, as ids [B] and values [B].
        delayed: rows with a minimum length, as the stop ids [I] and that length.
        prompt_scored: rows that want log probabilities of their prompts.
        stop_ids: rows that token ids end, as ids [I].
        on_host: rows whose tokens a device leaves to the host: those with restrictions or named
            tokens, or with more than ``MOST_EDITS``.
        masked: other rows with a grammar: the host tells a device which tokens they may have next.
        images: of rows with any.
    """

    def __init__(
        self,
        rows: int,
        max_model_len: int,
        max_blocks: Seq[int],
        grammars: GrammarRows | None = None,
    ) -> None:
        self.grammars = grammars
        self.tokens = np.zeros((rows, max_model_len), np.int32)
        self.length = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.tables = [np.full((rows, blocks), -1, np.int32) for blocks in max_blocks]
        self.table_length = [np.zeros(rows, np.int64) for _ in max_blocks]
        self.columns = SamplingColumns.empty(rows)
        self.params: list[SamplingParams | None] = [None] * rows
        self.sequence_ids = [-1] * rows
        self.penalised: set[int] = set()
        self.embedding: set[int] = set()
        self.scored: dict[int, int] = {}
        self.named: dict[int, NDArray[np.int64]] = {}
        self.restrictions = Restrictions()
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.delayed: dict[int, tuple[NDArray[np.int64], int]] = {}
        self.prompt_scored: set[int] = set()
        self.stop_ids: dict[int, NDArray[np.int64]] = {}
        self.on_host: set[int] = set()
        self.masked: set[int] = set()
        self.images: dict[int, tuple[PromptImage, ...]] = {}

    @property
    def changes_logits(self) -> bool:
        """Whether a row needs more of its logits than the choice of a token from them."""
        plain = (self.grammars is None or self.grammars.empty) and self.restrictions.empty
        return not plain or bool(self.penalised or self.scored or self.bias or self.delayed)

    def is_restricted(self, row: int) -> bool:
        """Whether a row has a grammar, or other tokens that may not be sampled."""
        return row in self.restrictions or (self.grammars is not None and row in self.grammars)

    def only_pooled(self, rows: NDArray[np.int64]) -> bool:
        """Whether nothing but hidden states is wanted of rows."""
        wanted = self.embedding
        return bool(wanted) and all(
            row in wanted and row not in self.named for row in rows.tolist()
        )

    def needs_host(self, batch: SubBatch) -> bool:
        """Whether rows want more of a step than tokens that a device chooses."""
        if not (self.on_host or self.embedding or self.prompt_scored):
            return False
        return any(
            (samples and (row in self.embedding or row in self.on_host))
            or (row in self.prompt_scored and start < self.num_prompt[row] - 1)
            for row, start, samples in zip(batch.rows, batch.starts, batch.samples, strict=True)
        )

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to the plan: tell, drop, add, move, extend, in this order.

        Rows that move layer by layer while the step computes do so after it, by ``move``.
        """
        if plan.told:
            self._tell(plan.told)
        for row in plan.drop:
            self._drop(row)
        for add in plan.add:
            self._add(add)
        for move in plan.moves:
            if not move.after_layer:
                self.move(move)
        for row, group, blocks in plan.extend:
            self._append(row, group, blocks)

    def _tell(self, told: Seq[tuple[int, Seq[int]]]) -> None:
        """Store tokens that others have chosen, by sequence."""
        rows = {sequence_id: row for row, sequence_id in enumerate(self.sequence_ids)}
        for sequence_id, tokens in told:
            for token in tokens:
                self.append_token(rows[sequence_id], token)

    def move(self, move: KVMove) -> None:
        """Switch a row to the block tables of its other tier."""
        for group, blocks in enumerate(move.target):
            self.table_length[group][move.row] = 0
            self._append(move.row, group, blocks)

    def tables_of(self, rows: NDArray[np.signedinteger[Any]]) -> list[NDArray[np.int32]]:
        """Block tables of rows [N], for each group [N, blocks of the longest]."""
        longest = [int(length[rows].max()) for length in self.table_length]
        return [t[rows, :width] for t, width in zip(self.tables, longest, strict=True)]

    def append_token(self, row: int, token: int) -> None:
        """Store the sampled next token, which a later step may need before the host knows it."""
        if self.length[row] < self.tokens.shape[1]:
            self.tokens[row, self.length[row]] = token
            self.length[row] += 1

    def append_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """``append_token`` for different rows at once."""
        length = self.length[rows]
        fits = length < self.tokens.shape[1]
        if not fits.all():
            rows, length, tokens = rows[fits], length[fits], tokens[fits]
        self.tokens[rows, length] = tokens
        self.length[rows] = length + 1

    def output(self, row: int, length: int) -> NDArray[np.int32]:
        """The output tokens of a row up to a length of the whole."""
        return self.tokens[row, self.num_prompt[row] : length]

    def guess(self, row: int, draft: Seq[int]) -> None:
        """Store tokens beyond those that the row knows, to be computed but not counted."""
        length = self.length[row]
        self.tokens[row, length : length + len(draft)] = draft

    def _drop(self, row: int) -> None:
        if self.sequence_ids[row] < 0:
            raise InvariantError(f"row {row} was dropped but is empty")
        self.sequence_ids[row] = -1
        self.params[row] = None
        for blocks in self.tables:
            blocks[row] = -1  # so that a table has nothing beyond the blocks of its row
        for marked in (
            self.penalised, self.embedding, self.prompt_scored, self.on_host, self.masked
        ):  # fmt: skip
            marked.discard(row)
        for special in (
            self.scored, self.named, self.bias, self.delayed, self.stop_ids, self.images
        ):  # fmt: skip
            special.pop(row, None)
        self.restrictions.drop(row)
        if self.grammars is not None:
            self.grammars.drop(row)

    def _add(self, add: RowAdd) -> None:
        row, params = add.row, add.sampling
        if self.sequence_ids[row] >= 0:
            raise InvariantError(f"row {row} is taken already")
        self.sequence_ids[row] = add.sequence_id
        self.tokens[row, : len(add.tokens)] = add.tokens
        self.length[row] = len(add.tokens)
        self.num_prompt[row] = add.num_prompt
        self.columns.set(row, params)
        self.params[row] = params
        for group, blocks in enumerate(add.tables):
            self.table_length[group][row] = 0
            self._append(row, group, blocks)
        self._mark(row, params, add.stop_ids)
        if add.embed:
            self.embedding.add(row)
        if add.images:
            self.images[row] = add.images
        if self.grammars is not None:
            self.grammars.add(add)
        elif params.grammar is not None:
            raise InvariantError("a request with a grammar reached an executor without grammars")

    def _mark(self, row: int, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Note what few rows want, so that the others cost nothing."""
        if _penalties_of(params) != NO_PENALTIES:
            self.penalised.add(row)
        if params.prompt_logprobs is not None:
            self.prompt_scored.add(row)
        if params.logprob_token_ids:
            self.named[row] = np.array(params.logprob_token_ids, np.int64)
            self.scored[row] = 0
        elif params.logprobs is not None:
            self.scored[row] = params.logprobs
        if params.restricted:
            self.restrictions.add(row, params)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self.bias[row] = np.array(ids, np.int64), np.array(values, np.float32)
        if stop_ids:
            self.stop_ids[row] = np.array(sorted(stop_ids), np.int64)
            if params.min_tokens:
                self.delayed[row] = self.stop_ids[row], params.min_tokens
        if params.restricted or row in self.named or self._edits(row) > MOST_EDITS:
            self.on_host.add(row)
        elif params.grammar is not None:
            self.masked.add(row)
        self.columns.changes[row] = self._changes_on_device(row)

    def _edits(self, row: int) -> int:
        """Token ids that bias and minimum length name."""
        return sum(len(edited[row][0]) for edited in (self.bias, self.delayed) if row in edited)

    def _changes_on_device(self, row: int) -> int:
        if row in self.on_host:
            return 0
        changes = PENALISED * (row in self.penalised) + EDITED * bool(self._edits(row))
        return changes + MASKED * (row in self.masked)

    def _append(self, row: int, group: int, blocks: Seq[int]) -> None:
        start = self.table_length[group][row]
        self.tables[group][row, start : start + len(blocks)] = blocks
        self.table_length[group][row] = start + len(blocks)
