"""Lines of batches, and a scripted asker for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from weft.batch.choice import ChosenOrder
from weft.batch.memory import KvMemory
from weft.batch.orders import ServedOrders
from weft.batch.ports import BatchLine, LineAnswer
from weft.batch.prompts import guess_prompt
from weft.blend.density import UNWEIGHED
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable


def request(name: str, **fields: Any) -> dict[str, Any]:
    """A line of a batch that is right but for the fields that are given."""
    body = {"model": "m", "prompt": name, "max_tokens": 2}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body, **fields}


class Answering:
    """Answers each line with its own name; keeps what was asked, and how many at once.

    Attributes:
        asked: numbers of lines in the order in which they were asked.
        most: that were open at once.
    """

    prompt = staticmethod(guess_prompt)
    waiting = 0

    def __init__(self, react: Callable[[int], Exception | None] = lambda _: None) -> None:
        self.asked: list[int] = []
        self.open = self.most = 0
        self._react = react

    async def ask(self, number: int, line: BatchLine) -> LineAnswer:
        self.asked.append(number)
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.001 * (number % 3))
        self.open -= 1
        failure = self._react(number)
        if failure is not None:
            raise failure
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return LineAnswer(
            200, "req_1", json.dumps({"text": line.custom_id, "usage": usage}).encode()
        )


def planned_by(thread: Executor, at_once: int) -> ServedOrders:
    """Orders of batches, as the engines of this machine have them; prompts have no tokens here."""
    chosen, room = ChosenOrder("dfs", True, "a test"), Room(10_000, at_once)
    return ServedOrders(chosen, room, UNWEIGHED, thread, KvMemory(10_000), LengthTable())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
