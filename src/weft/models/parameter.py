"""One tensor of a running model, and the checkpoint tensors that fill it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
EXPERT = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a parameter that it fills.

    ``index`` has a slice or an index for each leading dimension; a tensor with fewer dimensions
    than the part is repeated over it, one with more loses leading ones of 1. ``part`` has a slice
    for each leading dimension of the tensor, of which no more than that is taken. ``pairs`` are the
    rows of a head and those of them that a checkpoint rotates as neighbouring pairs, where they are
    to be rotated as two halves; along dimension ``axis`` the tensor is put in that order before a
    part is taken; of a head what begins at ``pairs_start`` is rotated. So are gates that alternate
    with what they multiply: one head of all rows.
    ``shape`` is that of the tensor, but of one that is ``transposed`` with both last ones swapped.
    """

    tensor: str  # without the layout's prefix
    shape: Shape
    index: tuple[slice | int, ...] = ()
    part: tuple[slice, ...] = ()
    pairs: tuple[int, int] | None = None
    axis: int = 0
    pairs_start: int = 0
    transposed: bool = False

    @property
    def stored_shape(self) -> Shape:
        """The shape of the tensor on disk."""
        if not self.transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def taken(self) -> tuple[slice, ...]:
        """``part`` for all dimensions of the tensor."""
        return self.part + (slice(None),) * (len(self.shape) - len(self.part))


def order_by_halves(piece: Piece) -> NDArray[np.int64]:
    """Return where the rows of a piece with ``pairs`` lie in its tensor, in the order they get."""
    assert piece.pairs is not None
    size, rotated = piece.pairs
    head = np.arange(size)
    turned = slice(piece.pairs_start, piece.pairs_start + rotated)
    head[turned] = head[turned].reshape(-1, 2).T.ravel()
    return (np.arange(0, piece.shape[piece.axis], size)[:, None] + head).ravel()


def in_order(piece: Piece, stored: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor, or experts of it, as a piece has it: of its shape and in its order."""
    found = stored.swapaxes(-1, -2) if piece.transposed else stored
    return found if piece.pairs is None else found.take(order_by_halves(piece), piece.axis)


@dataclass(frozen=True)
class Parameter:
    """One tensor of the running model."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]


def whole(name: str, tensor: str, shape: Shape) -> Parameter:
    """Return a parameter that is one tensor."""
    return Parameter(name, shape, (Piece(tensor, shape),))


def stack(name: str, parts: list[tuple[str, int]], *columns: int) -> Parameter:
    """Return a parameter of tensors stacked along the first dimension: (tensor, rows) each."""
    pieces, start = [], 0
    for tensor, rows in parts:
        pieces.append(Piece(tensor, (rows, *columns), (slice(start, start + rows),)))
        start += rows
    return Parameter(name, (start, *columns), tuple(pieces))


def renamed_on_disk(tensor: str, names: Mapping[str, str]) -> str:
    """Return what a tensor is called on disk, by ``CheckpointLayout.renamed``."""
    found = EXPERT.search(tensor)
    number = "" if found is None else found[1]
    key = EXPERT.sub(".*.", tensor)
    part, dot, kind = key.rpartition(".")
    name = names[key] if key in names else f"{names.get(part, part)}{dot}{kind}"
    return name.replace("*", number)
