"""Orders of lines: each line runs once, invalid ones too; finished lines inform the rest."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import msgspec
import numpy as np
import pytest
from answering import Answering, read, request

from weft.batch.demand import demand_of
from weft.batch.lines import parse_line
from weft.batch.order import InOrder, Planned, Prompt, plan, read_prompts
from weft.batch.ports import BatchLine, LineAnswer, NobodyAnswersError, Result
from weft.batch.prompts import guess_prompt
from weft.batch.results import Results
from weft.batch.runner import Runner
from weft.blend.density import Rates
from weft.blend.order import Room
from weft.blend.sheets import sheet_rates
from weft.core.errors import ConfigError
from weft.cost.hardware import hardware
from weft.cost.shape import model_shape

RATES = Rates(token_s=1e-4, square_s=1e-9, read_s=1e-7)
ROOM = Room(kv_tokens=4000, requests=8)


def lines(count: int, seed: int = 0) -> list[object]:
    """Long prompts with short answers, prompts of one beginning with long answers, and others."""
    draw = random.Random(seed)
    made: list[object] = []
    for i in range(count):
        kind = draw.randrange(10)
        if kind == 0:
            made.append("{")
        elif kind == 1:
            made.append(request(f"r{i}", url="/v1/embeddings", body={"input": "x"}))
        elif kind < 5:
            prompt = "".join(draw.choices("abcdef", k=400))
            made.append(request(f"r{i}", body={"prompt": prompt, "max_tokens": 2}))
        else:
            body = {"messages": [{"role": "user", "content": f"{'shared ' * 20}{i}"}]}
            made.append(request(f"r{i}", url="/v1/chat/completions", body=body))
    return made


def opened(source, **options) -> Results:
    folder = source.path.parent
    return Results(folder / "out.jsonl", folder / "err.jsonl", source, "m", **options)


def planned(kind: str, source, results: Results, room: Room = ROOM) -> Planned:
    reading = read_prompts(source, results, results.outputs(), guess_prompt)
    return plan(kind, asyncio.run(reading), room, RATES)


def play(order, room: int, seed: int = 0) -> tuple[list[int], int]:
    """The lines that an order hands out while they end at random, and how many ran at most."""
    draw, taken, running, most = random.Random(seed), [], [], 0
    while order.remaining or running:
        while (index := order.next()) is not None:
            taken.append(index)
            running.append(index)
        most = max(most, len(running))
        assert 0 < len(running) <= room
        ended = running.pop(draw.randrange(len(running)))
        order.ended(ended, draw.choice([None, 1, 30]))
    return taken, most


@pytest.mark.parametrize("kind", ["fcfs", "dfs", "blend"])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_every_line_goes_once_and_no_more_than_may_be_open(write, kind, count):
    source = write(*lines(count))
    results = opened(source)
    order = InOrder(count, results, 8) if kind == "fcfs" else planned(kind, source, results)
    assert order.remaining == count
    taken, most = play(order, 8)
    assert sorted(taken) == list(range(count))
    assert most == min(8, count)
    if kind == "fcfs":
        assert taken == list(range(count))
    results.close()


def test_depth_first_puts_prompts_of_one_beginning_together(write):
    bodies = [{"prompt": f"{'one ' if i % 2 else 'two '}{'of many ' * 20}{i}"} for i in range(20)]
    source = write(*[request(f"r{i}", body=body) for i, body in enumerate(bodies)])
    results = opened(source)
    taken, _ = play(planned("dfs", source, results), 8)
    assert sum(a % 2 != b % 2 for a, b in itertools.pairwise(taken)) == 1
    results.close()


def test_lines_with_a_result_are_left_out_and_their_lengths_known(write):
    source = write(*lines(60))
    results = opened(source)
    usage = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 9}}).encode()
    for index in range(0, 60, 3):
        failed = index % 2 == 0
        error = {"message": "no"} if failed else None
        results.put(index, Result(f"r{index}", LineAnswer(200, "x", usage), error))
    results.close()
    results = opened(source)
    assert results.outputs() == dict.fromkeys(range(3, 60, 6), 9)
    for kind in ("dfs", "blend"):
        taken, _ = play(planned(kind, source, results), 8)
        assert sorted(taken) == [i for i in range(60) if i % 3]
    results.close()


def test_samples_are_run_once_and_kept_when_the_run_is_cut_short(write):
    """The results of blend's samples are results; the next run asks what is missing only."""
    source = write(*lines(200))
    gone = NobodyAnswersError("gone")

    def run(most: int) -> None:
        results = opened(source)
        answers = Answering(lambda _: gone if len(answers.asked) > most else None)

        async def go() -> None:
            reading = read_prompts(source, results, results.outputs(), guess_prompt)
            order = plan("blend", await reading, ROOM, RATES)
            await Runner(source, results, answers, order).run()

        try:
            asyncio.run(go())
        finally:
            results.close()

    with pytest.raises(NobodyAnswersError):
        run(90)
    assert len(read(source.path.parent / "out.jsonl")) >= 60
    run(200)
    files = [read(source.path.parent / name) for name in ("out.jsonl", "err.jsonl")]
    ids = [line["id"] for line in files[0] + files[1]]
    assert len(ids) == len(set(ids)) == 200


