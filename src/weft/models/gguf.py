"""GGUF files of llama.cpp: metadata as a config, tensors as codes, or decoded by ``gguf``.

Integers of any GGUF type become floats as the ``gguf`` package defines; those that kernels have
codes for are read as such (``gguf_codes``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.kernels.quantized import Quantized
from weft.kernels.storage import NEST, Storage
from weft.models.config_reader import ConfigReader
from weft.models.families import GGUF_FAMILIES
from weft.models.family import FULL, SLIDING
from weft.models.gguf_codes import FORMS, unpack
from weft.models.gguf_header import GgufTensor, read_header
from weft.models.quant_config import GGUF, StoredWeights
from weft.models.spec import CheckpointLayout
from weft.models.weight_files import split_files

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
# Of whole tensors.
_LAYER_NAMES |= {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Divisors of the frequencies of the rotation: one for each; or one for short and long contexts.
_FACTORS = "rope_freqs.weight"
_BY_LENGTH = ("rope_factors_short.weight", "rope_factors_long.weight")
_IGNORED = """
attention.key_length attention.value_length rope.dimension_count vocab_size
rope.scaling.finetuned attention.causal rope.scaling.attn_factor
"""
_WHOLE_HEADS = ("attention.value_length", "rope.dimension_count")
_UNSCALED = "rope.scaling.factor rope.scaling.original_context_length"  # of no kind


class GgufFile:
    """An open GGUF file under the tensor names of Hugging Face checkpoints.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: an architecture or a key that weft does not implement.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path)
        self._fields = header.fields
        self._arch = str(self._fields.get("general.architecture"))
        family = GGUF_FAMILIES.get(self._arch)
        if family is None or family.gguf is None:
            remedy = f"supported: {', '.join(GGUF_FAMILIES)}"
            if self._arch == "gptoss":  # of Ollama, whose tensors have other names
                remedy = "take one that llama.cpp has made, such as ggml-org/gpt-oss-20b-GGUF"
            raise UnsupportedModelError(
                f"{path.name}: architecture '{self._arch}' is not supported in GGUF files; "
                f"{remedy}",
                param="general.architecture",
            )
        self._architecture, self._form = family.architecture, family.gguf
        self._stored = {**header.tensors}
        for part in split_files(path)[1:]:
            for name, tensor in read_header(part).tensors.items():
                if name in self._stored:
                    raise CheckpointError(f"tensor '{name}' is in two parts of {path}")
                self._stored[name] = tensor
        if len(self._shape_of_embedding()) != 2:
            raise CheckpointError(f"{path} has no table of embeddings; fetch it again")
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in self._stored.items():
            if name not in (_FACTORS, *_BY_LENGTH):
                self._tensors |= self._named(name, tensor)

    def _shape_of_embedding(self) -> tuple[int, ...]:
        embedding = self._stored.get("token_embd.weight")
        return embedding.shape if embedding is not None else ()

    def _named(self, name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
        """A tensor under the name of Hugging Face checkpoints; stacked experts one by one."""
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if layer is None:
            return {_NAMES.get(name, name): tensor}
        number, part, kind = layer.groups()
        home = f"model.layers.{number}"
        if part in _EXPERTS and len(tensor.shape) == 3:
            return {
                f"{home}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}": replace(
                    tensor, shape=tensor.shape[:2], data=data
                )
                for expert, data in enumerate(tensor.data)
            }
        names: Mapping[str, str] = _LAYER_NAMES
        if self._form.post_norms:
            names = {**names, **_POST_NORM_NAMES}
        names = {**names, **self._form.names}
        name = names.get(f"{part}.{kind}") or f"{names.get(part, part)}.{kind}"
        return {f"{home}.{name}": tensor}

    def layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        """Return how a family's checkpoints name tensors, with experts one by one, as here."""
        return replace(
            layout,
            stacked_experts=False,
            transposed_experts=False,
            interleaved_experts=False,
            split_expert_bias=True,
        )

    def config(self) -> dict[str, Any]:
        """Return the metadata as the ``config.json`` of the same model.

        Raises:
            UnsupportedModelError: a key that may change the result and that weft does not know.
        """
        prefix = f"{self._arch}."
        values = {
            k.removeprefix(prefix): v for k, v in self._fields.items() if k.startswith(prefix)
        }
        found = ConfigReader(values, self._path.name)
        heads, hidden = found.positive("attention.head_count"), found.positive("embedding_length")
        head_dim = found.positive("attention.key_length", hidden // heads)
        whole = ("attention.value_length",) if self._form.partly_rotated else _WHOLE_HEADS
        for key in whole:
            if found.positive(key, head_dim) != head_dim:
                found.refuse(key, values[key], f"whole heads of {head_dim} are supported")
        layers = found.positive("block_count")
        config: dict[str, Any] = {
            "architectures": [self._architecture],
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": found.positive("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": found.positive(
                "feed_forward_length", values.get("expert_feed_forward_length", 0)
            ),
            "max_position_embeddings": found.positive("context_length"),
            "rms_norm_eps": found.number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._shape_of_embedding()[1],
            "tie_word_embeddings": "output.weight" not in self._stored,
            "rope_theta": found.number("rope.freq_base", 10_000.0),
            "dtype": self._dtype(),
        }
        config |= self._form.stated
        for key, part in self._form.biases.items():
            config[key] = f"blk.0.{part}.bias" in self._stored
        config |= {
            key: found.number(stored)
            if isinstance(values[stored], float)
            else found.positive(stored)
            for stored, key in self._form.numbers.items()
            if values.get(stored)  # 0: there is none
        }
        found.ignore(*self._form.numbers)
        if self._form.partly_rotated:
            rotated = found.positive("rope.dimension_count", head_dim)
            config["partial_rotary_factor"] = rotated / head_dim
        config |= self._rope(found) | self._gemma(found, hidden, heads, head_dim, layers)
        config |= self._layer_types(found, values, layers)
        config["bos_token_id"] = self._fields.get("tokenizer.ggml.bos_token_id")
        ends = [self._fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
        config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
        found.ignore(*_IGNORED.split())
        found.finish()
        return config

    def _dtype(self) -> str:
        """The dtype that the integers stand in for; they are as near in any."""
        return "float32" if self._stored["token_embd.weight"].kind.name == "F32" else "bfloat16"

    def _rope(self, found: ConfigReader) -> dict[str, Any]:
        kind = found.choice("rope.scaling.type", "none", ("none", "linear", "yarn"))
        if _FACTORS in self._stored:
            factors = self._stored[_FACTORS].data.tolist()
            scaling = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            return {"rope_scaling": {"rope_type": "longrope", **scaling}}
        if all(name in self._stored for name in _BY_LENGTH):
            short, long = (self._stored[name].data.tolist() for name in _BY_LENGTH)
            original = found.positive("rope.scaling.original_context_length")
            scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            return {"rope_scaling": scaling, "original_max_position_embeddings": original}
        if kind == "none":
            found.ignore(*_UNSCALED.split())
            return {}
        scaling = {"rope_type": kind, "factor": found.number("rope.scaling.factor")}
        if kind == "yarn":
            original = found.positive("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                if (given := found.optional_number(f"rope.scaling.yarn_{name}")) is not None:
                    scaling[name] = given
        return {"rope_scaling": {**scaling, **self._form.scaling}}

    def _layer_types(
        self, found: ConfigReader, values: Mapping[str, Any], layers: int
    ) -> dict[str, Any]:
        """Which layers have the window, where a file lists them."""
        key = "attention.sliding_window_pattern"
        pattern = values.get(key)
        if pattern is None or "attention.sliding_window" not in self._form.numbers:
            return {}
        found.ignore(key)
        if not isinstance(pattern, list) or len(pattern) != layers:
            found.refuse(key, pattern, f"a list of {layers} flags is needed")
        return {"layer_types": [SLIDING if flag else FULL for flag in pattern]}

    def _gemma(
        self, found: ConfigReader, hidden: int, heads: int, head_dim: int, layers: int
    ) -> dict[str, Any]:
        if self._form.scaled_by_width is None:
            return {}
        by_width = layers == self._form.scaled_by_width
        return {
            "sliding_window": found.positive("attention.sliding_window"),
            "attn_logit_softcapping": found.optional_number("attn_logit_softcapping"),
            "final_logit_softcapping": found.optional_number("final_logit_softcapping"),
            "query_pre_attn_scalar": hidden // heads if by_width else head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def stored_weights(self) -> StoredWeights | None:
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
        rows = data if expert is None else data[expert]
        heads = self._permuted_heads(name)
        if heads:
            rows = rows[_rotated_by_halves(self.shape(name)[0], heads)[first:last]]
        else:
            rows = rows[first:last]
        return unpack(self.kind(name), rows)

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
        tensor = self._tensors[name]
        heads = self._permuted_heads(name)
        if heads:
            order = _rotated_by_halves(self.shape(name)[0], heads)[first:last]
            return self._floats(name, tensor.data[order])
        found = self._floats(name, tensor.data[first:last])
        if self._form.norms_plus_one and name.endswith("norm.weight"):
            found = found - np.float32(1.0)
        return found

    def _permuted_heads(self, name: str) -> int:
        """Return the heads of a tensor whose rows were reordered by llama.cpp, 0 for others."""
        part = re.search(r"self_attn\.([qk])_proj", name)
        if part is None or not self._form.rotated_by_pairs:
            return 0
        key = "attention.head_count" + ("_kv" if part[1] == "k" else "")
        heads = self._fields.get(f"{self._arch}.{key}")
        return int(heads or self._fields[f"{self._arch}.attention.head_count"])

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


def _rotated_by_halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Return the place of each row of Q or K in a file that rotates neighbouring dimensions."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
