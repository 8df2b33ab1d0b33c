"""Kills processes of a server at random while it answers batches and clients, and checks both.

    python tests/batch_soak.py --kills 200 --lines 500 [--seed 1] [--out batch_soak.json]

Three batches run at once: chat completions, completions and embeddings, whose answers were computed
by an undisturbed server, with the random clients of ``soak.py`` beside them. Supervisor, engine,
request planes and batch process are killed by SIGKILL; a supervisor is started again on the same
data folder. When batches have ended and kills are left, three more follow. Exit code 1, and a line
for each fault, if

- a batch does not complete, a line is not answered exactly once, or otherwise than undisturbed;
- clients see what ``soak.py`` calls a fault, but for the time between two supervisors;
- the data folder has other bytes than the listed files, or a log has a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from family import Family
from live import START_S, Server, eventually, free_port, serving
from served_batches import ENDED, create_of, listed, on_disk, patiently, results, upload, wait
from soak import WORDS, Clients, Killer, Tally, catalogue

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import report

KINDS = {"supervisor": 2, "engine": 6, "frontend": 6, "batches": 6}  # of every twenty kills
KILL_EVERY_S = (0.1, 3.0)
END_S = 1200.0  # for batches, beside all kills
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SIZE = 24  # of the clients' catalogue


def batch_lines(endpoint: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Lines for an endpoint, each with one right answer: drawn with a seed of its own."""

    def body(number: int) -> dict[str, Any]:
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        if endpoint == "/v1/embeddings":
            return {"model": "builtin", "input": f"{number} {text}"}
        bound = {"max_tokens": draw.randint(5, 110), "ignore_eos": True}
        made = {"model": "builtin", "seed": number, "temperature": 1, **bound}
        if endpoint == "/v1/completions":
            return {**made, "prompt": text}
        return {**made, "messages": [{"role": "user", "content": text}]}

    return [
        {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body(number)}
        for number in range(count)
    ]


