"""GGUF files of llama.cpp: metadata as a config, tensors as codes, or decoded by ``gguf``.

Integers of any GGUF type become floats as the ``gguf`` package defines; those that kernels have
codes for are read as such (``gguf_codes``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.kernels.delta import DeltaShape
from weft.kernels.quantized import Quantized
from weft.kernels.storage import NEST, Storage
from weft.models.families import GGUF_FAMILIES
from weft.models.gguf_codes import FORMS, unpack
from weft.models.gguf_config import BY_LENGTH, FACTORS, GgufConfig
from weft.models.gguf_header import GgufTensor, read_header
from weft.models.gguf_names import named
from weft.models.missing import supported_instead
from weft.models.quant_config import GGUF, StoredWeights
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec
from weft.models.weight_files import split_files


class GgufFile:
    """An open GGUF file under the tensor names of ``layout``.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: an architecture or a key that weft does not implement.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path)
        arch = str(header.fields.get("general.architecture"))
        family = GGUF_FAMILIES.get(arch)
        if family is None or family.gguf is None:
            remedy = supported_instead(arch, GGUF_FAMILIES)
            if arch == "gptoss":  # of Ollama, whose tensors have other names
                remedy = "Take one that llama.cpp has made, such as ggml-org/gpt-oss-20b-GGUF."
            raise UnsupportedModelError(
                f"{path.name}: architecture '{arch}' is not supported in GGUF files. {remedy}",
                param="general.architecture",
            )
        self._form = family.gguf
        stored = {**header.tensors}
        for part in split_files(path)[1:]:
            for name, tensor in read_header(part).tensors.items():
                if name in stored:
                    raise CheckpointError(f"tensor '{name}' is in two parts of {path}")
                stored[name] = tensor
        embedding = stored.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{path} has no table of embeddings; fetch it again")
        self._config = GgufConfig(header.fields, stored, family.architecture, self._form, path.name)
        tensors = {n: t for n, t in stored.items() if n not in (FACTORS, *BY_LENGTH)}
        self._tensors: dict[str, GgufTensor] = named(tensors, self._form, self._config.layers)

    def config(self) -> dict[str, Any]:
        """Return the metadata as the ``config.json`` of the same model.

        Raises:
            UnsupportedModelError: a key that may change the result and that weft does not know.
        """
        return self._config.read()

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return a spec, which ``config`` gave, for the tensors as they lie in this file."""
        layers = tuple(map(self._adapted_layer, spec.layers))
        layout = self._layout(spec.layout)
        return replace(spec, layers=layers, layout=layout, stored_weights=self._stored_weights())

    def _adapted_layer(self, layer: LayerSpec) -> LayerSpec:
        state = layer.state
        if state is None or not isinstance(state.shape, DeltaShape):
            return layer
        shape = replace(state.shape, tiled=self._form.tiled_heads)
        return replace(layer, state=replace(state, shape=shape))

    def _layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        """How tensors lie in this file, where a family's checkpoints have them as ``layout``."""
        fused_qkv, fused_gate_up, split_latent = (
            any(name.endswith(f".{part}.weight") for name in self._tensors)
            for part in ("qkv_proj", "gate_up_proj", "k_b_proj")
        )
        paired = layout.rotated_by_pairs or self._form.rotated_by_pairs
        if paired and fused_qkv:
            raise UnsupportedModelError(
                f"{self._path.name}: Q, K and V in one tensor are not supported where neighbouring "
                "dimensions are rotated; convert the model without --fuse-qkv",
                param="attn_qkv",
            )
        own: dict[str, Any] = {
            "prefixes": ("model.",),
            "stacked_experts": False,
            "transposed_experts": False,
            "interleaved_experts": False,
            "split_expert_bias": True,
            "correction_row": False,
            "decay_column": False,
            "rotated_by_pairs": paired,
            "fused_qkv": fused_qkv,
            "fused_gate_up": fused_gate_up,
            "split_latent": split_latent,
            "renamed": {},
            "other_mlp": "",
        }
        return replace(layout, **(own | dict(self._form.layout)))

    def _stored_weights(self) -> StoredWeights | None:
        """Return how the weights are stored as codes, None for a file of floats."""
        found = {name: self.storage(name) for name in self._tensors}
        coded = {name: storage for name, storage in found.items() if storage is not None}
        if not coded:
            return None
        kinds = Counter(self.kind(name) for name in coded)
        nested = any(storage.nested for storage in coded.values())
        return StoredWeights(
            GGUF,
            0,
            NEST if nested else 32,
            False,
            kinds=", ".join(kind for kind, _ in kinds.most_common()),
            tensors=tuple(sorted(coded.items(), key=lambda item: item[0])),
        )

    def kind(self, name: str) -> str:
        """Return the name of the type of a tensor."""
        return str(self._tensors[name].kind.name)

    def storage(self, name: str) -> Storage | None:
        """Return how kernels hold a matrix as it is stored; None: as floats."""
        form = FORMS.get(self.kind(name))
        return None if form is None or len(self.shape(name)) < 2 else form.storage

    def codes(self, name: str, first: int, last: int, expert: int | None = None) -> Quantized:
        """Return rows [first, last) of a tensor with a ``storage``, or of one of its experts."""
        data = self._tensors[name].data
        return unpack(self.kind(name), (data if expert is None else data[expert])[first:last])

    def keys(self) -> Iterator[str]:
        """Yield the names of all tensors."""
        yield from self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outputs first."""
        return tuple(reversed(self._tensors[name].shape))

    def get_tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor in float32."""
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Return rows [first, last) of a tensor in float32."""
        found = self._floats(name, self._tensors[name].data[first:last])
        if name.endswith(".A_log"):  # llama.cpp stores -exp(A_log)
            return np.log(-found)
        shifted = self._form.norms_plus_one and not name.endswith("linear_attn.norm.weight")
        return found - np.float32(1.0) if shifted and name.endswith("norm.weight") else found

    def _floats(self, name: str, data: Any) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        try:
            floats: NDArray[np.float32] = dequantize(data, self._tensors[name].kind)
            return floats
        except NotImplementedError as error:
            kind = self._tensors[name].kind.name
            raise CheckpointError(
                f"{self._path}: tensor '{name}' is stored as {kind}, which the gguf package does "
                "not decode"
            ) from error
