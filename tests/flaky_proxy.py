"""A TCP relay that delays what it carries, falls silent, and resets connections.

Stands for a bad network where there are no namespaces (``lossy_link``), and for middleboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from weft.core.addresses import format_address, parse_address


class FlakyProxy:
    """The relay, while it runs.

    Attributes:
        address: where it listens.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        self._target, self._delay_s = parse_address(target), delay_s
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def cut(self) -> None:
        """Carry nothing, and tell nobody."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Carry on, with what has waited."""
        self._loop.call_soon_threadsafe(self._open.set)

    def reset(self) -> None:
        """Break all connections."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    def close(self) -> None:
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = format_address(server.sockets[0].getsockname())
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        ways = [self._carry(reader, far_writer), self._carry(far_reader, writer)]
        await asyncio.gather(*ways, return_exceptions=True)
        self._writers -= {writer, far_writer}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one way, in order, until an end is reached."""
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await flying.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._open.wait()
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            while True:
                data = await reader.read(2**16)
                flying.put_nowait((self._loop.time() + self._delay_s, data))
                if not data:
                    await sending
                    return
        finally:
            sending.cancel()
            writer.transport.abort()


@contextlib.contextmanager
def flaky_proxy(target: str, delay_s: float = 0.0) -> Iterator[FlakyProxy]:
    """A relay to an address until the block ends.

    Args:
        delay_s: of everything, either way.
    """
    proxy = FlakyProxy(target, delay_s)
    try:
        yield proxy
    finally:
        proxy.close()
