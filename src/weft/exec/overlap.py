"""Steps of one or two sub-batches whose layers overlap with attention on the host (NEO).

A sub-batch has rows of both tiers. The device computes all but the attention of decodes whose KV
lies with the host, which the host worker computes meanwhile. With two sub-batches it does so while
the device has the other one (NEO section 3.1), in each layer l:

    device   post0(l-1) pre0(l) | ga0(l) post1(l) pre1(l+1) |
    host     ca1(l)             | ca0(l)                    |

where pre and post are what precedes and follows attention, ga is attention on the device and ca on
the host. With one sub-batch only its own attention on the device overlaps with the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import HostWorkerError, InvariantError
from weft.core.plan import SubBatch, Tier
from weft.exec.attend import attend_over
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import InputPacker, StepInputs
from weft.exec.piggyback import Rows
from weft.exec.store import KVStore
from weft.kernels.arrays import Array, empty
from weft.models.decoder import Attend, Decoder

Places: TypeAlias = "slice | NDArray[np.int64]"  # of tokens within a sub-batch


@dataclass(frozen=True)
class LaneResult:
    """What came of a sub-batch.

    Attributes:
        inputs: of all its tokens.
        hidden: [T, C], normalised; of rows that failed it means nothing.
        failed: why the host could not attend, by row.
    """

    inputs: StepInputs
    hidden: Array
    failed: dict[int, HostWorkerError]


class OverlappedForward:
    """Computes sub-batches with rows of both tiers; their tokens get the bits of ``bind_forward``.

    A CPU that stands for a device reads and writes the KV of prompts on the host in place.

    Args:
        store: the KV of the device.
        host: the KV of the host.
        pack: makes a packer of inputs, with memory of its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        host: KVStore,
        table: InputBatch,
        attention: HostAttention,
        pack: Callable[[], InputPacker],
    ) -> None:
        self.decoder, self.stores, self.table = decoder, (store, host), table
        self.attention = attention
        self._packers = tuple((pack(), pack(), pack()) for _ in range(2))
        self._lanes: list[_Lane] = []

    def run(self, batches: Seq[SubBatch]) -> list[LaneResult]:
        """Run every layer of one or two sub-batches.

        Raises:
            HostWorkerError: there is no host worker any more.
            InvariantError: there are more sub-batches.
        """
        if len(batches) > len(self._packers):
            raise InvariantError(f"{len(batches)} sub-batches cannot overlap")
        self._lanes.clear()
        for batch, packers in zip(batches, self._packers, strict=False):
            lane = _Lane(self, batch, packers)
            self._lanes.append(lane)
            lane.begin()
        first, *others = self._lanes
        layers = self.decoder.spec.num_layers
        for lane in others:
            lane.enter(0)
        for layer in range(layers):
            if layer:
                first.leave(layer - 1)
            first.enter(layer)
            for lane in others:
                lane.leave(layer)
                if layer + 1 < layers:
                    lane.enter(layer + 1)
        ended = [lane.end() for lane in others]  # while the host has the first one
        first.leave(layers - 1)
        return [first.end(), *ended]

    def give_up(self) -> None:
        """Leave nothing of an unfinished run with the host, so that its rows can be run again.

        Raises:
            HostWorkerError: there is no host worker any more.
        """
        rows = [row for lane in self._lanes for row in lane.with_host]
        self.attention.await_aborted(self.attention.mailbox.abort(rows))
        self._lanes.clear()


