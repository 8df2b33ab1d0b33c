"""Reads ``config.json`` and refuses unknown keys that change the result. Torch-free.

A family asks for the keys that it understands; ``finish`` then refuses every key that was not asked
for, unless it is known not to change the result or stands at a value that switches it off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from weft.core.errors import UnsupportedModelError, short
from weft.models.bounds import MOST, MOST_INTEGER, MOST_LISTED, MOST_NUMBER

# Keys that do not change the logits of inference, whatever their value.
_HARMLESS = """
architectures attention_dropout attn_implementation attn_pdrop auto_map cache_implementation
chunk_size_feed_forward classifier_dropout decoder_start_token_id dropout dtype embd_pdrop
finetuning_task hidden_dropout hidden_dropout_prob id2label initializer_factor initializer_range
input_jitter_noise label2id max_sequence_length model_max_length model_type num_labels
output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp
problem_type resid_pdrop return_dict router_aux_loss_coef router_jitter_noise sep_token_id
task_specific_params tie_last_hidden_states tokenizer_class torch_dtype torchscript
transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
use_flash_attention_2 use_return_dict
"""
HARMLESS = frozenset(_HARMLESS.split())

# Keys that would change the result at any other value than these.
NO_OP: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({},),
    "use_bfloat16": (False, True),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "qkv_bias": (False,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "interpolate_factor": (1,),
    "full_attn_mod": (1,),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "num_nextn_predict_layers": (0,),
    "mlp_only_layers": ([],),
    "shared_expert_intermediate_size": (0,),
}

# Old configs carry generation defaults; they are read from generation_config.json only.
_GENERATION = """
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
return_dict_in_generate suppress_tokens temperature tf_legacy_loss top_k top_p typical_p
"""
GENERATION = frozenset(_GENERATION.split())

_MISSING: Any = object()
SHOWN = 80  # characters of a key or value in an error


class ConfigReader:
    """One JSON object of a config, remembering which keys were asked for.

    Every getter raises ``UnsupportedModelError`` naming the key, its value and what is supported.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._assumed: dict[str, Any] = {}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def assume(self, **defaults: Any) -> None:
        """Set what a family takes for keys that its configs may leave out."""
        self._assumed.update(defaults)

    def value(self, key: str, default: Any = _MISSING) -> Any:
        """Return the raw value; a key that is absent or null counts as not given."""
        self._read.add(key)
        found = self._values.get(key)
        if found is None:
            found = self._assumed.get(key, default)
        if found is _MISSING:
            raise UnsupportedModelError(f"{self._where} lacks the key '{key}'", param=key)
        return found

    def switched_off(self, key: str) -> bool:
        """Return whether the key is null, or absent without a family default."""
        self._read.add(key)
        return self._values.get(key, self._assumed.get(key)) is None

    def positive(self, key: str, default: int = _MISSING) -> int:
        """Return an integer above zero, and not above what models have."""
        found, most = self.value(key, default), MOST.get(key, MOST_INTEGER)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(key, found, "a positive integer is needed")
        if found > most:
            self.refuse(key, found, f"at most {most} is")
        return int(found)

    def count(self, key: str, default: int = _MISSING) -> int:
        """Return an integer of at least zero."""
        return 0 if self.value(key, default) == 0 else self.positive(key, default)

    def number(self, key: str, default: float = _MISSING) -> float:
        """Return a finite number above zero."""
        found = self.value(key, default)
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not 0 < found < MOST_NUMBER
        ):
            self.refuse(key, found, "a positive number is needed")
        return float(found)

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None where the key is switched off."""
        return None if self.switched_off(key) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        found = self.value(key, default)
        if not isinstance(found, bool):
            self.refuse(key, found, "true or false is needed")
        return bool(found)

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        """Return one of the supported strings."""
        found = self.value(key, default)
        if not isinstance(found, str) or found not in choices:
            self.refuse(key, found, f"supported: {', '.join(sorted(choices))}")
        return found

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        found = self.value(key)
        good = isinstance(found, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < MOST_NUMBER
            for x in found[: MOST_LISTED + 1]
        )
        if not good or len(found) > MOST_LISTED:
            self.refuse(key, found, "a list of positive numbers is needed")
        return tuple(float(x) for x in found)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the integers of at least zero of a key that holds one, several, or null."""
        found = self.value(key, [])
        ids = found if isinstance(found, list) else [found]
        if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in ids):
            self.refuse(key, found, "an integer or a list of integers is needed")
        if len(ids) > MOST_LISTED or max(ids, default=0) > MOST_INTEGER:
            self.refuse(key, found, f"at most {MOST_LISTED} integers up to {MOST_INTEGER} are")
        return tuple(ids)

    def section(self, key: str) -> ConfigReader | None:
        """Return a nested object to read from, None where it is absent, null or empty."""
        found = self.value(key, {})
        if not isinstance(found, dict):
            self.refuse(key, found, "an object is needed")
        if not found:
            return None
        return ConfigReader(found, f"{self._where}, {key}")

    def ignore(self, *keys: str) -> None:
        """Mark keys that do not change the result of this family."""
        self._read.update(keys)

    def refuse(self, key: str, value: Any, why: str) -> NoReturn:
        """Raise ``UnsupportedModelError`` for a key and value."""
        raise UnsupportedModelError(
            f"{self._where}: '{short(key, SHOWN)}': {short(repr(value), SHOWN)} is not supported; "
            f"{why}",
            param=short(key, SHOWN),
        )

    def finish(self) -> None:
        """Refuse the keys that no family read and that may change the result."""
        for key, value in self._values.items():
            if key in self._read or key in HARMLESS or key in GENERATION or key.startswith("_"):
                continue
            if value is None or value in NO_OP.get(key, ()):
                continue
            self.refuse(key, value, "weft does not know this key, which may change the result")
