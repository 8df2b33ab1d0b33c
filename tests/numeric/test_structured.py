"""Structured output on the built-in model: valid for any schema, no effect on other requests."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import random_schema

from weft.core.errors import GrammarError
from weft.core.plan import StepOutputs, Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.compiling import CompilingInbox
from weft.engine.local import LocalEngine, LocalInbox
from weft.text import Tokenizer
from weft.text.grammar import json_schema_grammar, regex_grammar

PROMPT = (0, 4, 100, 200, 6, 5)


class Runner:
    """Runs sequences on an engine in this process."""

    def __init__(self, **settings: Any) -> None:
        common = {"model": "builtin", "dtype": "bfloat16", "max_model_len": 512}
        self.engine = LocalEngine({**common, **settings})
        self.tokenizer = Tokenizer.load(Path(self.engine.served.folder))
        self._ids = 0

    def run(self, many: list[SamplingParams], output: tuple[int, ...] = ()) -> list[list[Update]]:
        """The updates of a sequence for each set of parameters."""
        news: queue.Queue[Update] = queue.Queue()
        requests = []
        for params in many:
            self._ids += 1
            settled, eos = params.with_defaults({}), self.engine.served.eos_token_ids
            requests.append(Request(self._ids, PROMPT, settled, eos, output=output))
        own: dict[int, list[Update]] = {request.id: [] for request in requests}
        self.engine.client.submit(requests, lambda updates: [news.put(u) for u in updates] and None)
        left = len(requests)
        while left:
            update = news.get(timeout=60)
            own[update.sequence_id].append(update)
            left -= update.finish is not None
        return list(own.values())

    def text(self, updates: list[Update]) -> str:
        return self.tokenizer.decode([u.token for u in updates if u.token is not None])


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.engine.close()


def params(grammar: str | None, seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.7, "max_tokens": 80, **more}, seed=seed, grammar=grammar
    )


def tokens(updates: list[Update]) -> list[int | None]:
    return [update.token for update in updates]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_what_ends_by_itself_is_valid(runner, temperature):
    schemas = [random_schema(seed) for seed in range(1000, 1024)]
    many = [
        params(json_schema_grammar(json.dumps(schema)), seed, temperature=temperature)
        for seed, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, updates in zip(schemas, runner.run(many), strict=True):
        assert updates[-1].error is None
        if updates[-1].finish is FinishReason.STOP:
            ended += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(runner.text(updates)))
    assert ended > len(schemas) / 2


def test_a_sequence_that_is_taken_up_again_goes_on_in_its_grammar(runner):
    asked = params(regex_grammar("[a-z]{5,9}-[0-9]{12,30}!"), temperature=0)
    [whole] = runner.run([asked])
    assert whole[-1].finish is FinishReason.STOP
    for count in (1, 4, len(whole) - 2):
        [rest] = runner.run([asked], output=tuple(tokens(whole)[:count]))
        assert tokens(rest) == tokens(whole)[count:]


def test_preempted_sequences_keep_their_place_in_the_grammar(runner):
    grammar = regex_grammar("([a-z]{3}[0-9]{2};){14}")
    many = [params(grammar, seed, max_tokens=100) for seed in range(4)]
    tight = Runner(max_model_len=128, kv_memory="400KiB", prefix_caching=False)
    try:
        got = tight.run(many)
        assert tight.engine.built.scheduler.totals.preemptions > 0
    finally:
        tight.engine.close()
    assert [tokens(updates) for updates in got] == [tokens(u) for u in runner.run(many)]
    assert all(updates[-1].finish is FinishReason.STOP for updates in got)


def test_a_grammar_that_cannot_go_on_ends_its_own_sequence_alone(runner):
    """The second token of this grammar needs more memory than a grammar may have."""
    bomb = json.loads(regex_grammar("a"))
    bomb["grammars"][0]["lark_grammar"] = "start: /x((a{100}){100}){100}/"
    bystander = params(None, 5, ignore_eos=True)
    [undisturbed] = runner.run([bystander])
    bombed, other = runner.run([params(json.dumps(bomb)), bystander])
    assert bombed[-1].finish is FinishReason.ERROR
    assert isinstance(bombed[-1].error, GrammarError)
    assert tokens(other) == tokens(undisturbed)
    [wrong] = runner.run([params('{"grammars": [{"lark_grammar": "start: missing"}]}')])
    assert isinstance(wrong[-1].error, GrammarError)


def test_a_grammar_among_allowed_ids(runner):
    """What both allow may follow; where they have nothing in common, the sequence ends."""
    spell, eos = runner.tokenizer.decode, runner.engine.served.eos_token_ids
    size = runner.engine.served.vocab_size
    digits = tuple(i for i in range(size) if spell([i]).isdecimal())
    letters = tuple(i for i in range(size) if spell([i]).isalpha())
    grammar = regex_grammar("[0-9]{3,6}")
    [few] = runner.run([params(grammar, allowed_token_ids=(*digits[:9], *eos))])
    assert few[-1].finish is FinishReason.STOP
    assert set(tokens(few)) <= {*digits[:9], *eos}
    bystander = params(None, 5, ignore_eos=True)
    none, other = runner.run([params(grammar, allowed_token_ids=letters[:99]), bystander])
    assert none[-1].finish is FinishReason.ERROR
    assert none[-1].error.param == "allowed_token_ids"
    assert tokens(other) == tokens(runner.run([bystander])[0])


def test_a_restricted_sequence_that_is_taken_up_again_goes_on(runner):
    allowed, bad = tuple(range(300, 304)), ((300, 301), (301, 301), (302, 302, 302), (303,))
    asked = params(None, allowed_token_ids=allowed, bad_token_sequences=bad, max_tokens=20)
    [whole] = runner.run([asked])
    assert {301} < set(tokens(whole)) <= {300, 301, 302}
    for count in (1, 7, 19):
        [rest] = runner.run([asked], output=tuple(tokens(whole)[:count]))
        assert tokens(rest) == tokens(whole)[count:]


def test_a_grammar_in_long_use_does_not_wear_out(runner):
    """All copies of a grammar share a bounded memory: this one fills it after some 3000 tokens."""
    grammar = regex_grammar("(?s:.*)a.{30}z")
    many = [params(grammar, seed, temperature=1.5, max_tokens=300) for seed in range(16)]
    for updates in runner.run(many):
        assert updates[-1].error is None


def test_the_end_of_a_grammar_comes_before_the_minimum_length(runner):
    grammar = regex_grammar("yes|no")
    [updates] = runner.run([params(grammar, min_tokens=40, temperature=0)])
    assert runner.text(updates) in ("yes", "no")
    assert updates[-1].finish is FinishReason.STOP


def test_biases_and_penalties_choose_among_what_is_allowed(runner):
    grammar = regex_grammar("yes|no")
    ids = {word: runner.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("y", "n")}
    first = {word: runner.tokenizer.reference.token_to_id(word) for word in ("yes", "no")}
    for word, letter in (("yes", "y"), ("no", "n")):
        bias = {i: 100.0 for i in (ids[letter], first[word]) if i is not None}
        [updates] = runner.run([params(grammar, logit_bias=bias, temperature=0)])
        assert runner.text(updates) == word


def request(number: int, grammar: str | None) -> Request:
    return Request(number, PROMPT, params(grammar))


def test_requests_wait_for_their_grammar_and_nobody_waits_for_them():
    inner = LocalInbox()
    futures: dict[str, Future[None]] = {name: Future() for name in ("slow", "slower", "known")}
    futures["known"].set_result(None)
    inbox = CompilingInbox(inner, futures.__getitem__)
    heard: list[Update] = []

    def received() -> tuple[list[int], list[int]]:
        requests, cancels = inbox.receive()
        return [r.id for r in requests], [number for number, _ in cancels]

    many = [(1, "slow"), (2, None), (3, "known"), (4, "slower")]
    inner.submit([request(number, grammar) for number, grammar in many], heard.extend)
    assert received() == ([2, 3], [])
    inner.submit([request(5, None)], heard.extend)
    assert received() == ([5], [])
    futures["slow"].set_result(None)
    inbox.wait()  # ends, as a grammar is ready
    assert received() == ([1], [])
    inner.cancel(4)
    inner.cancel(5)
    assert received() == ([], [5])
    assert [(u.sequence_id, u.finish) for u in heard] == [(4, FinishReason.CANCELLED)]
    futures["slower"].set_exception(GrammarError("too late"))
    assert received() == ([], [])
    inbox.publish(StepOutputs([], [Update(1, None, finish=FinishReason.STOP)]))
    assert heard[-1].sequence_id == 1
