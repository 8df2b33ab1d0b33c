"""The models of a request plane, with a board of models and no engine."""

from __future__ import annotations

import asyncio

from starlette.types import Message

from weft.server.models import HELD_BYTES, Held


def piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_what_comes_while_a_request_waits_is_received_later():
    async def exchange() -> None:
        coming: asyncio.Queue[Message] = asyncio.Queue()
        pieces = [piece(b"a", more=True), piece(b"b" * HELD_BYTES, more=True)]
        last = piece(b"c", more=False)
        for message in (*pieces, last):
            coming.put_nowait(message)
        held = Held(coming.get)
        watching = asyncio.create_task(held.disconnected())
        await asyncio.sleep(0.01)
        assert coming.qsize() == 1  # the rest waits in the connection
        assert not watching.done()
        watching.cancel()
        assert [await held.receive() for _ in range(3)] == [*pieces, last]
        coming.put_nowait({"type": "http.disconnect"})
        watching = asyncio.create_task(held.disconnected())
        await asyncio.wait_for(watching, 1)

    asyncio.run(exchange())
