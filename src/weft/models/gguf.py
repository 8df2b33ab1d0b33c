"""GGUF files of llama.cpp: metadata as a config, tensors decoded to floats by ``gguf``.

Integers of any GGUF type become floats as the ``gguf`` package defines; the loader may then round
them to weft's own formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.models.config_reader import ConfigReader
from weft.models.families import GGUF_FAMILIES
from weft.models.gguf_header import read_header

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
}
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
_FACTORS = "rope_freqs.weight"  # one divisor for each frequency of the rotation
_IGNORED = """
attention.key_length attention.value_length rope.dimension_count vocab_size
rope.scaling.finetuned attention.causal
"""


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
            raise UnsupportedModelError(
                f"{path.name}: architecture '{self._arch}' is not supported in GGUF files; "
                f"supported: {', '.join(GGUF_FAMILIES)}",
                param="general.architecture",
            )
        self._architecture, self._form = family.architecture, family.gguf
        self._stored = header.tensors
        if len(self._shape_of_embedding()) != 2:
            raise CheckpointError(f"{path} has no table of embeddings; fetch it again")
        self._tensors = {self._name(name): tensor for name, tensor in self._stored.items()}
        self._tensors.pop(_FACTORS, None)

    def _shape_of_embedding(self) -> tuple[int, ...]:
        embedding = self._stored.get("token_embd.weight")
        return embedding.shape if embedding is not None else ()

    def _name(self, name: str) -> str:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if layer is None:
            return _NAMES.get(name, name)
        number, part, kind = layer.groups()
        names = _LAYER_NAMES
        if self._form.norms_plus_one:
            names = names | _POST_NORM_NAMES
        return f"model.layers.{number}.{names.get(part, part)}.{kind}"

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
        for key in ("attention.value_length", "rope.dimension_count"):
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
            "intermediate_size": found.positive("feed_forward_length"),
            "max_position_embeddings": found.positive("context_length"),
            "rms_norm_eps": found.number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._shape_of_embedding()[1],
            "tie_word_embeddings": "output.weight" not in self._stored,
            "rope_theta": found.number("rope.freq_base", 10_000.0),
            "dtype": self._dtype(),
        }
        if self._form.attention_bias:
            config["attention_bias"] = "blk.0.attn_q.bias" in self._stored
        config |= self._rope(found) | self._gemma(found, hidden, heads, head_dim, layers)
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
        if kind == "none":
            return {}
        scaling = {"rope_type": kind, "factor": found.number("rope.scaling.factor")}
        if kind == "yarn":
            original = found.positive("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}

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
