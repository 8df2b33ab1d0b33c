"""Sampling defaults from a checkpoint's ``generation_config.json``. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import UnsupportedModelError
from weft.core.json_files import check_depth, read_object
from weft.models.config_reader import ConfigReader

# Keys that would change the tokens but that weft does not honour, with the value that is off.
UNHONOURED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint; None where it states none."""

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unhonoured: tuple[str, ...] = ()  # keys that would change the tokens, but are not supported


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read a model folder's ``generation_config.json``; a folder without one has no defaults.

    Raises:
        UnsupportedModelError: the file is malformed, or a value is out of its range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    values = read_object(path, UnsupportedModelError)
    check_depth(values, path.name, UnsupportedModelError)
    config = ConfigReader(values, path.name)
    return GenerationDefaults(
        temperature=0.0 if not config.flag("do_sample", True) else _number(config, "temperature"),
        top_k=None if config.switched_off("top_k") else config.count("top_k"),
        top_p=_number(config, "top_p", 1.0),
        min_p=_number(config, "min_p", 1.0),
        repetition_penalty=_number(config, "repetition_penalty"),
        max_new_tokens=None
        if config.switched_off("max_new_tokens")
        else config.positive("max_new_tokens"),
        eos_token_ids=config.integers("eos_token_id"),
        unhonoured=tuple(
            key for key, off in UNHONOURED.items() if values.get(key) not in (None, off)
        ),
    )


def _number(config: ConfigReader, key: str, most: float | None = None) -> float | None:
    if config.switched_off(key):
        return None
    if config.value(key) == 0:
        return 0.0
    found = config.number(key)
    if most is not None and found > most:
        config.refuse(key, found, f"at most {most} is allowed")
    return found
