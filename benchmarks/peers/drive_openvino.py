"""Drives OpenVINO GenAI: its continuous batching pipeline, stepped in process.

python drive_openvino.py EXPORTED_MODEL THREADS FORMAT [--prefix-caching]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from driving import CACHING, Watch, Work, drive


def load(model: str, threads: int) -> Callable[[Work], dict[str, float]]:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = CACHING in sys.argv
    scheduler.dynamic_split_fuse = True
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if "BF16" in capabilities else "f32"  # it refuses bfloat16 without hardware
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", hints)
    numbers = itertools.count()

    def run(work: Work) -> dict[str, float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = work.output
        config.ignore_eos = True
        config.do_sample = False
        prompts = work.prompts()
        watch = Watch(work)
        handles = [
            pipeline.add_request(
                next(numbers), openvino.Tensor(np.array([prompt], np.int64)), config
            )
            for prompt in prompts
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        watch.tokens(index, len(output.generated_ids))
        return watch.result()

    return run


def version() -> str:
    import openvino_genai

    return str(openvino_genai.__version__)


if __name__ == "__main__":
    drive(lambda: load(sys.argv[1], int(sys.argv[2])), version)
