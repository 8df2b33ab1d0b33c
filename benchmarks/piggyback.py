"""Steps that carry piggybacked rows beside the same steps without them, and what a row adds.

    python benchmarks/piggyback.py [--model FOLDER] [--rows 1,4,16,64,400] [--context 128]
        [--own 1] [--steps 300] [--out benchmarks/results/piggyback.json]

One engine without a server: the step decodes ``--own`` rows on the device, and carries what the
host has done of ``--rows`` others, whose KV lies there. The host attends on a thread of its own.
*late*: the rows that a step carries through each layer, on average. *added* is the time of their
products, too; *copies* are what is beside these: q, k, v, residuals and results from and to the
mailbox. Where both cores are halves of one, steps without rows are slower, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import report
from weft.core.config import EngineConfig
from weft.core.plan import KVMove, RowAdd, StepPlan, SubBatch, Tier
from weft.core.types import SamplingParams
from weft.engine.build import Engine, build_engine

GREEDY = SamplingParams(
    max_tokens=10**6, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0
)


class Steps:
    """Steps of an engine, by hand. Row n has the blocks from n * ``blocks`` on, in either tier."""

    def __init__(self, engine: Engine, own: int, rows: int, context: int, room: int) -> None:
        self._engine, self._count = engine, 0
        self.own, self.rows = tuple(range(own)), tuple(range(own, own + rows))
        self._size = engine.resources.groups[0].block_size
        self._blocks = -(-(context + room) // self._size)
        self._groups = len(engine.resources.groups)
        self.layers = engine.model.spec.num_layers
        self._at = context
        for row in (*self.own, *self.rows):
            self._start(row, context)
        self.run(moves=tuple(self._away(row) for row in self.rows))

    def _table(self, row: int) -> tuple[tuple[int, ...], ...]:
        first = row * self._blocks
        return (tuple(range(first, first + self._blocks)),) * self._groups

    def _start(self, row: int, context: int) -> None:
        tokens = tuple(1 + (7 * row + i) % 500 for i in range(context))
        sampling = GREEDY
        add = RowAdd(row, row, tokens, context, sampling, frozenset(), self._table(row))
        self.run(SubBatch((row,), (0,), (context,), (True,)), add=(add,))

    def _away(self, row: int) -> KVMove:
        return KVMove(row, Tier.HOST, self._table(row), self._table(row))

    def run(self, *batches: SubBatch, **plan: Any) -> Any:
        self._count += 1
        return self._engine.executor.launch(StepPlan(self._count, batches, **plan)).result()

    def decode(self) -> SubBatch:
        """The own rows' next token."""
        count = len(self.own)
        batch = SubBatch(self.own, (self._at,) * count, (1,) * count, (True,) * count)
        self._at += 1
        return batch


def measure(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    config = EngineConfig(
        model=options.model, device="cpu", threads=1, host_threads=1,
        scheduler="slo-piggyback", max_num_seqs=rows + options.own, prefix_caching=False,
        kv_memory=options.memory, host_kv_memory=options.memory, slo_admission="off",
        classes={"interactive": {"tpot_s": 1.0}},
        max_model_len=options.context + options.steps * 2 + 64,
        profile=options.profile,
    )  # fmt: skip
    engine = build_engine(config)
    try:
        steps = Steps(engine, options.own, rows, options.context, 2 * options.steps + 8)
        limits = (rows,) * steps.layers
        mailbox = engine.executor.tier.attention.mailbox
        plain, carrying, waiting = [], [], set(steps.rows)
        before = mailbox.counters()
        carried = engine.executor._rows.carried
        spent = carried.spent_ns
        for turn in range(options.steps):
            started = time.perf_counter()
            steps.run(steps.decode())
            plain.append((time.perf_counter() - started) * 1e6)
            begun = tuple(waiting) if turn % 2 == 0 else ()
            waiting -= set(begun)

            given = {"piggybacked": begun, "piggyback_limits": limits}
            started = time.perf_counter()
            done = steps.run(steps.decode(), **given)
            carrying.append((time.perf_counter() - started) * 1e6)
            waiting.update(row for row, _ in done.piggybacked_results)
        spent = (carried.spent_ns - spent) / 1e3 / options.steps
        taken = mailbox.counters().taken - before.taken
    finally:
        engine.close()
    late = taken / options.steps / steps.layers
    added = statistics.median(carrying) - statistics.median(plain)
    return {
        "rows": rows,
        "plain_us": statistics.median(plain),
        "carrying_us": statistics.median(carrying),
        "added_us": added,
        "late": late,
        "added_us_a_layer": added / steps.layers,
        "copies_us": spent,
        "copies_us_a_layer": spent / steps.layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--rows", default="1,4,16,64,400")
    parser.add_argument("--own", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--profile", required=True, help="of `weft profile`, for 1 thread")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    print(
        "| rows | plain us | carrying us | rows a layer | added us a layer | copies us | a layer |"
    )
    print("|---|---|---|---|---|---|---|")
    for rows in map(int, options.rows.split(",")):
        row = measure(options, rows)
        found.append(row)
        print(
            f"| {rows} | {row['plain_us']:.0f} | {row['carrying_us']:.0f} | {row['late']:.1f} "
            f"| {row['added_us_a_layer']:.1f} | {row['copies_us']:.1f} "
            f"| {row['copies_us_a_layer']:.1f} |",
            flush=True,
        )
    if options.out:
        report.save(options.out, rows=found, context=options.context, own=options.own)


if __name__ == "__main__":
    main()
