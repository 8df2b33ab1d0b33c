"""Which order auto is and why; memory shared out among forecasts; lengths looked at on a thread."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from weft.batch.choice import choose_order
from weft.batch.memory import KvMemory
from weft.batch.order import Prompts, plan
from weft.blend.density import Rates
from weft.blend.forecast import Forecast
from weft.blend.jobs import Room
from weft.blend.lengths import LengthTable
from weft.blend.tree import build_tree

RATES = Rates(token_s=1e-4, square_s=1e-9, read_s=1e-7)


@pytest.mark.parametrize(
    ("overlaps", "forecast", "weighed", "kind", "words"),
    [
        (
            False,
            True,
            True,
            "dfs",
            "do not overlap .* so prefixes count; no more lines",
        ),
        (False, False, False, "dfs", "do not overlap .* left to the engine"),
        (True, True, True, "blend", "lines that need either are mixed"),
        (True, True, False, "dfs", "overlap compute with memory, but there is no profile"),
        (True, False, True, "dfs", "but there is no forecast of the KV memory"),
    ],
)
def test_auto_blends_only_where_that_gains(overlaps, forecast, weighed, kind, words):
    engine = {"overlaps": overlaps}
    chosen = choose_order("auto", engine, forecast=forecast, weighed=weighed)
    assert (chosen.kind, chosen.forecast) == (kind, forecast)
    assert re.search(words, str(chosen))


def test_what_is_asked_for_is_chosen():
    for kind, forecast in (("fcfs", False), ("dfs", True), ("blend", True)):
        chosen = choose_order(kind, {}, forecast=True, weighed=False)
        assert (chosen.kind, chosen.forecast, chosen.why) == (kind, forecast, "as asked for")
    assert not choose_order("dfs", {}, forecast=False, weighed=False).forecast


# -- memory ---------------------------------------------------------------------------------------


def forecasts(count: int) -> list[Forecast]:
    tree = build_tree([[n] * 100 for n in range(4)])
    return [Forecast(tree, 1) for _ in range(count)]


def test_forecasts_get_what_the_others_will_not_need():
    first, second, third = forecasts(3)
    memory = KvMemory(1000)
    for one in (first, second, third):
        memory.give(one)
        assert (one.capacity, one.alone) == (1000, True)
    first.admit(0, 50)
    second.admit(1, 200)
    memory.give(third)
    assert (third.capacity, third.alone) == (1000 - 150 - 300, False)
    memory.give(first)
    assert first.capacity == 1000 - 300
    second.release(1)
    memory.give(first)
    assert (first.capacity, first.alone) == (1000, True)


def test_memory_that_others_use_is_not_ours():
    [one] = forecasts(1)
    state = SimpleNamespace(blocks=0, free_blocks=0, block_size=10)
    memory = KvMemory(1000, lambda: state)
    memory.give(one)
    assert one.capacity == 1000, "the engine has said nothing yet"
    state.blocks, state.free_blocks = 100, 70
    memory.give(one)
    assert one.capacity == 700
    one.admit(0, 50)
    memory.give(one)
    assert one.capacity == 800, "a hundred of the three are its own"
    state.free_blocks = 100
    memory.give(one)
    assert one.capacity == 1000, "it has not been computed yet"


# -- off the loop ---------------------------------------------------------------------------------


def planned(kind: str, table: LengthTable, count: int = 300):
    prompts = Prompts()
    for number in range(count):
        prompts.planned.append(number)
        prompts.tokens.append(np.array([number % 3] * 32 + [number], np.uint32))
        prompts.longest.append(None)
        prompts.choices.append(1)
    return plan(kind, prompts, Room(20_000, 64), RATES, table)


@pytest.mark.parametrize("kind", ["dfs", "blend"])
def test_lengths_are_looked_at_on_the_thread_and_every_line_goes_once(kind, monkeypatch):
    from weft.blend import blending, forecasting

    used = set()
    for module in (blending, forecasting):
        curves = module.LengthCurves

        def counted(known, curves=curves):
            used.add(threading.current_thread())
            return curves(known)

        monkeypatch.setattr(module, "LengthCurves", counted)

    async def go(thread) -> list[int]:
        table = LengthTable()
        order = planned(kind, table)
        used.clear()
        order.look_on(thread)
        woken = asyncio.Event()
        order.wake = woken.set
        running, taken, steps = {}, [], 0
        while order.remaining or running:
            while (index := order.next()) is not None:
                order.started(index, True)
                running[index] = 0
                taken.append(index)
            if not running:
                await asyncio.wait_for(woken.wait(), 30)
                woken.clear()
                continue
            steps += 1
            for index in list(running):
                running[index] += 1
                if running[index] == 20 + index % 50:
                    order.ended(index, running.pop(index))
            if running:
                order.progress(*next(iter(running.items())))
            await asyncio.sleep(0)
        assert table.snapshot().told()[2][0] == 300
        return taken

    with ThreadPoolExecutor(1) as thread:
        taken = asyncio.run(go(thread))
        assert sorted(taken) == list(range(300))
    assert used
    assert threading.main_thread() not in used


def test_a_failure_on_the_thread_is_raised_by_the_order(monkeypatch):
    from weft.blend import forecasting

    async def go(thread) -> None:
        order = planned("dfs", LengthTable())
        order.look_on(thread)
        woken = asyncio.Event()
        order.wake = woken.set
        monkeypatch.setattr(forecasting, "LengthCurves", lambda _: 1 / 0)
        first = order.next()
        order.progress(first, 40)
        order.next()
        await asyncio.wait_for(woken.wait(), 30)
        with pytest.raises(ZeroDivisionError):
            order.next()

    with ThreadPoolExecutor(1) as thread:
        asyncio.run(go(thread))


def test_a_line_that_waits_in_the_engine_is_not_taken_to_grow():
    table = LengthTable()
    order = planned("dfs", table)
    first, second = order.next(), order.next()
    order.started(first, False)
    order.started(second, False)
    order.started(first, True)
    order.progress(first, 500)
    assert sorted(order._learning.running().ages.tolist()) == [0, 500]
    order.started(second, True)
    order.progress(second, 7)
    assert sorted(order._learning.running().ages.tolist()) == [7, 507]
