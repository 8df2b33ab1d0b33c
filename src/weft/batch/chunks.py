"""The order of a long batch: chunks of lines by prefix, each put in order on a thread.

Lines are sorted by hashes of what their prompts begin with, which takes no tokeniser and 80 bytes a
line. Chunks of them are then read and put in order one at a time, small ones first, so that few
tokens are in memory and lines go before all are in order. Of many lines the first ones go as the
file has them, while the others are sorted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import numpy as np

from weft.batch.memory import KvMemory
from weft.batch.order import Planned, Prompt, Prompts, read_prompt
from weft.batch.ports import BatchLine, LineSource, Sink
from weft.batch.prompts import guess_prompt
from weft.blend.density import Ints
from weft.blend.prefixes import LEVELS, by_prefix, in_shuffled_runs, prefix_hashes

SORTED_AT_ONCE = 8192  # lines; of more the first ones do not wait for that
UNSORTED_LINES = 1024
FIRST_LINES, GROWTH = 256, 4  # of chunks
CHUNK_LINES, CHUNK_TOKENS = 16_384, 4 * 2**20  # of a chunk at most; a token takes 8 bytes
SLICE_LINES = 128  # for which the thread is taken at a time
AHEAD = 2  # chunks that are in order, with the one that is being asked

Made = TypeVar("Made")


class ChunkedOrder:
    """Lines without a result. ``prepare`` has to run meanwhile, or nothing is handed out.

    Args:
        prompt_of: reads a line; on the thread.
        plan: puts lines in order; on the thread.
        thread: a single one, which several orders may share.
        memory: shared out among chunks, as far as they forecast it.
        mixed: each chunk is to be a mix of the whole batch.

    Attributes:
        wake: called when there may be a line where there was none.
        full: as of `Planned`.
        remaining: lines that were not handed out.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)
    full: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        source: LineSource,
        sink: Sink,
        prompt_of: Callable[[BatchLine], Prompt | None],
        plan: Callable[[Prompts], Planned],
        thread: Executor,
        memory: KvMemory | None = None,
        *,
        mixed: bool = False,
    ) -> None:
        self._source = source
        self._prompt_of = prompt_of
        self._plan = plan
        self._thread = thread
        self._memory = memory
        self._mixed = mixed
        self._undone = np.array([i for i in range(len(source)) if not sink.done(i)], np.int64)
        self.remaining = len(self._undone)
        self._chunks: deque[Planned] = deque()
        self._of: dict[int, Planned] = {}  # the chunk of each line that runs
        self._taken = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether there is a chunk to take lines from."""
        self._drop_empty()
        return bool(self._chunks)

    def next(self) -> int | None:
        if not self.ready or self.full():
            return None
        chunk = self._chunks[0]
        if self._memory is not None and chunk.forecast is not None:
            self._memory.give(chunk.forecast)
        index = chunk.next()
        if index is not None:
            self.remaining -= 1
            self._of[index] = chunk
        return index

    def started(self, index: int, computing: bool = False) -> None:
        """The engine has got a line that was handed out, or computes it."""
        if index in self._of:
            self._of[index].started(index, computing)

    def progress(self, index: int, output: int) -> None:
        """A line that runs has so many output tokens in each choice: so do lines of all chunks."""
        chunk = self._of.get(index)
        if chunk is None:
            return
        steps = -chunk.now
        chunk.progress(index, output)
        steps += chunk.now
        first = self._chunks[0] if self._chunks else chunk
        if first is not chunk and first.forecast is not None:
            first.forecast.now += steps

    def ended(self, index: int, output: int | None) -> None:
        self._of.pop(index).ended(index, output)

    def close(self) -> None:
        """Hand out nothing more; what runs was given up, and holds no memory."""
        for chunk in {*self._chunks, *self._of.values()}:
            chunk.close()
        self._chunks.clear()
        self._of.clear()

    def _drop_empty(self) -> None:
        while self._chunks and not self._chunks[0].remaining:
            self._chunks.popleft()
            self._taken.set()

    async def prepare(self) -> None:
        """Put chunk after chunk in order. When this ends, or is cancelled, no thread reads any."""
        many = len(self._undone) > SORTED_AT_ONCE and not self._mixed
        first, rest = np.split(self._undone, [UNSORTED_LINES if many else 0])
        await self._add_chunks(first)
        await self._add_chunks(await self._sorted(rest))

    async def _add_chunks(self, indices: Ints) -> None:
        """Put lines in order, as many at a time as may be in memory."""
        prompts, tokens = Prompts(), 0
        most = CHUNK_LINES if self._mixed else FIRST_LINES
        for start in range(0, len(indices), SLICE_LINES):
            mine = indices[start : start + SLICE_LINES].tolist()
            tokens += await self._on_thread(partial(self._read, mine, prompts))
            if len(prompts) >= most or tokens >= CHUNK_TOKENS:
                await self._add(prompts)
                prompts, tokens = Prompts(), 0
                most = min(most * GROWTH, CHUNK_LINES)
        if len(prompts):
            await self._add(prompts)

    async def _add(self, prompts: Prompts) -> None:
        chunk = await self._on_thread(partial(self._plan, prompts))
        chunk.look_on(self._thread)
        chunk.wake = lambda: self.wake()
        self._chunks.append(chunk)
        self.wake()
        while self.ready and len(self._chunks) >= AHEAD:
            self._taken.clear()
            await self._taken.wait()

    def _read(self, indices: Iterable[int], into: Prompts) -> int:
        """Read prompts; how many tokens they have."""
        tokens = 0
        for index in indices:
            prompt = read_prompt(self._source, index, self._prompt_of)
            into.add(index, prompt)
            tokens += 0 if prompt is None else len(prompt.tokens)
        return tokens

    async def _sorted(self, indices: Ints) -> Ints:
        """The same lines, those that begin alike one after the other."""
        rows = np.zeros((len(indices), len(LEVELS)), np.uint64)

        def hash_slice(start: int) -> None:
            for place in range(start, min(start + SLICE_LINES, len(indices))):
                prompt = read_prompt(self._source, int(indices[place]), guess_prompt)
                found = [] if prompt is None else prefix_hashes(prompt.tokens)
                rows[place, : len(found)] = found

        for start in range(0, len(indices), SLICE_LINES):
            await self._on_thread(partial(hash_slice, start))
        order = indices[await self._on_thread(partial(by_prefix, rows))]
        return in_shuffled_runs(order) if self._mixed else order

    async def _on_thread(self, work: Callable[[], Made]) -> Made:
        """Let the thread do something; a cancellation waits for its end."""
        waiting = self._thread.submit(work)
        working = asyncio.wrap_future(waiting)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            waiting.cancel()  # unless it has begun
            await asyncio.wait([working])
            raise
