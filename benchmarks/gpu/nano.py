"""Steps in two halves beside whole ones: what NanoFlow's overlap gains at limits of attention.

Random weights of a real shape; steps of both kinds alternate in one run, so that gains are ratios.
KV is what the steps have written themselves, once. Dense layers of a half run beside the attention
of the other half, which has a limited number of programs. On a CPU nothing overlaps: what stands in
for the device computes attention twice, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence as Seq

import torch
from figures import figure
from shapes import random_decoder, shape

from weft.core.plan import StepPlan, StepResult
from weft.cost.interference_profiler import HalvedPoint, HalvedStep, HalvesStage
from weft.cost.steps import SHORT, GroupRoom, StepRoom, StepRow
from weft.engine.halves import attention_limits
from weft.engine.timer import Timer
from weft.exec.device import CudaDevice, Device, HostDevice, tensor_memory
from weft.exec.graphs import GraphExecutor
from weft.exec.halves_pass import HalvesSetup
from weft.exec.input_batch import InputBatch
from weft.exec.setup import Steps
from weft.exec.store import KVStore
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.sched.halves import HALF_SIZES

BLOCK = 16
LEAST_GAIN = 1.03  # below which no step is split


def cases(rows: int, context: int, chunk: int) -> dict[str, HalvedStep]:
    """Decodes beside decodes, and a chunk of a prompt beside decodes."""
    decodes = (StepRow(context, 1),) * rows
    some = decodes[: rows // 2]
    return {
        f"{rows} decodes of {context} tokens": HalvedStep(decodes, rows // 2),
        f"{len(some)} of them and a prompt of {chunk}": HalvedStep((StepRow(0, chunk), *some), 1),
    }


class Engine:
    """An executor whose steps may have halves, and a stage that repeats steps in it."""

    def __init__(
        self, decoder: Decoder, device: Device, steps: Seq[HalvedStep], kv_dtype: str
    ) -> None:
        spec = decoder.spec
        rows = max(len(step.rows) for step in steps)
        longest = max(row.start + row.tokens for step in steps for row in step.rows)
        halves = {work.tokens for step in steps for work in step.works}
        wholes = {sum(work.tokens for work in step.works) for step in steps}
        blocks = max(sum(-(-(r.start + r.tokens) // BLOCK) for r in step.rows) for step in steps)
        groups = spec.kv_groups
        memory = tensor_memory(str(device.where))
        store = KVStore(groups, [blocks] * len(groups), BLOCK, kv_dtype, memory)
        table = InputBatch(rows, longest + BLOCK, [-(-longest // BLOCK) + 1] * len(groups))
        setup = Steps(
            max_tokens=max(*wholes, SHORT),  # of which KV is filled at least
            max_samples=rows,
            depth=1,
            sizes=tuple(sorted({*halves, *wholes, rows})),
            halves=HalvesSetup(tuple(sorted(halves))),
        )
        self.executor = GraphExecutor(decoder, store, table, device, setup)
        room = StepRoom(
            rows, longest, setup.max_tokens, BLOCK, spec.vocab_size,
            tuple(GroupRoom(blocks, group.window) for group in groups),
        )  # fmt: skip
        self.results: list[StepResult] = []
        self._timer = Timer(self.executor)
        self.stage = HalvesStage(self._run, room)
        self.stage.fill()

    def _run(self, plans: Seq[StepPlan]) -> list[float]:
        followed = list(self._timer.follow(plans))
        self.results = [result for _, result in followed]
        return [seconds for seconds, _ in followed]

    def measure(self, step: HalvedStep, repeats: int) -> tuple[HalvedPoint, float]:
        """The times of a step whole and in halves, and the share of rows with equal tokens."""
        point = self.stage.measure_both(step, repeats)
        whole, halved = (result.tokens for result in self.results[-2:])
        same = [a == b for a, b in zip(whole, halved, strict=True)]
        return point, sum(same) / max(1, len(same))


def measure(name: str, engine: Engine, step: HalvedStep, limits: Seq[int], repeats: int) -> None:
    wholes, gains = list[float](), dict[int, float]()
    for programs in limits:
        engine.executor.limit_attention(programs or None)
        point, same = engine.measure(step, repeats)
        wholes.append(point.whole_s)
        gains[programs] = point.whole_s / point.halves_s
        words = f"at most {programs} programs" if programs else "any number of programs"
        figure(f"{name}: in halves, {words} of attention", gains[programs], "times as fast")
        figure(f"{name}: tokens as of the whole step, {words}", same, "of the rows")
    figure(f"{name}: whole step", 1e3 * statistics.median(wholes), "ms")
    figure(f"{name}: best of the halves", max(gains.values()), "times as fast", LEAST_GAIN, "more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--quantize", default="fp8")
    parser.add_argument("--kv-dtype", help="of the KV; as the hidden states by default")
    parser.add_argument("--rows", type=int, default=HALF_SIZES[-1], help="rows that decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt beside decodes")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each kind")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device: Device = CudaDevice("cuda:0") if cuda else HostDevice()
    if not cuda:
        torch.set_num_threads(1)  # tiny shapes
    ops = select_ops(str(device.where), "bfloat16", "auto" if cuda else "reference")
    limits = attention_limits(str(device.where)) if cuda else (1, 0)
    found = cases(options.rows, options.context, options.chunk)
    spec = shape(options.model, options.context + options.chunk + 1)
    with torch.inference_mode():
        decoder = random_decoder(spec, torch.bfloat16, device.where, ops, options.quantize)
    engine = Engine(decoder, device, list(found.values()), options.kv_dtype or decoder.dtype)
    weights = "bf16" if options.quantize == "none" else options.quantize
    for words, step in found.items():
        name = f"{options.model} {weights}, {words}"
        measure(name, engine, step, limits, options.repeats)
    engine.executor.close()


if __name__ == "__main__":
    main()
