"""The halves of a step on a device: dense layers of one beside attention of the other (NanoFlow).

    main      post1(l-1) pre1(l) | post0(l-1) pre0(l) | post1(l) pre1(l+1) | ...
    branches             ga0(l-1)|             ga1(l) |             ga0(l) | ...

where pre and post are what precedes and follows attention, and ga is attention. Dense layers are
bound by arithmetic and decode attention by memory (NanoFlow, Zhu et al. 2025, section 4), so both
gain where kernels leave room for each other: attention begins first, with few programs. All
attention runs on one stream and all else on another, so that no kernel meets itself and each needs
one workspace. Both are captured as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.exec.attend import bind_lanes
from weft.exec.device import Branch, Device
from weft.exec.overlap_pass import AwaitLayer, BatchTokens
from weft.exec.store import KVStore
from weft.exec.sub_batches import run_overlapped
from weft.models.decoder import Decoder


@dataclass(frozen=True)
class HalvesSetup:
    """How halves of a step run.

    Attributes:
        sizes: tokens of a half that are captured, each with each; ascending.
        programs: of decode attention at the most; None for as many as suit it.
    """

    sizes: tuple[int, ...] = ()
    programs: int | None = None


class HalvesPass:
    """See the module docstring.

    Attributes:
        device, layers: what it runs on, and how many layers there are.
        lanes: puts a half on its way.
        programs: as ``HalvesSetup`` has them; what is captured keeps those of its time.
    """

    def __init__(
        self, decoder: Decoder, store: KVStore, device: Device, setup: HalvesSetup
    ) -> None:
        self.device, self.layers = device, decoder.spec.num_layers
        self.lanes = bind_lanes(decoder, store)
        self.programs = setup.programs

    def run(
        self, serial: Tensor, batches: Seq[BatchTokens], wait: AwaitLayer | None = None
    ) -> Tensor:
        """Run every layer of both halves.

        Args:
            serial, wait: as of ``OverlappedPass.run``; nobody is waited for here.

        Returns:
            normalised hidden states [T, C] of all tokens.
        """
        del serial, wait
        halves = [_Half(self, batch) for batch in batches]
        return torch.cat(run_overlapped(halves, self.layers))


class _Half:
    """A half on its way through the layers, as ``sub_batches.Lane``."""

    def __init__(self, on: HalvesPass, batch: BatchTokens) -> None:
        groups = [replace(group, programs=on.programs) for group in batch.groups]
        self._lane, self._device = on.lanes(batch.ids, batch.positions, groups), on.device
        self._attended: Branch

    def enter(self, layer: int) -> None:
        self._attended = self._device.branch(self._lane.enter(layer))

    def leave(self, layer: int) -> None:
        self._lane.leave(layer, self._attended.join())

    def end(self) -> Tensor:
        hidden: Tensor = self._lane.finish()
        return hidden
