"""The modelled executor: a null device whose tokens can be computed by hand.

Its "KV cache" stores (position, token) in each block, and the next token is

    next = (sum over all positions p of (p + 1) * token[p], read through the full groups' tables,
            + the same sum over the window of each sliding group) mod vocabulary

so a token is right only if every block that it needs was kept, shared, grown and moved correctly.
Each tier has such a cache; a row reads and writes where the plan has put its KV, and the
sub-batches must say the same. A group of recurrent layers counts like a full one, over the tokens
of which the slot that a step reads is the state, and those that follow; each slot keeps them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weft.core.errors import InvariantError, NonFiniteLogitsError, WeftError
from weft.core.plan import (
    KVMove,
    LeasedTokens,
    RowAdd,
    StepPlan,
    StepResult,
    Tier,
    TierCopy,
)
from weft.kv.cache import GroupSpec
from weft.kv.lease_turns import LeaseTurns
from weft.sim.piggyback import Piggyback
from weft.sim.states import advance, take_turns

Slot = tuple[int, int] | None


def next_token(tokens: Seq[int], groups: Seq[GroupSpec], vocab_size: int) -> int:
    """The token that follows ``tokens``, by the formula of the module docstring."""
    total = 0
    for group in groups:
        window = len(tokens) if group.window is None or group.recurrent else group.window
        first = max(0, len(tokens) - window)
        total += sum((p + 1) * tokens[p] for p in range(first, len(tokens)))
    return total % vocab_size


def _sampled(plan: StepPlan) -> set[int]:
    """Rows whose next token the step gives."""
    return {
        row
        for batch in plan.batches
        for row, samples in zip(batch.rows, batch.samples, strict=True)
        if samples
    }


@dataclass(slots=True)
class _ModelledRow:
    sequence_id: int
    tokens: list[int]
    tables: list[list[int]]
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    min_length: int = 0
    embed: bool = False
    tier: Tier = Tier.DEVICE
    state: tuple[int, ...] = ()  # tokens of which the latest step has made the state


class ModelledLease:
    """Whether a step may go on, as was said when it is computed."""

    def __init__(self) -> None:
        self._granted = self._recalled = False

    @property
    def granted(self) -> bool:
        """Whether the step may go on."""
        return self._granted and not self._recalled

    def grant(self, outlet: object | None) -> None:  # noqa: ARG002 - tokens come with the result
        """It may, unless the lease is recalled."""
        self._granted = True

    def recall(self) -> None:
        """It may not."""
        self._recalled = True


class ModelledTicket:
    """A step that is computed when it is collected."""

    def __init__(
        self, executor: ModelledExecutor, plan: StepPlan, lease: ModelledLease | None = None
    ) -> None:
        self.plan = plan
        self.lease = lease
        self._executor = executor
        self._collected = False

    def result(self) -> StepResult:
        if self._collected:
            raise InvariantError(f"step {self.plan.step_id} was collected twice")
        self._collected = True
        return self._executor.collect(self)


def first_allowed(token: int, stop_ids: Set[int], vocab_size: int) -> int:
    """The first token from this one on, in a circle, that is no stop id; this one if all are."""
    circle = ((token + step) % vocab_size for step in range(vocab_size))
    return next((other for other in circle if other not in stop_ids), token)


class ModelledExecutor:
    """Computes plans by the formula above, as late as possible.

    Args:
        groups: the KV groups, as the scheduler's cache has them.
        vocab_size: tokens are below it.
        depth: how many launched steps may be outstanding.
        faulty: called with (sequence id, number of known tokens); True makes that row fault.
        host_blocks: for each group, the blocks of the host tier; none if there is no such tier.
        piggyback: when results of the host come back, where each step takes a second.
        leases: called for a lease that was granted with the steps that it is for: how many of them
            are computed, if no row ends before; without it no step goes on.
    """

    def __init__(
        self,
        groups: Seq[GroupSpec],
        vocab_size: int,
        *,
        depth: int = 0,
        faulty: Callable[[int, int], bool] | None = None,
        host_blocks: Seq[int] = (),
        piggyback: Piggyback | None = None,
        leases: Callable[[int], int] | None = None,
    ) -> None:
        self.depth = depth
        self._leases = leases
        self.overlaps = False
        self._piggyback = piggyback
        self._now = 0.0  # in steps; one that waits for the host takes longer
        self._groups = tuple(group for group in groups if not group.recurrent)
        self._recurrent = len(self._groups) < len(groups)
        self._states: dict[Tier, dict[int, tuple[int, ...]]] = {tier: {} for tier in Tier}
        self._vocab_size = vocab_size
        self._faulty = faulty
        self._rows: dict[int, _ModelledRow] = {}
        self._outstanding: list[ModelledTicket] = []
        counts = {Tier.DEVICE: [group.num_blocks for group in groups], Tier.HOST: host_blocks}
        self._kv: dict[Tier, list[list[list[Slot]]]] = {
            tier: [
                [[None] * group.block_size for _ in range(count)]
                for group, count in zip(groups, counts[tier], strict=False)
                if not group.recurrent
            ]
            for tier in Tier
        }

    def launch(self, plan: StepPlan) -> ModelledTicket:
        """Queue a step.

        Raises:
            InvariantError: more than ``depth`` steps are outstanding before it, or a row is planned
                with a draft before its last token was collected.
        """
        if len(self._outstanding) > self.depth:
            raise InvariantError(f"{len(self._outstanding)} steps are outstanding already")
        early = {row for batch in plan.batches for row in batch.drafts}
        if any(early & _sampled(ticket.plan) for ticket in self._outstanding):
            raise InvariantError(f"of rows {early} one is planned while its token is in flight")
        lease = ModelledLease() if plan.lease and self._leases is not None else None
        ticket = ModelledTicket(self, plan, lease)
        self._outstanding.append(ticket)
        return ticket

    def close(self) -> None:
        """Raises InvariantError if a launched step was never collected."""
        if self._outstanding:
            raise InvariantError(f"{len(self._outstanding)} steps were never collected")

    def collect(self, ticket: ModelledTicket) -> StepResult:
        """Compute the oldest outstanding step."""
        if self._outstanding[0] is not ticket:
            raise InvariantError("steps must be collected in the order of their launch")
        self._outstanding.pop(0)
        self._before(ticket.plan)
        self._apply(ticket.plan)
        ids: list[int] = []
        tokens: list[int] = []
        faults: dict[int, WeftError] = {}
        accepted: dict[int, tuple[tuple[int, None], ...]] = {}
        embeddings: dict[int, bytes] = {}
        for batch in ticket.plan.batches:
            if self._recurrent:
                advance(self._states[Tier.DEVICE], self._rows, batch)
            elif batch.states:
                raise InvariantError("a plan has states for a model without any")
            for index, start, count, samples, tier in zip(
                batch.rows, batch.starts, batch.counts, batch.samples, batch.row_tiers, strict=True
            ):
                row, draft = self._rows[index], batch.drafts.get(index, ())
                if row.tier is not tier:
                    raise InvariantError(
                        f"sequence {row.sequence_id} computes in the {tier} tier, but its KV lies "
                        f"in the {row.tier} tier"
                    )
                self._write(row, start, [*row.tokens[start : start + count], *draft])
                if not samples:
                    continue
                token = self._sample(row, start + count, faults)
                ids.append(row.sequence_id)
                tokens.append(token)
                row.tokens.append(token)
                if row.embed and row.sequence_id not in faults:
                    embeddings[row.sequence_id] = struct.pack("<f", token)
                if draft:
                    accepted[row.sequence_id] = self._verify(row, draft, token)
        piggybacked_results = self._piggyback_results(ticket.plan, faults)
        for move in ticket.plan.moves:
            if move.after_layer:
                self._move(move)
        leased = self._go_on(ticket, tokens, faults)
        result = self._result(ticket.plan.step_id, ids, tokens, faults, accepted, embeddings)
        result = replace(result, leased=leased)
        if self._piggyback is None:
            return result
        return replace(
            result,
            piggybacked_results=piggybacked_results,
            piggyback_layers=self._piggyback.in_layers,
        )

    def _go_on(
        self, ticket: ModelledTicket, tokens: list[int], faults: dict[int, WeftError]
    ) -> LeasedTokens | None:
        """Compute steps under the lease of a step that gave ``tokens``; these become the last."""
        if ticket.lease is None or not ticket.lease.granted or self._leases is None:
            return None
        (batch,) = ticket.plan.batches
        rows = [self._rows[index] for index in batch.rows]
        turns = [LeaseTurns(s.write, s.lent) for s in batch.states if s.lent is not None]
        if len(turns) != len(rows) * self._recurrent:
            raise InvariantError("a lease has slots for some rows only")
        earlier: list[tuple[int, ...]] = []
        for _ in range(self._leases(ticket.plan.lease)):
            if faults or any(row.tokens[-1] in row.stop_ids for row in rows):
                break
            earlier.append(tuple(tokens))
            if self._recurrent:
                take_turns(self._states[Tier.DEVICE], rows, turns)
            for i, row in enumerate(rows):
                self._write(row, len(row.tokens) - 1, row.tokens[-1:])
                tokens[i] = self._sample(row, len(row.tokens), faults)
                row.tokens.append(tokens[i])
        return LeasedTokens(tuple(earlier), frozenset()) if earlier else None

    def _before(self, plan: StepPlan) -> None:
        """Abort tokens, and wait for the host where the plan writes to its KV."""
        if self._piggyback is not None:
            self._now = self._piggyback.before(plan, self._now)
        elif plan.piggybacks:
            raise InvariantError("the modelled executor carries no piggybacked rows")

    def _piggyback_results(
        self, plan: StepPlan, faults: dict[int, WeftError]
    ) -> tuple[tuple[int, int], ...]:
        """Begin tokens of piggybacked rows, and end those whose last result is back."""
        if self._piggyback is None:
            return ()
        for index in plan.piggybacked:
            row = self._rows[index]
            if row.tier is not Tier.HOST:
                raise InvariantError(
                    f"sequence {row.sequence_id} piggybacks, but its KV is no host's"
                )
            self._write(row, len(row.tokens) - 1, row.tokens[-1:])
        begun = {index: len(self._rows[index].tokens) for index in plan.piggybacked}
        self._piggyback.begin(begun, self._now)
        ended = []
        for index in self._piggyback.piggyback(self._now, 1.0, plan.piggyback_limits).finished:
            row = self._rows[index]
            token = self._sample(row, len(row.tokens), faults)
            row.tokens.append(token)
            ended.append((row.sequence_id, token))
        self._now += 1.0
        return tuple(ended)

    @staticmethod
    def _result(
        step_id: int,
        ids: list[int],
        tokens: list[int],
        faults: Mapping[int, WeftError],
        accepted: Mapping[int, tuple[tuple[int, None], ...]],
        embeddings: Mapping[int, bytes],
    ) -> StepResult:
        return StepResult(
            step_id,
            tuple(ids),
            tuple(tokens),
            faults=faults,
            accepted=accepted,
            embeddings=embeddings,
        )

    def _verify(
        self, row: _ModelledRow, draft: Seq[int], token: int
    ) -> tuple[tuple[int, None], ...]:
        """Tokens that follow as long as each one before was guessed; ``token`` is the first."""
        more: list[tuple[int, None]] = []
        for guess in draft:
            faults: dict[int, WeftError] = {}
            if guess != token:
                break
            token = self._sample(row, len(row.tokens), faults)
            if faults:
                break
            row.tokens.append(token)
            more.append((token, None))
        return tuple(more)

    def _apply(self, plan: StepPlan) -> None:
        for tier, pairs in ((Tier.DEVICE, plan.zero), (Tier.HOST, plan.zero_host)):
            for group, block in pairs:
                self._kv[tier][group][block] = [None] * self._groups[group].block_size
        self._copy(Tier.DEVICE, Tier.HOST, plan.spills)
        for index in plan.drop:
            if self._piggyback is not None:
                self._piggyback.give_up(index)
            del self._rows[index]
        for add in plan.add:
            if add.row in self._rows:
                raise InvariantError(f"row {add.row} is taken already")
            self._require(add.tier)
            self._rows[add.row] = self._row(add)
        for move in plan.moves:
            if not move.after_layer:
                self._move(move)
        for row, group, blocks in plan.extend:
            self._rows[row].tables[group].extend(blocks)
        self._copy(Tier.HOST, Tier.DEVICE, plan.fills)

    def _copy(self, origin: Tier, to: Tier, copies: Seq[TierCopy]) -> None:
        for group, source, target in copies:
            if group == len(self._groups):
                self._states[to][target] = self._states[origin][source]
                continue
            self._kv[to][group][target] = list(self._kv[origin][group][source])

    def _require(self, tier: Tier) -> None:
        if not self._kv[tier]:
            raise InvariantError(f"the modelled executor has no {tier} tier")

    def _move(self, move: KVMove) -> None:
        """Copy the blocks of a row to the other tier and switch to the new table.

        Raises:
            InvariantError: the row is in that tier already or its table is not the move's source.
        """
        self._require(move.to)
        row = self._rows[move.row]
        if row.tier is move.to:
            raise InvariantError(f"sequence {row.sequence_id} is in the {move.to} tier already")
        for group, (source, target) in enumerate(zip(move.source, move.target, strict=True)):
            for index, (old, new) in enumerate(zip(source, target, strict=True)):
                if old < 0:
                    continue
                if row.tables[group][index] != old:
                    raise InvariantError(f"sequence {row.sequence_id} moves what is not its own")
                self._kv[move.to][group][new] = list(self._kv[row.tier][group][old])
        if self._recurrent != (move.state is not None):
            raise InvariantError(f"a move of sequence {row.sequence_id} forgets its state")
        if move.state is not None:
            read, write = move.state
            self._states[move.to][write] = self._states[row.tier][read]
        row.tier, row.tables = move.to, [list(table) for table in move.target]
        if self._piggyback is not None:
            if move.to is Tier.HOST:
                self._piggyback.keep(move.row, len(row.tokens))
            else:
                self._piggyback.give_up(move.row)

    @staticmethod
    def _row(add: RowAdd) -> _ModelledRow:
        tables = [list(table) for table in add.tables]
        min_length = add.num_prompt + add.sampling.min_tokens
        tokens = list(add.tokens)
        return _ModelledRow(
            add.sequence_id, tokens, tables, add.stop_ids, min_length, add.embed, add.tier
        )

    def _write(self, row: _ModelledRow, start: int, tokens: Seq[int]) -> None:
        for group, blocks, table in zip(self._groups, self._kv[row.tier], row.tables, strict=True):
            for position, token in enumerate(tokens, start):
                block = table[position // group.block_size]
                if block < 0:
                    raise InvariantError(f"sequence {row.sequence_id} writes where it has no block")
                blocks[block][position % group.block_size] = (position, token)

    def _sample(self, row: _ModelledRow, length: int, faults: dict[int, WeftError]) -> int:
        if self._faulty is not None and self._faulty(row.sequence_id, length):
            faults[row.sequence_id] = NonFiniteLogitsError("The modelled row is faulty.")
            return 0
        token = self._attend(row, length) % self._vocab_size
        if length < row.min_length:
            token = first_allowed(token, row.stop_ids, self._vocab_size)
        return token

    def _attend(self, row: _ModelledRow, length: int) -> int:
        total = 0
        for group, blocks, table in zip(self._groups, self._kv[row.tier], row.tables, strict=True):
            first = 0 if group.window is None else max(0, length - group.window)
            for position in range(first, length):
                slot = blocks[table[position // group.block_size]][position % group.block_size]
                if slot is None or slot[0] != position:
                    raise InvariantError(
                        f"sequence {row.sequence_id} reads {slot} at position {position}"
                    )
                total += (position + 1) * slot[1]
        if self._recurrent:
            total += sum((p + 1) * token for p, token in enumerate(row.state[:length]))
        return total

    def touched_blocks(self, tier: Tier = Tier.DEVICE) -> list[set[int]]:
        """For each group the blocks of the tier that outstanding steps read or write."""
        touched: list[set[int]] = [set() for _ in self._groups]
        where = {index: row.tier for index, row in self._rows.items()}
        tables = {index: [list(t) for t in row.tables] for index, row in self._rows.items()}
        lengths = {index: len(row.tokens) for index, row in self._rows.items()}
        piggybacking: dict[int, int] = {}  # row -> tokens when its token began, at most
        if self._piggyback is not None:
            piggybacking = {row: count for row, count in lengths.items() if row in self._piggyback}

        def move(moves: Seq[KVMove]) -> None:
            for change in moves:
                for blocks, source, target in zip(
                    touched, change.source, change.target, strict=True
                ):
                    blocks.update(target if change.to is tier else source)
                where[change.row] = change.to
                tables[change.row] = [list(table) for table in change.target]

        for ticket in self._outstanding:
            plan = ticket.plan
            for add in plan.add:
                where[add.row] = add.tier
                tables[add.row] = [list(table) for table in add.tables]
            move([change for change in plan.moves if not change.after_layer])
            for row, group_index, blocks in plan.extend:
                tables[row][group_index].extend(blocks)
            for batch in plan.batches:
                for index, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
                    if where[index] is not tier:
                        continue
                    count += len(batch.drafts.get(index, ()))
                    for group_index, group in enumerate(self._groups):
                        first = group.first_block(start + 1)
                        last = -(-(start + count) // group.block_size)
                        touched[group_index].update(tables[index][group_index][first:last])
            move([change for change in plan.moves if change.after_layer])
            lengths |= {add.row: len(add.tokens) for add in plan.add}
            piggybacking |= {row: lengths[row] + len(self._outstanding) for row in plan.piggybacked}
        for index, length in piggybacking.items() if tier is Tier.HOST else ():
            parts = zip(self._groups, touched, tables[index], strict=True)
            for group, group_blocks, table in parts:
                group_blocks.update(table[group.first_block(length) :])
        return touched
