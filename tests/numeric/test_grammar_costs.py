"""Grammars that take too long end alone, by a clock that the tests move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from weft import LLM, SamplingParams
from weft.core.errors import GrammarError
from weft.core.grammar import grammar_tokenizer
from weft.core.plan import RowAdd
from weft.exec import grammar as costs
from weft.exec.grammar import GrammarRows, Grammars
from weft.models.hub import resolve_model
from weft.text.grammar import lark_grammar, regex_grammar

VOCAB = 4096
ENDLESS = "[a-z]*"


class Rows(GrammarRows):
    """Rows whose masks take as long as the test says; ``seconds`` by row, else nothing."""

    def __init__(self, grammars: Grammars) -> None:
        self.now = 0.0
        self.seconds: dict[int, float] = {}
        super().__init__(grammars, lambda: self.now)

    def start(self, grammar: str, count: int, seconds: float) -> list[int]:
        rows = [len(self._rows) + i for i in range(count)]
        for row in rows:
            params = SamplingParams(grammar=grammar)
            self.add(RowAdd(row, row, (1,), 1, params, frozenset(), ()))
            self.seconds[row] = seconds
        return rows

    def step(self, rows: list[int]) -> list[int]:
        """Return the rows that ended."""
        logits = torch.zeros(len(rows), VOCAB)
        faults = self.forbid(logits, rows)
        self.advance(rows, logits.argmax(-1).numpy().astype(np.int64))
        for row, error in faults.items():
            assert isinstance(error, GrammarError)
            assert "too costly" in error.message
            self.drop(row)
        return [*faults]

    def _fill(self, number, mask):
        if self._rows[number].error is None:
            self.now += self.seconds[number]
        return super()._fill(number, mask)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = Path(resolve_model("builtin"), "tokenizer.json").read_text(encoding="utf-8")
    return Grammars(lambda: grammar_tokenizer(text, VOCAB, [0]))


@pytest.fixture
def rows(grammars: Grammars) -> Rows:
    return Rows(grammars)


def test_what_is_free_is_free_for_any_number_of_rows_and_steps(rows):
    running = rows.start(regex_grammar(ENDLESS), 200, costs.FREE_S)
    for _ in range(100):
        assert rows.step(running) == []
    assert rows.now > 30


def test_a_costly_grammar_ends_with_all_its_rows_and_alone(rows):
    costly = rows.start(regex_grammar("[a-f]*"), 64, 0.1)
    others = rows.start(regex_grammar(ENDLESS), 8, 0.001) + rows.start(
        regex_grammar("[b-z]*"), 1, 0.03
    )
    ended = rows.step(costly + others)
    assert rows.now < costs.BUDGET_S + 0.2  # of 6.4 s
    assert ended == costly[6:]
    assert rows.step(costly[:6] + others) == costly[:6]
    for _ in range(100):
        assert rows.step(others) == []


def test_a_grammar_that_grows_costly_ends_before_a_step_takes_long(rows):
    costly = rows.start(regex_grammar("[a-f]*"), 64, 0.0)
    other = rows.start(regex_grammar(ENDLESS), 1, 0.0001)
    ended: list[int] = []
    longest = 0.0
    for step in range(100):
        rows.seconds.update(dict.fromkeys(costly, 0.001 * step))
        before = rows.now
        ended += rows.step([row for row in costly + other if row not in ended])
        longest = max(longest, rows.now - before)
    assert sorted(ended) == costly
    assert longest < 0.5  # of 6.4 s at most


def test_many_grammars_share_the_bound_and_a_modest_one_goes_on(rows):
    modest = rows.start(regex_grammar(ENDLESS), 1, 0.02)
    costly = [
        row for n in range(10) for row in rows.start(regex_grammar(f"a[a-z]{{{n},99}}"), 1, 0.1)
    ]
    ended: list[int] = []
    first = rows.now
    ended += rows.step(costly + modest)
    assert rows.now - first < 1.1  # nothing is known of them before they have taken it
    for _ in range(30):
        ended += rows.step([row for row in costly + modest if row not in ended])
    assert sorted(ended) == costly


def test_a_mask_that_takes_long_once_is_no_reason(rows):
    [row] = rows.start(regex_grammar(ENDLESS), 1, 0.0)
    for step in range(60):
        rows.seconds[row] = 0.3 if step % 20 == 0 else 0.0
        assert rows.step([row]) == []


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"threads": 1, "kv_memory": "16MiB", "max_model_len": 256, "max_num_seqs": 24}
    with LLM.in_process("builtin", **settings) as llm:
        yield llm


def test_choices_beyond_the_bound_end_and_the_engine_goes_on(llm, monkeypatch):
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ambiguous = SamplingParams(
        temperature=0.7, max_tokens=40, seed=1, grammar=lark_grammar("start: a\na: a a | /[a-z]/")
    )
    prompts = [[5, 6, 7]] * 17
    [expected] = llm.generate(prompts[:1], free, progress=False)
    with monkeypatch.context() as bounds:
        bounds.setattr(costs, "FREE_S", -1.0)  # each mask counts as a second
        many = [free, *[ambiguous] * 16]
        first, *rest = llm.generate(prompts, many, progress=False)
    assert first.token_ids == expected.token_ids
    for result in rest:
        assert isinstance(result.error, GrammarError)
        assert "too costly" in result.error.message
    digits = SamplingParams(temperature=0, max_tokens=40, grammar=regex_grammar("[0-9]{4}"))
    [after] = llm.generate(prompts[:1], digits, progress=False)
    assert after.text.isdigit()
    llm.engine.built.scheduler.check()
