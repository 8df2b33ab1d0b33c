"""Prints the settings page: ``python tools/settings_page.py > docs/settings.md``."""

from __future__ import annotations

from typing import Any

from weft.attend.options import PlaceOptions
from weft.batch.options import BatchOptions
from weft.bench.options import (
    EnergyBench,
    InterfereBench,
    KernelsBench,
    ServeBench,
    ThroughputBench,
)
from weft.core.config import EngineConfig
from weft.core.settings import Setting, settings_of
from weft.core.types import DEFAULT_CLASSES, SamplingParams
from weft.cost.options import ProfileOptions
from weft.server.frontend_options import FrontendOptions
from weft.server.options import ServerOptions
from weft.sim.options import SimOptions

HEAD = """# Settings

Every setting is declared once in the code; this page, the command line, YAML files and the Python
API derive from the declaration (`python tools/settings_page.py > docs/settings.md`).

On the command line a setting is a flag (`--max-model-len 4096`; true and false are `--name` and
`--no-name`). In a file for `--config` it is a key (`max_model_len: 4096`). In Python it is an
argument of `LLM(...)` or `SamplingParams(...)`. A flag wins over the file. *unset* means that weft
decides from model and machine, or, for sampling, that the model's `generation_config.json` does.
Names in bold are the settings of every day: `--help` shows these, `--help-all` shows all.
"""

CLASSES = """
## Service classes

`classes` (in a config file) changes or extends this table. The lowest number is served first.

| name | priority | ttft_s | tpot_s |
|---|---|---|---|
"""


def row(declared: Setting) -> str:
    """One line of a table."""
    default = "unset" if declared.optional else f"`{default_of(declared)}`"
    kind = f"{declared.kind}, {declared.bounds()}" if declared.bounds() else declared.kind
    name = f"**`{declared.name}`**" if declared.everyday else f"`{declared.name}`"
    return f"| {name} | {kind} | {default} | {declared.help} |"


def default_of(declared: Setting) -> str:
    if declared.kind == "bool":
        return str(declared.default).lower()
    return str(declared.default) if declared.default not in ((), {}) else "none"


def table(title: str, declared_by: Any) -> str:
    """All settings of a dataclass as a titled table."""
    lines = [
        f"\n## {title}\n",
        "| name | type and bounds | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(row, settings_of(declared_by).values())]) + "\n"


def page() -> str:
    """The whole page."""
    classes = "".join(
        f"| {c.name} | {c.priority} | {c.ttft_s or '-'} | {c.tpot_s or '-'} |\n"
        for c in DEFAULT_CLASSES
    )
    return (
        HEAD
        + table("Engine", EngineConfig)
        + table("Server", ServerOptions)
        + table("Sampling", SamplingParams)
        + CLASSES
        + classes
        + table("`weft batch` (beside those of the engine)", BatchOptions)
        + table("`weft bench serve`", ServeBench)
        + table("`weft bench throughput` (beside those of the engine)", ThroughputBench)
        + table("`weft bench energy` (beside those of `weft bench serve`)", EnergyBench)
        + table("`weft bench interfere` (beside those of the engine)", InterfereBench)
        + table("`weft bench kernels`", KernelsBench)
        + table("`weft profile` (beside those of the engine)", ProfileOptions)
        + table("`weft frontend` (beside those of the server)", FrontendOptions)
        + table("`weft attend`", PlaceOptions)
        + table("`weft sim`", SimOptions)
    )


if __name__ == "__main__":
    print(page(), end="")