class _Lane:
    """A sub-batch on its way through the layers.

    Attributes:
        with_host: rows that have a slot of the mailbox.
    """

    def __init__(
        self, shared: OverlappedForward, batch: SubBatch, packers: Seq[InputPacker]
    ) -> None:
        self.batch = batch
        self._decoder, self._mailbox = shared.decoder, shared.attention.mailbox
        self._shared, self._packers = shared, packers
        self.with_host: list[int] = []
        self._failed: dict[int, HostWorkerError] = {}

    def begin(self) -> None:
        """Embed the tokens; those that the host attends for get slots of the mailbox."""
        batch, (whole, *rest) = self.batch, self._packers
        self._inputs = inputs = whole.pack(batch)
        decoder = self._decoder
        self._residual = decoder.embed(inputs.input_ids)  # [T, C]
        self._layer_inputs = decoder.layer_inputs(inputs.input_ids, self._residual)
        self._angles = decoder.angles(inputs.positions)
        places = {Tier.DEVICE: list[int](), Tier.HOST: list[int]()}
        decodes: list[int] = []
        for index, tier in enumerate(batch.row_tiers):
            single = batch.counts[index] == 1 and batch.starts[index] > 0
            (decodes if single and tier is Tier.HOST else places[tier]).append(index)
        self._parts = [
            self._part(rows, store, packer)
            for rows, store, packer in zip(places.values(), self._shared.stores, rest, strict=True)
            if rows
        ]
        self._begin_on_host(decodes)

    def _part(
        self, indices: Seq[int], store: KVStore, packer: InputPacker
    ) -> tuple[Places, Attend]:
        """Tokens of some rows, and the device's attention to them over a store."""
        inputs = self._inputs
        if len(indices) < len(self.batch.rows):
            inputs = packer.pack(_chosen(self.batch, indices))
        places = _places(self._inputs.counts, indices)
        return places, attend_over(self._decoder, store, inputs.groups)

    def _begin_on_host(self, indices: Seq[int]) -> None:
        batch, table = self.batch, self._shared.table
        rows = np.array([batch.rows[i] for i in indices], np.int32)
        self._rows: Rows = rows  # for which the host attends, without those that have failed
        self._places = self._host_places = _places(self._inputs.counts, indices)
        if not len(rows):
            return
        self.with_host = rows.tolist()
        contexts = [batch.starts[i] + 1 for i in indices]
        widths = [int(lengths[rows].max()) for lengths in table.table_length]
        tables = [blocks[rows, :width] for blocks, width in zip(table.tables, widths, strict=True)]
        self._mailbox.begin(rows, contexts, tables)

    def enter(self, layer: int) -> None:
        """Compute what precedes attention, hand the host its part, and attend on the device."""
        q, k, v = self._decoder.pre(layer, self._residual, self._angles)
        if len(self._rows):
            theirs = [None if x is None else x[self._places] for x in (q, k, v)]
            assert theirs[0] is not None
            self._mailbox.submit(self._rows, layer, *theirs)
        if self._parts and not self.with_host and len(self._parts) == 1:
            self._attended = self._parts[0][1](layer, q, k, v)
            return
        self._attended = empty(q, tuple(q.shape))
        for places, attend in self._parts:
            own = [None if x is None else x[places] for x in (q, k, v)]
            assert own[0] is not None
            self._attended[places] = attend(layer, *own)

    def leave(self, layer: int) -> None:
        """Await the host's attention, and compute what follows attention."""
        if self.with_host:
            self._take(layer)
        inputs = None if self._layer_inputs is None else self._layer_inputs[layer]
        self._residual = self._decoder.post(layer, self._attended, self._residual, inputs)

    def _take(self, layer: int) -> None:
        """Fill in what the host has computed; rows for which it could not go on as zeros.

        Their tokens mean nothing from there on, and no other row's depend on them.
        """
        if len(self._rows):
            self._shared.attention.await_results(self._rows)
            self._drop_failed()
        if self._failed:
            self._attended[self._host_places] = 0
        if len(self._rows):
            self._attended[self._places] = self._mailbox.take(self._rows, layer)

    def _drop_failed(self) -> None:
        why = self._mailbox.failed()
        gone = [row for row in self._rows.tolist() if row in why]
        if not gone:
            return
        self._failed |= {
            row: HostWorkerError(f"The host could not attend for this request: {why[row]}.")
            for row in gone
        }
        keep = ~np.isin(self._rows, gone)
        places = np.arange(len(self._inputs.input_ids))[self._places]
        self._rows, self._places = self._rows[keep], places[keep]

    def end(self) -> LaneResult:
        """Give the slots back. The last layer has been left."""
        self._mailbox.release(self.with_host)
        self.with_host = []
        return LaneResult(self._inputs, self._decoder.finish(self._residual), self._failed)


def _chosen(batch: SubBatch, indices: Seq[int]) -> SubBatch:
    """The sub-batch of some rows of another one, in their order there."""
    rows = tuple(batch.rows[i] for i in indices)
    return SubBatch(
        rows,
        tuple(batch.starts[i] for i in indices),
        tuple(batch.counts[i] for i in indices),
        tuple(batch.samples[i] for i in indices),
        tuple(batch.row_tiers[i] for i in indices),
        {row: batch.drafts[row] for row in rows if row in batch.drafts},
    )


def _places(counts: NDArray[np.int64], indices: Seq[int]) -> Places:
    """The tokens of rows: a slice if they follow each other."""
    if not indices:
        return slice(0, 0)
    ends = np.cumsum(counts)
    if indices[-1] - indices[0] + 1 == len(indices):
        return slice(int(ends[indices[0]] - counts[indices[0]]), int(ends[indices[-1]]))
    return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in indices])
