"""Runs random clients on a server for minutes, kills its processes, and checks what remains.

    python tests/soak.py --minutes 10 [--seed 1] [--kill engine,standby,frontend] [--out soak.json]

Every request is one of a catalogue whose answers were computed one by one on the undisturbed
server. Clients ask for it whole or streamed, read slowly, stop in the middle, reset the connection,
or send rubbish. Exit code 1, and a line for each fault, if

- an answer differs from the known one, ends early, holds an error, or takes two minutes;
- a connection breaks that did not belong to a request plane that was killed;
- something is left at the end: sequences, KV blocks, ring slots, descriptors, processes, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import httpx
import psutil

from family import Family, own_memory, rings
from live import SMALL, START_S, Server, eventually, in_shared_memory, serving
from plainhttp import BrokenError, Exchange, events

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import report

CLIENTS = 24  # at once; more than the engine runs at once, so that some wait
ARRIVALS_PER_S = 12.0
HANG_S = 120.0
SAMPLE_S = 1.0
RECOVERY_S = 60.0
MEMORY_BOUND = 64 << 20  # of any process beyond its like before the traffic
RING_BOUND = 16 << 20
WORDS = ["def", "class", "import", "for", "in", "the", "of", "a list", "string", "number"]
WORDS += ["if", "="]
SCHEMA = {"name": "x", "schema": {"type": "array", "items": {"enum": [1, "two", None]}}}
MANNERS = {"whole": 30, "stream": 35, "slow": 10, "leave": 12, "reset": 8, "rubbish": 5}
RUBBISH = (
    b"",
    b"{",
    b"[]",
    b'{"model":"builtin"}',
    b"\xff" * 40,
    b'{"model":"builtin","prompt":3}',
)


@dataclass(frozen=True)
class Ask:
    """One entry of the catalogue."""

    path: str
    body: dict[str, Any]


@dataclass
class Tally:
    """What the clients saw."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    pauses_s: list[float] = field(default_factory=list)  # longest silence of each whole stream
    kills: list[tuple[float, str]] = field(default_factory=list)
    cut_ports: set[int] = field(default_factory=set)  # connections of killed request planes
    outages: list[tuple[float, float]] = field(default_factory=list)  # beginnings and ends
    last_good: float = 0.0

    def was_down(self, since: float) -> bool:
        """Whether there was no server at some moment since then."""
        return any(end > since for _, end in self.outages)

    def fault(self, text: str) -> None:
        self.done["fault"] += 1
        if len(self.faults) < 50:
            self.faults.append(text)


def catalogue(draw: random.Random, size: int) -> list[Ask]:
    """Requests of all kinds, each with one right answer: greedy, or drawn with a given seed."""

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=round(most ** draw.random())))

    def one(number: int) -> Ask:
        body: dict[str, Any] = {"model": "builtin", "max_tokens": round(200 ** draw.random())}
        body["temperature"] = draw.choice((0, 0, 0.9))
        body["seed"] = number
        if number % 4 == 0:
            body["n"] = draw.randint(2, 3)
        if number % 5 == 2:
            body["speculation"] = 4
        if number % 5 == 0:
            body["stop"] = [" the", "\n\n"]
        if number % 3:
            scores = {"logprobs": 2} if number % 7 == 0 else {}
            return Ask("/v1/completions", {**body, **scores, "prompt": text(400)})
        scores = {"logprobs": True, "top_logprobs": 2} if number % 2 == 0 else {}
        if number % 9 == 0:
            body["response_format"] = {"type": "json_schema", "json_schema": SCHEMA}
        messages = [{"role": "user", "content": text(200)}]
        return Ask("/v1/chat/completions", {**body, **scores, "messages": messages})

    return [one(number) for number in range(size)]


def content(choice: dict[str, Any]) -> str:
    """The text of a choice of any kind of answer or chunk."""
    part = choice.get("message") or choice.get("delta")
    return choice.get("text", "") if part is None else part.get("content") or ""


def scored(choice: dict[str, Any]) -> list[str]:
    """The tokens that a choice gives log probabilities of."""
    scores = choice.get("logprobs") or {}
    return scores.get("tokens") or [entry["token"] for entry in scores.get("content") or []]


Answer = dict[int, tuple[str, list[str], str | None]]  # choice -> text, scored tokens, finish


def whole_answer(data: bytes) -> tuple[Answer, int]:
    """Choices and output tokens of an answer."""
    answer = json.loads(data)
    choices = {
        choice["index"]: (content(choice), scored(choice), choice["finish_reason"])
        for choice in answer["choices"]
    }
    return choices, answer["usage"]["completion_tokens"]


