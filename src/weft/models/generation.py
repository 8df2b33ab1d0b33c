"""Sampling defaults from a checkpoint's ``generation_config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import UnsupportedModelError
from weft.core.json_files import check_depth, read_object
from weft.core.settings import Setting
from weft.core.types import NEUTRAL, NUMBERS
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
    """Sampling defaults of a checkpoint.

    Attributes:
        sampling: what ``SamplingParams`` takes, without what the checkpoint does not state.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
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
    greedy = not config.flag("do_sample", True)
    found = {
        name: 0.0 if greedy and name == "temperature" else _number(config, NUMBERS[name])
        for name in NEUTRAL
    }
    if not config.switched_off("max_new_tokens"):
        found["max_tokens"] = config.positive("max_new_tokens")
    return GenerationDefaults(
        sampling={name: value for name, value in found.items() if value is not None},
        eos_token_ids=config.integers("eos_token_id"),
        unhonoured=tuple(
            key for key, off in UNHONOURED.items() if values.get(key) not in (None, off)
        ),
    )


def _number(config: ConfigReader, declared: Setting) -> float | None:
    key = declared.name
    if config.switched_off(key):
        return None
    if declared.kind == "int":
        return config.count(key)
    if config.value(key) == 0:
        return 0.0
    found = config.number(key)
    if found is not None and declared.high is not None and found > declared.high:
        config.refuse(key, found, f"at most {float(declared.high)} is allowed")
    return found
