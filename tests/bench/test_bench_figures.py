"""Figures of a benchmark by hand: times at the socket, percentiles, goodput, fits, traces."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time

import pytest
from fakeserver import chunk

from weft.bench.asking import _Reading
from weft.bench.client import BrokenError, TimedAnswer
from weft.bench.kernels import bench_kernels, format_kernels
from weft.bench.load import Load, Stop
from weft.bench.options import KernelsBench, ServeBench, ThroughputBench
from weft.bench.prompts import PromptMaker
from weft.bench.stats import Outcome, Slo, summarise
from weft.bench.throughput import bench_throughput
from weft.core.errors import ConfigError, ParameterError, WeftError
from weft.kernels.measure import Case
from weft.workload.arrivals import gamma_times
from weft.workload.lengths import parse_lengths
from weft.workload.percentiles import percentiles_ms
from weft.workload.sweep import fit_saturation, serviceable
from weft.workload.trace import read_trace


def done(sent: float, *events: float, tokens: int | None = None) -> Outcome:
    outcome = Outcome(due_s=sent, asked_tokens=len(events), sent_s=sent, end_s=events[-1])
    outcome.event_s = list(events)
    outcome.output_tokens = len(events) if tokens is None else tokens
    return outcome


def test_latencies_of_one_request():
    outcome = done(1.0, 1.5, 1.75, 2.5, 3.5)
    assert (outcome.ttft_s, outcome.e2e_s) == (0.5, 2.5)
    assert outcome.itl_s == [0.25, 0.75, 1.0]
    assert outcome.tpot_s == 2.0 / 3
    # two tokens in an event: the time is shared among all of them
    assert done(0.0, 1.0, 2.0, tokens=5).tpot_s == 0.25
    assert done(0.0, 1.0).tpot_s is None


def test_percentiles_are_those_of_the_definition():
    values = [i / 1000 for i in range(1001)]  # 0 to 1000 ms
    random.Random(0).shuffle(values)
    found = percentiles_ms(values)
    wanted = {
        "mean": 500,
        "p50": 500,
        "p90": 900,
        "p95": 950,
        "p99": 990,
        "p99.9": 999,
        "max": 1000,
    }
    assert found == pytest.approx({"mean": 500, **wanted, "max": 1000})
    assert percentiles_ms([]) is None
    assert percentiles_ms([0.004])["p99.9"] == pytest.approx(4.0)


def test_a_run_is_summed_up():
    failed = Outcome(0.0, 4, sent_s=0.0, end_s=4.0, failure="http 429", detail="later")
    late = done(2.0, 3.0, 4.0, 5.0, 10.0)
    figures = summarise([done(0.0, 1.0, 2.0), late, failed, failed], Slo(ttft_ms=1000, e2e_ms=5000))
    assert figures["seconds"] == 10.0
    assert figures["completed"] == 2
    assert figures["requests_per_s"] == 0.2
    assert figures["output_tokens_per_s"] == 0.6
    assert figures["failures"] == {"http 429": 2}
    assert figures["failure_examples"] == {"http 429": "later"}
    assert figures["attainment"] == 0.25  # who fails has not met anything
    assert figures["goodput_per_s"] == pytest.approx(0.1)
    assert figures["ttft_ms"]["max"] == 1000.0
    assert summarise([failed])["ttft_ms"] is None


# -- times at the socket ------------------------------------------------------------------------


def stream_of(*events: object) -> bytes:
    parts = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"]
    parts.append(b"transfer-encoding: chunked\r\n\r\n")
    for event in events:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        parts.append(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    return b"".join([*parts, b"0\r\n\r\n"])


TEXTS = ("", "a", "bé", "c")
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
STREAM = stream_of(*(chunk({}, text) for text in TEXTS), USAGE, "[DONE]")


def read(pieces: list[bytes]) -> Outcome:
    """Feed pieces, one a second, and return what was noted."""

    async def go() -> Outcome:
        reading = _Reading(Outcome(0.0, 3), lambda now: now)
        answer = TimedAnswer(reading.event)
        for second, piece in enumerate(pieces):
            answer.feed(piece, float(second))
        assert await answer.arrived is True
        reading.end()
        return reading.outcome

    return asyncio.run(go())


def test_an_event_has_the_time_of_its_last_byte():
    ends = [i + 4 for i in range(len(STREAM)) if STREAM[i : i + 4] == b"\n\n\r\n"]
    outcome = read([STREAM[i : i + 1] for i in range(len(STREAM))])
    assert outcome.failure is None
    # a byte a second: its data is complete with the first of its two newlines
    assert outcome.event_s == [float(end - 4) for end in ends[1:4]]
    assert (outcome.input_tokens, outcome.output_tokens) == (9, 3)


@pytest.mark.parametrize("seed", range(20))
def test_events_are_read_however_they_are_cut(seed):
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(STREAM)), draw.randint(0, 12)))
    pieces = [STREAM[a:b] for a, b in itertools.pairwise([0, *cuts, len(STREAM)])]
    outcome = read(pieces)
    assert outcome.failure is None
    assert len(outcome.event_s) == 3
    assert outcome.event_s == sorted(outcome.event_s)


@pytest.mark.parametrize("length", [0, 10, len(STREAM) - 1])
def test_an_answer_that_ends_early_is_broken(length):
    async def go() -> None:
        answer = TimedAnswer(lambda *_: None)
        answer.feed(STREAM[:length], 0.0)
        answer.end(None)
        with pytest.raises(BrokenError, match="closed"):
            await answer.arrived

    asyncio.run(go())


# -- arrivals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_intervals_have_the_rate_and_the_burstiness(burstiness, variation):
    times = list(itertools.islice(gamma_times(8.0, burstiness, 3), 20001))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(variation, rel=0.06)


def test_loads_stop_and_wait_for_all_answers():
    async def go() -> tuple[int, int, int]:
        most = open_now = 0

        async def send(number: int, due: float) -> Outcome:
            nonlocal most, open_now
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0.001 * (number % 3))
            open_now -= 1
            return done(due, due + 1.0)

        closed = await Load(send, Stop(requests=40), lambda _: None).closed_loop(5)
        assert most == 5
        at_once = (0.0 for _ in itertools.count())
        opened = await Load(send, Stop(requests=30), lambda _: None).open_loop(at_once)
        until = await Load(send, Stop(seconds=0.05), lambda _: None).open_loop(
            0.01 * i for i in itertools.count()
        )
        return len(closed), len(opened), len(until)

    assert asyncio.run(go()) == (40, 30, 5)


# -- sweeps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("knee", [6.0, 11.3, 20.0])
def test_the_knee_is_found(knee, noise):
    draw = random.Random(1)
    offered = [1 + 31 / 12 * i for i in range(13)]
    given = [min(x, knee) + draw.gauss(0, noise) for x in offered]
    fit = fit_saturation(offered, given)
    assert fit is not None
    assert fit.knee == pytest.approx(knee, abs=0.02 if noise == 0 else 1.0)
    assert fit.plateau == pytest.approx(knee, abs=0.02 if noise == 0 else 1.0)


def test_a_load_that_never_bends_has_no_knee():
    offered = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert fit_saturation(offered, offered) is None
    assert fit_saturation(offered, [0.95 * x for x in offered]) is None
    assert fit_saturation([1.0, 2.0, 4.0], [1.0, 2.0, 2.0]) is None  # too few to tell
    falling = fit_saturation(offered, [1.0, 2.0, 4.0, 3.0, 1.0])
    assert falling is not None
    assert falling.slope_after < 0


def test_the_serviceable_load_ends_at_the_first_miss():
    runs = [{"load": x, "attainment": y} for x, y in ((1, 1.0), (4, 0.96), (2, 0.99), (8, 0.5))]
    assert serviceable(runs) == 4
    assert serviceable([*runs, {"load": 3, "attainment": 0.9}]) == 2
    assert serviceable([{"load": 1, "attainment": 0.94}]) is None


# -- prompts and lengths ------------------------------------------------------------------------


def test_lengths():
    draw = random.Random(0)
    assert parse_lengths("17", "x")(draw) == 17
    even = [parse_lengths("5..9", "x")(draw) for _ in range(400)]
    assert set(even) == {5, 6, 7, 8, 9}
    drawn = [parse_lengths("lognormal:200:100", "x")(draw) for _ in range(20000)]
    assert statistics.fmean(drawn) == pytest.approx(200, rel=0.03)
    assert statistics.stdev(drawn) == pytest.approx(100, rel=0.06)
    for wrong in (
        "",
        "0",
        "-1",
        "x",
        "9..5",
        "0..4",
        "lognormal:5",
        "lognormal:1..2:3",
        "1e3",
        "²",
    ):
        with pytest.raises(ParameterError, match="input_tokens must be a length"):
            parse_lengths(wrong, "input_tokens")


def test_prompts_have_their_length_and_share_what_they_should():
    maker = PromptMaker(seed=1, token_ids=500, shared_tokens=8)
    first, second = maker.make(0, 20), maker.make(1, 20)
    assert len(first) == len(second) == 28
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert first == maker.make(0, 20)
    blocks = PromptMaker(seed=1, token_ids=500)
    long, longer = blocks.make(0, 1100, (5, 6, 7)), blocks.make(1, 1500, (5, 6, 8))
    assert (len(long), len(longer)) == (1100, 1500)
    assert long[:1024] == longer[:1024]
    assert long[1024:] != longer[1024:1100]
    text = PromptMaker(seed=1, tokens_per_word=2.0, extra_tokens=7).make(0, 107)
    assert isinstance(text, str)
    assert len(text.split()) == 50


# -- traces -------------------------------------------------------------------------------------


def test_traces_of_each_form(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,110,27\n"
    )
    assert [(a.at_s, a.input_tokens, a.output_tokens) for a in read_trace(str(azure))] == [
        (0.0, 4808, 10), (pytest.approx(1.5), 110, 27),
    ]  # fmt: skip
    mooncake = tmp_path / "mooncake.jsonl"
    line = {"timestamp": 27000, "input_length": 700, "output_length": 5, "hash_ids": [0, 3]}
    mooncake.write_text(json.dumps(line) + "\n" + json.dumps({**line, "timestamp": 3000}) + "\n")
    first, second = read_trace(str(mooncake))
    assert (first.at_s, second.at_s, second.blocks) == (0.0, 24.0, (0, 3))
    own = tmp_path / "own.jsonl"
    own.write_text('{"at_s": 1, "prompt": "hello", "output_tokens": 3}\n\n'
                   '{"at_s": 1.5, "input_tokens": 8, "output_tokens": 4}\n')  # fmt: skip
    first, second = read_trace(str(own))
    assert (first.prompt, first.at_s, second.at_s, second.input_tokens) == ("hello", 0.0, 0.5, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ("nonsense\n", "trace:1: not a request"),
        ("[1]\n", "trace:1: a line must be an object"),
        ('{"at_s": 1}\n', "trace:1: 'input_tokens' is missing"),
        ('{"at_s": "x", "input_tokens": 1, "output_tokens": 1}\n', "trace:1: not a request"),
        ('{"at_s": NaN, "input_tokens": 1, "output_tokens": 1}\n', "trace:1: not a request"),
        ('{"at_s": 0, "input_tokens": -1, "output_tokens": 1}\n', "trace:1: not a request"),
        ('{"at_s": 0, "input_tokens": 1.5, "output_tokens": 1}\n', "trace:1: not a request"),
        ('{"timestamp": 0, "hash_ids": [1]}\n', "trace:1: 'input_length' is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1,1\nx,1,1\n", "trace:3"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.97,1\n", "trace:2: not a row"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path, text, words):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ParameterError, match=words):
        read_trace(str(path))


# -- settings -----------------------------------------------------------------------------------


def test_rates():
    assert ServeBench(rate="4,1").rates() == [1.0, 4.0]
    thirteen = ServeBench(rate="1..32:13").rates()
    assert len(thirteen) == 13
    assert (thirteen[0], thirteen[-1]) == (1.0, 32.0)
    for wrong in (
        "fast",
        "",
        "0",
        "-1",
        "1,,2",
        "1..4",
        "1..4:1",
        "1..4:0",
        "inf",
        "nan",
        "1..9:9999",
    ):
        with pytest.raises(ConfigError, match="rate must be numbers above 0"):
            ServeBench(rate=wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"arrivals": "trace"}, "--trace FILE"),
        ({"trace": "x"}, "--arrivals trace"),
        ({"prompts": "ids", "endpoint": "chat"}, "completions only"),
        ({"clients": (0,)}, "clients"),
        ({"burstiness": 0.0}, "burstiness must be a number, above 0"),
        ({"output_tokens": "many"}, "output_tokens must be a length"),
        ({"arrivals": "weekly"}, "one of poisson, gamma, closed, trace"),
        ({"clients": (8,)}, "--clients needs --arrivals closed; they are poisson"),
        ({"arrivals": "closed", "rate": "5"}, "--rate needs --arrivals poisson or gamma"),
        ({"burstiness": 0.2}, "--burstiness needs --arrivals gamma"),
        ({"arrivals": "gamma", "speed": 2.0}, "--speed needs --arrivals trace"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServeBench(**settings)


# -- kernels ------------------------------------------------------------------------------------


class TwoKernels:
    """One bound by memory, one by products; each notes how often it ran."""

    def __init__(self) -> None:
        self.ran = [0, 0]
        self.count = 0

    def set_threads(self, count):
        self.count = count

    def threads(self):
        return self.count

    def clock(self):
        return time.perf_counter()

    def isa(self):
        return "avx2"

    def read_rate(self, _seconds):
        return 1e9

    def multiply_rate(self, dtype, _seconds):
        assert dtype == "bfloat16"
        return 4e9

    def cases(self):
        for index, (name, read, flops) in enumerate((("copy", 1e6, 1e6), ("mul", 1e3, 8e6))):
            yield Case(name, read, flops, "bfloat16", lambda i=index: self.ran.__setitem__(i, 1))


def test_shares_of_the_roofline_follow_from_the_times():
    kernels = TwoKernels()
    result = bench_kernels(kernels, KernelsBench(seconds=0.001, threads=3), "a CPU")
    copy, mul = result["kernels"]
    assert kernels.ran == [1, 1]
    assert (result["processor"], result["isa"], result["threads"]) == ("a CPU", "avx2", 3)
    assert (result["read_bytes_per_s"], result["multiply_flops_per_s"]) == (1e9, {"bfloat16": 4e9})
    assert format_kernels(result).startswith("a CPU, instruction set avx2, 3 threads\n")
    assert (copy["bound"], mul["bound"]) == ("memory", "compute")
    # a megabyte takes 1 ms at 1 GB/s, 8 million operations 2 ms at 4 GFLOP/s
    assert copy["share"] * copy["median_us"] == pytest.approx(1e3)
    assert mul["share"] * mul["median_us"] == pytest.approx(2e3)
    assert mul["best_us"] <= mul["median_us"]
    only = bench_kernels(kernels, KernelsBench(seconds=0.001, only="mu"), "a CPU")
    assert [row["name"] for row in only["kernels"]] == ["mul"]
    with pytest.raises(ConfigError, match="No kernel has 'x'"):
        bench_kernels(kernels, KernelsBench(only="x"), "a CPU")


# -- throughput ---------------------------------------------------------------------------------


class CountingEngine:
    """Gives the tokens of all prompts in turns, as an engine that runs them together does."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def token_iter(self, prompts, params):
        self.calls.append(tuple(len(prompt) for prompt in prompts))
        for step in range(max(each.max_tokens for each in params)):
            for index, each in enumerate(params):
                if step < each.max_tokens:
                    yield index, 1


def test_throughput_counts_tokens_and_warms_up():
    engine = CountingEngine()
    options = ThroughputBench(prompts=3, input_tokens="5", output_tokens="4", repeats=2)
    result = bench_throughput(engine, "m", 500, options)
    assert engine.calls == [(5, 5, 5)] * 3
    spread = result["output_tokens_per_s"]
    assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"] < math.inf
    assert result["first_token_s"]["median"] <= result["all_first_tokens_s"]["median"]
    # 9 of 12 tokens come after all prompts have their first one
    rest = result["seconds"]["median"] - result["all_first_tokens_s"]["median"]
    assert result["decode_tokens_per_s"]["median"] == pytest.approx(9 / rest, rel=0.5)
    one = ThroughputBench(prompts=1, input_tokens="5", output_tokens="1", repeats=1)
    assert bench_throughput(engine, "m", 500, one)["decode_tokens_per_s"] is None
    with pytest.raises(WeftError, match="no ids"):
        bench_throughput(engine, "m", 50, options)
