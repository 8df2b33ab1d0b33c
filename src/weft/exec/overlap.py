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

import numpy as np

from weft.core.errors import HostWorkerError, InvariantError
from weft.core.plan import SubBatch
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.inputs import InputPacker, StepInputs
from weft.exec.piggyback import Rows
from weft.exec.store import KVStore
from weft.exec.sub_batches import MOST, check_overlaps, chosen, kinds_of, order_of, run_overlapped
from weft.kernels.arrays import Array
from weft.kernels.cpu.lane import CpuLane, LanePart
from weft.kernels.cpu.stack import CpuStack
from weft.models.decoder import Decoder


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
    """

    def __init__(
        self,
        decoder: Decoder,
        stores: tuple[KVStore, KVStore],
        table: InputBatch,
        attention: HostAttention,
        pack: Callable[[], InputPacker],
    ) -> None:
        """Bind the model to both tiers.

        Args:
            stores: the KV of the device and of the host.
            pack: makes a packer of inputs, with memory of its own.

        Raises:
            InvariantError: the model does not run as native calls.
        """
        stacks = [decoder.bind(store.keys, store.values) for store in stores]
        self._layers, self._attention = decoder.spec.num_layers, attention
        self._lanes = [_Lane(stacks, table, attention, pack) for _ in range(MOST)]
        self._running: list[_Lane] = []

    def run(self, batches: Seq[SubBatch]) -> list[LaneResult]:
        """Run every layer of one or two sub-batches.

        Raises:
            HostWorkerError: there is no host worker any more.
            InvariantError: there are more sub-batches.
        """
        check_overlaps(batches)
        self._running = self._lanes[: len(batches)]
        for lane, batch in zip(self._running, batches, strict=True):
            lane.begin(batch)
        return run_overlapped(self._running, self._layers)

    def give_up(self) -> None:
        """Leave nothing of an unfinished run with the host, so that its rows can be run again.

        Raises:
            HostWorkerError: there is no host worker any more.
        """
        rows = [row for lane in self._running for row in lane.with_host]
        self._attention.await_aborted(self._attention.mailbox.abort(rows))
        for lane in self._running:
            lane.with_host = []


class _Lane:
    """A sub-batch on its way through the layers.

    Its tokens are in this order: of rows on the device, of prompts on the host, and of decodes on
    the host, for which the host worker attends.

    Attributes:
        batch: the sub-batch.
        with_host: rows that have a slot of the mailbox.
    """

    batch: SubBatch
    with_host: list[int]

    def __init__(
        self,
        stacks: Seq[object],
        table: InputBatch,
        attention: HostAttention,
        pack: Callable[[], InputPacker],
    ) -> None:
        self._stacks: list[CpuStack] = []
        for stack in stacks:
            if not isinstance(stack, CpuStack):
                raise InvariantError("a model that does not run as native calls cannot overlap")
            self._stacks.append(stack)
        self._table, self._attention, self._mailbox = table, attention, attention.mailbox
        self._whole, self._packers = pack(), (pack(), pack())
        self._native = CpuLane(self._mailbox, self._stacks[0])
        self.with_host = []

    def begin(self, batch: SubBatch) -> None:
        """Embed the tokens; those that the host attends for get slots of the mailbox."""
        self.batch, self.with_host = batch, []
        self._failed: dict[int, HostWorkerError] = {}
        self._inputs = inputs = self._whole.pack(batch)
        kinds = kinds_of(batch)
        self._order = order_of(inputs.counts, [i for kind in kinds for i in kind])
        ids, positions = inputs.input_ids, inputs.positions
        if self._order is not None:
            ids, positions = ids[self._order], positions[self._order]
        parts = [
            self._part(indices, stack, packer)
            for indices, stack, packer in zip(kinds, self._stacks, self._packers, strict=False)
            if indices
        ]
        self._rows: Rows = np.array([batch.rows[i] for i in kinds[2]], np.int32)
        if len(self._rows):
            self.with_host = self._rows.tolist()
            self._begin_on_host([batch.starts[i] + 1 for i in kinds[2]])
        self._native.begin(ids, positions, parts, self._rows)

    def _part(self, indices: Seq[int], stack: CpuStack, packer: InputPacker) -> LanePart:
        inputs = self._inputs
        if len(indices) < len(self.batch.rows):
            inputs = packer.pack(chosen(self.batch, indices))
        return LanePart(stack, len(inputs.input_ids), inputs.groups)

    def _begin_on_host(self, contexts: Seq[int]) -> None:
        table, rows = self._table, self._rows
        widths = [int(lengths[rows].max()) for lengths in table.table_length]
        tables = [blocks[rows, :width] for blocks, width in zip(table.tables, widths, strict=True)]
        self._mailbox.begin(rows, contexts, tables)

    def enter(self, layer: int) -> None:
        """Compute what precedes attention, hand the host its part, and attend on the device."""
        self._native.enter(layer)

    def leave(self, layer: int) -> None:
        """Await the host's attention, and compute what follows attention.

        Rows for which the host fails go on without it: their tokens mean nothing from there on, and
        no other row's depend on them.
        """
        if len(self._rows):
            self._attention.await_results(self._rows)
            self._drop_failed()
        self._native.leave(layer)

    def _drop_failed(self) -> None:
        why = self._mailbox.failed()
        gone = [row for row in self._rows.tolist() if row in why]
        if not gone:
            return
        self._failed |= {
            row: HostWorkerError(f"The host could not attend for this request: {why[row]}.")
            for row in gone
        }
        self._native.fail(gone)
        self._rows = self._rows[~np.isin(self._rows, gone)]

    def end(self) -> LaneResult:
        """Give the slots back, and the tokens in the order of the plan."""
        hidden = self._native.finish()
        if self._order is not None:
            ordered = np.empty_like(hidden)
            ordered[self._order] = hidden
            hidden = ordered
        self._mailbox.release(self.with_host)
        self.with_host = []
        return LaneResult(self._inputs, hidden, self._failed)
