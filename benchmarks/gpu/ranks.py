"""Sums over the GPUs of a machine and ways from stage to stage, each also captured; needs 2 GPUs.

    python benchmarks/gpu/ranks.py [--ranks 2] [--limit 60] [--device cuda]

For each size of a sum: by peer memory (where it goes so), by weft's exchange through NCCL, and by
NCCL's own all-reduce, which adds in another order. Every way must give all ranks the bits of the
reference, but for the last. Then whole engines: tokens of 2 ranks, of 2 stages, and with 4 GPUs of
both, against those of one GPU. ``--device cpu`` runs the same over gloo, as a test of this script.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from decode import Inbox
from figures import figure, note

from weft.core.config import EngineConfig
from weft.core.plan import StepOutputs, Update
from weft.core.types import Request, SamplingParams
from weft.engine.driven import DrivenEngine
from weft.exec.device import CudaDevice, Device, HostDevice
from weft.kernels.collectives import in_order
from weft.kernels.process_group import Group, Pipe

SIZES = (8, 32, 128, 256, 512, 2048, 4096)  # KiB: 8 is a row of 4096 numbers in bfloat16
AT_ONCE, ROUNDS, PROMPTS, TOKENS = 32, 7, 6, 48


def device_of(kind: str, rank: int) -> Device:
    if kind == "cpu":
        return HostDevice()
    torch.cuda.set_device(rank)
    return CudaDevice(f"cuda:{rank}")


def part_of(rank: int, kibibytes: int, device: Device) -> torch.Tensor:
    """A rank's numbers, whose sum depends on the order."""
    draw = torch.Generator().manual_seed(rank)
    numbers = torch.randn(512 * kibibytes, generator=draw) * 3.0**rank
    return numbers.to(torch.bfloat16).to(device.where)


