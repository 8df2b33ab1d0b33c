"""Decode steps that are planned, replayed under leases, or gone on with by the GPU alone.

All of them must give the tokens of steps that are neither captured nor leased. Random weights. Each
way is tried in a process of its own, as a wrong one may hang or break the context.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from figures import figure
from shapes import random_decoder, shape

from weft.core.plan import RowAdd, StepPlan, SubBatch
from weft.core.types import SamplingParams
from weft.exec.device import CudaDevice, Device, HostDevice, tensor_memory
from weft.exec.graphs import GraphExecutor, Steps
from weft.exec.input_batch import InputBatch
from weft.exec.step_packer import PackedStep
from weft.exec.store import KVStore
from weft.kernels.cpu import _native
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder

BLOCK, LEASE, LIMIT_S = 16, 64, 40.0
Tokens = list[list[int]]  # of each step


class Rows:
    """An executor, and rows that decode in every step, after a prompt of one token each."""

    def __init__(
        self, decoder: Decoder, device: Device, batch: int, steps: int, *, capture: bool = True
    ) -> None:
        each, groups = -(-(steps + 2) // BLOCK), decoder.spec.kv_groups
        memory = tensor_memory(str(device.where))
        store = KVStore(groups, [batch * each] * len(groups), BLOCK, decoder.dtype, memory)
        table = InputBatch(batch, steps + 2, [each] * len(groups))
        kinds = Steps(max(batch, 16), batch, 1, capture, (batch,), leases=True)
        self.executor = GraphExecutor(decoder, store, table, device, kinds)
        self.stamps = _native.Stamps()
        self._batch, self._step, self._each, self._groups = batch, 0, each, len(groups)
        self._vocabulary = decoder.spec.vocab_size

    def begin(self) -> None:
        """Seat the rows anew; some draw their tokens, with penalties."""
        rows = range(self._batch)
        drop = () if self._step == 0 else tuple(rows)
        adds = []
        for row in rows:
            blocks = tuple(range(row * self._each, (row + 1) * self._each))
            prompt, tables = (7 * row % self._vocabulary,), (blocks,) * self._groups
            adds.append(RowAdd(row, row, prompt, 1, asked(row), frozenset(), tables))
        self._step += 1
        self.executor.launch(StepPlan(self._step, (), drop=drop, add=tuple(adds))).result()

    def batch(self, start: int) -> SubBatch:
        count = self._batch
        return SubBatch(tuple(range(count)), (start,) * count, (1,) * count, (True,) * count)

    def plan(self, start: int, lease: int = 0) -> StepPlan:
        self._step += 1
        return StepPlan(self._step, (self.batch(start),), lease=lease)

    def planned(self, steps: int) -> Tokens:
        """Each step by a plan, launched before the one ahead of it is collected."""
        found, ticket = [], self.executor.launch(self.plan(0))
        for start in range(1, steps):
            following = self.executor.launch(self.plan(start))
            found.append(list(ticket.result().tokens))
            ticket = following
        return [*found, list(ticket.result().tokens)]

    def replayed(self, steps: int) -> Tokens:
        """As many steps under each lease as it lasts for."""
        found: Tokens = []
        while len(found) < steps:
            lease = min(LEASE, steps - len(found) - 1)
            ticket = self.executor.launch(self.plan(len(found), lease))
            if ticket.lease is not None:
                ticket.lease.grant(self.stamps.outlet)
            result = ticket.result()
            if result.leased is not None:
                found += map(list, result.leased.steps)
            found.append(list(result.tokens))
        return found

    def first(self, steps: int) -> PackedStep:
        """Compute the first step, whose tables have room for all."""
        executor = self.executor
        packed = executor._packer.pack(self.batch(0), None, steps - 1)
        with executor._device.work():
            executor._steps.upload(packed)
            executor._steps.forward(packed)
            executor._steps.sample(packed)
        executor._device.synchronize()
        return packed


def asked(row: int) -> SamplingParams:
    """What a row asks of its tokens: every second one draws them, with a penalty."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, seed=row)
    if row % 2:
        params = replace(params, temperature=0.9, top_p=0.9, presence_penalty=0.5)
    return params.with_defaults({})


