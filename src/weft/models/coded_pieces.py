"""Pieces of a checkpoint that are stored quantised: which they are, and what is taken of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError
from weft.kernels.float4 import Float4
from weft.kernels.quantized import Quantized
from weft.kernels.storage import Storage
from weft.models.parameter import Parameter, Piece, Shape, order_by_halves
from weft.models.quant import ClippedCount, ExpectedTensor, dequantize, parts_of, unpack
from weft.models.quant_config import FP8_METHODS, StoredWeights
from weft.models.safetensors_file import DTYPES, StoredTensor

logger = logging.getLogger("weft")

Numbers: TypeAlias = NDArray[Any]

SCALES = ("scales", "weight_scale", "weight_scale_inv")
# Of the experts of a layer that are stored as one tensor: what their names end in.
STACKED = {"weight": "", "weight_scale_inv": "_scale_inv", "weight_scale": "_scale"}
STACKED |= {"blocks": "_blocks", "scales": "_scales"}
KV_SCALES = re.compile(
    r".*\.self_attn\.(attn\.)?(q_scale|k_scale|v_scale|kv_scale|prob_scale|"
    r"k_proj\.(k_scale|output_scale)|v_proj\.(v_scale|output_scale)|q_proj\.output_scale)"
)


class CodedPieces:
    """The quantised weights among the pieces of a checkpoint."""

    def __init__(
        self,
        stored: StoredWeights | None,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        name_of: Callable[[Piece], str],
        read: Callable[[str], Numbers],
    ) -> None:
        """Bind what reads.

        Args:
            stored: how they are stored; None: there are none.
            tensors: all of the checkpoint, by name.
            name_of: the name of a piece's tensor.
            read: reads a tensor by its name.
        """
        self._format = stored
        self._folder = folder
        self._tensors = tensors
        self._name_of = name_of
        self._read = read
        self._limits = ClippedCount()
        self._last: tuple[str, Numbers] | None = None  # a weight of which parts are taken

    def parts(self, piece: Piece) -> dict[str, ExpectedTensor]:
        """Return the tensors of a weight that is stored quantised, none for another one.

        Raises:
            CheckpointError: the format cannot hold a weight of its sizes.
        """
        names = self._names(piece)
        if self._format is None or not names:
            return {}
        *experts, rows, columns = _coded_shape(piece)
        with self._named(piece):
            parts = parts_of(self._format, rows, columns)
        return {
            names(suffix): ExpectedTensor(
                (*experts, *part.shape),
                part.dtypes,
                part.optional,
                None if part.also is None else (*experts, *part.also),
            )
            for suffix, part in parts.items()
        }

    def is_coded(self, piece: Piece) -> bool:
        """Whether a piece is stored quantised."""
        return bool(self.parts(piece))

    def _names(self, piece: Piece) -> Callable[[str], str] | None:
        """Return from the end of a part's name to its name, None for a weight in floats."""
        name = self._name_of(piece)
        if len(piece.shape) == 3:

            def full(suffix: str) -> str:
                return name + STACKED.get(suffix, f"_{suffix}")

        elif len(piece.shape) == 2 and name.endswith(".weight"):

            def full(suffix: str) -> str:
                return name.removesuffix("weight") + suffix

        else:
            return None
        return full if any(full(suffix) in self._tensors for suffix in SCALES) else None

    def storage(self, parameter: Parameter, described: Storage) -> Storage:
        """Return a described storage with the type of scales that the checkpoint has."""
        assert self._format is not None
        if self._format.is_float:
            return described
        names = self._names(parameter.pieces[0])
        assert names is not None
        found = [self._tensors[name] for name in map(names, SCALES) if name in self._tensors]
        return Storage(described.bits, described.group, DTYPES[found[0].dtype], described.zeros)

    def weights(self, piece: Piece, kept: Storage) -> Iterator[tuple[int | None, Any]]:
        """Yield what is taken of a weight, of stacked experts each with its number.

        Args:
            kept: how it will be kept; MXFP4 may become int8.
        """
        for expert, tensors in self._tensors_of(piece):
            weight = self._unpacked(piece, tensors)
            if piece.pairs is not None:
                weight = weight.reordered(order_by_halves(piece))
            if piece.part:
                weight = weight.part(*piece.taken[-2:])
            if isinstance(weight, Float4) and kept.format == "int":
                weight = weight.integers()
            if isinstance(weight, Quantized) and kept.zeros:
                weight = weight.with_zeros()
            yield expert, weight

    def floats(self, piece: Piece) -> Iterator[tuple[int | None, Numbers]]:
        """Yield what is taken of a weight in float32, of stacked experts each with its number."""
        for expert, numbers in self._dequantized(piece):
            if piece.transposed and expert is None:
                numbers = numbers.T
            if piece.pairs is not None:
                numbers = numbers[order_by_halves(piece)]
            yield expert, numbers[piece.taken[-2:]]

    def _dequantized(self, piece: Piece) -> Iterator[tuple[int | None, Numbers]]:
        """Yield a weight as it is stored in float32; once for parts taken one after the other."""
        assert self._format is not None
        name = self._name_of(piece)
        if self._last is not None and self._last[0] == name:
            yield None, self._last[1]
            return
        self._last = None
        for expert, tensors in self._tensors_of(piece):
            self._count(piece, tensors)
            with self._named(piece):
                numbers = dequantize(self._format, tensors, *_coded_shape(piece)[-2:])
            if piece.part and expert is None:
                self._last = name, numbers
            yield expert, numbers

    def _unpacked(self, piece: Piece, tensors: Mapping[str, Numbers]) -> Any:
        assert self._format is not None
        self._count(piece, tensors)
        with self._named(piece):
            return unpack(self._format, tensors, *_coded_shape(piece)[-2:])

    def _tensors_of(self, piece: Piece) -> Iterator[tuple[int | None, dict[str, Numbers]]]:
        assert self._format is not None
        names = self._names(piece)
        assert names is not None
        suffixes = parts_of(self._format, *_coded_shape(piece)[-2:])
        found = {s: self._read(names(s)) for s in suffixes if names(s) in self._tensors}
        if len(piece.shape) == 2:
            yield None, found
            return
        for expert in range(*piece.taken[0].indices(piece.shape[0])):
            yield expert, {suffix: numbers[expert] for suffix, numbers in found.items()}

    def _count(self, piece: Piece, tensors: Mapping[str, Numbers]) -> None:
        if self._format is not None and self._format.method in FP8_METHODS:
            scales = next(tensors[suffix] for suffix in SCALES if suffix in tensors)
            count = len(np.unique(scales.astype(np.float32)))
            self._limits.add(self._name_of(piece), tensors["weight"], count)

    def _named(self, piece: Piece) -> AbstractContextManager[None]:
        return _named(f"tensor '{self._name_of(piece)}' in {self._folder}")

    def tell(self) -> None:
        """Warn of FP8 numbers that are cut off; say that scales of KV are not used."""
        if (words := self._limits.warning()) is not None:
            logger.warning("%s: %s", self._folder, words)
        if self._format is not None and any(map(KV_SCALES.fullmatch, self._tensors)):
            logger.info(
                "%s: its scales of KV are not used; with kv_dtype fp8 each token and head has a "
                "scale of its own",
                self._folder,
            )


def _coded_shape(piece: Piece) -> Shape:
    """The shape of the codes of a weight; of stacked experts, whichever way floats lie there."""
    return piece.stored_shape if len(piece.shape) == 2 else piece.shape


@contextmanager
def _named(words: str) -> Iterator[None]:
    """Put a tensor's name before what is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{words}: {error.message}") from error
