"""Several servers for one batch: the work goes by speed, and none of it is lost with a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

import pytest
from answering import read, request
from test_batch_http import MODELS, Said, Scripted, running

from weft.batch import fleet as fleets
from weft.batch import http
from weft.batch.fleet import Fleet, Member, PlannedParts, in_random_order
from weft.batch.options import BatchOptions
from weft.batch.order import read_prompts
from weft.batch.ports import BatchLine, LineAnswer, NobodyAnswersError
from weft.batch.prompts import guess_prompt
from weft.batch.results import Results
from weft.batch.runner import Runner
from weft.blend.density import Rates
from weft.core.errors import ConfigError
from weft.offline import run_batch

RATES = Rates(token_s=1.0, square_s=0.0, read_s=1.0)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(fleets, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(fleets, "PROBE_AGAIN_S", 0.02)


class Serving:
    """A server that needs so long for a line, until it is taken away.

    Attributes:
        asked: custom ids in the order in which they came.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        self.there = True
        self.asked: list[str] = []
        self.open = self.most = 0

    @property
    def silent_s(self) -> float:
        return 1e9

    async def alive(self, timeout_s: float) -> bool:  # noqa: ARG002
        return self.there

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:  # noqa: ARG002
        self.asked.append(line.custom_id)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.seconds)
            while not self.there:  # hangs, as a lost machine does
                await asyncio.sleep(3600)
        finally:
            self.open -= 1
        usage = {"prompt_tokens": 10, "completion_tokens": 10}
        body = {"text": line.custom_id, "usage": usage}
        return LineAnswer(200, "req_1", json.dumps(body).encode())


class Trial:
    """A batch over servers that are no more than objects."""

    def __init__(self, source, servers: list[Serving], at_once: int = 4, order: str = "fcfs"):
        folder = source.path.parent
        self.source, self.servers = source, servers
        self.results = Results(folder / "out.jsonl", folder / "err.jsonl", source, "m")
        self.at_once, self.order = at_once, order
        self.said: list[str] = []

    async def run(self, meanwhile=None, patience_s: float = 60.0) -> Fleet:
        left = [i for i in range(len(self.source)) if not self.results.done(i)]
        parts = None
        if self.order != "fcfs":
            outputs = self.results.outputs()
            prompts = await read_prompts(self.source, self.results, outputs, guess_prompt)
            others = set(prompts.others)
            left = [*in_random_order([i for i in left if i not in others]), *others]
            parts = PlannedParts(self.order, prompts, RATES, 16)
        members = [Member(server, self.at_once) for server in self.servers]
        fleet = Fleet(members, left, len(left), self.source.number, parts, patience_s)
        fleet.say = self.said.append
        runner = Runner(self.source, self.results, fleet, fleet)
        fleet.changed = runner.look
        tasks = [asyncio.create_task(runner.run()), asyncio.create_task(fleet.watch())]
        if meanwhile is not None:
            tasks.append(asyncio.create_task(meanwhile(fleet)))
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[:2]:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.results.close()
        return fleet

    def check(self) -> None:
        """Every line has its answer, once."""
        lines = read(self.source.path.parent / "out.jsonl")
        names = [line["custom_id"] for line in lines]
        assert sorted(names) == sorted(f"r{i}" for i in range(len(self.source)))
        assert all(line["response"]["body"]["text"] == line["custom_id"] for line in lines)


def families(count: int, size: int = 10) -> list[Any]:
    """Lines in families of one long beginning each, shuffled."""
    made = [f"{'family ' * 20}{i % (count // size):04d} {'x ' * 40}{i}" for i in range(count)]
    return [request(f"r{i}", body={"prompt": text}) for i, text in enumerate(made)]


@pytest.mark.parametrize("order", ["fcfs", "dfs", "blend"])
def test_every_line_is_answered_once_and_the_faster_server_does_more(write, order):
    fast, slow = Serving("fast", 0.01), Serving("slow", 0.08)  # whatever else the machine does
    trial = Trial(write(*families(400)), [fast, slow], order=order)
    asyncio.run(trial.run())
    trial.check()
    assert 1.5 < len(fast.asked) / len(slow.asked) < 12
    assert fast.most <= 4
    assert slow.most <= 4
    assert any("split by speed" in text for text in trial.said) == (order != "fcfs")


def test_families_of_prompts_stay_together(write):
    """Of two servers that share lines by turns each would compute every prefix."""
    trial = Trial(write(*families(600)), [Serving("a", 0.005), Serving("b", 0.005)], order="dfs")
    asyncio.run(trial.run())
    trial.check()
    homes = [Counter(int(n[1:]) % 60 for n in server.asked) for server in trial.servers]
    apart = sum(min(homes[0][family], homes[1][family]) for family in range(60))
    assert apart < 90, "of 600; 300 if dealt by turns"


def test_who_has_done_its_part_takes_over_the_tail_of_another(write):
    quick, slowing = Serving("quick", 0.004), Serving("slowing", 0.004)

    async def slow_down(fleet: Fleet) -> None:
        while not slowing.asked or not any(m.queue for m in fleet.members):
            await asyncio.sleep(0.001)
        slowing.seconds = 0.1

    trial = Trial(write(*families(400)), [quick, slowing], order="dfs")
    started = time.monotonic()
    asyncio.run(trial.run(slow_down))
    trial.check()
    assert len(quick.asked) > 300
    assert time.monotonic() - started < 3, "without stealing about 4 s"


