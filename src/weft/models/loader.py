"""Streams safetensors into a decoder: fills each parameter once and accounts for each tensor.

All headers are read and checked before a byte of weights is; then every tensor is copied from the
memory-mapped file into its place and packed, so the peak is the model and one tensor. Weights that
are rounded to integers come a few rows at a time, so there the peak is the rounded model.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, short
from weft.core.starting import progress_bar, told_at_start
from weft.kernels.arrays import numpy_dtype
from weft.kernels.interface import OpTable
from weft.kernels.quantized import stacked
from weft.kernels.storage import MULTIPLIED, Storage, computed_as
from weft.models.coded_pieces import KV_SCALES, CodedPieces
from weft.models.decoder import Decoder
from weft.models.encoder_layout import dense_tensors
from weft.models.gguf import GgufFile
from weft.models.gguf_pieces import GgufPieces
from weft.models.host_part import HostPart
from weft.models.kept_weights import KeptWeights
from weft.models.layout import embedding_name, is_kept_float32, parameters, stored_as
from weft.models.parameter import Parameter, Piece, in_order
from weft.models.quant import FLOATS, ExpectedTensor
from weft.models.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from weft.models.shard import WHOLE, Shard, cut, shard_spec
from weft.models.spec import ModelSpec
from weft.models.spec_reader import read_spec
from weft.models.stages import stage_spec
from weft.models.weight_files import is_gguf, weight_files

logger = logging.getLogger("weft")

# Of a tensor that is rounded, read at a time: for a CPU what its caches hold, for a GPU what keeps
# it busy longer than its launches take.
CHUNK_BYTES, DEVICE_CHUNK_BYTES = 1 << 20, 32 << 20
LISTED = 8  # names shown in an error that concerns many tensors


def load_model(
    path: Path,
    dtype: str,
    max_model_len: int | None,
    ops: OpTable,
    rounding: Callable[[str], Storage | None] = lambda _: None,
    kept: KeptWeights | None = None,
    host: HostPart | None = None,
    layers: range | None = None,
) -> Decoder:
    """Load a model folder, or of a model that is cut the part of the rank of ``ops``.

    Args:
        dtype: the name of what the weights are converted to.
        ops: whose ``pack`` brings each weight to where it computes.
        max_model_len: the longest sequence that will be served, in tokens.
        rounding: how a parameter is rounded to integers, by its name; None: it is not. An embedding
            that the output head is tied to is asked for as ``lm_head``.
        kept: where packed weights are looked for, and kept if they are not there.
        host: what stays on the host of a device, to which the rest goes.
        layers: those of the stage of ``ops``, if the model is split into stages.

    Raises:
        UnsupportedModelError: the config asks for something that weft does not implement.
        CheckpointError: a tensor is missing, unexpected, misshapen, unreadable or twice there.
        ConfigError: the model cannot be cut into so many parts.
    """
    spec = read_spec(path, max_model_len)
    shard = Shard(ops.ranks.rank, ops.ranks.size)
    rank_spec, own, stage = shard_spec(spec, shard.size), spec, ""
    if layers is not None:
        stage = f" of layers {layers.start} to {layers.stop - 1}"
        rank_spec, own = (
            stage_spec(one, ops.link.stage, ops.link.stages, layers) for one in (rank_spec, spec)
        )

    def part(
        ops: OpTable, rounding: Callable[[str], Storage | None], wanted: Callable[[str], bool]
    ) -> dict[str, Any]:
        weights = None
        if kept is not None and ops.packed is not None:
            needed = tuple(p for p in cut(parameters(own), own, shard) if wanted(p.name))
            weights = kept.find(path, weight_files(path), needed, shard, dtype, ops.packed, stage)
        if weights is None:
            if kept is not None and ops.packed is not None:
                told_at_start("packing the weights for this CPU; later starts map the packed file")
            with ExitStack() as files:
                checkpoint = Checkpoint(path, spec, files, shard, None if own is spec else own)
                weights = checkpoint.load(dtype, ops, rounding, wanted)
            if kept is not None and ops.packed is not None:
                kept.keep(weights)
        return weights

    if host is None:
        return Decoder(rank_spec, part(ops, rounding, lambda _: True), ops)
    weights = part(ops, rounding, lambda name: not host.has(name))
    weights |= host.hosted(spec, part(host.ops, host.rounding, host.has))
    return Decoder(rank_spec, weights, ops)


class Checkpoint:
    """The open safetensors files of a model folder, checked against what the spec needs."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        files: ExitStack,
        shard: Shard = WHOLE,
        part: ModelSpec | None = None,
    ) -> None:
        """Open every file on ``files`` and check all headers.

        Args:
            spec: of the whole model.
            shard: the part of it that ``load`` returns.
            part: the stage of which that is a part; None for the whole model.

        Raises:
            CheckpointError: see ``load_model``.
        """
        self._spec = spec
        self._folder = folder
        self._beside = {"lm_head.weight", "score.weight"} | dense_tensors(spec)
        paths = [folder] if folder.is_file() else weight_files(folder)
        self._open = {path: _open(path, files, folder) for path in paths}
        self._stored = self._read_headers()
        self._prefix = self._find_prefix()
        experts = (".experts.down_proj", ".experts.down_proj_blocks")
        together = any(name.endswith(experts) for name in self._stored)
        whole = tuple(parameters(spec, stacked_experts=together))
        self._codes = self._pieces()
        self._check(whole)
        if part is not None:
            spec, whole = part, tuple(parameters(part, stacked_experts=together))
        self._parameters = tuple(cut(whole, spec, shard))
        self._chunk_bytes = CHUNK_BYTES

    def _pieces(self) -> CodedPieces | GgufPieces:
        files = {path: file for path, file in self._open.items() if isinstance(file, GgufFile)}
        if files:
            return GgufPieces(files, self._full_name, self._folder)
        stored = self._spec.stored_weights
        return CodedPieces(stored, self._folder, self._stored, self._full_name, self._read)

    def load(
        self,
        dtype: str,
        ops: OpTable,
        rounding: Callable[[str], Storage | None],
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Return every wanted parameter by name, converted to ``dtype``, then packed."""
        if ops.names["paged_attention"] == "triton":
            self._chunk_bytes = DEVICE_CHUNK_BYTES
        chosen = [one for one in self._parameters if wanted(one.name)]
        sizes = [2 * math.prod(one.shape) for one in chosen]  # as if all were stored in 16 bits
        with progress_bar("loading weights", sum(sizes)) as done:
            return self._load(dtype, ops, rounding, zip(chosen, sizes, strict=True), done)

    def _load(
        self,
        dtype: str,
        ops: OpTable,
        rounding: Callable[[str], Storage | None],
        chosen: Iterable[tuple[Parameter, int]],
        done: Callable[[int], Any],
    ) -> dict[str, Any]:
        """As ``load``; ``done`` gets the size of each parameter that is."""
        weights, changed = {}, {}
        for parameter, size in chosen:
            name = parameter.name
            if name == "embed" and self._spec.tied_embeddings:
                name = "lm_head"
            storage, stored = rounding(name), self._stored_as(parameter)
            kept = None if stored is None else computed_as(stored, ops.computes)
            if storage is not None:
                found = ops.quantise(name, parameter.shape, dtype, storage)
                self._round(parameter, found)
            elif kept is not None:
                found = self._coded(parameter, name, dtype, kept, ops)
            else:
                pieces = None
                if ops.packed is not None and name.rpartition(".")[2] in MULTIPLIED:
                    pieces = self._rows_of(parameter, dtype)
                kind = "float32" if is_kept_float32(name) else dtype
                found = ops.pack(name, pieces or self._fill(parameter, kind))
            weights[parameter.name] = found
            if stored is not None and storage is None and kept != stored:
                changed[str(stored)] = dtype if kept is None else str(kept)
            done(size)
        integers = ops.computes(Storage(8, None))
        for was, becomes in changed.items():
            logger.warning(
                "%s: weights that are stored as %s are computed as %s, which takes more memory%s",
                self._folder,
                was,
                becomes,
                "; with quantize int8 they take less" if becomes == dtype and integers else "",
            )
        self._codes.tell()
        return weights

    def kept(self, computes: Callable[[Storage], bool]) -> list[tuple[Parameter, Storage | None]]:
        """Return every parameter, with how its codes are kept; None: it is or becomes floats.

        Args:
            computes: with which codes the kernels multiply.
        """
        found = []
        for parameter in self._parameters:
            stored = self._stored_as(parameter)
            kept = None if stored is None else computed_as(stored, computes)
            found.append((parameter, kept and self._codes.storage(parameter, kept)))
        return found

    def _coded(
        self, parameter: Parameter, name: str, dtype: str, kept: Storage, ops: OpTable
    ) -> Any:
        """Return a parameter with its codes as they are stored."""
        kept = self._codes.storage(parameter, kept)
        if (
            isinstance(self._codes, CodedPieces)
            and kept.format == "int"
            and len(parameter.shape) == 2
        ):
            whole = stacked(
                [weight for p in parameter.pieces for _, weight in self._codes.weights(p, kept)]
            )
            found = ops.quantise(name, whole.shape, dtype, whole.storage)
            found.write(0, whole)
            return found
        found = ops.quantise(name, parameter.shape, dtype, kept)
        for piece in parameter.pieces:
            matrix, first = _place(piece, found)
            places: dict[int | None, int] = {}
            for expert, weight in self._codes.weights(piece, kept):
                start = places.get(expert, first)
                (matrix if expert is None else matrix[expert]).write(start, weight)
                places[expert] = start + weight.shape[0]
        return found

    def _stored_as(self, parameter: Parameter) -> Storage | None:
        """Return how the codes of a parameter are kept, None for one that is or becomes floats."""
        tied = parameter.name == "embed" and self._spec.tied_embeddings
        kinds = {self._codes.is_coded(piece) for piece in parameter.pieces}
        if len(kinds) > 1 and isinstance(self._codes, CodedPieces):
            names = ", ".join(self._full_name(piece) for piece in parameter.pieces)
            raise CheckpointError(f"{self._folder}: only some of {names} are quantised")
        if kinds != {True} or self._spec.stored_weights is None:
            return None
        return stored_as(self._spec.stored_weights, parameter, tied=tied)

    def _round(self, parameter: Parameter, weight: Any) -> None:
        """Write the pieces of a parameter into the matrix, or the experts' matrices, it becomes."""
        for piece in parameter.pieces:
            matrix, first = _place(piece, weight)
            if self._codes.parts(piece):
                for expert, numbers in self._codes.floats(piece):
                    (matrix if expert is None else matrix[expert]).write(first, numbers)
                continue
            matrices = list(matrix) if len(piece.shape) == 3 else [matrix]
            if piece.transposed or piece.axis:  # of experts, which cannot be read row by row
                for matrix, rows in zip(matrices, self._taken(piece), strict=True):
                    matrix.write(first, rows)
                continue
            height = piece.shape[-2]
            *_, taken_rows, taken_columns = piece.taken
            low, high, _ = taken_rows.indices(height)
            for place, matrix in enumerate(matrices):
                top = place * height
                for start, rows in self._rows(piece, top + low, top + high):
                    try:
                        matrix.write(first + start, rows[:, taken_columns])
                    except ValueError as error:
                        name = self._full_name(piece)
                        raise CheckpointError(
                            f"{self._stored[name].file}: tensor '{name}': {error}"
                        ) from error

    def _rows(self, piece: Piece, first: int, last: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield rows of a tensor [..., n] with their places after ``first``, a few at a time.

        They are read and not mapped: pages of a map would stay with the process.
        """
        name, columns = self._full_name(piece), piece.shape[-1]
        if piece.pairs is not None or piece.transposed:  # of rows all over the tensor
            expert = first // piece.shape[-2]  # 0 of a single matrix
            part = (slice(expert, expert + 1),) if len(piece.shape) == 3 else ()
            found = in_order(piece, self._read(name, part)).reshape(-1, columns)
            top = expert * piece.shape[-2]
            yield 0, found[first - top : last - top]
            return
        stored = self._stored[name]
        dtype = numpy_dtype(DTYPES[stored.dtype])
        row_bytes = columns * dtype.itemsize
        count = max(1, self._chunk_bytes // row_bytes)
        handle = self._open[stored.file]
        if isinstance(handle, GgufFile):
            for start in range(first, last, count):
                yield start - first, handle.rows(name, start, min(last, start + count))
            return
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset + first * row_bytes)
            for start in range(0, last - first, count):
                data = bytearray(min(count, last - first - start) * row_bytes)
                if file.readinto(data) != len(data):
                    raise CheckpointError(f"cannot read tensor '{name}' of {stored.file}")
                yield start, np.frombuffer(data, dtype).reshape(-1, columns)

    def _read_headers(self) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        for path, handle in self._open.items():
            for tensor in _tensors(path, handle):
                if tensor.name in stored:
                    raise CheckpointError(
                        f"tensor '{tensor.name}' is in two files: "
                        f"{stored[tensor.name].file.name} and {path.name}; remove one of them"
                    )
                stored[tensor.name] = tensor
        return stored

    def _find_prefix(self) -> str:
        for prefix in self._spec.layout.prefixes:
            if prefix + embedding_name(self._spec) in self._stored:
                return prefix
        return self._spec.layout.prefixes[0]

    def _full_name(self, piece: Piece) -> str:
        if piece.tensor not in self._beside:
            name, other = self._prefix + piece.tensor, self._spec.layout.other_mlp
            if other and name not in self._stored:
                renamed = name.replace(".mlp.", f".{other}.")
                return renamed if renamed in self._stored else name
            return name
        nested = self._prefix.removesuffix("model.") + piece.tensor
        return nested if nested in self._stored else piece.tensor

    def _check(self, whole: Iterable[Parameter]) -> None:
        needed: dict[str, ExpectedTensor] = {}
        for parameter in whole:
            for piece in parameter.pieces:
                needed |= self._codes.parts(piece) or {
                    self._full_name(piece): ExpectedTensor(piece.stored_shape, FLOATS)
                }
        missing = [n for n, part in needed.items() if n not in self._stored and not part.optional]
        ignored = [re.compile(pattern) for pattern in self._ignored()]
        extra = [
            name
            for name in self._stored
            if name not in needed and not any(pattern.fullmatch(name) for pattern in ignored)
        ]
        if self._spec.tied_embeddings:
            extra = [name for name in extra if not self._is_tied_copy(name)]
        problems = [
            *_listed(
                "missing",
                [f"'{name}'" for name in missing],
                "fetch the checkpoint again, it is incomplete or renamed",
            ),
            *_listed(
                "not known to this family",
                [f"'{name}' in {self._stored[name].file.name}" for name in extra],
                "does config.json belong to these weights?",
            ),
            *itertools.islice(self._misfits(needed), LISTED),
        ]
        if problems:
            raise CheckpointError(f"checkpoint {self._folder}: " + "; ".join(problems))

    def _ignored(self) -> Iterator[str]:
        yield from self._spec.layout.ignored
        if self._spec.stored_weights is not None:
            yield KV_SCALES.pattern
        for number, layer in enumerate(self._spec.layers):
            if layer.kv_source is not None:  # saved by some, read by nobody
                prefix = re.escape(f"{self._prefix}layers.{number}.self_attn.")
                yield rf"{prefix}(k_proj|v_proj|k_norm|v_norm)\..*"

    def _is_tied_copy(self, name: str) -> bool:
        """Return whether ``name`` is an output head equal to the embedding that replaces it."""
        if not name.endswith("lm_head.weight"):
            return False
        embedding = self._read(self._prefix + embedding_name(self._spec))
        if np.array_equal(self._read(name), embedding):
            return True
        raise CheckpointError(
            f"{self._stored[name].file}: tensor '{name}' differs from the embedding although "
            "config.json says tie_word_embeddings; set it to false or remove the tensor"
        )

    def _misfits(self, needed: dict[str, ExpectedTensor]) -> Iterator[str]:
        for name, part in needed.items():
            stored = self._stored.get(name)
            if stored is None:
                continue
            if stored.shape not in (part.shape, part.also):
                yield (
                    f"tensor '{name}' in {stored.file.name} has shape {list(stored.shape)}, "
                    f"config.json makes it {list(part.shape)}"
                )
            if stored.dtype not in part.dtypes:
                yield (
                    f"tensor '{name}' in {stored.file.name} has dtype {stored.dtype}, "
                    f"supported: {', '.join(sorted(part.dtypes))}"
                )

    def _rows_of(self, parameter: Parameter, dtype: str) -> list[NDArray[Any]] | None:
        """Return what lies below each other in a matrix, as it is mapped; None for all else."""
        found, outputs = [], 0
        for piece in parameter.pieces:
            index = piece.index[0] if len(piece.index) == 1 else None
            mapped = len(piece.shape) == 2 and piece.pairs is None and not self._codes.parts(piece)
            if not mapped or not isinstance(index, slice):
                return None
            rows = self._taken(piece)
            if rows.dtype != numpy_dtype(dtype) or index.start != outputs:
                return None
            found.append(rows)
            outputs += len(rows)
        return found if outputs == parameter.shape[0] else None

    def _fill(self, parameter: Parameter, dtype: str) -> NDArray[Any]:
        """Return a parameter in a dtype: where it is one piece of that type, as it is mapped."""
        kind, whole = numpy_dtype(dtype), parameter.pieces[0]
        if len(parameter.pieces) == 1 and not whole.index and not self._codes.parts(whole):
            found = self._taken(whole)
            if found.shape == tuple(parameter.shape) and dtype != "float16":
                return found.astype(kind, copy=False)
        target = np.empty(parameter.shape, kind)
        for piece in parameter.pieces:
            name = self._full_name(piece)
            part = target[piece.index] if piece.index else target
            with np.errstate(over="ignore"):  # which is checked below
                if self._codes.parts(piece):
                    for expert, numbers in self._codes.floats(piece):
                        (part if expert is None else part[expert])[...] = numbers
                else:
                    part[...] = self._taken(piece)
            if dtype == "float16" and not np.isfinite(part).all():
                raise CheckpointError(
                    f"{self._stored[name].file}: tensor '{name}' does not fit into float16; "
                    "use dtype bfloat16 or float32"
                )
        return target

    def _taken(self, piece: Piece) -> NDArray[Any]:
        """Return what is taken of a tensor: a view of the mapped file where its rows stay."""
        if piece.pairs is None and not piece.transposed:
            return self._read(self._full_name(piece), piece.part)
        return in_order(piece, self._read(self._full_name(piece)))[piece.part]

    def _read(self, name: str, part: tuple[slice, ...] = ()) -> NDArray[Any]:
        """Return a tensor, or a part of it: a view of the mapped file, or decoded of GGUF."""
        path = self._stored[name].file if name in self._stored else self._folder
        try:
            stored, handle = self._stored[name], self._open[path]
            if isinstance(handle, GgufFile):
                return handle.get_tensor(name)[part]
            return handle.read(stored)[part]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"cannot read tensor '{name}' of {path}: {error}") from error


def _place(piece: Piece, weight: Any) -> tuple[Any, int]:
    """Return the matrix that a piece is part of, of experts one of them, and its first output."""
    first = next((at.start for at in piece.index if isinstance(at, slice) and at.start), 0)
    number = [part for part in piece.index if isinstance(part, int)]
    return (weight[number[0]] if number else weight), first


def _open(path: Path, files: ExitStack, folder: Path) -> SafetensorsFile | GgufFile:
    return GgufFile(path) if is_gguf(path) else SafetensorsFile(path, files, folder)


def _tensors(path: Path, file: SafetensorsFile | GgufFile) -> Iterator[StoredTensor]:
    if isinstance(file, GgufFile):
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield StoredTensor(name, path, file.shape(name), "F32", 0)
        return
    yield from file.tensors()


def _listed(what: str, names: list[str], hint: str) -> Iterator[str]:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        plural = "tensor" if len(names) == 1 else "tensors"
        yield f"{plural} {what}: {', '.join(map(short, names[:LISTED]))}{more} ({hint})"
