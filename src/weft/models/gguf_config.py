"""The metadata of a GGUF file as the ``config.json`` of the same model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.models.config_reader import ConfigReader
from weft.models.gguf_form import GgufFacts, GgufForm
from weft.models.gguf_header import GgufTensor

# Divisors of the frequencies of the rotation: one for each; or one for short and long contexts.
FACTORS = "rope_freqs.weight"
BY_LENGTH = ("rope_factors_short.weight", "rope_factors_long.weight")
_IGNORED = """
attention.key_length attention.value_length rope.dimension_count vocab_size
rope.scaling.finetuned attention.causal rope.scaling.attn_factor nextn_predict_layers
"""
_WHOLE_HEADS = ("attention.value_length", "rope.dimension_count")
_UNSCALED = "rope.scaling.factor rope.scaling.original_context_length"  # of no kind
_SCORINGS = {"softmax": 1, "sigmoid": 2}


class GgufConfig:
    """Reads the metadata of a file.

    Attributes:
        layers: their number, without those that guess further tokens.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        tensors: Mapping[str, GgufTensor],
        architecture: str,
        form: GgufForm,
        name: str,
    ) -> None:
        """Bind what is read.

        Args:
            architecture: what ``config.json`` calls it.
            name: of the file, for messages.
        """
        self._fields, self._tensors = fields, tensors
        self._architecture, self._form = architecture, form
        prefix = f"{fields.get('general.architecture')}."
        values = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
        self._found = found = ConfigReader(values, name)
        blocks = found.positive("block_count")
        further = found.count("nextn_predict_layers", 0)
        if further >= blocks:
            found.refuse("nextn_predict_layers", further, f"fewer than all {blocks} layers are")
        self.layers = blocks - further
        self._facts = GgufFacts(found, self.layers, tensors)

    def read(self) -> dict[str, Any]:
        """Return the metadata as a ``config.json``.

        Raises:
            UnsupportedModelError: a key that may change the result and that weft does not know.
        """
        found, form = self._found, self._form
        more = form.more(self._facts) if form.more is not None else {}
        config = {"architectures": [self._architecture], **form.stated}
        config |= self._sizes(more) | self._flags() | self._facts.numbers(form.numbers)
        if isinstance(more.get("architectures"), list):
            more["architectures"] = list(more["architectures"])
        scaling = more.pop("scaling", {})
        if "rope_parameters" not in more:
            config["rope_theta"] = found.number("rope.freq_base", 10_000.0)
            config |= self._rope({**form.scaling, **scaling})
        config |= self._gemma(config) | self._layer_types() | self._ends() | more
        self._check_scoring()
        found.ignore(*_IGNORED.split(), *form.unused)
        found.finish()
        return config

    def _sizes(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes that all families have, but for those that ``more`` has."""
        found, facts = self._found, self._facts
        hidden = found.positive("embedding_length")
        heads = more.get("num_attention_heads") or found.positive("attention.head_count")
        config: dict[str, Any] = {
            "hidden_size": hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "max_position_embeddings": found.positive("context_length"),
            "vocab_size": self._tensors["token_embd.weight"].shape[1],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "dtype": self._dtype(),
        }
        if "attention.layer_norm_epsilon" not in self._form.numbers:
            config["rms_norm_eps"] = found.number("attention.layer_norm_rms_epsilon")
        if "head_dim" not in more:
            config["head_dim"] = head_dim = found.positive("attention.key_length", hidden // heads)
            whole = ("attention.value_length",) if self._form.partly_rotated else _WHOLE_HEADS
            for key in whole:
                if found.positive(key, head_dim) != head_dim:
                    found.refuse(key, found.value(key), f"whole heads of {head_dim} are supported")
            if self._form.partly_rotated:
                rotated = found.positive("rope.dimension_count", head_dim)
                config["partial_rotary_factor"] = rotated / head_dim
        if "num_key_value_heads" not in more:
            config["num_key_value_heads"] = facts.common("attention.head_count_kv", heads)
        if "intermediate_size" not in more:
            of_experts = found.value("expert_feed_forward_length", 0)
            config["intermediate_size"] = facts.common("feed_forward_length", of_experts)
        return config

    def _flags(self) -> dict[str, bool]:
        """Which biases, and other tensors that only some models of a family have, there are."""
        return {
            key: self._facts.has(part) or self._facts.has(part.replace("attn_q.", "attn_qkv."))
            for key, part in self._form.biases.items()
        }

    def _ends(self) -> dict[str, Any]:
        named = "tokenizer.ggml.{}_token_id".format
        ends = [self._fields.get(named(end)) for end in ("eos", "eot", "eom")]
        return {
            "bos_token_id": self._fields.get(named("bos")),
            "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
        }

    def _dtype(self) -> str:
        """The dtype that the integers stand in for; they are as near in any."""
        return "float32" if self._tensors["token_embd.weight"].kind.name == "F32" else "bfloat16"

    def _rope(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """How the rotation is scaled; of YaRN, with what is stated elsewhere."""
        found = self._found
        kind = found.choice("rope.scaling.type", "none", ("none", "linear", "yarn", "longrope"))
        if FACTORS in self._tensors:
            factors = self._tensors[FACTORS].data.tolist()
            scaling = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            return {"rope_scaling": {"rope_type": "longrope", **scaling}}
        if all(name in self._tensors for name in BY_LENGTH):
            short, long = (self._tensors[name].data.tolist() for name in BY_LENGTH)
            original = found.positive("rope.scaling.original_context_length")
            scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            return {"rope_scaling": scaling, "original_max_position_embeddings": original}
        if kind == "longrope":
            found.refuse("rope.scaling.type", kind, "it has no divisors of frequencies")
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
        return {"rope_scaling": {**scaling, **stated}}

    def _layer_types(self) -> dict[str, Any]:
        """Which layers have the window, where a file lists them."""
        pattern = self._found.value("attention.sliding_window_pattern", None)
        if pattern is None or "attention.sliding_window" not in self._form.numbers:
            return {}
        return {"layer_types": self._facts.windows()}

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if self._form.scaled_by_width is None:
            return {}
        found, by_width = self._found, self.layers == self._form.scaled_by_width
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            "sliding_window": found.positive("attention.sliding_window"),
            "attn_logit_softcapping": found.optional_number("attn_logit_softcapping"),
            "final_logit_softcapping": found.optional_number("final_logit_softcapping"),
            "query_pre_attn_scalar": width if by_width else config["head_dim"],
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def _check_scoring(self) -> None:
        """Refuse experts whose weights are made otherwise than the family makes them."""
        key, scoring = "expert_gating_func", self._form.scoring
        if scoring:
            value = self._found.count(key, 0)
            if value not in (0, _SCORINGS[scoring]):
                self._found.refuse(key, value, f"{_SCORINGS[scoring]}, {scoring}, is supported")