@pytest.mark.parametrize("order", ["fcfs", "dfs"])
def test_lines_of_a_server_that_is_lost_are_answered_by_the_others(write, order):
    servers = [Serving(name, 0.005) for name in "abc"]

    async def lose(_: Fleet) -> None:
        while len(servers[0].asked) < 30:
            await asyncio.sleep(0.001)
        servers[0].there = False

    trial = Trial(write(*families(300)), servers, order=order)
    fleet = asyncio.run(trial.run(lose))
    trial.check()
    assert fleet.members[0].lost is not None
    assert any("a is lost" in text and "2 others go on" in text for text in trial.said)
    asked = Counter(itertools.chain(*(server.asked for server in servers)))
    assert 1 <= sum(count - 1 for count in asked.values()) <= 4, "only what it was answering"
    assert all(server.most <= 4 for server in servers)


def test_a_server_that_comes_back_takes_part_again(write):
    servers = [Serving(name, 0.01) for name in "ab"]

    async def lose(fleet: Fleet) -> None:
        await asyncio.sleep(0.05)
        servers[0].there = False
        while fleet.members[0].lost is None:
            await asyncio.sleep(0.001)
        before = len(servers[0].asked)
        servers[0].there = True
        while len(servers[0].asked) < before + 10:
            await asyncio.sleep(0.001)
        trial.said.append("it was asked again")

    trial = Trial(write(*families(400)), servers, order="dfs")
    asyncio.run(trial.run(lose))
    trial.check()
    assert "a answers again." in trial.said
    assert "it was asked again" in trial.said


def test_without_any_server_the_run_stops_and_can_go_on(write):
    source = write(*families(200))
    servers = [Serving(name, 0.005) for name in "ab"]

    async def lose(_: Fleet) -> None:
        while sum(len(server.asked) for server in servers) < 100:
            await asyncio.sleep(0.001)
        for server in servers:
            server.there = False

    trial = Trial(source, servers, order="dfs")
    with pytest.raises(NobodyAnswersError, match=r"None of the 2 servers has answered for 0\.1 s"):
        asyncio.run(trial.run(lose, patience_s=0.1))
    done = len(read(source.path.parent / "out.jsonl"))
    assert 50 < done < 100
    again = Trial(source, [Serving("c", 0.001), Serving("d", 0.001)], order="dfs")
    asyncio.run(again.run())
    again.check()
    assert sum(len(server.asked) for server in again.servers) == 200 - done


def test_lines_without_a_prompt_are_in_no_part(write):
    vectors = [
        request(f"r{i}", url="/v1/embeddings", body={"model": "m", "input": "x"}) for i in range(50)
    ]
    rest = [{**line, "custom_id": f"r{50 + i}"} for i, line in enumerate(families(20))]
    trial = Trial(write(*vectors, *rest), [Serving("a", 0.001), Serving("b", 0.001)], order="dfs")
    asyncio.run(trial.run())
    trial.check()


# -- over HTTP ------------------------------------------------------------------------------------


class Answers(Scripted):
    """Answers lines with their own names, and hangs up for good after so many."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__(MODELS)
        self.most = most

    def next(self) -> Said | None:
        if len(self.bodies) > self.most:
            return None
        if not self.bodies:
            return MODELS
        time.sleep(0.005)
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return 200, {}, {"text": self.bodies[-1][1].get("prompt", ""), "usage": usage}


def batch(tmp_path, *urls: str, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    output = tmp_path / "out.jsonl"
    fields = {"concurrency": 4, "patience_s": 2.0, **options}
    code = run_batch(
        str(tmp_path / "in.jsonl"), BatchOptions(output=str(output), url=urls, **fields), {}
    )
    return code, read(output)


@pytest.mark.parametrize("order", ["fcfs", "dfs"])
def test_a_batch_outlives_a_server(tmp_path, write, order, capsys):
    write(*families(200))
    with running(Answers(most=40)) as dying, running(Answers()) as other:
        code, lines = batch(tmp_path, dying, f"{other}/v1", order=order)
    assert code == 0
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(200))
    said = capsys.readouterr().err
    assert f"{dying} is lost" in said
    assert "another one goes on with its lines" in said
    assert "a fleet of 2 servers answers up to 8 at once" in said


def test_a_server_that_is_not_there_at_the_start_is_left_out(tmp_path, write, capsys):
    write(*families(20))
    with running(Answers()) as url:
        code, lines = batch(tmp_path, "http://127.0.0.1:9", url)
    assert (code, len(lines)) == (0, 20)
    assert "the batch begins without a server: No server answers at" in capsys.readouterr().err


def test_servers_that_cannot_be_asked_are_told(tmp_path, write):
    write(*families(20))
    with pytest.raises(NobodyAnswersError, match=r"No server .*:9 .*; No server .*:7 "):
        batch(tmp_path, "http://127.0.0.1:9", "http://127.0.0.1:7")
    with pytest.raises(ConfigError, match="another server"):
        batch(tmp_path, "http://127.0.0.1:9", "http://127.0.0.1:9/v1/")


def test_a_key_that_is_refused_does_not_come_back_as_a_server():
    async def go(url: str) -> bool:
        asker = http.HttpAsker(url, None)
        alive = await asker.alive(1.0)
        await asker.aclose()
        return alive

    for status, alive in ((401, False), (403, False), (404, True), (200, True), (503, False)):
        with running(Scripted((status, {}, {}))) as url:
            assert asyncio.run(go(url)) == alive