def uncaptured(decoder: Decoder, device: Device, batch: int, steps: int) -> Tokens:
    """The truth: functions that run one by one, each step planned and awaited."""
    rows = Rows(decoder, device, batch, steps, capture=False)
    rows.begin()
    return [list(rows.executor.launch(rows.plan(at)).result().tokens) for at in range(steps)]


def alone(rows: Rows, device: Device, steps: int, *, resident: bool) -> Callable[[], Tokens]:
    """Return what has the GPU go on by itself."""
    from device_loop import DeviceLoop, LoopMemory

    assert isinstance(device, CudaDevice), "only a GPU goes on by itself"
    rows.begin()
    packed, functions = rows.first(steps), rows.executor._functions
    assert packed.sample is not None
    forward, sample = packed.forward, packed.sample

    def step() -> None:
        functions.forward(forward, 1, carries=False)
        functions.sample(sample)

    loop = DeviceLoop(step, device, resident=resident)

    def run() -> Tokens:
        again = rows.first(steps)
        starts = [0] * len(again.inputs.rows)
        memory = LoopMemory(rows.executor, again, starts, [], steps - 1, LIMIT_S)
        loop.run(memory)
        found, end = memory.outcome()
        if end != "steps":
            raise RuntimeError(f"the loop has ended after {len(found)} steps: {end}")
        return found

    return run


def measure(options: argparse.Namespace) -> None:
    """Compare one way with planned steps, and print how fast both are."""
    cuda = options.device == "cuda"
    device: Device = CudaDevice("cuda:0") if cuda else HostDevice()
    ops = select_ops(str(device.where), "bfloat16", "auto" if cuda else "reference")
    batch, steps = options.batch, options.steps
    with torch.inference_mode():
        spec = shape(options.model, max(64, steps + 2), layers=options.layers)
        decoder = random_decoder(spec, torch.bfloat16, device.where, ops, "none")
    truth = uncaptured(decoder, device, batch, steps)
    rows = Rows(decoder, device, batch, steps)
    ways: dict[str, Callable[[], Tokens]] = {"planned": lambda: rows.planned(steps)}
    if options.way == "replayed":
        ways["replayed"] = lambda: rows.replayed(steps)
    else:
        ways[options.way] = alone(rows, device, steps, resident=options.way == "resident")
    layers = f", {options.layers} layers" if options.layers else ""
    name, rates = f"{options.model} bf16{layers}, batch {batch}", {}
    for way, run in (*ways.items(), *ways.items()):  # the first round is a warm-up
        rows.begin()
        device.synchronize()
        started = time.perf_counter()
        found = run()
        rates[way] = steps / (time.perf_counter() - started)
        differ = int((torch.tensor(found) != torch.tensor(truth)).sum())
        if differ:
            figure(f"{name}: tokens of steps {way} that differ", differ, "", 0, "less")
            raise SystemExit(1)
    figure(f"{name}: tokens of steps {options.way} that differ", 0, "", 0, "less")
    figure(f"{name}: steps planned", rates["planned"], "steps/s")
    figure(f"{name}: steps {options.way}", rates[options.way] / rates["planned"], "times that")
    rows.executor.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300, help="so that a loop relaunches itself")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--way", choices=("replayed", "looping", "resident"))
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a way may take")
    options = parser.parse_args()
    if options.way:
        measure(options)
        return 0
    # A kernel that is loaded while a loop runs would wait for its end.
    environment, missing = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}, 0
    for way in ("replayed", "looping", "resident")[: 3 if options.device == "cuda" else 1]:
        try:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            subprocess.run(command, check=True, timeout=options.limit, env=environment)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"steps {way}: {error}", flush=True)
            missing += 1
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
