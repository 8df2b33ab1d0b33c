"""Cost of piggybacked rows to captured steps, and how fast they advance, with random weights.

Steps without such rows and steps with them alternate in one run, so that the time of the latter is
a ratio. Rows of the host have no KV of their own: what they read is zeros.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from figures import figure
from shapes import random_decoder, shape

from weft.core.plan import RowAdd, StepPlan, SubBatch, Tier
from weft.core.types import SamplingParams
from weft.exec.device import CudaDevice, Device, HostDevice, tensor_memory
from weft.exec.device_tier import device_tier
from weft.exec.graphs import GraphExecutor, Steps
from weft.exec.host_attention import HostAttention, WorkerThreads
from weft.exec.input_batch import InputBatch
from weft.exec.store import KVStore
from weft.kernels.lanes import MOST_LANES, lanes_for
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder

BLOCK, ROUNDS = 16, 6
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0).with_defaults({})


class Engine:
    """An executor with rows of the device, which decode in every step, and rows of the host."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        own: int,
        hosted: int,
        context: int,
        threads: int,
        *,
        overlaps: bool = False,
    ) -> None:
        spec, rows, most = decoder.spec, own + hosted, context + 1024
        each, groups = -(-most // BLOCK), spec.kv_groups
        table = InputBatch(rows, most, [each] * len(groups))
        memory = tensor_memory(str(device.where))
        blocks = [own * each] * len(groups)
        store = KVStore(groups, blocks, BLOCK, decoder.dtype, memory)

        def attend(host: KVStore) -> HostAttention:
            return HostAttention(decoder, host, table, WorkerThreads(threads))

        blocks = [hosted * each] * len(groups)
        tier = device_tier(store, blocks, device, attend, overlaps=overlaps)
        sizes = tuple(sorted({own, hosted, own + hosted})) if overlaps else (own,)
        steps = Steps(max(sizes[-1], 16), sizes[-1], 1, sizes=sizes, lanes=lanes_for(rows))
        self.executor = GraphExecutor(decoder, store, table, device, steps, tier)
        self._own, self._limits = own, (MOST_LANES,) * spec.num_layers
        self._idle, self._step = list(range(own, rows)), 0
        adds = []
        for row in range(rows):
            place = row if row < own else row - own
            blocks_of = tuple(range(place * each, (place + 1) * each))
            tokens = (1,) * (1 if row < own else context)
            tables = (blocks_of,) * len(groups)
            kept = Tier.HOST if overlaps and row >= own else Tier.DEVICE
            adds.append(RowAdd(row, row, tokens, 1, GREEDY, frozenset(), tables, tier=kept))
        self._run(add=tuple(adds))

    def _run(self, **more: object) -> int:
        """Run a step; return how many tokens of the host came."""
        count = self._own
        batch = SubBatch(tuple(range(count)), (self._step,) * count, (1,) * count, (True,) * count)
        self._step += 1
        plan = partial(StepPlan, self._step, (batch,))(**more)  # type: ignore[arg-type]
        result = self.executor.launch(plan).result()
        came = [row for row, _ in result.piggybacked_results]
        self._idle += came
        return len(came)

    def time(self, steps: int, *, carry: bool) -> tuple[float, float]:
        """Run steps; return the median time of one, and the tokens of the host a second."""
        times, tokens = [], 0
        for _ in range(steps):
            more: dict[str, object] = {}
            if carry:
                more = {"piggybacked": tuple(self._idle), "piggyback_limits": self._limits}
                self._idle = []
            started = time.perf_counter()
            tokens += self._run(**more)
            times.append(time.perf_counter() - started)
        return statistics.median(times), tokens / sum(times)


def prepared(
    description: str, *, rows: int, context: int, steps: int
) -> tuple[argparse.Namespace, Decoder, Device]:
    """Read the command line; return it with a random decoder and its device.

    Args:
        rows, context, steps: defaults of the options with these names.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--batch", type=int, default=64, help="rows of the device")
    parser.add_argument("--rows", type=int, default=rows, help="rows of the host")
    parser.add_argument("--context", type=int, default=context, help="tokens of a row of the host")
    parser.add_argument("--threads", type=int, default=8, help="of the host worker")
    parser.add_argument("--steps", type=int, default=steps, help="of each kind in a round")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device: Device = CudaDevice("cuda:0") if cuda else HostDevice()
    ops = select_ops(str(device.where), "bfloat16", "auto" if cuda else "reference")
    spec = shape(options.model, options.context + 1024)
    with torch.inference_mode():
        decoder = random_decoder(spec, torch.bfloat16, device.where, ops, "none")
    return options, decoder, device


def main() -> None:
    options, decoder, device = prepared(__doc__, rows=64, context=1024, steps=40)
    engine = Engine(decoder, device, options.batch, options.rows, options.context, options.threads)
    found = []
    for _ in range(ROUNDS):
        alone, _ = engine.time(options.steps, carry=False)
        beside, rate = engine.time(options.steps, carry=True)
        found.append((alone, beside / alone, rate))
    name = f"{options.model} bf16, batch {options.batch}, {options.rows} rows of the host"
    alone, ratio, rate = (statistics.median(numbers) for numbers in zip(*found, strict=True))
    figure(f"{name}: step without them", 1e3 * alone, "ms")
    figure(f"{name}: step with them", ratio, "times that")
    figure(f"{name}: their tokens", rate, "tok/s")
    engine.executor.close()


if __name__ == "__main__":
    main()
