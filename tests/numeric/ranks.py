"""Ranks of a model for tests: each on a thread of this process, or a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parent))

from paged import PagedRunner

from weft.kernels.collectives import Collectives
from weft.kernels.ops import select_ops
from weft.kernels.process_group import Group
from weft.models.decoder import Decoder
from weft.models.loader import load_model

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(size: int, folder: Path, work: Callable[[Group], T]) -> list[T]:
    """Call ``work`` on so many ranks at once, each on a thread; what they return, by rank."""
    meeting_point = folder / f"meeting-{size}"

    def rank(number: int) -> T:
        return work(Group(number, size, meeting_point, "cpu"))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def load(folder: Path, ranks: Collectives, kernels: str = "cpu", **more: Any) -> Decoder:
    """The part of a rank, in float32."""
    ops = replace(select_ops("cpu", "float32", kernels), ranks=ranks)
    return load_model(folder, "float32", more.pop("max_model_len", None), ops, **more)


def greedy(decoder: Decoder, tokens: list[int], count: int) -> list[int]:
    """So many likeliest tokens after a prompt."""
    runner, found = PagedRunner(decoder), []
    logits = runner.step([("a", tokens)])[0]
    for _ in range(count):
        found.append(int(logits[-1].argmax()))
        logits = runner.step([("a", [found[-1]])])[0]
    return found


def tokens_of_processes(size: int, folder: Path, jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """What each rank, a process of its own, generates for each job; see ``main``."""
    arguments = [str(size), str(folder / f"processes-{size}"), json.dumps(jobs)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *arguments], stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


def main(rank: str, size: str, meeting_point: str, jobs: str) -> None:
    """Print the tokens of every job: model folder, prompt, count of tokens."""
    torch.set_num_threads(1)
    group = Group(int(rank), int(size), Path(meeting_point), "cpu")
    found = []
    for job in json.loads(jobs):
        found.append(greedy(load(Path(job["folder"]), group), job["prompt"], job["count"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
