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
from functools import partial

import torch
from torch import Tensor

from weft.exec.attend import attend_over
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
        programs: as ``HalvesSetup`` has them; what is captured keeps those of its time.
    """

    def __init__(
        self, decoder: Decoder, store: KVStore, device: Device, setup: HalvesSetup
    ) -> None:
        self.decoder, self.store, self.device = decoder, store, device
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
        return torch.cat(run_overlapped(halves, self.decoder.spec.num_layers))


class _Half:
    """A half on its way through the layers, as ``sub_batches.Lane``."""

    def __init__(self, on: HalvesPass, batch: BatchTokens) -> None:
        self._decoder, self._device = on.decoder, on.device
        groups = [replace(group, programs=on.programs) for group in batch.groups]
        self._attend = attend_over(on.decoder, on.store, groups)
        self._residual = on.decoder.embed(batch.ids)  # [N, C]
        self._inputs = on.decoder.layer_inputs(batch.ids, self._residual)  # [L, N, P] or None
        self._angles = on.decoder.angles(batch.positions)
        self._attended: Branch

    def enter(self, layer: int) -> None:
        q, k, v = self._decoder.pre(layer, self._residual, self._angles)
        self._attended = self._device.branch(partial(self._attend, layer, q, k, v))

    def leave(self, layer: int) -> None:
        attended = self._attended.join()  # [N, H, D]
        inputs = None if self._inputs is None else self._inputs[layer]
        self._residual = self._decoder.post(layer, attended, self._residual, inputs)

    def end(self) -> Tensor:
        hidden: Tensor = self._decoder.finish(self._residual)
        return hidden
