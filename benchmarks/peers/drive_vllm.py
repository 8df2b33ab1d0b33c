"""Drives vLLM's CPU build: its engine, stepped in process, compiled.

python drive_vllm.py MODEL THREADS FORMAT [--prefix-caching]
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from driving import CACHING, MOST_TOKENS, Watch, Work, drive

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(sys.argv[2]) - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def load(model: str) -> Callable[[Work], dict[str, float]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype="bfloat16", max_model_len=MOST_TOKENS, max_num_seqs=64, seed=0,
        enable_prefix_caching=CACHING in sys.argv,
    )  # fmt: skip
    engine: Any = llm.llm_engine
    numbers = itertools.count()

    def run(work: Work) -> dict[str, float]:
        params = SamplingParams(
            temperature=0, max_tokens=work.output, ignore_eos=True, detokenize=False
        )
        have: dict[str, int] = {}
        prompts = work.prompts()
        watch = Watch(work)
        for prompt in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                watch.tokens(output.request_id, count - have.get(output.request_id, 0))
                have[output.request_id] = count
        return watch.result()

    return run


def version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    drive(lambda: load(sys.argv[1]), version)