class Assembly:
    """Puts the chunks of a stream together, and knows whether it has ended properly."""

    def __init__(self) -> None:
        self.choices: Answer = {}
        self.tokens = -1
        self.ended = False

    def push(self, event: str) -> None:
        assert not self.ended, "something after [DONE]"
        if event == "[DONE]":
            self.ended = True
            return
        chunk = json.loads(event)
        assert "error" not in chunk, f"an error in the stream: {event}"
        for choice in chunk["choices"]:
            text, tokens, finish = self.choices.get(choice["index"], ("", [], None))
            assert finish is None, "a choice that goes on after its end"
            self.choices[choice["index"]] = (
                text + content(choice),
                tokens + scored(choice),
                choice["finish_reason"],
            )
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]


class Clients:
    """All traffic of one soak."""

    def __init__(self, url: str, asks: list[Ask], draw: random.Random, tally: Tally) -> None:
        self._url = url
        self._asks = asks
        self._known: list[tuple[Answer, int]] = []
        self._draw = draw
        self._tally = tally

    async def learn(self) -> None:
        """Compute the right answers, one after the other."""
        for ask in self._asks:
            async with Exchange(self._url, ask.path, ask.body) as exchange:
                await exchange.send()
                await exchange.begin()
                data = b"".join([part async for part in exchange.body()])
                assert exchange.status == 200, data
                self._known.append(whole_answer(data))

    async def run(self, seconds: float, enough: Callable[[], bool] = lambda: True) -> None:
        """Requests at random moments, never more than ``CLIENTS`` at once.

        Args:
            enough: go on until this holds, too.
        """
        end = time.monotonic() + seconds
        room = asyncio.Semaphore(CLIENTS)
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end or not enough():
                await room.acquire()
                task = group.create_task(self._one())
                task.add_done_callback(lambda _: room.release())
                await asyncio.sleep(self._draw.expovariate(ARRIVALS_PER_S))

    async def _one(self) -> None:
        index = self._draw.randrange(len(self._asks))
        manner = self._draw.choices(list(MANNERS), list(MANNERS.values()))[0]
        tally, port, begun = self._tally, [0], time.monotonic()
        try:
            async with asyncio.timeout(HANG_S):
                outcome = await self._as(manner, index, port)
        except TimeoutError:
            tally.fault(f"{manner} {index}: nothing for {HANG_S} s")
        except (BrokenError, OSError) as error:
            if port[0] in tally.cut_ports:
                tally.done["cut by a kill"] += 1
            elif tally.was_down(begun):
                tally.done["cut by a restart"] += 1
            else:
                tally.fault(f"{manner} {index}: the connection broke: {error!r}")
        except (AssertionError, ValueError, KeyError) as error:
            # An engine that loses its supervisor ends what is open, if there is time for it.
            if "engine_dead" in str(error) and tally.was_down(begun):
                tally.done["cut by a restart"] += 1
            else:
                tally.fault(f"{manner} {index}: {error!r}"[:600])
        else:
            tally.done[outcome] += 1
            if outcome in ("whole", "stream", "slow"):
                tally.last_good = time.monotonic()

    async def _as(self, manner: str, index: int, port: list[int]) -> str:
        ask, draw = self._asks[index], self._draw
        if manner == "rubbish":
            ask = Ask(ask.path, draw.choice(RUBBISH))  # type: ignore[arg-type]
        elif manner != "whole":
            ask = Ask(
                ask.path, ask.body | {"stream": True, "stream_options": {"include_usage": True}}
            )
        receive = 4096 if manner == "slow" else None
        async with Exchange(self._url, ask.path, ask.body, receive) as exchange:
            port[0] = exchange.port
            await exchange.send()
            if manner == "reset":
                await asyncio.sleep(draw.random() ** 3)
                exchange.reset()
                return manner
            await exchange.begin()
            if manner == "rubbish":
                data = b"".join([part async for part in exchange.body()])
                assert exchange.status == 400, data
                assert "error" in json.loads(data), data
                return manner
            if exchange.status in (429, 503):
                assert int(exchange.headers["retry-after"]) >= 0
                return f"refused {exchange.status}"
            assert exchange.status == 200, b"".join([part async for part in exchange.body()])
            if manner == "whole":
                self._check(index, *whole_answer(b"".join([p async for p in exchange.body()])))
                return manner
            return await self._stream(manner, index, exchange)

    async def _stream(self, manner: str, index: int, exchange: Exchange) -> str:
        seen, longest, before = Assembly(), 0.0, time.monotonic()
        stop_after = self._draw.randint(1, 30) if manner == "leave" else -1
        async for event in events(exchange.body()):
            seen.push(event)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
            if manner == "slow":
                await asyncio.sleep(0.05 * self._draw.random())
            stop_after -= 1
            if stop_after == 0:
                return manner
        assert seen.ended, "a stream without [DONE]"
        self._check(index, seen.choices, seen.tokens)
        if manner == "stream":
            self._tally.pauses_s.append(longest)
        return manner if manner != "leave" else "stream"

    def _check(self, index: int, choices: Answer, tokens: int) -> None:
        known, known_tokens = self._known[index]
        assert choices == known, f"got {choices} instead of {known}"
        assert tokens == known_tokens, f"usage {tokens} instead of {known_tokens}"
        self._tally.tokens += tokens


