"""One tensor of a running model, and the checkpoint tensors that fill it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a parameter that it fills.

    ``index`` has a slice or an index for each leading dimension; a tensor with fewer dimensions
    than the part is repeated over it. ``part`` has a slice for each leading dimension of the
    tensor, of which no more than that is taken.
    """

    tensor: str  # without the layout's prefix
    shape: Shape
    index: tuple[slice | int, ...] = ()
    part: tuple[slice, ...] = ()

    @property
    def taken(self) -> tuple[slice, ...]:
        """``part`` for all dimensions of the tensor."""
        return self.part + (slice(None),) * (len(self.shape) - len(self.part))


@dataclass(frozen=True)
class Parameter:
    """One tensor of the running model."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
