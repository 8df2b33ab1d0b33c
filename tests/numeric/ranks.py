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

from weft.kernels.collectives import ALONE, ONE_STAGE, Collectives, Link
from weft.kernels.ops import select_ops
from weft.kernels.process_group import Group, Pipe
from weft.models.decoder import Decoder
from weft.models.layout import weight_bytes
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.stages import split_spec

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(size: int, folder: Path, work: Callable[[Group], T]) -> list[T]:
    """Call ``work`` on so many ranks at once, each on a thread; what they return, by rank."""
    meeting_point = folder / f"meeting-{size}"

    def rank(number: int) -> T:
        return work(Group(number, size, meeting_point, "cpu"))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def on_stages(
    stages: int, width: int, folder: Path, work: Callable[[Collectives, Pipe], T]
) -> list[T]:
    """Call ``work`` on the ranks of so many stages at once, as ``on_ranks``."""

    def rank(number: int) -> T:
        stage, ranks = number // width, ALONE
        if width > 1:
            ranks = Group(number % width, width, folder / f"stage-{stage}", "cpu")
        pipe = Pipe(number, stages * width, stages, folder / "stages", "cpu")
        found = work(ranks, pipe)
        pipe.flush()
        return found

    with ThreadPoolExecutor(stages * width) as pool:
        return list(pool.map(rank, range(stages * width)))


def layers_of(folder: Path, stages: int, max_model_len: int | None = None) -> list[range]:
    """The layers of each stage."""
    spec = read_spec(folder, max_model_len)
    parts = split_spec(spec, stages, lambda part: weight_bytes(part, "float32"))
    return [range(part.stage.first, part.stage.first + part.num_layers) for part in parts]


def load(
    folder: Path, ranks: Collectives, kernels: str = "cpu", link: Link = ONE_STAGE, **more: Any
) -> Decoder:
    """The part of a rank, in float32."""
    ops = replace(select_ops("cpu", "float32", kernels), ranks=ranks, link=link)
    max_model_len = more.pop("max_model_len", None)
    if link.stages > 1:
        more["layers"] = layers_of(folder, link.stages, max_model_len)[link.stage]
    return load_model(folder, "float32", max_model_len, ops, **more)


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
    """Print the tokens of every job: model folder, prompt, count of tokens, kernels if named."""
    torch.set_num_threads(1)
    group = Group(int(rank), int(size), Path(meeting_point), "cpu")
    found = []
    for job in json.loads(jobs):
        decoder = load(Path(job["folder"]), group, job.get("kernels", "cpu"))
        found.append(greedy(decoder, job["prompt"], job["count"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
