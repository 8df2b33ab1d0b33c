"""Each client of ``clients/`` against both servers, in the deep tests; versions in the guide."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from depth import deep

CLIENTS = Path(__file__).parent / "clients"
NAMES = sorted(folder.parent.name for folder in CLIENTS.glob("*/drive.*"))


def pinned_version(client: str) -> str:
    """The version of a client's first package."""
    if (pins := CLIENTS / client / "package.json").exists():
        return str(next(iter(json.loads(pins.read_text())["dependencies"].values())))
    lines = (CLIENTS / client / "requirements.txt").read_text().splitlines()
    return next(line.split("==")[1] for line in lines if "==" in line)


def test_the_guide_names_the_versions_that_are_tested():
    guide = (CLIENTS.parents[2] / "docs" / "guide.md").read_text()
    table = guide.split("\n## Clients\n")[1].split("\n## ")[0]
    rows = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:]) == sorted(pinned_version(name) for name in NAMES)


@deep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_a_client_does_its_task(name):
    command = [sys.executable, str(CLIENTS / "run.py"), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
