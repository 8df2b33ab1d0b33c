"""Every family against transformers: whole prompts, chunks, token by token, greedy, ragged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoints import (
    CASES,
    build,
    likeliest_by_reference,
    prompt,
    reference_logits,
    save,
)
from paged import PagedRunner, run_chunks
from torch import Tensor

from depth import deep
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.loader import load_model

TOLERANCE = 1e-4  # absolute, on float32 logits
PROMPT, TAIL, GREEDY = 139, 9, 32
BOUNDARY = 160  # original_max_position_embeddings of the longrope cases


@dataclass(frozen=True)
class Pair:
    """A reference model, the same weights loaded by weft, and the reference's logits."""

    reference: Any
    decoder: Decoder
    tokens: list[int]
    logits: Tensor  # [n, V]


def prompt_length(name: str) -> int:
    long = CASES[name].max_model_len or 0
    return BOUNDARY + 10 if long > BOUNDARY else PROMPT


@pytest.fixture(
    scope="module", params=[(n, k) for n in CASES for k in ("cpu", "reference")], ids="-".join
)
def pair(request, tmp_path_factory) -> Pair:
    name, kernels = request.param
    torch.set_num_threads(1)
    reference = build(name)
    folder = save(reference, tmp_path_factory.mktemp("model"))
    ops = select_ops("cpu", "float32", kernels)
    decoder = load_model(folder, "float32", CASES[name].max_model_len, ops)
    tokens = prompt(prompt_length(name) + TAIL)
    return Pair(reference, decoder, tokens, reference_logits(reference, tokens))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert expected.std() > 0.3, "logits too flat to tell models apart"
    difference = (found - expected).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e}"


def test_whole_prompt(pair: Pair) -> None:
    found = PagedRunner(pair.decoder).step([("a", pair.tokens)])[0]
    assert_close(found, pair.logits)


# One token at a time goes on for a while in the tests below.
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=deep), 7, pytest.param(64, marks=deep)])
def test_chunks(pair: Pair, chunk: int) -> None:
    assert_close(run_chunks(PagedRunner(pair.decoder), "a", pair.tokens, chunk), pair.logits)


def test_token_by_token_after_prompt(pair: Pair) -> None:
    runner = PagedRunner(pair.decoder)
    first = runner.step([("a", pair.tokens[:-TAIL])])[0]
    rest = run_chunks(runner, "a", pair.tokens[-TAIL:], 1)
    assert_close(torch.cat((first, rest)), pair.logits)


def test_greedy(pair: Pair) -> None:
    length = len(pair.tokens) - TAIL
    if length < BOUNDARY:  # stay on one side of it, as the reference changes factors on the way
        length = min(length, BOUNDARY - GREEDY)
    tokens = list(pair.tokens[:length])
    runner, found = PagedRunner(pair.decoder), []
    logits = runner.step([("a", tokens)])[0]
    for _ in range(GREEDY):
        found.append(int(logits[-1].argmax()))
        logits = runner.step([("a", [found[-1]])])[0]
    assert found == likeliest_by_reference(pair.reference, tokens, found)


def test_ragged_batch_equals_one_by_one(pair: Pair) -> None:
    prompts = {"a": prompt(61, 1), "b": prompt(3, 2), "c": prompt(90, 3), "d": prompt(17, 4)}
    alone = {
        name: PagedRunner(pair.decoder).step([(name, tokens)])[0]
        for name, tokens in prompts.items()
    }
    runner = PagedRunner(pair.decoder)
    taken = {
        "a": [20, 1, 40],
        "b": [1, 1, 1],
        "c": [89, 1],
        "d": [5, 12],
    }
    found: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for step in range(3):
        names = [name for name in sorted(prompts, reverse=True) if step < len(taken[name])]
        bounds = {name: sum(taken[name][:step]) for name in names}
        rows = [(n, prompts[n][bounds[n] : bounds[n] + taken[n][step]]) for n in names]
        for name, logits in zip(names, runner.step(rows), strict=True):
            found[name].append(logits)
    for name, expected in alone.items():
        assert_close(torch.cat(found[name]), expected)
