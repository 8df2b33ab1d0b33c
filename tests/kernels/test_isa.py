"""The instruction set of the native kernels: what the machine has, and what was built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.kernels.cpu import isa
from weft.kernels.cpu.isa import chosen_isa
from weft.kernels.unavailable import KernelUnavailable


@pytest.fixture
def built(monkeypatch):
    """A build for another machine: what it would say of this one."""

    def build(sets: list[str], machine: list[str]) -> list[str]:
        used = [sets[0]]
        native = SimpleNamespace(
            isas=lambda: sets,
            machine_isas=lambda: machine,
            isa=lambda: used[-1],
            use_isa=used.append,
        )
        monkeypatch.setattr(isa, "_native", native)
        return used

    monkeypatch.delenv("WEFT_ISA", raising=False)
    return build


def test_a_build_that_has_the_machines_set_says_nothing(built, caplog):
    built(["avx2", "baseline"], ["avx2", "baseline"])
    assert chosen_isa() == "avx2"
    assert caplog.messages == []


def test_a_build_for_another_machine_is_named(built, caplog):
    built(["baseline"], ["avx512", "avx2", "baseline"])
    assert chosen_isa() == "baseline"
    (line,) = caplog.messages
    for words in ("run as baseline", "has avx512", "make setup"):
        assert words in line


def test_a_set_that_was_not_built_is_told_from_one_that_cannot_run(built, monkeypatch):
    used = built(["avx512", "baseline"], ["avx512", "avx2", "baseline"])
    monkeypatch.setenv("WEFT_ISA", "avx2")
    with pytest.raises(KernelUnavailable, match="this build has: avx512, baseline"):
        chosen_isa()
    monkeypatch.setenv("WEFT_ISA", "neonbf16")
    with pytest.raises(KernelUnavailable, match="this machine can run: avx512, baseline"):
        chosen_isa()
    monkeypatch.setenv("WEFT_ISA", "baseline")
    assert chosen_isa() == "baseline" == used[-1]