class Killer:
    """Kills a process of the server now and then."""

    def __init__(self, family: Family, port: int, tally: Tally, draw: random.Random) -> None:
        self._family, self._port, self._tally, self._draw = family, port, tally, draw

    async def run(self, kinds: list[str], every_s: float) -> None:
        """Kill one of each kind in any order, then again, for ever."""
        while True:
            for kind in self._draw.sample(kinds, len(kinds)):
                await asyncio.sleep(every_s * self._draw.uniform(0.5, 1.5))
                while not (members := self.members(kind)):
                    await asyncio.sleep(0.1)  # it is being started
                self.kill(kind, self._draw.choice(members))

    def members(self, kind: str) -> list[psutil.Process]:
        """Living processes of a kind."""
        return [process for title, process in self._family.members() if title == f"weft-{kind}"]

    def kill(self, kind: str, victim: psutil.Process) -> None:
        """Kill a process, and note whose connections end with it."""
        victim.suspend()  # so that it accepts nothing between the look and the kill
        if kind == "frontend":
            held = victim.net_connections("tcp")
            ports = {c.raddr.port for c in held if c.raddr and c.laddr.port == self._port}
            self._tally.cut_ports |= ports
        victim.kill()
        self._tally.kills.append((time.monotonic(), kind))


async def watch(family: Family, memory: list[int]) -> None:
    """Look at processes and rings once in a while, for ever."""
    while True:
        family.sample()
        memory.append(ring_state(family)[0])
        await asyncio.sleep(SAMPLE_S)


def ring_state(family: Family) -> tuple[int, int]:
    """(resident bytes, busy slots) of all rings."""
    found = []
    for title, process in family.members():
        if title == "weft-frontend":
            try:
                found += list(rings(process.pid))
            except (OSError, psutil.Error):
                continue
    return sum(ring.memory_bytes for ring in found), sum(ring.busy for ring in found)


class Held(NamedTuple):
    """The processes of one title: how many, and the most that one of them has."""

    processes: int = 0
    descriptors: int = 0
    memory_bytes: int = 0


def held(family: Family) -> dict[str, Held]:
    """What the server's processes hold now, by title."""
    found: dict[str, Held] = {}
    for title, process in family.members():
        one = found.get(title, Held())
        descriptors = max(one.descriptors, process.num_fds())
        memory = max(one.memory_bytes, own_memory(process.pid))
        found[title] = Held(one.processes + 1, descriptors, memory)
    return found


def what_is_left(server: Server, family: Family, before: dict[str, Held]) -> list[str]:
    """Wait until the server is as idle as before; what has not become so in time."""
    faults = []
    checks = {
        "sequences or KV blocks": server.idle,
        "ring slots": lambda: ring_state(family)[1] == 0,
        "processes": lambda: (
            {title: one.processes for title, one in held(family).items()}
            == {title: one.processes for title, one in before.items()}
        ),
        "descriptors": lambda: all(
            one.descriptors <= before[title].descriptors + 2 for title, one in held(family).items()
        ),
    }
    for name, check in checks.items():
        try:
            eventually(check, RECOVERY_S)
        except (AssertionError, OSError, httpx.HTTPError, psutil.Error) as error:
            faults.append(f"left over: {name}: {held(family)}, before {before} ({error!r})")
    return faults


def growth_faults(
    rows: list[dict[str, Any]], before: dict[str, Held], ring_memory: list[int]
) -> list[str]:
    """Memory beyond what the largest process of the same title had before the traffic."""
    faults = []
    for row in rows:
        like = before.get(row["process"])  # None: it did not live to get its title
        if like is not None and (more := row["memory_bytes"] - like.memory_bytes) > MEMORY_BOUND:
            faults.append(f"{row['process']} {row['pid']} grew by {more / 2**20:.0f} MiB")
    quarter = len(ring_memory) // 4
    if quarter and max(ring_memory[-quarter:]) - max(ring_memory[: 2 * quarter]) > RING_BOUND:
        faults.append("the rings' memory grew")
    return faults


