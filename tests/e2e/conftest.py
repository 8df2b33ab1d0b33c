"""Commands of weft in the process of the tests, and engines without a model in others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from live import with_engines
from weft import cli
from weft.engine import forkserver, llm
from weft.engine.local import LocalEngine


@pytest.fixture
def call(capsys, monkeypatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as ``run`` does, but in this process, which has torch already."""
    monkeypatch.setattr(llm, "RemoteEngine", lambda given, meanwhile: LocalEngine(given))  # noqa: ARG005
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(forkserver, "adopt_orphans", _adopt_orphans)

    def calling(*arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        return subprocess.CompletedProcess(arguments, end.value.code, *capsys.readouterr())

    return calling


def _adopt_orphans() -> None:
    """The process of tests would adopt whatever any later test leaves behind, and reap nothing."""
    raise AssertionError("this command starts a server: use run")


@pytest.fixture
def modelled_engines(tmp_path, monkeypatch) -> None:
    """Lets processes of engines compute nothing and import no torch."""
    variables = with_engines(tmp_path, modelled=True)
    monkeypatch.setenv("PYTHONPATH", variables["PYTHONPATH"])
