"""Packs sub-batches into the one buffer that a step on a device uploads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import InvariantError
from weft.core.plan import SubBatch
from weft.exec.device import Device
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import VIEWS, InputPacker, StepInputs
from weft.exec.states import write_states
from weft.exec.step_layout import (
    HASH_WORDS,
    Buffer,
    LaneSizes,
    Layout,
    PairSizes,
    buffers_for,
    forward_layout,
    overlapped_layout,
    padded_size,
    sample_layout,
)
from weft.exec.sub_batches import MOST, chosen, kinds_of, merged

NOTHING = SubBatch((), (), (), ())  # of a step that only carries piggybacked rows

Arrays = dict[str, NDArray[Any]]
Parts: TypeAlias = tuple[SubBatch, SubBatch, SubBatch]  # as ``kinds_of`` has a sub-batch's rows


@dataclass(frozen=True)
class Carried:
    """What a step does of piggybacked rows.

    Attributes:
        serial: the number of the step, from 1 on.
        begun: rows whose token begins, no more than there are lanes.
        limits: for each layer, how many results it may take.
        dropped: rows whose token on its way is dropped before.
    """

    serial: int
    begun: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OverlappedStep:
    """Of a step of overlapped sub-batches, how they are packed.

    Attributes:
        counts, sizes: tokens of each, without padding and with it.
        captured: whether there is a graph of these sizes.
        max_query_len: as ``PackedStep`` has it, of rows whose KV is on the device.
        hosted: of each, the rows that the host attends for.
        prompts: of each, the place of the first token of prompts on the host, and their rows.
        second: the place of its first row in the step.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    captured: bool
    max_query_len: int | None
    hosted: tuple[SubBatch, ...]
    prompts: tuple[tuple[int, SubBatch], ...]
    second: int

    @property
    def shift(self) -> int:
        """By how many tokens padding puts the second one off."""
        return self.sizes[0] - self.counts[0]

    def shift_of(self, row: int) -> int:
        """By how many tokens the row at this place of the step is put off."""
        return self.shift if row >= self.second else 0

    def moved(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Where tokens of the step are, padding included."""
        return np.where(tokens < self.counts[0], tokens, tokens + self.shift)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A sub-batch in one of the buffers.

    Attributes:
        buffer: which one.
        words: the part [first, end) of the buffer that must be uploaded.
        forward, sample: where the numbers of each lie; no ``sample`` if nothing is sampled.
        inputs: what was packed, valid until the next sub-batch is.
        carries: whether lanes carry piggybacked rows.
        overlapped: of overlapped sub-batches; their samples come in the order of the plan.
        ahead: steps after it for which the tables have room.
    """

    buffer: int
    words: slice
    forward: Layout
    sample: Layout | None
    inputs: StepInputs
    carries: bool = False
    overlapped: OverlappedStep | None = None
    ahead: int = 0

    @property
    def max_query_len(self) -> int | None:
        """1 if no row computes more than one token; None otherwise."""
        return 1 if len(self.inputs.input_ids) == len(self.inputs.rows) else None


class StepPacker:
    """Fills the buffers in turn; the caller sees to it that a buffer is not in use any more.

    Args:
        windows: for each KV group the window of its layers; None for none.
        max_tokens: of a step.
        sizes: that steps are padded to, ascending.
        lanes: None where steps carry no piggybacked rows.
        pairs: sizes of overlapped sub-batches; None where there are none.
        states: whether the model has recurrent layers.

    Attributes:
        max_rows, max_tokens: of a step, of the tokens padding included.
        max_context: tokens of a row.
        most_decodes: ``max_tokens`` of a step in which each row computes one.
        windows: of each KV group; 0 for none.
        buffers: on the host, each as ``layout`` says.
    """

    def __init__(
        self,
        table: InputBatch,
        block_size: int,
        windows: Seq[int | None],
        device: Device,
        max_tokens: int,
        sizes: Seq[int],
        lanes: LaneSizes | None = None,
        pairs: PairSizes | None = None,
        buffers: int = buffers_for(0),
        *,
        states: bool = False,
    ) -> None:
        """Take ``buffers`` that the device reads while the next step is packed into another."""
        self._table, self.pairs, self._states = table, pairs, states
        self._of_device = [InputPacker(table, block_size) for _ in range(MOST)]
        self.windows = [window or 0 for window in windows]
        self._sizes = sizes
        self._packer = InputPacker(table, block_size)
        self.max_rows = len(table.sequence_ids)
        self.max_context = table.tokens.shape[1]
        self.max_tokens = padded_size(max_tokens, sizes)
        self.most_decodes = padded_size(min(self.max_rows, max_tokens), sizes)
        blocks = [tables.shape[1] for tables in table.tables]
        self.layout = Buffer.for_steps(
            self.max_tokens,
            self.max_rows,
            blocks,
            lanes,
            overlaps=pairs is not None,
            states=states,
        )
        self.buffers = [device.host_memory(self.layout.words, torch.int32) for _ in range(buffers)]
        self._hashes = [self.layout.hashes(buffer).numpy() for buffer in self.buffers]
        self._views: list[dict[int, Arrays]] = [{} for _ in range(buffers)]
        self._next = 0

    @property
    def lanes(self) -> int:
        """Lanes of a step that carries piggybacked rows."""
        return 0 if self.layout.lanes is None else self.layout.lanes.size

    def forward_layout(self, tokens: int) -> Layout:
        """The layout of the forward pass over so many tokens, padding included."""
        rows = min(tokens, self.max_rows)
        return forward_layout(tokens, rows, len(self.windows), self._states)

    def pack(self, batch: SubBatch, carried: Carried | None = None, ahead: int = 0) -> PackedStep:
        """Write a sub-batch into the next buffer, and what the lanes of the step are told.

        A step with lanes samples, so that a row may end in it.

        Args:
            ahead: steps of the same rows that may follow without being packed.

        Raises:
            IndexError: the plan is beyond the rows.
            InvariantError: a token is neither known nor in flight.
        """
        inputs = self._packer.pack(batch)
        forward = self.forward_layout(padded_size(len(inputs.input_ids), self._sizes))
        sample = None
        if len(inputs.sample_rows) or carried is not None:
            sample = sample_layout(padded_size(len(inputs.sample_rows), self._sizes))
        return self._fill(batch, inputs, forward, sample, carried, ahead)

    def overlapped_layout(self, sizes: tuple[int, ...]) -> Layout:
        """The layout of overlapped sub-batches of so many tokens, padding included."""
        return overlapped_layout(sizes, self.max_rows, len(self.windows))

    def pack_overlapped(
        self, batches: Seq[SubBatch], serial: int, sizes: tuple[int, int] | None = None
    ) -> PackedStep:
        """Write overlapped sub-batches into the next buffer.

        The tokens of each come in this order: of rows on the device, of prompts on the host, and of
        decodes on the host.

        Args:
            serial: the number of the step.
            sizes: to which they are padded; None: captured ones, if there are some for them.

        Raises:
            IndexError, InvariantError: see ``pack``.
        """
        split = [_split(batch) for batch in (*batches, NOTHING, NOTHING)[:MOST]]
        batch = merged([part for parts in split for part in parts])
        of = self._overlapped(split, sizes)
        inputs = self._packer.pack(batch)
        buffer, self._next = self._next, (self._next + 1) % len(self.buffers)
        layout, pivot = self.overlapped_layout(of.sizes), self.layout.pivot
        arrays = self._arrays(buffer, layout, pivot)
        arrays["serial"][:] = serial
        self._write_overlapped(arrays, inputs, of)
        tables, used = self.buffers[buffer].numpy()[pivot + layout.words :], 0
        for number, (own, _, _) in enumerate(split):
            used += self._write_of_device(arrays, number, own, tables, used)
        if batch.rows:
            last = of.moved(inputs.groups[0].query_start[1:] - 1)
            self._point_at_tokens_in_flight(arrays["ids"], last, batch, inputs)
        order = _sample_order(merged(batches), batch)
        inputs = replace(
            inputs,
            input_ids=arrays["ids"],
            sample_rows=inputs.sample_rows[order],
            sample_at=of.moved(inputs.sample_at[order]),
            sample_lengths=inputs.sample_lengths[order],
        )
        sample = None
        if len(order):
            sample = sample_layout(padded_size(len(order), self._sizes))
        words = self._end(buffer, layout.hash, batch, inputs, sample, pivot + layout.words + used)
        return PackedStep(buffer, words, layout, sample, inputs, overlapped=of)

    def _overlapped(self, split: Seq[Parts], sizes: tuple[int, int] | None) -> OverlappedStep:
        """How sub-batches are packed, to these sizes or to those that suit them."""
        counts = tuple(sum(part.num_tokens for part in parts) for parts in split)
        on_host = any(prompts.rows for _, prompts, _ in split)
        if sizes is None and self.pairs is not None and not on_host:
            sizes = self.pairs.padded(counts)
        decodes = all(own.num_tokens == len(own.rows) for own, _, _ in split)
        return OverlappedStep(
            counts,
            sizes or tuple(padded_size(n, self._sizes) if n else 0 for n in counts),
            captured=sizes is not None,
            max_query_len=1 if decodes else None,
            hosted=tuple(hosted for _, _, hosted in split),
            prompts=tuple((own.num_tokens, prompts) for own, prompts, _ in split),
            second=sum(len(part.rows) for part in split[0]),
        )

    def _write_overlapped(self, arrays: Arrays, inputs: StepInputs, of: OverlappedStep) -> None:
        """Write the tokens of two sub-batches, the second one's behind the first one's padding."""
        (count, _), (size, _) = of.counts, of.sizes
        for name, values in (("ids", inputs.input_ids), ("positions", inputs.positions)):
            _put(arrays[name][:size], values[:count])
            _put(arrays[name][size:], values[count:])
        arrays["hosted"][:] = self.max_rows
        for start, tokens, batch in zip((0, size), of.counts, of.hosted, strict=True):
            end = start + tokens
            arrays["hosted"][end - len(batch.rows) : end] = batch.rows

    def _write_of_device(
        self, arrays: Arrays, number: int, own: SubBatch, tables: NDArray[np.int32], used: int
    ) -> int:
        """Write where the rows on the device have their KV; return how long their tables are."""
        packer = self._of_device[number]
        inputs = packer.pack(own)
        for slots, group in zip(arrays[f"slot_mapping{number}"], inputs.groups, strict=True):
            _put(slots, group.slot_mapping, -1)
        bounds, starts = inputs.groups[0].query_start, arrays[f"table_start{number}"]
        _put(arrays[f"query_start{number}"], bounds, len(inputs.input_ids))
        _put(arrays[f"seq_lens{number}"], inputs.groups[0].seq_lens)
        count = packer.pack_tables(self.windows, tables[used:], starts)
        starts += used
        return count

    def pack_padding(self, forward: Layout, sample: Layout) -> PackedStep:
        """Write a step of these layouts that is only padding."""
        carried = None if self.layout.lanes is None else Carried(1)
        return self._fill(NOTHING, self._packer.pack(NOTHING), forward, sample, carried)

    def sample_at(self, layout: Layout) -> int:
        """The word where the numbers of samples begin."""
        return self.layout.lanes_at - layout.words

    def _fill(
        self,
        batch: SubBatch,
        inputs: StepInputs,
        forward: Layout,
        sample: Layout | None,
        carried: Carried | None,
        ahead: int = 0,
    ) -> PackedStep:
        buffer, self._next = self._next, (self._next + 1) % len(self.buffers)
        pivot = self.layout.pivot
        read_as = self.layout.forward_hash(forward, carried is not None)
        if carried is not None:
            self._write_lanes(buffer, carried)
        arrays = self._arrays(buffer, forward, pivot)
        self._write_tokens(arrays, batch, inputs)
        tables = self.buffers[buffer].numpy()[pivot + forward.words :]
        used = self._packer.pack_tables(self.windows, tables, arrays["table_start"], ahead)
        words = self._end(buffer, read_as, batch, inputs, sample, pivot + forward.words + used)
        return PackedStep(buffer, words, forward, sample, inputs, carried is not None, ahead=ahead)

    def _end(
        self,
        buffer: int,
        read_as: int,
        batch: SubBatch,
        inputs: StepInputs,
        sample: Layout | None,
        end: int,
    ) -> slice:
        """Write samples and hashes; return the words of the whole step, which ends at ``end``."""
        self._hashes[buffer][:] = read_as, 0 if sample is None else sample.hash
        first = self.layout.pivot - HASH_WORDS
        if sample is not None:
            first = self.sample_at(sample)
            self._write_samples(self._arrays(buffer, sample, first), batch, inputs)
        return slice(first, end)

    def _write_tokens(self, arrays: Arrays, batch: SubBatch, inputs: StepInputs) -> None:
        tokens, rows = len(inputs.input_ids), len(inputs.rows)
        _put(arrays["ids"], inputs.input_ids)
        _put(arrays["positions"], inputs.positions)
        for slots, group in zip(arrays["slot_mapping"], inputs.groups, strict=True):
            _put(slots, group.slot_mapping, -1)
        bounds = inputs.groups[0].query_start
        _put(arrays["query_start"], bounds, tokens)
        _put(arrays["seq_lens"], inputs.groups[0].seq_lens)
        if self._states:
            write_states(arrays, batch)
        if rows:
            self._point_at_tokens_in_flight(arrays["ids"], bounds[1:] - 1, batch, inputs)

    def _point_at_tokens_in_flight(
        self,
        ids: NDArray[np.int64],
        last: NDArray[np.int32],
        batch: SubBatch,
        inputs: StepInputs,
    ) -> None:
        """For rows whose last token is still on the device, store where to read it."""
        unknown = inputs.starts + inputs.counts - self._table.length[inputs.rows]  # [R]
        for index, row in enumerate(batch.rows) if batch.drafts else ():
            unknown[index] -= len(batch.drafts.get(row, ()))
        if unknown.max() > 1:
            row = int(inputs.rows[unknown.argmax()])
            raise InvariantError(f"row {row} is to compute a token that is not even in flight")
        in_flight = unknown == 1
        ids[last[in_flight]] = -1 - inputs.rows[in_flight]

    def _write_samples(self, arrays: Arrays, batch: SubBatch, inputs: StepInputs) -> None:
        rows, columns = inputs.sample_rows, self._table.columns
        _put(arrays["at"], inputs.sample_at)
        _put(arrays["row"], rows, self.max_rows)
        _put(arrays["seed"], columns.seed[rows])
        _put(arrays["counter"], inputs.sample_lengths - self._table.num_prompt[rows])
        _put(arrays["settings"], columns.choice[rows])
        _put(arrays["changes"], columns.changes[rows])
        arrays["guesses"][:] = -1
        if batch.drafts:
            (after,) = np.nonzero(rows[1:] == rows[:-1])  # a row stands once but for its draft
            at = inputs.sample_at[after + 1]
            arrays["guesses"][after + 1] = inputs.input_ids[at]

    def _write_lanes(self, buffer: int, carried: Carried) -> None:
        assert self.layout.lanes is not None
        arrays, table = self._arrays(buffer, self.layout.lanes, self.layout.lanes_at), self._table
        rows = np.array(carried.begun, np.int64)
        arrays["serial"][:] = carried.serial
        _put(arrays["limits"], np.array(carried.limits, np.int32))
        arrays["stays"][:] = 1
        arrays["stays"][list(carried.dropped)] = 0
        _put(arrays["begun"], rows, self.max_rows)
        lengths, columns = table.length[rows], table.columns
        _put(arrays["ids"], table.tokens[rows, lengths - 1])
        _put(arrays["positions"], lengths - 1)
        _put(arrays["seed"], columns.seed[rows])
        _put(arrays["counter"], lengths - table.num_prompt[rows])
        _put(arrays["settings"], columns.choice[rows])
        _put(arrays["changes"], columns.changes[rows])

    def _arrays(self, buffer: int, layout: Layout, at: int) -> Arrays:
        views = self._views[buffer]
        if layout.hash not in views:
            if len(views) == VIEWS:
                views.clear()
            found = layout.views(self.buffers[buffer], at)
            views[layout.hash] = {name: view.numpy() for name, view in found.items()}
        return views[layout.hash]


def _split(batch: SubBatch) -> Parts:
    """A sub-batch's rows on the device, and its prompts and decodes on the host."""
    device, prompts, decodes = kinds_of(batch)
    return chosen(batch, device), chosen(batch, prompts), chosen(batch, decodes)


def _sample_order(plan: SubBatch, packed: SubBatch) -> list[int]:
    """The samples of packed rows, in the order in which a plan has those rows."""
    of_row, count = dict[int, range](), 0
    for row, samples in zip(packed.rows, packed.samples, strict=True):
        after = count + (1 + len(packed.drafts.get(row, ())) if samples else 0)
        of_row[row], count = range(count, after), after
    return [i for row in plan.rows for i in of_row[row]]


def _put(target: NDArray[np.int64], values: NDArray[np.generic], padding: int = 0) -> None:
    """Write values at the start of ``target``, and padding behind them."""
    target[: len(values)] = values
    target[len(values) :] = padding
