"""Structured output on the built-in model: the share of valid output, and the cost of a token.

    python benchmarks/structured.py [--schemas 500] [--out benchmarks/results/structured.json]

First random schemas (`tests/numeric/schemas.py`) at two temperatures: every output that ends by
``stop`` has to satisfy its schema; one that does not ends the run with an error. Then the time of
a token with free text, a schema, and log probabilities, for 1 and 8 sequences, interleaved. CPU
time is of the whole process, with one thread for the model: on a busy machine only that can be
compared.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import torch

import report
from weft.core.errors import GrammarError
from weft.core.plan import RowAdd, Update
from weft.core.types import Request, SamplingParams
from weft.engine.local import LocalEngine
from weft.exec.grammar import GrammarRows
from weft.text import Tokenizer
from weft.text.grammar import GrammarChecker, json_schema_grammar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "numeric"))
from schemas import random_schema

MAX_TOKENS = 300
TIMED_TOKENS = 256
AT_ONCE = 16
ENDLESS = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 8}},
        "required": ["n", "s"],
        "additionalProperties": False,
    },
}


class Runner:
    """Runs sequences on an engine in this process."""

    def __init__(self) -> None:
        self.engine = LocalEngine({"model": "builtin", "threads": 1})
        self.served = self.engine.served
        self.tokenizer = Tokenizer.load(Path(self.served.folder))
        self._ids = 0

    def run(self, many: Seq[SamplingParams]) -> list[tuple[str, str]]:
        """Return text and end of a sequence for each set of parameters."""
        news: queue.Queue[Update] = queue.Queue()
        prompt = tuple(self.tokenizer.encode("Answer: "))
        requests = []
        for params in many:
            self._ids += 1
            settled = params.with_defaults({})
            requests.append(Request(self._ids, prompt, settled, self.served.eos_token_ids))
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        ends: dict[int, str] = {}
        self.engine.client.submit(requests, lambda updates: [news.put(u) for u in updates] and None)
        while len(ends) < len(requests):
            update = news.get(timeout=120)
            if update.token is not None:
                tokens[update.sequence_id].append(update.token)
            if update.finish is not None:
                ends[update.sequence_id] = update.finish
                if update.error is not None:
                    raise update.error
        return [(self.tokenizer.decode(tokens[r.id]), ends[r.id]) for r in requests]


def validity(runner: Runner, count: int, temperature: float) -> dict[str, Any]:
    """Ends of the outputs of ``count`` schemas; raises for one that is not valid."""
    served = runner.served
    checker = GrammarChecker(runner.tokenizer, served.vocab_size, served.eos_token_ids)
    schemas: list[tuple[dict[str, Any], str]] = []
    refused: Counter[str] = Counter()
    seed = 0
    while len(schemas) < count:
        schema = random_schema(seed)
        seed += 1
        try:
            grammar = json_schema_grammar(json.dumps(schema))
            checker.check(grammar)
        except GrammarError as error:
            refused[error.message[:60]] += 1
            continue
        schemas.append((schema, grammar))
    ends: Counter[str] = Counter()
    for start in range(0, count, AT_ONCE):
        batch = schemas[start : start + AT_ONCE]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=MAX_TOKENS, seed=start + i, grammar=grammar
            )
            for i, (_, grammar) in enumerate(batch)
        ]
        for (schema, _), (text, end) in zip(batch, runner.run(params), strict=True):
            ends[end] += 1
            if end == "stop":
                check(schema, text)
    return {
        "temperature": temperature,
        "schemas": count,
        "max_tokens": MAX_TOKENS,
        "valid": ends["stop"],
        "ended_by_length": ends["length"],
        "refused_before": dict(refused),
    }


def check(schema: dict[str, Any], text: str) -> None:
    """Raise if a text does not satisfy a schema."""
    try:
        # Formats but dates: a grammar takes the 29th of February in any year.
        formats = jsonschema.FormatChecker(("ipv4", "uuid"))
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        raise SystemExit(f"NOT VALID: {json.dumps(schema)}\n{text!r}\n{error}") from error


def overheads(runner: Runner, pairs: int) -> list[dict[str, Any]]:
    """Milliseconds of a step in each way of asking, for 1 and 8 sequences."""
    grammar = json_schema_grammar(json.dumps(ENDLESS))
    free = SamplingParams(temperature=0.7, max_tokens=TIMED_TOKENS, seed=1, ignore_eos=True)
    ways = {
        "free text": free,
        "schema": replace(free, ignore_eos=False, grammar=grammar),
        "logprobs=0": replace(free, logprobs=0),
        "logprobs=5": replace(free, logprobs=5),
        "logprobs=20": replace(free, logprobs=20),
    }
    rows = []
    for batch in (1, 8):
        elapsed: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for round_number in range(pairs + 1):
            for name in random.Random(round_number).sample(list(ways), len(ways)):
                many = [replace(ways[name], seed=round_number * 100 + i) for i in range(batch)]
                started, worked = time.perf_counter(), time.process_time()
                runner.run(many)
                if round_number:  # the first one warms up
                    worked = time.process_time() - worked
                    cpu[name].append(1e3 * worked / TIMED_TOKENS)
                    elapsed[name].append(1e3 * (time.perf_counter() - started) / TIMED_TOKENS)
        for name in ways:
            rows.append(
                {
                    "sequences": batch,
                    "asked": name,
                    **_compared("elapsed", elapsed["free text"], elapsed[name], batch),
                    **_compared("cpu", cpu["free text"], cpu[name], batch),
                }
            )
            print({key: value for key, value in rows[-1].items() if "samples" not in key})
    return rows


def _compared(what: str, base: Seq[float], own: Seq[float], batch: int) -> dict[str, Any]:
    """Milliseconds of a step, and what a token takes more than in the same round of free text."""
    more = [1e3 * (b - a) / batch for a, b in zip(base, own, strict=True)]
    return {
        f"{what}_step_ms": round(statistics.median(own), 3),
        f"{what}_more_us_a_token": round(statistics.median(more), 1),
        f"{what}_samples_ms": [round(value, 3) for value in own],
    }


def mask_cost(runner: Runner, grammar: str) -> list[dict[str, Any]]:
    """Microseconds a token that masking the logits and advancing the grammar take by themselves."""
    found = []
    for batch in (1, 8, 32):
        rows = GrammarRows(runner.engine.built.grammars)
        params = SamplingParams(grammar=grammar)
        for row in range(batch):
            rows.add(RowAdd(row, row, (1,), 1, params, frozenset(), ()))
        numbers = list(range(batch))
        draw = torch.Generator().manual_seed(batch)
        samples = []
        for _ in range(TIMED_TOKENS):
            logits = torch.randn(batch, runner.served.vocab_size, generator=draw)
            started = time.perf_counter()
            faults = rows.forbid(logits, numbers)
            masked = time.perf_counter() - started
            tokens = logits.argmax(-1).numpy()
            started = time.perf_counter()
            rows.advance(numbers, tokens)
            samples.append(1e6 * (masked + time.perf_counter() - started) / batch)
            assert not faults
        middle, slow = statistics.median(samples), sorted(samples)[int(0.99 * len(samples))]
        found.append({"sequences": batch, "us_a_token": round(middle, 1), "p99": round(slow, 1)})
        print(found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runner = Runner()
    shares = []
    for temperature in (0.7, 1.5) if options.schemas else ():
        shares.append(validity(runner, options.schemas, temperature))
        print(shares[-1])
    masks = mask_cost(runner, json_schema_grammar(json.dumps(ENDLESS)))
    rows = overheads(runner, options.pairs)
    runner.engine.close()
    if options.out is not None:
        report.save(options.out, validity=shares, masks=masks, overheads=rows)


if __name__ == "__main__":
    main()
