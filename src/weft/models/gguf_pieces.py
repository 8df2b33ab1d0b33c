"""Pieces of a GGUF file that are stored as codes, read a few rows at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from weft.kernels.quantized import Quantized
from weft.kernels.storage import Storage
from weft.models.gguf import GgufFile
from weft.models.gguf_codes import WIDENED
from weft.models.parameter import Parameter, Piece, order_by_halves
from weft.models.quant import ExpectedTensor

logger = logging.getLogger("weft")

CHUNK_WEIGHTS = 4 << 20  # that are unpacked at a time


class GgufPieces:
    """The quantised weights among the pieces of a GGUF file; as ``CodedPieces``."""

    def __init__(
        self, files: Mapping[Path, GgufFile], name_of: Callable[[Piece], str], folder: Path
    ) -> None:
        self._files = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        self._name_of = name_of
        self._folder = folder

    def parts(self, piece: Piece) -> dict[str, ExpectedTensor]:
        """Return no tensors: codes and scales are one, which can be read as floats, too."""
        del piece
        return {}

    def is_coded(self, piece: Piece) -> bool:
        """Whether a piece is stored as codes that kernels may have."""
        name = self._name_of(piece)
        return name in self._files and self._files[name].storage(name) is not None

    def storage(self, parameter: Parameter, described: Storage) -> Storage:
        """Return a described storage, which is that of the file."""
        del parameter
        return described

    def weights(self, piece: Piece, kept: Storage) -> Iterator[tuple[int | None, Quantized]]:
        """Yield what is taken of a weight, a few rows after the other.

        Args:
            kept: how all pieces of the parameter will be kept.
        """
        name = self._name_of(piece)
        file, columns = self._files[name], piece.shape[-1]
        *_, taken_rows, taken_columns = piece.taken
        count = max(1, CHUNK_WEIGHTS // columns)
        experts = (
            range(*piece.taken[0].indices(piece.shape[0])) if len(piece.shape) == 3 else [None]
        )
        for expert in experts:
            if piece.pairs is not None:  # of rows all over the tensor
                whole = file.codes(name, 0, piece.shape[-2], expert)
                whole = whole.reordered(order_by_halves(piece))
                yield expert, whole.part(taken_rows, taken_columns).kept_as(kept)
                continue
            low, high, _ = taken_rows.indices(piece.shape[-2])
            for start in range(low, high, count):
                rows = file.codes(name, start, min(high, start + count), expert)
                yield expert, rows.part(slice(None), taken_columns).kept_as(kept)

    def floats(self, piece: Piece) -> Iterator[tuple[int | None, object]]:
        """Floats are read as those of other tensors."""
        raise NotImplementedError(piece.tensor)

    def tell(self) -> None:
        """Say which types take more memory than in the file."""
        kinds = {file.kind(name) for name, file in self._files.items()}
        if widened := sorted(kinds.intersection(WIDENED)):
            logger.info(
                "%s: weights stored as %s are kept in codes of 4 bits, without a change",
                self._folder,
                " and ".join(widened),
            )
