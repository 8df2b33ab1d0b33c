"""``weft bench throughput``: prefill and decode rates of an engine, in process, without HTTP."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

from tqdm import tqdm

from weft.bench.options import ThroughputBench
from weft.bench.prompts import FIRST_ID
from weft.core.errors import ConfigError
from weft.core.types import SamplingParams
from weft.workload.lengths import parse_lengths


class MeasuredEngine(Protocol):
    """The engine to measure, such as ``weft.LLM``."""

    def token_iter(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Iterator[tuple[int, int]]:
        """Compute all prompts at once; yield (index of the prompt, token) as tokens come."""


def bench_throughput(
    engine: MeasuredEngine, model: str, vocab_size: int, options: ThroughputBench
) -> dict[str, Any]:
    """Compute random prompts once to warm up, then ``repeats`` times; each value has a spread.

    Raises:
        ConfigError: the vocabulary is too small for random prompts.
        WeftError: a prompt could not be computed.
    """
    if vocab_size <= FIRST_ID:
        raise ConfigError(f"A vocabulary of {vocab_size} leaves no ids for random prompts.")
    runs = []
    hidden = not sys.stderr.isatty()
    for number in tqdm(range(options.repeats + 1), unit="run", disable=hidden):
        run = _run(engine, vocab_size, options, number)
        if number:
            runs.append(run)
    measured = {name: _spread([run[name] for run in runs]) for name in runs[0]}
    return {
        "command": "weft bench throughput",
        "options": asdict(options),
        "model": model,
        "prompts": options.prompts,
        **measured,
    }


def _run(
    engine: MeasuredEngine, vocab_size: int, options: ThroughputBench, number: int
) -> dict[str, float | None]:
    draw = random.Random(f"{options.seed} {number}")
    given = parse_lengths(options.input_tokens, "input_tokens")
    asked = parse_lengths(options.output_tokens, "output_tokens")
    ids = range(FIRST_ID, vocab_size)
    prompts = [draw.choices(ids, k=given(draw)) for _ in range(options.prompts)]
    params = [
        SamplingParams(temperature=0, max_tokens=asked(draw), ignore_eos=True) for _ in prompts
    ]
    began: dict[int, float] = {}
    count = 0
    after_first = 0  # tokens that came before every prompt had its first
    started, cpu = time.perf_counter(), time.process_time()
    now = started
    for index, _ in engine.token_iter(prompts, params):
        now = time.perf_counter()
        count += 1
        if index not in began:
            began[index] = now - started
            after_first = count
    cpu = time.process_time() - cpu
    seconds, all_first = now - started, max(began.values())
    decoding = seconds - all_first
    return {
        "first_token_s": min(began.values()),
        "all_first_tokens_s": all_first,
        "seconds": seconds,
        "prefill_tokens_per_s": sum(map(len, prompts)) / all_first,
        "decode_tokens_per_s": (count - after_first) / decoding if count > after_first else None,
        "output_tokens_per_s": count / seconds,
        "cpu_s_per_output_token": cpu / count,  # of this process, for the prompts, too
    }


def _spread(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "lowest": min(known), "highest": max(known)}
