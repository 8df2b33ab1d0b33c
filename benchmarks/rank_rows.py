"""The time that ranks need to agree on the piggybacked rows of a step, beside a sum over ranks.

    python benchmarks/rank_rows.py [--slots 128,512] [--width 512] [--rounds 2000]
        [--out benchmarks/results/rank_rows.json]

Two processes on this machine, joined by gloo. *agree*: what each step with rows on their way does
once (``exec.host_results``), from the states of the mailbox to the rows that both have. *sum*: of
four rows of ``--width`` numbers, of which a step does two a layer and one more. Both are taken in
turns, and are medians of rank 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import report
from weft.exec.host_results import AgreedResults
from weft.kernels.cpu.host import HostLayer, HostMailbox, HostWorker
from weft.kernels.process_group import Group

RANKS, LAYERS, HEADS, DIM, CONTEXT = 2, 32, 8, 64, 16


def mailbox_with_results(slots: int) -> HostMailbox:
    """A mailbox of which every second slot has a result of some layer."""
    cache = np.zeros((slots, HEADS, CONTEXT, DIM), np.float32)
    layers = [HostLayer(cache, cache.copy(), HEADS, 1.0) for _ in range(LAYERS)]
    mailbox = HostMailbox.create(layers, slots=slots, table_width=1, dtype="float32")
    rows = np.arange(0, slots, 2, dtype=np.int32)
    mailbox.begin(rows, np.full(len(rows), CONTEXT), [rows[:, None]])
    qkv = np.ones((3, len(rows), HEADS, DIM), np.float32)
    for layer in range(LAYERS):
        mine = rows[layer::LAYERS]
        mailbox.submit(mine, layer, *qkv[:, : len(mine)])
    with HostWorker(mailbox):
        while {"submitted", "running"} & set(mailbox.states()):
            time.sleep(0.001)
    return mailbox


def measure(rank: int, options: argparse.Namespace, meeting: Path, found: Any) -> None:
    """Take both in turns; rank 0 tells the medians."""
    group = Group(rank, RANKS, meeting, "cpu")
    hidden = np.ones((4, options.width), np.float32)
    for slots in map(int, options.slots.split(",")):
        results = AgreedResults(mailbox_with_results(slots), group)
        times: dict[str, list[float]] = {"agree_us": [], "sum_us": []}
        for _ in range(options.rounds):
            for name, work in (
                ("sum_us", lambda: group.sum(hidden)),
                ("agree_us", lambda results=results: results.look(0.0)),
            ):
                group.sum(hidden[:1])  # meet
                started = time.perf_counter()
                work()
                times[name].append((time.perf_counter() - started) * 1e6)
        assert int(results.counts().sum()) == slots // 2
        if rank == 0:
            found.put({"slots": slots, **{k: statistics.median(v) for k, v in times.items()}})
    found.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", default="128,512")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spawn, rows = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        told, meeting = spawn.SimpleQueue(), Path(folder) / "meeting"
        processes = [
            spawn.Process(target=measure, args=(rank, options, meeting, told))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        ended = 0
        while ended < RANKS:
            row = told.get()
            ended += row is None
            rows += [row] if row is not None else []
        for process in processes:
            process.join()
    print("| slots | agree us | sum us | of the sums of a step |\n|---|---|---|---|")
    for row in rows:
        row["of_step"] = row["agree_us"] / row["sum_us"] / (2 * LAYERS + 1)
        print(
            f"| {row['slots']} | {row['agree_us']:.0f} | {row['sum_us']:.0f} "
            f"| {row['of_step']:.1%} |"
        )
    if options.out:
        report.save(options.out, rows=rows, layers=LAYERS, width=options.width)


if __name__ == "__main__":
    main()
