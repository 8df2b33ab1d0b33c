"""Prints requirements of weft, one a line: of its build, of running it, or of an extra.

    python scripts/requirements.py build|native|run|EXTRA

``native`` are cmake and ninja where the machine has none; the Python that runs this must have the
requirements of ``build`` by then.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(of: str) -> list[str]:
    """Return the requirements of ``of``. Raises SystemExit if that is unknown."""
    if of == "native":
        from scikit_build_core.build import get_requires_for_build_editable

        return get_requires_for_build_editable()
    facts = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = facts["project"]
    groups: dict[str, list[str]] = {
        "build": facts["build-system"]["requires"],
        "run": project["dependencies"],
        **project["optional-dependencies"],
    }
    if of not in groups:
        raise SystemExit(
            f"no requirements of '{of}'; there are those of native, {', '.join(groups)}"
        )
    return groups[of]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name one: build, native, run or an extra")
    print(*requirements(sys.argv[1]), sep="\n")
