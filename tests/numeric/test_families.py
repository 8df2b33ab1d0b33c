"""One row makes a family known: to configs, GGUF files, the check of KV types, and the tests."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import CASES, FAMILY_CASES
from test_models_gguf import ARCHITECTURES
from test_models_gguf_converted import CONVERTED

from weft.core.kv_types import KV_TYPES
from weft.models.encoders import ENCODERS
from weft.models.families import BY_ARCHITECTURE, BY_MODEL_TYPE, FAMILIES, GGUF_FAMILIES, ROWS
from weft.models.spec_reader import spec_from_config


def test_no_name_stands_in_two_rows():
    checkpoints = len(ROWS) + sum(len(row.multimodal) for row in ROWS)
    assert len(FAMILIES) == len(ROWS)
    aliases = [alias for row in ROWS for alias in row.aliases]
    classifiers = [row for row in ROWS if row.classifier is not None]
    others = len(BY_ARCHITECTURE) - len(aliases) - len(classifiers)
    assert others == len(BY_MODEL_TYPE) == checkpoints


def test_every_family_has_a_test_model():
    encoders = {row.name for row in ENCODERS}  # of which ``encoder_models`` has models
    missing = FAMILIES.keys() - FAMILY_CASES.keys() - encoders
    assert not missing, "CASES in checkpoints.py has none; it makes them of small configs"


@pytest.mark.parametrize(("name", "case"), FAMILY_CASES.items())
def test_configs_are_read_by_each_name_of_their_family(name, case):
    row, config = FAMILIES[name], CASES[case].config().to_dict()
    by_type = spec_from_config({**config, "architectures": None, "model_type": row.model_type})
    by_architecture = spec_from_config({**config, "architectures": [row.architecture]})
    assert by_type == by_architecture
    assert by_type.family == name
    assert replace(by_type, family="") != by_type
    assert set(row.unsound_kv) <= set(KV_TYPES)


def test_every_family_that_llama_cpp_stores_is_tried_in_its_files():
    assert {*ARCHITECTURES, *CONVERTED} == set(GGUF_FAMILIES)


def test_the_guide_names_the_architectures_of_gguf_files():
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    listed = re.search(r"^Architectures, as .*? the text\.", guide, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert set(GGUF_FAMILIES) <= set(re.findall(r"[\w-]+", listed[0]))
