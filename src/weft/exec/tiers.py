"""Moves KV between the device and host memory, as plans say."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from weft.core.errors import InvariantError
from weft.core.plan import KVMove, StepPlan, Tier
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.kernels.cpu.blocks import BlockArrays, copy_blocks


class Copies(Protocol):
    """Copies between the two tiers of one KV, ordered between the steps before and after them.

    So a block that is given up and taken again is never read too late or written too early.
    """

    def zero(self, group: int, block: int) -> None:
        """Overwrite a block of the host in all layers of a group."""

    def copy(self, to: Tier, group: int, source: Seq[int], target: Seq[int]) -> None:
        """Copy blocks ``source`` of a group to ``target`` of the other tier, in all layers."""


class HostTier:
    """The KV of the host beside that of a device; both have the same groups and layers."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def before(self, plan: StepPlan) -> None:
        """Do what a step finds done: zeros on the host, and moves that are not layer-wise."""
        for group, block in plan.zero_host:
            self._copies.zero(group, block)
        for move in plan.moves:
            if not move.after_layer:
                self.move(move)

    def after(self, plan: StepPlan, table: InputBatch) -> None:
        """Do the layer-wise moves of a step, which has been computed or ordered.

        Each layer may leave as soon as it is computed, and nobody may read the KV on the host
        before the step is collected. So all of it leaves when the last layer is computed: that
        saves an event for each layer, and the copies still overlap with what follows.
        """
        for move in plan.moves:
            if move.after_layer:
                self.move(move)
                table.move(move)

    def move(self, move: KVMove) -> None:
        """Copy what lies in the blocks of ``source`` to those of ``target``, in all layers."""
        for group, tables in enumerate(zip(move.source, move.target, strict=True)):
            pairs = [(a, b) for a, b in zip(*tables, strict=True) if a >= 0]  # -1 in both alike
            if pairs:
                source, target = zip(*pairs, strict=True)
                self._copies.copy(move.to, group, source, target)


class NativeCopies:
    """Copies where the device is the CPU: plain ones, done on return.

    The executor's thread makes them between its steps, on the threads of the kernels.
    """

    def __init__(self, store: KVStore, host: KVStore) -> None:
        self._host = host
        self._arrays = {
            tier: [BlockArrays(kv.tensors(group)) for group in range(len(kv.keys))]
            for tier, kv in ((Tier.DEVICE, store), (Tier.HOST, host))
        }

    def zero(self, group: int, block: int) -> None:
        self._host.zero(group, block)

    def copy(self, to: Tier, group: int, source: Seq[int], target: Seq[int]) -> None:
        origin = Tier.DEVICE if to is Tier.HOST else Tier.HOST
        copy_blocks(self._arrays[origin][group], self._arrays[to][group], source, target)


def check_computes(plan: StepPlan, tier: HostTier | None) -> None:
    """Raise InvariantError for a plan that needs more of the host than its memory."""
    if plan.computes_on_host or (plan.needs_host and tier is None):
        raise InvariantError(f"step {plan.step_id} needs a host tier, which is not here")
