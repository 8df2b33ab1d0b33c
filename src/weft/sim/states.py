"""Recurrent states of the modelled executor: each slot holds the tokens that it is the state of."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from weft.core.errors import InvariantError
from weft.core.plan import NO_STATE, SubBatch
from weft.kv.lease_turns import LeaseTurns

Slots = dict[int, tuple[int, ...]]


class Row(Protocol):
    """A row of the executor; ``state`` is what its latest step has made the state of."""

    sequence_id: int
    tokens: list[int]
    state: tuple[int, ...]


def advance(slots: Slots, rows: Mapping[int, Row], batch: SubBatch) -> None:
    """Read and write the states of all rows of a sub-batch.

    Raises:
        InvariantError: a slot is not the state before the tokens of its row, or the plan says
            nothing of states.
    """
    if len(batch.states) != len(batch.rows):
        raise InvariantError("a plan has states for some rows only")
    written: Slots = {}
    for index, start, count, state in zip(
        batch.rows, batch.starts, batch.counts, batch.states, strict=True
    ):
        row = rows[index]
        before = () if state.read == NO_STATE else slots[state.read]
        if before != tuple(row.tokens[:start]):
            raise InvariantError(f"sequence {row.sequence_id} reads a state of other tokens")
        tokens = (*row.tokens[: start + count], *batch.drafts.get(index, ()))
        row.state = tokens
        for place, slot in (*state.marks, (len(tokens), state.write)):
            if slot in written:
                raise InvariantError(f"slot {slot} is written twice in a step")
            written[slot] = tokens[:place]
    if any(state.read in written for state in batch.states):
        raise InvariantError("a step writes a state that it reads")
    slots.update(written)


def take_turns(slots: Slots, rows: Seq[Row], turns: Seq[LeaseTurns]) -> None:
    """Read and write the states of rows for a step under a lease.

    Raises:
        InvariantError: a slot is not the state before the step, or is read and written.
    """
    read, written = [turn.now for turn in turns], [turn.spare[-1] for turn in turns]
    if set(read) & set(written) or len(set(written)) < len(written):
        raise InvariantError("leased steps write a state twice, or one that is read")
    for row, turn in zip(rows, turns, strict=True):
        if slots[turn.now] != tuple(row.tokens[:-1]):
            raise InvariantError(f"sequence {row.sequence_id} goes on from other tokens")
        slots[turn.spare[-1]] = row.state = tuple(row.tokens)
        turn.computed(len(row.tokens))