async def traffic(
    server: Server, seconds: float, seed: int, kinds: list[str], every_s: float, size: int
) -> tuple[Tally, Family, list[int], list[str]]:
    """Run clients and killer, until one of each kind is killed; then wait until all is quiet."""
    draw, tally, family = random.Random(seed), Tally(), Family(server.process.pid)
    clients = Clients(server.url, catalogue(draw, size), draw, tally)
    await clients.learn()
    if "standby" in kinds:
        eventually(lambda: "weft-standby" in held(family), START_S)
    before, memory = held(family), []
    jobs = [asyncio.create_task(watch(family, memory))]
    killer = Killer(family, int(server.url.rsplit(":", 1)[1]), tally, random.Random(seed + 1))
    if kinds:
        jobs.append(asyncio.create_task(killer.run(kinds, every_s)))

    def each_is_killed() -> bool:
        return {kind for _, kind in tally.kills} >= set(kinds) or jobs[-1].done()

    await clients.run(seconds, each_is_killed)
    for job in jobs:
        job.cancel()
    faults = [str(job.exception()) for job in jobs if job.done() and job.exception()]
    faults += what_is_left(server, family, before)
    await clients.run(2.0)  # whoever was killed last, all is well again
    if tally.kills and tally.last_good < tally.kills[-1][0]:
        faults.append("no right answer since the last kill")
    faults += what_is_left(server, family, before)
    family.sample()
    faults += tally.faults + growth_faults(family.growth(), before, memory)
    return tally, family, memory, faults


def named(memory: str) -> bool:
    """Whether it bears the number of a living process, which is none of a server that has ended."""
    return any(psutil.pid_exists(int(number)) for number in re.findall(r"\d{3,}", memory))


def soak(
    minutes: float,
    *,
    seed: int = 0,
    kinds: list[str] | None = None,
    every_s: float = 15.0,
    size: int = 40,
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run one soak; the report's ``faults`` are empty if all is well."""
    shm = in_shared_memory()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *arguments) as server:
        tally, family, memory, faults = asyncio.run(
            traffic(server, 60 * minutes, seed, kinds or [], every_s, size)
        )
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)
        log = server.errors.read_text()
    if code != 0:
        faults.append(f"exit code {code}: {log[-2000:]}")
    end = time.monotonic() + 15  # those that were just told to end may take a moment
    while family.alive() and time.monotonic() < end:
        time.sleep(0.1)
    if family.alive():
        faults.append(f"processes that outlive the server: {family.alive()}")
    if new := [name for name in in_shared_memory() if name not in shm and not named(name)]:
        faults.append(f"shared memory that outlives the server: {new}")
    if "Traceback" in log:
        faults.append(f"a traceback in the log: {log[log.index('Traceback') :][:2000]}")
    cuts = quantiles(tally.pauses_s, n=100) if len(tally.pauses_s) > 1 else [0.0] * 99
    return {
        "minutes": minutes,
        "seed": seed,
        "settings": [*SMALL, *arguments],
        "requests": dict(sorted(tally.done.items())),
        "output_tokens": tally.tokens,
        "kills": dict(Counter(kind for _, kind in tally.kills)),
        "longest_silence_s": {"p50": cuts[49], "p99": cuts[98], "max": max(tally.pauses_s or [0])},
        "processes": family.growth(),
        "ring_mib": {"start": memory[0] / 2**20, "end": memory[-1] / 2**20} if memory else {},
        "faults": faults,
    }


def show(result: dict[str, Any]) -> None:
    """Print the report as a table."""
    for name in ("requests", "output_tokens", "kills", "longest_silence_s", "ring_mib"):
        print(f"{name:18} {result[name]}")
    print(f"{'process':16} {'pid':>8} {'MiB':>8} {'more':>6} {'fds':>5} {'more':>5} {'threads':>8}")
    for row in result["processes"]:
        print(
            f"{row['process']:16} {row['pid']:8} {row['memory_bytes'] / 2**20:8.1f} "
            f"{row['memory_bytes_more'] / 2**20:6.1f} {row['descriptors']:5.0f} "
            f"{row['descriptors_more']:5.0f} {row['threads']:8.0f}"
        )
    for fault in result["faults"]:
        print(f"FAULT {fault}")
    print(f"{len(result['faults'])} faults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", default="", help="engine,standby,frontend or some of them")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds, on average")
    parser.add_argument("--out", type=Path)
    parser.add_argument("serve", nargs="*", help="arguments for weft serve, after --")
    given = parser.parse_args()
    kinds = [kind for kind in given.kill.split(",") if kind]
    arguments = (*given.serve, *["--standby"] * ("standby" in kinds))
    result = soak(
        given.minutes, seed=given.seed, kinds=kinds, every_s=given.kill_every, arguments=arguments
    )
    show(result)
    if given.out:
        report.save(given.out, **result)
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