def ways_of(group: Group, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """How ``x`` can be summed; every rank has the same ways."""
    found: dict[str, Callable[[], Any]] = {"exchange": lambda: group._sum_of_group(x)}
    if group._peers is not None and group._peers.takes(x):
        found["peer memory"] = lambda: group.sum(x)
    if x.is_cuda:
        found["all-reduce of NCCL"] = lambda: group._group.allreduce([x.clone()]).wait()
    return found


def microseconds(device: Device, way: Callable[[], Any], *, captured: bool) -> float:
    """The median time of one of many calls in a row."""

    def calls() -> None:
        for _ in range(AT_ONCE):
            way()

    run = device.capture(calls) if captured else calls
    times = []
    for _ in range(ROUNDS):
        with device.work():
            way()  # all ranks begin together
        device.synchronize()
        began = time.perf_counter()
        with device.work():
            run()
        device.synchronize()
        times.append((time.perf_counter() - began) / AT_ONCE)
    return 1e6 * statistics.median(times)


def measure_sums(rank: int, size: int, kind: str, meeting: str, found: Any) -> None:
    """One rank; rank 0 puts (name, value, unit) of every figure."""
    device = device_of(kind, rank)
    group = Group(rank, size, Path(meeting), str(device.where))
    for kibibytes in SIZES:
        x = part_of(rank, kibibytes, device)
        wanted = in_order([part_of(r, kibibytes, device) for r in range(size)])
        for name, way in ways_of(group, x).items():
            if "NCCL" not in name:
                with device.work():
                    first = way()
                device.synchronize()
                wrong = int((first != wanted).sum())
                if wrong:
                    found.put((f"{name}, {kibibytes} KiB, wrong numbers", wrong, ""))
            for captured in (False, True):
                took = microseconds(device, way, captured=captured)
                if rank == 0:
                    how = "captured" if captured else "eager"
                    found.put((f"sum by {name}, {kibibytes} KiB, {how}", took, "us"))
    found.put(None)


def measure_pipe(rank: int, kind: str, meeting: str, found: Any) -> None:
    """The time that 1 and 1024 rows of 4096 numbers take through two stages."""
    device = device_of(kind, rank)
    pipe = Pipe(rank, 2, 2, Path(meeting), str(device.where))
    for rows in (1, 1024):
        x = torch.full((rows, 4096), float(rank), dtype=torch.bfloat16, device=device.where)
        way = (lambda x=x: pipe.receive(x)) if rank else (lambda x=x: pipe.send(x))
        for captured in (False, True):
            took = microseconds(device, way, captured=captured)
            if rank:
                how = "captured" if captured else "eager"
                found.put((f"{rows} rows from stage to stage, {how}", took, "us"))
                if int((x != 0).sum()):
                    found.put((f"{rows} rows, wrong numbers", int((x != 0).sum()), ""))
    pipe.flush()
    found.put(None)


def in_processes(count: int, work: Callable[..., None], *given: Any, limit_s: float) -> bool:
    """Run ``work`` on so many ranks and print what they find; whether all went well."""
    context = multiprocessing.get_context("spawn")
    found, good, left = context.Queue(), True, count
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        more = (*given, f"{folder}/meeting", found)
        ranks = [context.Process(target=work, args=(rank, *more)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + limit_s
        while left:
            try:
                told = found.get(timeout=0.5)
            except Exception:
                dead = any(rank.exitcode not in (None, 0) for rank in ranks)
                if dead or time.monotonic() > end:
                    print("a rank has failed" if dead else f"no end within {limit_s} s")
                    good = False
                    break
                continue
            left -= told is None
            if told is not None:
                figure(told[0], *told[1:])
                good = good and "wrong" not in told[0]
        for rank in ranks:
            if not good:
                rank.kill()
            rank.join()
    return good


class Answers(Inbox):
    """Keeps the tokens of each request, too."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.tokens: dict[int, list[int]] = {request.id: [] for request in requests}

    def publish(self, outputs: StepOutputs) -> None:
        super().publish(outputs)
        for update in (*(Update(*pair) for pair in outputs.tokens), *outputs.updates):
            if update.error is not None:
                raise update.error
            if update.token is not None:
                self.tokens[update.sequence_id].append(update.token)


def tokens_of(kind: str, **settings: int) -> list[list[int]]:
    """What an engine in float32 generates for prompts of several lengths."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    greedy = greedy.with_defaults({})
    prompts = [(7 + i, 11, 13) * (1 + 9 * i) for i in range(PROMPTS)]
    more: dict[str, Any] = {"threads": 1} if kind == "cpu" else {}
    more |= {"device": kind, "dtype": "float32", "kv_memory": 2**26, "max_num_seqs": 8}
    engine = DrivenEngine(EngineConfig(**more, **settings))
    try:
        answers = Answers([Request(i, prompt, greedy) for i, prompt in enumerate(prompts)])
        began = time.perf_counter()
        engine.run(answers)
        took = time.perf_counter() - began
    finally:
        engine.close()
    name = ", ".join(f"{key} {value}" for key, value in settings.items()) or "one process"
    figure(f"tokens a second with {name}", PROMPTS * TOKENS / took, "tok/s")
    return list(answers.tokens.values())


def is_absent(package: str) -> bool:
    try:
        return find_spec(package) is None
    except ModuleNotFoundError:
        return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds of each group of ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    there = torch.cuda.device_count() if options.device == "cuda" else 4
    if there < options.ranks:
        print(f"needs {options.ranks} GPUs, and this machine has {there}: nothing was measured")
        return 0
    good = in_processes(
        options.ranks, measure_sums, options.ranks, options.device, limit_s=options.limit
    )
    good &= in_processes(2, measure_pipe, options.device, limit_s=options.limit)
    absent = [name for name in ("msgspec", "setproctitle") if is_absent(name)]
    if absent:
        note(f"engines of several processes need {', '.join(absent)}: they were not measured")
        return 0 if good else 1
    expected = tokens_of(options.device)
    splits = [{"tensor_parallel": 2}, {"pipeline_parallel": 2}]
    if there >= 4:
        splits.append({"pipeline_parallel": 2, "tensor_parallel": 2})
    for settings in splits:
        same = tokens_of(options.device, **settings) == expected
        figure(f"same tokens with {settings}", float(same), "", 1.0, "more")
        good &= same
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
