"""Extra time of steps with decodes on the host, which they wait for in each layer; random weights.

Steps of rows of the device alone alternate with those that have rows of the host as well, in the
same sub-batch and in another one, so that the times of the latter are ratios. Rows of the host have
no KV of their own: what they read is zeros.
"""

from __future__ import annotations

import statistics
import time

from figures import figure
from lanes import Engine, prepared

from weft.core.plan import StepPlan, SubBatch, Tier
from weft.exec.device import Device
from weft.models.decoder import Decoder

ROUNDS = 4


class OverlappingEngine(Engine):
    """Rows of the device and of the host, which decode in every step that has them."""

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        own: int,
        hosted: int,
        context: int,
        threads: int,
    ) -> None:
        super().__init__(decoder, device, own, hosted, context, threads, overlaps=True)
        self._on_host = context - 1  # tokens of those rows with KV

    def time_of(self, steps: int, sub_batches: int) -> float:
        """Run steps whose rows of the host are in the only sub-batch, or the second; 0: nowhere.

        Returns:
            the median time of one.
        """
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self._step_with(sub_batches)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def _step_with(self, sub_batches: int) -> None:
        own, hosted = range(self._own), range(self._own, self._own + len(self._idle))
        device = [(row, self._step, Tier.DEVICE) for row in own]
        host = [(row, self._on_host, Tier.HOST) for row in hosted]
        parts = {0: [device], 1: [device + host], 2: [device, host]}[sub_batches]
        batches = []
        for part in parts:
            rows, starts, tiers = zip(*part, strict=True)
            count = len(rows)
            kept = tiers if Tier.HOST in tiers else ()
            batches.append(SubBatch(rows, starts, (1,) * count, (True,) * count, kept))
        self._step += 1
        self._on_host += sub_batches > 0
        self.executor.launch(StepPlan(self._step, tuple(batches))).result()


def main() -> None:
    options, decoder, device = prepared(__doc__, rows=32, context=256, steps=20)
    given = options.batch, options.rows, options.context, options.threads
    engine = OverlappingEngine(decoder, device, *given)
    found = [
        [engine.time_of(options.steps, sub_batches) for sub_batches in (0, 1, 2)]
        for _ in range(ROUNDS)
    ]
    alone, one, two = (statistics.median(times) for times in zip(*found, strict=True))
    name = f"{options.model} bf16, batch {options.batch}, {options.rows} rows of the host"
    figure(f"{name}: step without them", 1e3 * alone, "ms")
    figure(f"{name}: step with them in its sub-batch", one / alone, "times that")
    figure(f"{name}: step with them in another one", two / alone, "times that")
    engine.executor.close()


if __name__ == "__main__":
    main()