def test_progress_of_a_planned_line_is_passed_on(write):
    source = write("{", *[request(f"r{i}") for i in range(3)])
    results = opened(source)
    seen: list[tuple[int, int]] = []

    class Told:
        remaining = 0

        def progress(self, number: int, output: int) -> None:
            seen.append((number, output))

    order = Planned(Told(), [1, 2, 3], [0], 8)
    for index in range(4):
        order.progress(index, 5)
    assert seen == [(0, 5), (1, 5), (2, 5)]
    results.close()


def test_what_has_not_reached_the_engine_does_not_run(write):
    """A line that waited for room counted as one that gains a token a step."""
    source = write(*[request(f"r{i}") for i in range(40)])
    results = opened(source)
    order = planned("blend", source, results)
    first = [order.next() for _ in range(2)]
    order.full = lambda: True
    assert order.next() is None
    order.full = lambda: False
    forecast = order._order.forecast
    leaf = [order._order._leaf[index] for index in first]
    order.progress(first[0], 9)
    assert [forecast.age(one) for one in leaf] == [9, 9]
    order.started(first[1])
    assert [forecast.age(one) for one in leaf] == [9, 0]
    order.progress(first[1], 2)
    assert forecast.now == 11
    assert order.next() is not None
    forecast.check()
    results.close()


def test_choices_of_a_line_run_beside_each_other(write):
    """The end of a line of n choices moved the clock by the sum of their tokens."""
    body = {"prompt": "x" * 80, "max_tokens": 30, "n": 3}
    source = write(*[request(f"r{i}", body=body) for i in range(4)])
    results = opened(source)
    order = planned("blend", source, results)
    forecast = order._order.forecast
    first = order.next()
    before = forecast.held()
    order.progress(first, 8)
    assert forecast.now == 8
    assert forecast.held() == before + 3 * 8
    order.ended(first, 3 * 10)
    assert forecast.now == 10
    results.close()


def guessed(url: str, **body: object) -> Prompt | None:
    line = msgspec.json.decode(json.dumps(request("a", url=url, body=body)), type=BatchLine)
    return guess_prompt(line)


def test_prompts_that_begin_alike_do_so_when_guessed():
    first = guessed("/v1/chat/completions", messages=[{"role": "system", "content": "Be brief."}])
    other = guessed("/v1/chat/completions", messages=[{"role": "system", "content": "Be long."}])
    assert first is not None
    assert other is not None
    common = np.argmin(first.tokens[: len(other.tokens)] == other.tokens[: len(first.tokens)])
    assert common * 4 >= len('[{"role": "system", "content": "Be ') - 4


@pytest.mark.parametrize(
    ("url", "body", "longest"),
    [
        ("/v1/completions", {"prompt": "x"}, 16),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}, 5),
        ("/v1/chat/completions", {"messages": []}, None),
        ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 7}, 7),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}, 3),
    ],
)
def test_bounds_of_outputs_are_those_of_the_bodies(url, body, longest):
    prompt = guessed(url, **body)
    assert prompt is not None
    assert prompt.longest == longest


def test_token_ids_are_taken_as_they_are():
    prompt = guessed("/v1/completions", prompt=[5, 6, 70000])
    assert prompt is not None
    assert prompt.tokens.tolist() == [5, 6, 70000]
    assert guessed("/v1/embeddings", input="x") is None
    assert guessed("/v1/completions", prompt="x", max_tokens="many") is None


def test_a_sheet_weighs_with_the_types_that_the_engine_has():
    shape, h100 = model_shape("llama-3.1-8b"), hardware("h100")
    assert sheet_rates(shape, h100, {}) == Rates.of(shape, h100, "bf16", 2.0)
    for engine, dtype, kv_bytes in (
        ({"dtype": "float32"}, "fp32", 4.0),
        ({"dtype": "float16", "kv_dtype": "float16"}, "fp16", 2.0),
        ({"dtype": "bfloat16", "kv_dtype": "int8"}, "bf16", 1 + 4 / 128),
        ({"dtype": "bfloat16", "weights": "fp8 (a scale an output, activations in FP8 by token)"},
         "fp8", 2.0),
        ({"dtype": "bfloat16", "weights": "fp8 (a scale an output, activations in floats)"},
         "bf16", 2.0),
        ({"dtype": "bfloat16", "weights": "int8 (a scale an output)"}, "bf16", 2.0),
    ):  # fmt: skip
        assert sheet_rates(shape, h100, engine) == Rates.of(shape, h100, dtype, kv_bytes)
    with pytest.raises(ConfigError, match="t4 does not compute in bf16"):
        sheet_rates(shape, hardware("t4"), {"dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/rerank", {"query": "q" * 38, "documents": ["d" * 36]}),
        ("/v1/score", {"text_1": "q" * 38, "text_2": ["d" * 36]}),
        ("/v1/embeddings", {"input": ["d" * 76]}),
    ],
)
def test_vectors_and_scores_are_all_input(url, body):
    """Four bytes of both texts count as a token; there is no output to plan with."""
    given = {"custom_id": "1", "method": "POST", "url": url, "body": body}
    line = parse_line(json.dumps(given).encode())
    demand = demand_of(line)
    assert (demand.input_tokens, demand.output_tokens) == (20, 0)
    assert guess_prompt(line) is None
