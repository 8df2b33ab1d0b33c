"""Two sub-batches that overlap with attention on the host, in captured steps: the tokens of the
device alone.

The device is the host, and a captured function sees nothing but what was uploaded. Courier and host
worker are real threads.
"""

from __future__ import annotations

import pytest
from graphed import use_graphs
from test_overlap import (
    FAMILIES,
    Dawdling,
    Late,
    assert_same_as_ample,
    folders,  # noqa: F401
    host,  # noqa: F401
)

from depth import deep


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    use_graphs(monkeypatch)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [*((name, None) for name in FAMILIES), ("gemma3", Dawdling), ("llama-gqa", Late)],
    indirect=["host"],
)
def test_overlap_changes_no_token(folders, family, seed, monkeypatch) -> None:  # noqa: F811
    kinds = assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)
    assert min(kinds[kind] for kind in ("one", "two", "mixed", "prompt", "comes back")) > 5
