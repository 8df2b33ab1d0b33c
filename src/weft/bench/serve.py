"""``weft bench serve``: puts load on any OpenAI server and reports latency and throughput."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

import uvloop
from tqdm import tqdm

from weft.bench.asking import ask
from weft.bench.client import LoadClient, first_model
from weft.bench.load import Load, Stop
from weft.bench.meters import SAMPLE_S, CpuMeter, Meter, find_processes
from weft.bench.options import DEFAULT_REQUESTS, ServeBench
from weft.bench.prompts import PromptMaker
from weft.bench.stats import Outcome, Slo, summarise
from weft.core.addresses import host_of
from weft.core.errors import WeftError
from weft.workload.arrivals import gamma_times
from weft.workload.lengths import parse_lengths
from weft.workload.percentiles import percentiles_ms
from weft.workload.sweep import FEWEST_RATES, fit_saturation, serviceable
from weft.workload.trace import Arrival, read_trace

CALIBRATION_WORDS = (64, 192)


def bench_serve(options: ServeBench, meters: Seq[Meter] | None = None) -> dict[str, Any]:
    """Run all loads and return the result, as it is written as JSON.

    Args:
        meters: of what each load costs beside time; CPU time, where it can be read, if None.

    Raises:
        WeftError: no server, a wrong trace, no process of ``server_pids``, or a server that refuses
            the very first request.
    """
    arrivals = None if options.trace is None else read_trace(options.trace)
    if meters is None:
        meters = [CpuMeter(find_processes(*host_of(options.url), options.server_pids))]
    return uvloop.run(_Bench(options, arrivals, meters).run())


class _Bench:
    def __init__(
        self, options: ServeBench, arrivals: list[Arrival] | None, meters: Seq[Meter]
    ) -> None:
        self.options = options
        self.arrivals = arrivals
        self.meters = meters
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        self.client = LoadClient(options.url, key, options.timeout_s)
        self.body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": options.temperature,
        }
        if options.endpoint == "chat":
            self.body["messages"] = ()
        if options.ignore_eos:
            self.body["ignore_eos"] = True
        self.slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms)
        self._input = parse_lengths(options.input_tokens, "input_tokens")
        self._output = parse_lengths(options.output_tokens, "output_tokens")
        self.maker = PromptMaker(options.seed)

    async def run(self) -> dict[str, Any]:
        options = self.options
        try:
            self.body["model"] = options.model or await first_model(self.client)
            await self._make_prompts()
            for number in range(options.warmup):
                await self._must(self._ask(-1 - number, 0.0, time.perf_counter()))
            runs = [await self._one_load(load) for load in self._loads()]
        finally:
            self.client.close()
        return {
            "command": "weft bench serve",
            "options": {**asdict(options), "api_key": None},
            "server": self.client.address,
            "model": self.body["model"],
            "tokens_per_word": self.maker.tokens_per_word,
            "runs": runs,
            **self._of_the_sweep(runs),
        }

    def _loads(self) -> list[float]:
        if self.options.arrivals == "closed":
            return [float(clients) for clients in sorted(self.options.clients)]
        if self.arrivals is not None:
            last = max(self.arrivals[-1].at_s / self.options.speed, 1e-3)
            return [len(self.arrivals) / last]
        return self.options.rates()

    async def _one_load(self, load: float) -> dict[str, Any]:
        options = self.options
        stop = Stop(self._requests(), options.duration_s)
        hidden = not sys.stderr.isatty()
        unit = "clients" if options.arrivals == "closed" else "requests/s"
        with tqdm(total=stop.requests, desc=f"{load:g} {unit}", unit="req", disable=hidden) as bar:
            failed = 0

            def done(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.failure is not None
                bar.set_postfix_str(f"{failed} failed" if failed else "", refresh=False)
                bar.update()

            runner = Load(lambda number, due: self._ask(number, due, runner.started), stop, done)
            for meter in self.meters:
                meter.start()
            looking = asyncio.create_task(self._look())
            cpu, started = time.process_time(), time.perf_counter()
            if options.arrivals == "closed":
                outcomes = await runner.closed_loop(int(load))
            else:
                outcomes = await runner.open_loop(self._times(load))
            cpu, taken = time.process_time() - cpu, time.perf_counter() - started
            looking.cancel()
        figures = summarise(outcomes, self.slo if options.has_slo else None)
        tokens = figures["output_tokens"]
        client = {
            "cpu_share": cpu / taken,
            "cpu_s_per_output_token": cpu / tokens if tokens else None,
            "late_ms": percentiles_ms([outcome.sent_s - outcome.due_s for outcome in outcomes]),
        }
        result = {"load": load, "unit": unit, **figures, "client": client}
        result |= {meter.key: meter.end(taken, tokens) for meter in self.meters}
        if options.samples:
            result["samples"] = [asdict(outcome) for outcome in outcomes]
        return result

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            for meter in self.meters:
                meter.look()

    def _requests(self) -> int | None:
        if self.arrivals is not None:
            return min(self.options.requests or len(self.arrivals), len(self.arrivals))
        if self.options.requests is None and self.options.duration_s is None:
            return DEFAULT_REQUESTS
        return self.options.requests

    def _times(self, rate: float) -> Iterator[float]:
        if self.arrivals is not None:
            return (arrival.at_s / self.options.speed for arrival in self.arrivals)
        shape = self.options.burstiness if self.options.arrivals == "gamma" else 1.0
        return gamma_times(rate, shape, self.options.seed)

    async def _ask(self, number: int, due: float, started: float) -> Outcome:
        """Request ``number``; those below 0 are of the warm-up."""
        draw = random.Random(f"{self.options.seed} {number}")
        given, asked = self._input(draw), self._output(draw)
        blocks: tuple[int, ...] = ()
        text = None
        if self.arrivals is not None and number >= 0:
            arrival = self.arrivals[number]
            given, asked, blocks = arrival.input_tokens, arrival.output_tokens, arrival.blocks
            text = arrival.prompt
        outcome = Outcome(due, asked)
        prompt = self.maker.make(number, given, blocks) if text is None else text
        await ask(self.client, self.body, prompt, outcome, lambda now: now - started)
        outcome.end_s = time.perf_counter() - started
        return outcome

    async def _must(self, asking: Any) -> Outcome:
        outcome: Outcome = await asking
        if outcome.failure is not None:
            detail = f": {outcome.detail}" if outcome.detail else ""
            raise WeftError(f"{self.client.address}: {outcome.failure}{detail}")
        return outcome

    async def _make_prompts(self) -> None:
        """Measure how many tokens of the server a word has, and what it adds to a prompt."""
        options = self.options
        if options.prompts == "ids":
            self.maker = PromptMaker(
                options.seed, options.token_ids, shared_tokens=options.shared_prefix_tokens
            )
            return
        counts = []
        for words in CALIBRATION_WORDS:
            prompt = PromptMaker(options.seed).make(-words, words)
            asking = ask(self.client, self.body, prompt, Outcome(0.0, 1), lambda now: now)
            counts.append((await self._must(asking)).input_tokens)
        few, many = CALIBRATION_WORDS
        per_word = (counts[1] - counts[0]) / (many - few)
        if per_word <= 0:  # the server does not count them
            self.maker = PromptMaker(options.seed, shared_tokens=options.shared_prefix_tokens)
            return
        self.maker = PromptMaker(
            options.seed,
            tokens_per_word=per_word,
            extra_tokens=max(0.0, counts[0] - few * per_word),
            shared_tokens=options.shared_prefix_tokens,
        )

    def _of_the_sweep(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if len(runs) >= FEWEST_RATES:
            given = [run["requests_per_s"] for run in runs]
            fit = fit_saturation([run["load"] for run in runs], given)
            found["saturation"] = None if fit is None else asdict(fit)
        if self.options.has_slo:
            found["serviceable_load"] = serviceable(runs)
        return found
