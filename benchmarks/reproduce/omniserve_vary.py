"""OmniServe: under which conditions best effort gains from hosts, one cell for each of them.

    python benchmarks/reproduce/omniserve_vary.py [--out FOLDER] [--quick]

Yi-34B on two A100. What section 5 leaves open is another from row to row: where prompts are
computed (section 5.4.4 has a decode instance of its own), the links between the devices, the
device's memory for KV, rates, targets and contexts. About a quarter of an hour of one core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omniserve_cells import BE_MANY, BEST_EFFORT, MODELS, Cell, Setting, host_tokens, run, true_cost
from reproduction import Reproduction

SECONDS = 90.0  # of virtual time
# Schedulers by label: their name, and the number of hosts.
RUNS: Mapping[str, tuple[str, int]] = {
    "device alone": ("device", 1),
    "load-aware": ("load-aware", 5),
    "NEO, all on hosts": ("host-only", 5),
    "piggybacked": ("piggybacked", 5),
    "paper's order": ("eager", 5),
    "decodes leave for prompts": ("roomy", 5),
    "decodes leave, 1 host": ("roomy", 1),
}
OURS = ("piggybacked", "paper's order", "decodes leave for prompts")


@dataclass(frozen=True)
class Condition:
    """A row of the sweep; ``more`` are fields of ``Setting``."""

    what: str
    rate: float = 4.0
    tpot_s: float = 0.2
    more: Mapping[str, Any] = field(default_factory=dict)


def elsewhere(device_kv: float, **more: Any) -> dict[str, Any]:
    return {"elsewhere": True, "device_kv": device_kv, **more}


CONDITIONS = (
    Condition("as in the paper"),
    Condition("NVLink, hosts of 1 TiB", more={"machine": "a100"}),
    Condition("1/10 of the KV memory, 8 req/s", 8.0, more={"device_kv": 0.1}),
    Condition("prompts elsewhere", more=elsewhere(1.0)),
    Condition("elsewhere, 1/4 KV", more=elsewhere(0.25)),
    Condition("elsewhere, 1/4 KV, target of 30 ms", 4.0, 0.03, elsewhere(0.25)),
    Condition("elsewhere, 1/4 KV, DailyMails", more=elsewhere(0.25, best_effort="DailyMails")),
    Condition(
        "elsewhere, 1/4 KV, 2048 in and out",
        more=elsewhere(0.25, best_effort="as long as asked"),
    ),
    Condition("elsewhere, 1/10 KV", more=elsewhere(0.1)),
    Condition("elsewhere, 1/10 KV, 8 req/s", 8.0, more=elsewhere(0.1)),
)


def best_effort_rows(condition: Condition) -> tuple[float, float]:
    """Best-effort sequences of the mean length that fit on the device, were it alone, and on 5
    hosts.
    """
    model, setting = MODELS[0], Setting(hosts=5, **condition.more)
    given, asked = BEST_EFFORT[setting.best_effort]
    length = given + asked / 2
    room = true_cost(model.name, model.tp, setting.machine).kv_room() * setting.device_kv
    return room / length, setting.hosts * host_tokens(model, setting) / length


def main() -> None:
    made = Reproduction.start("omniserve/vary", __doc__.splitlines()[0])
    conditions = CONDITIONS[::3] if made.quick else CONDITIONS
    rows: list[list[object]] = []
    gains: dict[str, float] = {}
    for condition in conditions:
        cells = {label: of(condition, *given, made.quick) for label, given in RUNS.items()}
        rows += [row(condition, label, cell) for label, cell in cells.items()]
        best = max(cells[label].be_output for label in OURS)
        for label in ("device alone", "load-aware", "NEO, all on hosts"):
            gains[f"{condition.what}: over {label}"] = best / max(0.1, cells[label].be_output)
        print(condition.what, {name: round(cell.be_output, 1) for name, cell in cells.items()})
    header = ["condition", "KV fits, device", "KV fits, 5 hosts", "scheduler", "both kept",
              "BE output tok/s", "of it by hosts", "BE prompt tok/s", "ITL p50 ms"]  # fmt: skip
    made.table("Best effort under other conditions", header, rows)
    for what, gain in gains.items():
        made.compare(what, 9.85, gain, "x", "1")
    made.finish(seconds=SECONDS)


def of(condition: Condition, name: str, hosts: int, quick: bool) -> Cell:
    model = replace(MODELS[0], tpot_s=condition.tpot_s)
    seconds = SECONDS / 3 if quick else SECONDS
    more = {"hosts": hosts, "be_open": BE_MANY, **condition.more}
    return run(name, model, condition.rate, seconds, **more)


def row(condition: Condition, label: str, cell: Cell) -> list[object]:
    here, hosts = best_effort_rows(condition)
    return [
        condition.what, round(here, 1), round(hosts, 1), label, f"{cell.attainment:.1%}",
        round(cell.be_output, 1), round(cell.be_hosts, 1), round(cell.be_prompt),
        round(cell.itl, 1),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
