"""Traces and jobs: reading files, errors in them, and shared prefixes."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import ParameterError
from weft.sim.jobs import answer_text, own_text, prompt_of, shared_text, trace_jobs
from weft.workload.lengths import parse_lengths
from weft.workload.percentiles import PERCENTILES, percentiles_ms
from weft.workload.trace import BLOCK_TOKENS, Arrival, read_requests, read_trace


def test_files_of_lengths_have_no_times(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens\n74,918,992\n290,0,290\n"
    )
    first, second = read_requests(str(path))
    assert math.isnan(first.at_s)
    assert (first.input_tokens, first.output_tokens, second.output_tokens) == (74, 918, 1)
    with pytest.raises(ParameterError, match="has lengths, but no times"):
        read_trace(str(path))


@pytest.mark.parametrize("row", ["74", "74,x", "74,-1", ",", "7.5,3"])
def test_a_wrong_row_of_lengths_is_named(tmp_path, row):
    path = tmp_path / "lengths.csv"
    path.write_text(f"num_prefill_tokens,num_decode_tokens\n1,2\n{row}\n")
    with pytest.raises(ParameterError, match=r"lengths\.csv:3: not a row with") as error:
        read_requests(str(path), "be_trace")
    assert error.value.param == "be_trace"


def test_lengths_about_a_middle():
    draw = random.Random(1)
    drawn = {parse_lengths("1000+-10%", "x")(draw) for _ in range(20000)}
    assert (min(drawn), max(drawn)) == (900, 1100)
    assert {parse_lengths("1+-10%", "x")(draw) for _ in range(9)} == {1}
    with pytest.raises(ParameterError):
        parse_lengths("1000+-x%", "x")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1))
def test_counted_percentiles_are_those_of_every_value(pairs):
    values = [float(value) for value, _ in pairs]
    counts = [count for _, count in pairs]
    spread = np.repeat(values, counts).tolist()
    found, wanted = percentiles_ms(values, counts), percentiles_ms(spread)
    assert len(PERCENTILES) + 2 == len(found)
    assert found == pytest.approx(wanted)


def test_blocks_of_a_trace_are_shared_exactly():
    long = Arrival(0.0, 1100, 5, (7, 8, 9))
    longer = Arrival(1.0, 1500, 5, (7, 8, 10))
    short = Arrival(2.0, 100, 5, (7,))
    jobs = list(trace_jobs([long, longer, short], "interactive"))
    first, second, third = (job.tokens() for job in jobs)
    assert [len(tokens) for tokens in (first, second, third)] == [1100, 1500, 100]
    assert [job.input_tokens for job in jobs] == [1100, 1500, 100]
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert not set(first[2 * BLOCK_TOKENS :]) & set(second)
    assert third == first[:100]
    # what a trace says nothing about is nobody else's
    assert not set(prompt_tokens(Arrival(0.0, 600, 5), 0)) & set(prompt_tokens(long, 1))
    assert not set(prompt_tokens(Arrival(0.0, 600, 5), 0)) & set(
        prompt_tokens(Arrival(0.0, 600, 5), 1)
    )


def prompt_tokens(arrival: Arrival, index: int) -> list[int]:
    found = []
    for first, length, same in prompt_of(arrival, index):
        found += [first] * length if same else range(first, first + length)
    return found


def test_texts_of_each_kind_are_apart_and_fit_64_bits():
    far = 2**34 - 1
    texts = (own_text(far, 2**24), shared_text(far, 2**24), answer_text(2**40, 5))
    ends = sorted((text.first, text.first + text.length) for text in texts)
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert 0 < ends[0][0] < ends[-1][1] < 2**63


def test_times_of_a_trace_and_other_times():
    arrivals = [Arrival(float(i), 10, 2) for i in range(3)]
    assert [job.at_s for job in trace_jobs(arrivals, "flex", speed=2.0)] == [0.0, 0.5, 1.0]
    other = list(trace_jobs(arrivals, "flex", iter([1.0, 4.0, 9.0])))
    assert [job.at_s for job in other] == [1.0, 4.0, 9.0]
    assert {job.service_class for job in other} == {"flex"}


def test_own_lines_are_read_without_prompts_param(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"at_s": 3, "input_tokens": 8, "output_tokens": 4}) + "\n{}\n")
    with pytest.raises(ParameterError, match=r"own\.jsonl:2: 'input_tokens' is missing"):
        read_requests(str(path))
