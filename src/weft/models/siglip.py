"""The vision tower of Gemma 3: a SigLIP encoder, and what makes tokens of its patches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError
from weft.kernels.arrays import Array, numpy_dtype
from weft.kernels.interface import AttentionMetadata, OpTable, Weight
from weft.models.quant import FLOATS
from weft.models.safetensors_file import SafetensorsFile, StoredTensor
from weft.models.vision import VisionSpec
from weft.models.weight_files import weight_files

# Rows of one native call: what else the engine computes waits for the end of a call.
ROWS_AT_ONCE = 256
BLOCK = 16  # tokens


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: tuple[Array, Array]  # weight and bias, [C] each
    qkv: tuple[Weight, Array]  # [3C, C], [3C]
    output: tuple[Weight, Array]  # [C, C], [C]
    norm2: tuple[Array, Array]
    up: tuple[Weight, Array]  # [I, C], [I]
    down: tuple[Weight, Array]  # [C, I], [C]


class SiglipTower:
    """A loaded tower, which turns an image into what a prompt's tokens read. For one thread."""

    def __init__(
        self,
        spec: VisionSpec,
        read: Callable[[str], NDArray[Any]],
        dtype: str,
        ops: OpTable,
    ) -> None:
        """Take the parameters.

        Args:
            read: a tensor of ``spec.shapes()`` by its name.
            dtype: the name of what is computed in.
            ops: the native kernels.
        """
        self.spec = spec
        self._ops = ops
        self._dtype = numpy_dtype(dtype)

        def floats(name: str) -> Array:
            return np.ascontiguousarray(read(name).astype(self._dtype))

        def matrix(name: str, *parts: str) -> tuple[Weight, Array]:
            weights = [floats(f"{name}.{part}.weight") for part in parts]
            biases = [floats(f"{name}.{part}.bias") for part in parts]
            return ops.pack("up", weights), np.concatenate(biases)

        def norm(name: str) -> tuple[Array, Array]:
            return floats(f"{name}.weight"), floats(f"{name}.bias")

        tower, projector = "vision_tower", "multi_modal_projector"
        patch = floats(f"{tower}.embeddings.patch_embedding.weight")
        self._patch = ops.pack("up", patch.reshape(len(patch), -1))  # [C, 3 * P * P]
        self._patch_bias = floats(f"{tower}.embeddings.patch_embedding.bias")
        self._positions = floats(f"{tower}.embeddings.position_embedding.weight")
        self._layers = []
        for number in range(spec.num_layers):
            layer = f"{tower}.encoder.layers.{number}"
            self._layers.append(
                _Layer(
                    norm(f"{layer}.layer_norm1"),
                    matrix(f"{layer}.self_attn", "q_proj", "k_proj", "v_proj"),
                    matrix(f"{layer}.self_attn", "out_proj"),
                    norm(f"{layer}.layer_norm2"),
                    matrix(f"{layer}.mlp", "fc1"),
                    matrix(f"{layer}.mlp", "fc2"),
                )
            )
        self._last_norm = norm(f"{tower}.post_layernorm")
        self._soft_norm = floats(f"{projector}.mm_soft_emb_norm.weight")
        projection = floats(f"{projector}.mm_input_projection_weight")
        self._projection = ops.pack("up", np.ascontiguousarray(projection.T))

    def encode(self, pixels: NDArray[np.uint8]) -> Array:
        """Return [tokens, C] for the prompt, of pixels [H, W, 3]."""
        x = self._embed(pixels)  # [S * S, C]
        for layer in self._layers:
            x = x + self._attend(layer, self._norm(x, layer.norm1))
            x = x + self._by_rows(self._norm(x, layer.norm2), partial(self._mlp, layer))
        x = self._norm(x, self._last_norm)
        return self._project(x)

    def _embed(self, pixels: NDArray[np.uint8]) -> Array:
        """The patches of an image, and where they are."""
        spec, side, patch = self.spec, self.spec.side, self.spec.patch_size
        x: Array = pixels.astype(np.float32) * np.float32(spec.rescale)
        x = (x - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
        x = x.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        x = np.ascontiguousarray(x.reshape(side * side, -1).astype(self._dtype))
        return self._linear(x, self._patch, self._patch_bias) + self._positions

    def _norm(self, x: Array, by: tuple[Array, Array]) -> Array:
        weight, bias = by
        return self._ops.rms_norm(x, weight, self.spec.norm_eps, False, True) + bias

    def _linear(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        return self._by_rows(x, lambda rows: self._ops.linear(rows, weight, bias))

    def _by_rows(self, x: Array, compute: Callable[[Array], Array]) -> Array:
        """Compute a few rows at a time."""
        starts = range(0, len(x), ROWS_AT_ONCE)
        return np.concatenate([compute(x[i : i + ROWS_AT_ONCE]) for i in starts])

    def _mlp(self, layer: _Layer, x: Array) -> Array:
        wide = self._ops.linear(x, *layer.up)
        # The activation is that of a gated MLP whose other half is 1.
        gated = np.concatenate((wide, np.ones_like(wide)), 1)
        return self._ops.linear(self._ops.act_mul(gated, "gelu_tanh"), *layer.down)

    def _attend(self, layer: _Layer, x: Array) -> Array:
        """Attention of all patches to all, on paged caches of this one image."""
        spec, count = self.spec, len(x)
        heads, size = spec.num_heads, spec.hidden_size // spec.num_heads
        qkv = self._linear(x, *layer.qkv).reshape(count, 3 * heads, size)
        blocks = -(-count // BLOCK)
        cache = np.zeros((2, blocks, heads, BLOCK, size), self._dtype)
        for which in (0, 1):
            padded = np.zeros((blocks * BLOCK, heads, size), self._dtype)
            padded[:count] = qkv[:, (1 + which) * heads : (2 + which) * heads]
            cache[which] = padded.reshape(blocks, BLOCK, heads, size).transpose(0, 2, 1, 3)
        table = np.arange(blocks, dtype=np.int32)[None]

        def attend(q: Array) -> Array:
            batch = AttentionMetadata(
                block_tables=table,
                query_start=np.array([0, len(q)], np.int32),
                seq_lens=np.array([count], np.int32),
                slot_mapping=np.full(len(q), -1, np.int64),
                block_size=BLOCK,
            )
            scale, arrays = size**-0.5, (cache[0], cache[1], batch)
            out = self._ops.paged_attention(
                q, None, None, *arrays, scale=scale, window=None, softcap=None, causal=False
            )
            return out.reshape(len(q), -1)

        attended = self._by_rows(qkv[:, :heads], attend)
        return self._linear(attended, *layer.output)

    def _project(self, x: Array) -> Array:
        """Means of squares of patches, as wide as the embeddings of tokens."""
        spec, side = self.spec, self.spec.side
        square = side // int(spec.tokens**0.5)
        pooled = x.astype(np.float32).reshape(side // square, square, side // square, square, -1)
        pooled = pooled.mean((1, 3)).reshape(spec.tokens, -1).astype(self._dtype)
        normed = self._ops.rms_norm(pooled, self._soft_norm, spec.norm_eps, True)
        return self._ops.linear(normed, self._projection, None)


def load_siglip(folder: Path, spec: VisionSpec, dtype: str, ops: OpTable) -> SiglipTower:
    """Load the tower of a model folder.

    Raises:
        CheckpointError: a tensor is missing, misshapen, unreadable, or not of floats.
    """
    with ExitStack() as files:
        opened = {path: SafetensorsFile(path, files) for path in weight_files(folder)}
        stored = dict(_named(opened.values()))
        _check(folder, spec, stored)
        tensors = {name: stored[name] for name, _ in spec.shapes()}
        return SiglipTower(
            spec, lambda name: opened[tensors[name].file].read(tensors[name]), dtype, ops
        )


def _named(files: Iterable[SafetensorsFile]) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors of the tower by the names of ``VisionSpec.shapes``; versions differ in prefixes."""
    for file in files:
        for tensor in file.tensors():
            name = tensor.name.removeprefix("model.")
            yield name.replace("vision_tower.vision_model.", "vision_tower.", 1), tensor


def _check(folder: Path, spec: VisionSpec, stored: Mapping[str, StoredTensor]) -> None:
    for name, shape in spec.shapes():
        tensor = stored.get(name)
        if tensor is None:
            raise CheckpointError(f"{folder} lacks the tensor '{name}' of the vision tower")
        if tensor.shape != shape or tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{folder}: the tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}; "
                f"floats {list(shape)} are needed"
            )
