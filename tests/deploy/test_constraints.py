"""The pinned packages are those that weft requires, each with its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
RUN = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["fast"]]
WANTED = {
    "constraints.txt": RUN,
    "constraints-cuda.txt": [*RUN, *PROJECT["optional-dependencies"]["cuda"]],
    "constraints-build.txt": [*PYPROJECT["build-system"]["requires"], "cmake", "ninja"],
}


def pins(name: str) -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Requirements of a file, with their hashes, by name."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            words, *hashes = line.split("--hash=")
            pin = Requirement(words)
            found.setdefault(canonicalize_name(pin.name), []).append((pin, hashes))
    return found


@pytest.mark.parametrize("name", WANTED)
def test_each_pin_is_one_version_with_hashes(name):
    found = pins(name)
    assert found
    for pin, hashes in (each for several in found.values() for each in several):
        (version,) = pin.specifier
        assert version.operator == "=="
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", word.strip()) for word in hashes)


@pytest.mark.parametrize("name", WANTED)
def test_the_pins_are_what_weft_requires(name):
    found = pins(name)
    for requirement in map(Requirement, WANTED[name]):
        several = found.get(canonicalize_name(requirement.name))
        assert several, f"{requirement.name} has no pin: run tools/constraints.py"
        for pin, _ in several:
            (version,) = pin.specifier
            assert requirement.specifier.contains(version.version), f"{pin} is not {requirement}"


def test_both_files_agree():
    smaller, larger = pins("constraints.txt"), pins("constraints-cuda.txt")
    for name, several in smaller.items():
        assert {str(pin) for pin, _ in several} == {str(pin) for pin, _ in larger[name]}
    assert not [name for name in smaller if name.startswith(("torch", "triton", "nvidia"))]


def test_no_file_names_a_registry():
    for name in WANTED:
        assert "://" not in (ROOT / "deploy" / name).read_text(encoding="utf-8")
