"""The native path gives the very bits that were recorded, on each instruction set."""

from __future__ import annotations

import json

import pytest
from checkpoints import CASES, FAMILY_CASES
from golden import RECORDED, SAME_BITS, each_hash

from depth import deep
from weft.kernels.cpu import attention

HASHES = json.loads(RECORDED.read_text())
ISAS = [
    pytest.param(isa, marks=[deep] if number else []) for number, isa in enumerate(attention.isas())
]


@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_those_recorded(isa):
    hashes = HASHES.get(SAME_BITS.get(isa, isa))
    if hashes is None:
        pytest.skip(f"no machine with {isa} has recorded its logits")
    cases = CASES if isa != attention.isas()[0] else FAMILY_CASES.values()
    found = dict(each_hash(isa, cases))
    known = found.keys() & hashes.keys()
    assert {key: found[key] for key in known} == {key: hashes[key] for key in known}
    if new := sorted(found.keys() - known):  # families that came on a machine without this set
        pytest.skip(f"{len(known)} are those recorded; record {', '.join(new)} on {isa}: golden.py")
