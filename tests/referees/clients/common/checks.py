"""Shared by the Python programs of these clients: the server's address, and reports of checks.

Runs in the environment of a client, so it needs nothing but Python.
"""

import asyncio
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar

URL = os.environ["WEFT_URL"]
MODEL = os.environ["WEFT_MODEL"]
KNOWN = os.environ["WEFT_ANSWERS"] == "known"  # the script's engine, else a real model
FRUIT = Literal["apple", "plum"]  # the tool's argument: short whatever a model says
COLOUR = "mauve"  # the tool's result
WORDS = "one two three four five six seven eight nine ten"
PNG = (  # one white pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8/5+hHgAHggJ/PchI7wAAAABJRU5ErkJggg=="
)
MAX_TOKENS = 60
LONG = 4000  # tokens, for answers that are cancelled
IDLE_S = 30.0
BATCH_S = 300.0  # until a small batch has ended
LOOP = asyncio.new_event_loop()
T = TypeVar("T")
REPORT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a client prints does not stand between the lines of the report


def colour_of(fruit: FRUIT) -> str:
    """Return the colour of a fruit."""
    return f"The colour of {fruit} is {COLOUR}."


def say(text: str) -> str:
    """A line that has the script's engine answer with this text."""
    return "script> say " + json.dumps(text)


def call(name: str, **arguments: object) -> str:
    """A line that has it call a function; ``$result`` in an argument is the last tool's result."""
    return f"script> call {name} {json.dumps(arguments)}"


RECALL = "script> recall"  # it repeats what it has said before
WAIT = "script> wait"  # it goes on until it is cancelled


def expect(word: str, text: object) -> None:
    """The text has the word, where answers are known; else it is only a text."""
    assert isinstance(text, str), f"not a text: {text!r}"
    if KNOWN:
        assert word in text, f"{word!r} is not in {text!r}"


def expect_pieces(pieces: list[str]) -> None:
    """A stream that came in pieces."""
    expect(WORDS, "".join(pieces))
    assert not KNOWN or len(pieces) > 2, f"not a stream: {pieces}"


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run asynchronous work, all in one event loop: connections that clients keep belong to it."""
    return LOOP.run_until_complete(work)


async def leave(stream: AsyncIterator[object] | Awaitable[AsyncIterator[object]]) -> None:
    """Cancel whoever reads a stream after three events; the server must be idle then."""
    seen = asyncio.Event()

    async def read() -> None:
        count = 0
        async for _ in await stream if isinstance(stream, Awaitable) else stream:
            count += 1
            if count == 3:
                seen.set()

    reading = asyncio.create_task(read())
    watching = asyncio.create_task(seen.wait())
    await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    if reading.done():
        await reading
        assert not KNOWN, "the stream ended by itself"
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle)


def wait_until_idle() -> None:
    """Wait until no request is under way at the server."""
    end = time.monotonic() + IDLE_S
    while busy := requests_under_way():
        assert time.monotonic() < end, f"{busy} requests go on"
        time.sleep(0.1)


def wait_until_busy(ended: Callable[[], bool]) -> None:
    """Wait until a request is under way, or ``ended`` where that may be."""
    end = time.monotonic() + IDLE_S
    while not requests_under_way():
        if ended():
            assert not KNOWN, "the client ended by itself"
            return
        assert time.monotonic() < end, "no request came"
        time.sleep(0.02)


def requests_under_way() -> int:
    """Requests that run or wait, as the metrics tell."""
    with urllib.request.urlopen(f"{URL}/metrics") as page:
        lines = page.read().decode().splitlines()
    gauges = ("weft:num_requests_running", "weft:num_requests_waiting")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(gauges))


def run(**checks: Callable[[], object]) -> None:
    """Run the checks in order; a line of JSON for each."""
    for name, check in checks.items():
        fault = None
        try:
            check()
        except BaseException as error:  # whatever a client raises is its verdict
            traceback.print_exc(file=sys.stderr)
            fault = f"{type(error).__name__}: {error}"
        print(json.dumps({"check": name, "fault": fault}), file=REPORT, flush=True)


def run_each(variants: Iterable[Any], *functions: Callable[[Any], object]) -> None:
    """Run checks named after functions, each with every variant of a client."""
    given = tuple(variants)

    def of(function: Callable[[Any], object]) -> Callable[[], None]:
        def check() -> None:
            for variant in given:
                function(variant)

        return check

    run(**{function.__name__: of(function) for function in functions})
