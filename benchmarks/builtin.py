"""Tokens a second of the built-in model, or another, in process, and where a step's time goes.

    python benchmarks/builtin.py [--model FOLDER] [--sequences 1,8,32]
        [--out benchmarks/results/builtin.json]

Greedy, 64-token prompts, 128 tokens each, both on the same threads and dtype in the same run,
interleaved. ``outside`` is the share of the loop's wall time in which no forward pass ran
(plan, pack, sample, commit, hand-over between threads); ``ratio`` is weft over transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import report
from resident import Answers
from weft.core.config import EngineConfig
from weft.core.types import Request, SamplingParams
from weft.engine.build import Engine, build_engine
from weft.engine.loop import EngineLoop
from weft.engine.machine import WallClock
from weft.models.hub import resolve_model

PROMPT_TOKENS, NEW_TOKENS = 64, 128


class ForwardTimer:
    """Sums the wall time that an executor spends in forward passes and output heads."""

    def __init__(self, executor: Any) -> None:
        self.seconds = 0.0
        for owner, name in ((executor, "_compute"), (executor._decoder, "logits")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def prompts(count: int, vocab_size: int, salt: int) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(count + 1000 * salt)
    shape = (count, PROMPT_TOKENS)
    return [tuple(row) for row in torch.randint(8, vocab_size, shape, generator=draw).tolist()]


def run_weft(engine: Engine, timer: ForwardTimer, count: int, salt: int) -> tuple[float, float]:
    """Tokens a second, and the share of the time outside the forward pass."""
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0
    ).with_defaults({})
    vocab_size = engine.model.spec.vocab_size
    answers = Answers(
        [
            Request(number, prompt, params)
            for number, prompt in enumerate(prompts(count, vocab_size, salt))
        ]
    )
    loop = EngineLoop(engine.scheduler, engine.executor, answers, WallClock())
    timer.seconds = 0.0
    started = time.perf_counter()
    loop.run_until_idle()
    seconds = time.perf_counter() - started
    tokens = sum(map(len, answers.tokens.values()))
    assert tokens == count * NEW_TOKENS
    assert timer.seconds > 0, "no forward pass was seen"
    return tokens / seconds, 1 - timer.seconds / seconds


def run_transformers(model: Any, count: int, vocab_size: int, salt: int) -> float:
    inputs = torch.tensor(prompts(count, vocab_size, salt))
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            **options,
        )
    assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS
    return count * NEW_TOKENS / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    rows = measure(options)
    if options.out:
        report.save(
            options.out, torch=torch.__version__, threads=torch.get_num_threads(), rows=rows
        )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    settings = {"threads": options.threads, "dtype": options.dtype, "prefix_caching": False}
    settings |= {"resident": "off"}  # whose forward passes are seen
    settings |= {"model": options.model, "kv_memory": "512MiB"}
    engines = {d: build_engine(EngineConfig(steps_in_flight=d, **settings)) for d in (0, 1)}
    timers = {depth: ForwardTimer(engine.executor) for depth, engine in engines.items()}
    dtype = getattr(torch, engines[0].model.dtype)
    peer = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=dtype).eval()
    vocab_size = engines[0].model.spec.vocab_size
    rows = []
    print(f"{engines[0].model.dtype}, {torch.get_num_threads()} threads, {options.pairs} pairs")
    print(f"{'seqs':>5} {'weft tok/s':>11} {'outside':>8} {'no overlap':>11} {'outside':>8}"
          f" {'transformers':>13} {'ratio':>6}")  # fmt: skip
    for count in map(int, options.sequences.split(",")):
        samples: dict[str, list[float]] = {}
        for pair in range(options.pairs + 1):
            taken = {}
            for depth, engine in engines.items():
                rate, outside = run_weft(engine, timers[depth], count, pair)
                taken |= {f"rate{depth}": rate, f"outside{depth}": outside}
            taken["peer"] = run_transformers(peer, count, vocab_size, pair)
            if pair:  # the first pair warms up
                for name, value in taken.items():
                    samples.setdefault(name, []).append(value)
        row = {name: statistics.median(values) for name, values in samples.items()}
        row["ratio"] = statistics.median(
            a / b for a, b in zip(samples["rate1"], samples["peer"], strict=True)
        )
        rows.append({"sequences": count, **row, "samples": samples})
        print(f"{count:>5} {row['rate1']:>11.0f} {row['outside1']:>8.1%} {row['rate0']:>11.0f}"
              f" {row['outside0']:>8.1%} {row['peer']:>13.0f} {row['ratio']:>6.2f}")  # fmt: skip
    for engine in engines.values():
        engine.executor.close()
    return rows


if __name__ == "__main__":
    main()
