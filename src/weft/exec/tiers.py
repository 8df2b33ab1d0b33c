"""Moves KV between the device and host memory, as plans say."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from weft.core.errors import InvariantError
from weft.core.plan import KVMove, StepPlan, Tier, TierCopy
from weft.exec.host_attention import HostAttention
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.kernels.block_arrays import BlockArrays

# Copies blocks of sources to blocks of targets, or orders that: see ``kernels.cpu.blocks`` and
# ``Device.copy_blocks``.
CopyBlocks: TypeAlias = Callable[[BlockArrays, BlockArrays, Seq[int], Seq[int]], None]


class HostTier:
    """The KV of the host beside that of a device; both have the same groups and layers.

    All layers of a group move in one copy. The executor orders copies between the steps before and
    after them, so that a block that is given up and taken again is never read too late or written
    too early. Where the device is the CPU they are done when they return.

    Attributes:
        host: the KV of the host.
        attention: attends to rows whose KV lies here; None where nobody does.
        overlaps: whether sub-batches with such rows wait for it in each layer.
    """

    def __init__(
        self,
        store: KVStore,
        host: KVStore,
        copy_blocks: CopyBlocks,
        attention: HostAttention | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.host, self.attention, self.overlaps = host, attention, overlaps
        self._arrays = {Tier.DEVICE: _by_group(store), Tier.HOST: _by_group(host)}
        self._zeros = _by_group(store.like([1] * len(store.keys)))
        self._copy_blocks = copy_blocks

    def before(self, plan: StepPlan) -> None:
        """Do what a step finds done: zeros on the host, and copies that are not layer-wise."""
        for group, block in plan.zero_host:
            zeros, arrays = self._zeros[group], self._arrays[Tier.HOST][group]
            for source, target in zip(zeros, arrays, strict=True):
                self._copy_blocks(source, target, (0,), (block,))
        self._copy(Tier.DEVICE, plan.spills)
        for move in plan.moves:
            if not move.after_layer and not move.host.place:
                self.move(move)
        if self.attention is not None and self.attention.places is not None:
            self.attention.places.before(plan)
        self._copy(Tier.HOST, plan.fills)

    def after(self, plan: StepPlan, table: InputBatch) -> None:
        """Do the layer-wise moves of a step that has been computed, or ordered.

        A layer's KV might leave as soon as it is computed, but nobody can look for it before the
        step is committed. So it leaves when the last layer is computed, without a copy and an event
        for each layer.
        """
        for move in plan.moves:
            if move.after_layer:
                self.move(move)
                table.move(move)

    def move(self, move: KVMove) -> None:
        """Copy what lies in the blocks of ``source`` to those of ``target``, in all layers.

        And the recurrent state of the row, if it has one.
        """
        origin = Tier.DEVICE if move.to is Tier.HOST else Tier.HOST
        copies = [
            (group, a, b)
            for group, blocks in enumerate(zip(move.source, move.target, strict=True))
            for a, b in zip(*blocks, strict=True)
            if a >= 0
        ]
        if move.state is not None:
            copies.append((len(move.source), *move.state))
        self._copy(origin, copies)

    def _copy(self, origin: Tier, copies: Seq[TierCopy]) -> None:
        """Copy blocks of one tier to the other one, those of each group in one call.

        Slots of states are the blocks of one more group, with a call for each size of their parts.
        """
        target = Tier.DEVICE if origin is Tier.HOST else Tier.HOST
        for group, sources in enumerate(self._arrays[origin]):
            pairs = [(a, b) for index, a, b in copies if index == group]
            if not pairs:
                continue
            for source, to in zip(sources, self._arrays[target][group], strict=True):
                self._copy_blocks(source, to, [a for a, _ in pairs], [b for _, b in pairs])


def _by_group(store: KVStore) -> list[list[BlockArrays]]:
    """The arrays of each group; and of states, whose parts differ in size."""
    groups = [[BlockArrays(store.tensors(group))] for group in range(len(store.keys))]
    if store.states is not None:
        groups.append([BlockArrays(part) for part in store.states.arrays()])
    return groups


def check_computes(plan: StepPlan, tier: HostTier | None) -> None:
    """Raise InvariantError for a plan that needs more of the host than there is."""
    here = tier is not None and tier.attention is not None
    overlaps = tier is not None and tier.overlaps
    if (plan.attends_on_host and not overlaps) or (plan.piggybacks and not here):
        raise InvariantError(f"step {plan.step_id} needs attention of a host, which is not here")
    places = None if tier is None or tier.attention is None else tier.attention.places
    if places is None and (plan.zero_places or any(move.host.place for move in plan.moves)):
        raise InvariantError(f"step {plan.step_id} needs a remote place, which is not here")
    if plan.needs_host and tier is None:
        raise InvariantError(f"step {plan.step_id} needs a host tier, which is not here")