@dataclass
class Site:
    """A data folder and a port, and the server that is there at present.

    Attributes:
        logs: what each server has written to standard error.
    """

    folder: Path
    arguments: tuple[str, ...]
    modelled: bool = False
    port: int = field(default_factory=free_port)
    logs: list[Path] = field(default_factory=list)
    server: Server | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> Server:
        place = self.folder / f"server{len(self.logs)}"
        place.mkdir()
        self.logs.append(place / "stderr.txt")
        options = ("--data-dir", str(self.data), "--disk-reserve-bytes", "0", *self.arguments)
        self.server = self._stack.enter_context(
            serving(place, *options, port=self.port, modelled=self.modelled)
        )
        return self.server

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server and wait for all that it has started; its exit code."""
        assert self.server is not None
        process = self.server.process
        process.send_signal(number)
        code = process.wait(START_S)
        self._stack.close()
        return code


class Batches:
    """The batches of one soak.

    Attributes:
        running: some have not ended.
    """

    def __init__(self, client: openai.OpenAI, count: int, draw: random.Random) -> None:
        self.running = False
        self._client = client
        self._lines = {endpoint: batch_lines(endpoint, count, draw) for endpoint in ENDPOINTS}
        self._known: dict[str, dict[str, str]] = {}

    def learn(self) -> None:
        """Have an undisturbed server answer all lines."""
        for endpoint, batch_id in self._create().items():
            texts, errors = results(self._client, wait(self._client, batch_id, END_S))
            assert not errors, errors
            assert texts.keys() == {line["custom_id"] for line in self._lines[endpoint]}
            self._known[endpoint] = texts

    def one_round(self, seconds: float) -> None:
        """Batches from their upload to their end."""
        self.running = True
        for batch_id in self._create().values():
            wait(self._client, batch_id, seconds)
        self.running = False

    def _create(self) -> dict[str, str]:
        client, ids = self._client, {}
        for endpoint, lines in self._lines.items():
            file_id = patiently(lambda: upload(client, lines))  # noqa: B023
            ids[endpoint] = patiently(lambda: create_of(client, file_id, endpoint=endpoint))  # noqa: B023
        return ids

    def faults(self) -> Iterator[str]:
        """What is wrong with any batch; some were made twice, since the answer was cut off."""
        for batch in patiently(lambda: list(self._client.batches.list(limit=100))):
            if batch.status not in ENDED:
                batch = wait(self._client, batch.id, END_S)
            try:
                assert batch.status == "completed", batch
                texts, errors = results(self._client, batch)
                known = self._known[batch.endpoint]
                assert not errors, errors
                assert texts.keys() == known.keys(), texts.keys() ^ known.keys()
                wrong = {name for name, text in texts.items() if text != known[name]}
                assert not wrong, f"other texts: {sorted(wrong)[:10]}"
            except AssertionError as error:
                yield f"{batch.endpoint} {batch.id}: {error}"[:1000]

    def count(self) -> int:
        return len(patiently(lambda: list(self._client.batches.list(limit=100))))


class Disturber:
    """Kills processes while batches run."""

    def __init__(self, site: Site, tally: Tally, draw: random.Random, kills: int) -> None:
        self.left = kills
        self._site, self._tally, self._draw = site, tally, draw
        deck: list[str] = []
        while len(deck) < kills:
            shuffled = [kind for kind, share in KINDS.items() for _ in range(share)]
            draw.shuffle(shuffled)
            deck += shuffled
        self._deck = deck[:kills]

    async def run(self, batches: Batches) -> None:
        while self.left:
            await asyncio.sleep(self._draw.uniform(*KILL_EVERY_S))
            if batches.running:
                kind = self._deck[self.left - 1]
                if kind == "supervisor":
                    await self._restart()
                elif not await self._kill(kind):
                    continue  # it is being started
                self.left -= 1

    async def _kill(self, kind: str) -> bool:
        assert self._site.server is not None
        family = Family(self._site.server.process.pid)
        killer = Killer(family, self._site.port, self._tally, self._draw)
        members = killer.members(kind)
        if members:
            with contextlib.suppress(psutil.NoSuchProcess):
                killer.kill(kind, self._draw.choice(members))
                return True
        return False

    async def _restart(self) -> None:
        begun = time.monotonic()
        self._tally.outages.append((begun, float("inf")))
        await asyncio.to_thread(self._site.stop, signal.SIGKILL)
        await asyncio.to_thread(self._site.start)
        self._tally.outages[-1] = (begun, time.monotonic())
        self._tally.kills.append((begun, "supervisor"))


async def disturbed(
    site: Site, kills: int, lines: int, draw: random.Random, tally: Tally
) -> list[str]:
    """Batches, clients and kills at once; what was wrong."""
    server = await asyncio.to_thread(site.start)
    batches = Batches(server.client(), lines, draw)
    clients = Clients(server.url, catalogue(draw, SIZE), draw, tally)
    await clients.learn()
    await asyncio.to_thread(batches.learn)
    disturber = Disturber(site, tally, random.Random(draw.random()), kills)
    killing = asyncio.create_task(disturber.run(batches))

    async def rounds() -> None:
        while disturber.left and not killing.done():
            await asyncio.to_thread(batches.one_round, END_S)

    ending = asyncio.create_task(rounds())
    await clients.run(0.0, ending.done)
    await asyncio.gather(killing, ending)
    faults = await asyncio.to_thread(lambda: list(batches.faults()))
    tally.done["batches"] = await asyncio.to_thread(batches.count)
    return faults


def folder_faults(site: Site) -> list[str]:
    """Whether the folder has exactly the listed files, once another server has looked at it."""
    server = site.start()
    try:
        found, shown = on_disk(site.data), listed(server.client())
        eventually(server.idle, START_S)
    except (AssertionError, httpx.HTTPError) as error:
        return [f"not idle at the end: {error!r}"]
    finally:
        site.stop()
    return [] if found == shown else [f"files on the disk {found}, listed {shown}"]


def batch_soak(kills: int, lines: int, *, seed: int = 0, modelled: bool = False) -> dict[str, Any]:
    """Run one soak; the report's ``faults`` are empty if all is well.

    Args:
        modelled: with engines that import no torch.
    """
    tally, begun = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), ("--frontends", "2"), modelled)
        faults = asyncio.run(disturbed(site, kills, lines, random.Random(seed), tally))
        if code := site.stop():
            faults.append(f"exit code {code}")
        faults += tally.faults + folder_faults(site)
        for log in site.logs:
            text = log.read_text()
            if "Traceback" in text:
                faults.append(f"a traceback in a log: {text[text.index('Traceback') :][:3000]}")
    return {
        "seconds": time.monotonic() - begun,
        "seed": seed,
        "lines": lines,
        "batches": tally.done.pop("batches"),
        "kills": dict(Counter(kind for _, kind in tally.kills)),
        "requests": dict(sorted(tally.done.items())),
        "output_tokens": tally.tokens,
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--lines", type=int, default=500, help="of each batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = batch_soak(given.kills, given.lines, seed=given.seed)
    for name, value in result.items():
        if name != "faults":
            print(f"{name:14} {value}")
    for fault in result["faults"]:
        print(f"FAULT {fault}")
    if given.out:
        report.save(given.out, **result)
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
