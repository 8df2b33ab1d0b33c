"""Decoding with the resident loop against the loop in Python, in process, on the same threads.

    python benchmarks/resident.py [--model FOLDER] [--sequences 1,8,32] [--threads 1] [--pairs 7]
        [--ask '{"repetition_penalty": 1.1}'] [--out benchmarks/results/resident.json]

Drawn tokens, 64-token prompts, 256 tokens each. Two engines in one process take turns, and must
give the same tokens. ``ratio`` is the median over the pairs of tokens a second, resident over not.
``--ask``: more sampling parameters, of every request.
``Python us`` is the CPU time a token of the thread that plans and commits; so that it can be told,
the model computes on another one here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import report
from weft.core.config import EngineConfig
from weft.core.plan import StepOutputs
from weft.core.ports import Lease
from weft.core.types import Request, SamplingParams
from weft.engine.driven import DrivenEngine

PROMPT_TOKENS, NEW_TOKENS = 64, 256


class Answers:
    """An inbox that hands out all requests at once, and keeps the tokens of each."""

    def __init__(self, requests: list[Request]) -> None:
        self.tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        self._requests = requests

    def receive(self) -> Any:
        requests, self._requests = self._requests, []
        return requests, ()

    def computing(self, sequence_ids: Any) -> None:
        """Nobody is blamed for crashes here."""

    def lend(self, lease: Lease) -> None:
        lease.grant(None)

    def publish(self, outputs: StepOutputs) -> None:
        for sequence_id, token in outputs.tokens:
            self.tokens[sequence_id].append(token)
        for update in outputs.updates:
            if update.token is not None:
                self.tokens[update.sequence_id].append(update.token)

    def wait(self) -> None:
        raise AssertionError("the benchmark never waits")


def drawn(engine: DrivenEngine, count: int, salt: int, ask: dict[str, Any]) -> list[Request]:
    """Requests with prompts of drawn tokens, others for each salt."""
    draw, vocabulary = random.Random(1000 * salt + count), engine.vocab_size
    requests = []
    for number in range(count):
        prompt = tuple(draw.randrange(8, vocabulary) for _ in range(PROMPT_TOKENS))
        wanted = {"temperature": 0.8, "max_tokens": NEW_TOKENS, "ignore_eos": True, **ask}
        params = SamplingParams(seed=number, **wanted).with_defaults({})
        requests.append(Request(number, prompt, params))
    return requests


def run(
    engine: DrivenEngine, count: int, salt: int, ask: dict[str, Any]
) -> tuple[float, float, dict[int, list[int]]]:
    """Tokens a second, CPU microseconds of this thread a token, and the tokens."""
    answers = Answers(drawn(engine, count, salt, ask))
    started, cpu = time.perf_counter(), time.thread_time()
    engine.run(answers)
    seconds, cpu = time.perf_counter() - started, time.thread_time() - cpu
    tokens = sum(map(len, answers.tokens.values()))
    return tokens / seconds, 1e6 * cpu / tokens, answers.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ask", type=json.loads, default={}, metavar="JSON")
    options = parser.parse_args()
    settings: dict[str, Any] = {"model": options.model, "threads": options.threads}
    settings |= {"prefix_caching": False, "kv_memory": "512MiB", "max_num_seqs": 64}
    settings["steps_in_flight"] = 1
    engines = {r: DrivenEngine(EngineConfig(resident=r, **settings)) for r in ("off", "auto")}
    print(
        f"{'seqs':>5} {'tok/s':>8} {'resident':>9} {'ratio':>6} {'Python us':>10} {'resident':>9}"
    )
    rows = []
    for count in map(int, options.sequences.split(",")):
        samples: dict[str, list[tuple[float, float]]] = {"off": [], "auto": []}
        for pair in range(options.pairs + 1):
            order = ("off", "auto") if pair % 2 else ("auto", "off")
            found = {name: run(engines[name], count, pair, options.ask) for name in order}
            assert found["off"][2] == found["auto"][2], "the tokens differ"
            if pair:  # the first pair warms up
                for name in order:
                    samples[name].append(found[name][:2])
        ratio = statistics.median(
            new[0] / old[0] for new, old in zip(samples["auto"], samples["off"], strict=True)
        )
        medians = {
            name: [statistics.median(part) for part in zip(*pairs, strict=True)]
            for name, pairs in samples.items()
        }
        (old, old_us), (new, new_us) = medians["off"], medians["auto"]
        print(f"{count:>5} {old:>8.0f} {new:>9.0f} {ratio:>6.2f} {old_us:>10.1f} {new_us:>9.1f}")
        rows.append({"sequences": count, "ratio": ratio, "samples": samples})
    totals = engines["auto"].totals
    print(f"{totals.resident_steps} of {totals.steps} steps were the resident loop's")
    for engine in engines.values():
        engine.close()
    if options.out:
        told = {"model": options.model, "threads": options.threads, "ask": options.ask}
        report.save(options.out, **told, rows=rows)


if __name__ == "__main__":
    main()
