"""Lines before an engine whose every step the test decides: room in the ring, ends, seeds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import request

import weft
from weft.api import Builder, ModelCard
from weft.api.errors import DeadlineExceededError
from weft.batch import engine as batch_engine
from weft.batch.engine import TELL_EVERY, EngineAsker
from weft.batch.ports import BatchLine, NobodyAnswersError
from weft.core.errors import (
    EngineBusyError,
    EngineDeadError,
    NonFiniteLogitsError,
    ParameterError,
    WeftError,
)
from weft.core.plan import Update
from weft.core.types import FinishReason
from weft.text import ChatTemplate, Tokenizer

FOLDER = Path(weft.__file__).parent / "builtin"
CARD = ModelCard(("m",), vocab_size=4096, max_model_len=256, eos_token_ids=(1, 6), hidden_size=8)


class Engine:
    """Has room for some sequences; what they say comes from the test.

    Attributes:
        live: requests and their sinks by id.
        cancelled: ids with reasons.
    """

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.others = 0  # sequences of somebody else
        self.live: dict[int, Any] = {}
        self.seen: list[Any] = []
        self.cancelled: list[tuple[int, FinishReason]] = []
        self.dead = False

    def submit(self, requests: Any, sink: Any) -> None:
        if self.dead:
            raise EngineDeadError("dead")
        if len(requests) > self.room:
            raise ParameterError(f"{len(requests)} sequences do not fit")
        if len(self.live) + self.others + len(requests) > self.room:
            raise EngineBusyError("full")
        self.seen += requests
        self.live |= {request.id: sink for request in requests}

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cancelled.append((sequence_id, reason))

    def say(self, number: int, tokens: int, finish: str | None = "length", **end: Any) -> None:
        """Give tokens, and perhaps an end, to the request that was submitted as ``number``."""
        name = self.seen[number].id
        updates = [Update(name, 500 + i) for i in range(tokens)]
        if finish is not None:
            updates.append(Update(name, None, finish=FinishReason(finish), **end))
        sink = self.live[name]
        if finish is not None:
            del self.live[name]
        sink(updates)


@pytest.fixture(scope="module")
def builder() -> Builder:
    return Builder(Tokenizer.load(FOLDER), ChatTemplate.load(FOLDER), CARD)


def line(name: str = "a", **fields: Any) -> BatchLine:
    body = {"model": "m", "prompt": name, "max_tokens": 4, **fields}
    return msgspec.json.decode(json.dumps(request(name, body=body)), type=BatchLine)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_sequences_are_of_the_class_of_batches(builder):
    async def go() -> None:
        engine = Engine()
        asking = asyncio.create_task(EngineAsker(engine, builder).ask(1, line(n=2)))
        await settle()
        assert [request.service_class for request in engine.seen] == ["batch"] * 2
        engine.say(0, 2)
        assert not asking.done()
        engine.say(1, 3)
        answer = await asking
        whole = json.loads(answer.body)
        assert answer.status == 200
        assert whole["usage"]["completion_tokens"] == 5
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]

    asyncio.run(go())


def test_lines_wait_for_room_in_the_ring_and_come_when_others_end(builder):
    async def go() -> None:
        engine = Engine(room=2)
        asker = EngineAsker(engine, builder)
        first = [asyncio.create_task(asker.ask(i, line(n=1))) for i in range(2)]
        await settle()
        later = asyncio.create_task(asker.ask(3, line()))
        await settle()
        assert len(engine.seen) == 2
        engine.say(1, 1)
        await settle()
        assert len(engine.seen) == 3
        engine.say(0, 1)
        engine.say(2, 1)
        assert [answer.status for answer in await asyncio.gather(*first, later)] == [200] * 3
        with pytest.raises(ParameterError, match="3 sequences do not fit"):
            await asker.ask(4, line(n=3))

    asyncio.run(go())


def test_a_ring_that_others_fill_is_waited_for(builder, monkeypatch):
    """A line failed for good where none of the own lines ran."""
    monkeypatch.setattr(batch_engine, "TRY_EVERY_S", 0.01)

    async def go() -> None:
        engine = Engine(room=2)
        engine.others = 2
        asker, started = EngineAsker(engine, builder), []
        asker.started = lambda number, computing: started.append((number, computing))
        asking = asyncio.create_task(asker.ask(7, line()))
        await asyncio.sleep(0.05)
        assert not engine.seen
        assert (asker.waiting, started) == (1, [])
        engine.others = 0
        while not engine.seen:
            await asyncio.sleep(0.01)
        assert (asker.waiting, started) == (0, [(7, False)])
        engine.say(0, 1)
        assert (await asking).status == 200

    asyncio.run(go())


def test_a_failed_choice_fails_the_line_and_frees_the_others(builder):
    async def go() -> None:
        engine = Engine()
        asking = asyncio.create_task(EngineAsker(engine, builder).ask(1, line(n=2)))
        await settle()
        engine.say(1, 1, finish="error", error=NonFiniteLogitsError("NaN"))
        with pytest.raises(NonFiniteLogitsError):
            await asking
        assert engine.cancelled == [(engine.seen[0].id, FinishReason.CANCELLED)]
        engine.say(0, 1, finish="cancelled")  # its last word comes too late, and harms nobody

    asyncio.run(go())


def test_a_dead_engine_ends_the_run_and_not_the_line(builder):
    async def go() -> None:
        engine = Engine()
        asker = EngineAsker(engine, builder)
        asking = asyncio.create_task(asker.ask(1, line()))
        await settle()
        engine.say(0, 0, finish="error", error=EngineDeadError("gone"))
        with pytest.raises(NobodyAnswersError, match="gone"):
            await asking
        engine.dead = True
        with pytest.raises(NobodyAnswersError, match="dead"):
            await asker.ask(2, line())

    asyncio.run(go())


def test_a_line_may_have_a_time(builder):
    async def go() -> None:
        engine = Engine()
        with pytest.raises(DeadlineExceededError):
            await EngineAsker(engine, builder).ask(1, line(timeout=0.01))
        assert engine.cancelled == [(engine.seen[0].id, FinishReason.CANCELLED)]

    asyncio.run(go())


def seeds(builder: Builder, base_seed: int | None, numbers: list[int], **fields: Any) -> list[int]:
    async def go() -> list[int]:
        engine = Engine()
        asker = EngineAsker(engine, builder, base_seed)
        tasks = [asyncio.create_task(asker.ask(n, line(n=2, **fields))) for n in numbers]
        await settle()
        for task in tasks:
            task.cancel()
        return [request.sampling.seed for request in engine.seen]

    return asyncio.run(go())


def test_seeds_follow_the_line_and_not_the_order(builder):
    forth, back = seeds(builder, 7, [1, 2, 3]), seeds(builder, 7, [3, 2, 1])
    assert forth[:2] == back[4:]
    assert forth[2:4] == back[2:4]
    assert len(set(forth)) == 6
    assert seeds(builder, 8, [1]) != forth[:2]
    assert seeds(builder, 7, [1, 2], seed=5) == [5, 6, 5, 6]
    assert len(set(seeds(builder, None, [1, 2, 3]))) == 6


def test_the_oldest_line_tells_how_far_it_is(builder):
    async def go() -> list[tuple[int, int]]:
        engine, told = Engine(), []
        asker = EngineAsker(engine, builder)
        asker.progress = lambda number, tokens: told.append((number, tokens))
        fields = {"max_tokens": 100, "ignore_eos": True}
        tasks = [asyncio.create_task(asker.ask(n, line(**fields))) for n in (4, 5)]
        await settle()
        for number in (1, 0):
            engine.say(number, TELL_EVERY, finish=None)
        engine.say(0, 3)
        await settle()
        engine.say(1, TELL_EVERY, finish=None)
        engine.say(1, 1)
        await asyncio.gather(*tasks)
        return told

    assert asyncio.run(go()) == [(4, TELL_EVERY), (5, 2 * TELL_EVERY)]


def test_what_an_order_knows_of_a_line(builder):
    asker = EngineAsker(Engine(), builder)
    prompt = asker.prompt(line("abc", n=3))
    assert prompt is not None
    assert prompt.tokens.tolist() == builder.tokenizer.encode("abc")
    assert (prompt.longest, prompt.choices) == (4, 3)
    assert prompt.each(7) == 3
    vectors = request("v", url="/v1/embeddings", body={"model": "m", "input": "x"})
    assert asker.prompt(msgspec.json.decode(json.dumps(vectors), type=BatchLine)) is None
    with pytest.raises(WeftError):
        asker.prompt(line(temperature="hot"))


@pytest.mark.parametrize("stop", [None, ["never"]])
def test_text_is_the_same_however_many_tokens_it_is_made_of_at_once(builder, stop):
    async def go() -> str:
        engine = Engine()
        fields = {"max_tokens": 200, "ignore_eos": True, "n": 2, "stop": stop}
        asking = asyncio.create_task(EngineAsker(engine, builder).ask(1, line(**fields)))
        await settle()
        for number, count in ((0, 100), (1, 3), (0, 50), (1, 70)):
            engine.say(number, count, finish=None)
        name, other = engine.seen[0].id, engine.seen[1].id
        sink = engine.live[name]
        end = Update(name, None, finish=FinishReason.LENGTH)
        sink([Update(name, 7), end, Update(other, 7)])  # an end amid the news of another choice
        engine.say(1, 1)
        whole = json.loads((await asking).body)
        assert whole["usage"]["completion_tokens"] == 151 + 75
        return str([choice["text"] for choice in whole["choices"]])

    ids = [[*range(500, 600), *range(500, 550), 7], [*range(500, 503), *range(500, 570), 7, 500]]
    assert asyncio.run(go()) == str([builder.tokenizer.decode(tokens) for tokens in ids])


def test_a_stop_string_ends_the_engines_work_at_once(builder):
    async def go() -> None:
        engine = Engine()
        asking = asyncio.create_task(EngineAsker(engine, builder).ask(1, line(stop=[")"])))
        await settle()
        name = engine.seen[0].id
        for token in builder.tokenizer.encode("x)y"):
            engine.live[name]([Update(name, token)])
        assert (name, FinishReason.STOP) in engine.cancelled
        engine.say(0, 0, finish="stop")
        [choice] = json.loads((await asking).body)["choices"]
        assert choice["text"].endswith("x")

    asyncio.run(go())
