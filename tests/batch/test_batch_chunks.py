"""Orders of long batches: each line once, prefixes together, little in memory, off the loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from answering import request

from weft.batch import chunks
from weft.batch.chunks import ChunkedOrder
from weft.batch.order import plan
from weft.batch.prompts import guess_prompt
from weft.batch.results import Results
from weft.blend.density import UNWEIGHED
from weft.blend.order import Room

ROOM = Room(10_000, 64)


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many chunks of few lines."""
    for name, value in (("SLICE_LINES", 8), ("FIRST_LINES", 16), ("CHUNK_LINES", 64)):
        monkeypatch.setattr(chunks, name, value)
    monkeypatch.setattr(chunks, "SORTED_AT_ONCE", 200)
    monkeypatch.setattr(chunks, "UNSORTED_LINES", 32)


def opened(source) -> Results:
    folder = source.path.parent
    return Results(folder / "out.jsonl", folder / "err.jsonl", source, "m")


def ordering(source, results, thread, **given) -> ChunkedOrder:
    given = {"prompt_of": guess_prompt, **given}
    planning = given.pop("plan", lambda prompts: plan("dfs", prompts, ROOM, UNWEIGHED))
    return ChunkedOrder(source, results, given.pop("prompt_of"), planning, thread, **given)


async def take_all(order: ChunkedOrder) -> list[int]:
    """The lines that an order hands out, each of which ends at once."""
    changed, taken = asyncio.Event(), []
    order.wake = changed.set
    preparing = asyncio.create_task(order.prepare())
    while order.remaining:
        index = order.next()
        if index is None:
            assert not order.ready, "nothing runs, so a chunk that is there has a line"
            changed.clear()
            await asyncio.wait_for(changed.wait(), 30)
            continue
        taken.append(index)
        order.ended(index, 3)
    await asyncio.wait_for(preparing, 30)
    return taken


def families(count: int, of: int = 7) -> list[object]:
    """Lines of which every seventh has the same long beginning."""
    return [
        request(f"r{i}", body={"prompt": f"{chr(97 + i % of) * 300} and its own {i}"})
        for i in range(count)
    ]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count", [1, 150, 700])
def test_every_line_goes_once(write, thread, count, mixed):
    lines = families(count)
    lines[::9] = ["{"] * len(lines[::9])
    source = write(*lines)
    results = opened(source)
    taken = asyncio.run(take_all(ordering(source, results, thread, mixed=mixed)))
    assert Counter(taken) == Counter(range(count))
    results.close()


def test_lines_that_begin_alike_follow_each_other_over_all_chunks(write, thread):
    source = write(*families(700))
    results = opened(source)
    taken = asyncio.run(take_all(ordering(source, results, thread)))
    sorted_ones = taken[32:]
    assert taken[:32] != sorted_ones[:32]
    assert set(taken[:32]) == set(range(32)), "the first ones do not wait until all are sorted"
    changes = sum(a % 7 != b % 7 for a, b in itertools.pairwise(sorted_ones))
    assert changes <= 12, "seven families in a dozen chunks"
    results.close()


def test_chunks_of_a_mix_are_mixes(write, thread):
    seen = []

    def planned(prompts):
        seen.append(Counter(index % 2 for index in prompts.planned))
        return plan("dfs", prompts, ROOM, UNWEIGHED)

    source = write(*families(4096, of=2))
    results = opened(source)
    chunk = 512
    order = ordering(source, results, thread, mixed=True, plan=planned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_LINES", chunk)
        asyncio.run(take_all(order))
    assert [sum(one.values()) for one in seen] == [chunk] * 8
    assert all(min(one[0], one[1]) >= chunk / 8 for one in seen), seen
    results.close()


def test_few_tokens_are_in_memory_and_all_work_is_on_the_thread(write, thread, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 1000)
    sizes, threads = [], set()

    def planned(prompts):
        threads.add(threading.current_thread())
        sizes.append(sum(map(len, prompts.tokens)))
        return plan("dfs", prompts, ROOM, UNWEIGHED)

    def prompt_of(line):
        threads.add(threading.current_thread())
        return guess_prompt(line)

    source = write(*families(300))
    results = opened(source)
    order = ordering(source, results, thread, plan=planned, prompt_of=prompt_of)
    asyncio.run(take_all(order))
    slice_tokens = 8 * 80
    assert max(sizes) < 1000 + slice_tokens
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    results.close()


def test_no_more_chunks_are_made_than_are_needed(write, thread):
    made = []

    def planned(prompts):
        made.append(len(prompts))
        return plan("dfs", prompts, ROOM, UNWEIGHED)

    source = write(*families(700))
    results = opened(source)
    order = ordering(source, results, thread, plan=planned)

    async def go() -> None:
        changed = asyncio.Event()
        order.wake = changed.set
        preparing = asyncio.create_task(order.prepare())
        while len(made) < chunks.AHEAD:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(thread, lambda: None)
        assert len(made) == chunks.AHEAD
        preparing.cancel()
        await asyncio.wait([preparing])

    asyncio.run(go())
    results.close()


def test_a_cancellation_waits_until_no_thread_reads_the_input(write, thread):
    """The file is closed then, and its descriptor may be somebody else's."""
    began, go_on, reads = threading.Event(), threading.Event(), []

    def prompt_of(line):
        began.set()
        assert go_on.wait(30)
        reads.append(line.custom_id)
        return guess_prompt(line)

    source = write(*families(100))
    results = opened(source)
    order = ordering(source, results, thread, prompt_of=prompt_of)

    async def go() -> int:
        preparing = asyncio.create_task(order.prepare())
        await asyncio.to_thread(began.wait, 30)
        preparing.cancel()
        await asyncio.sleep(0.05)
        assert not preparing.done()
        go_on.set()
        await asyncio.wait([preparing])
        return len(reads)

    at_end = asyncio.run(go())
    thread.submit(lambda: None).result()
    assert at_end == len(reads) == 8, "the slice that was being read, and nothing after it"
    results.close()


def test_a_failure_on_the_thread_is_that_of_the_preparation(write, thread):
    def planned(prompts):  # noqa: ARG001
        raise MemoryError("no room")

    source = write(*families(20))
    results = opened(source)
    with pytest.raises(MemoryError):
        asyncio.run(ordering(source, results, thread, plan=planned).prepare())
    results.close()
