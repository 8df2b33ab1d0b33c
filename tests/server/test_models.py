"""The models of a request plane, with a board of models and no engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from weft.core.errors import ConfigError, EngineDeadError, ModelFailedError
from weft.ring.model_board import (
    LOAD,
    ModelBoard,
    ModelRow,
    OrderAnswer,
    create_model_board,
)
from weft.server.counts import Board, Counts, create_board
from weft.server.keeper import FrontendKeeper, Links
from weft.server.models import HELD_BYTES, Held, Models, PlaneModel
from weft.server.options import ServerOptions


class Making:
    """Makes the parts of a model, as soon as nothing keeps it from that.

    Attributes:
        tried: how often it was asked to.
    """

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.tried = 0

    def __call__(self, _: str) -> Any:
        """The parts of a model that has nothing to do."""
        self.tried += 1
        if self.error:
            raise ConfigError(self.error)
        service = SimpleNamespace(look=lambda: None, num_open=0, state="ready")
        return SimpleNamespace(service=service, routes=[], start=lambda: None)


def plane(*makings: Making) -> tuple[Models, ModelBoard]:
    """Models "a", "b" and so on, all asleep, and the board that shows them."""
    board = ModelBoard(create_model_board(len(makings), 1))
    models = [
        PlaneModel(number, (name,), board, 0, making)
        for number, (name, making) in enumerate(zip("abc", makings, strict=False))
    ]
    return Models(models, board, ServerOptions(), lambda: None), board


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


def test_a_model_that_cannot_be_served_leaves_the_others_alone():
    async def life() -> None:
        broken, whole = Making("There is no tokenizer.json."), Making()
        models, board = plane(broken, whole)
        board.write(0, ModelRow("awake", card="{}", starts=1))
        await models.start()
        assert (models.state, models.find("a").state) == ("ready", "failed")
        with pytest.raises(ModelFailedError, match=r"'a' .* no tokenizer.json"):
            models.known()
        board.write(1, ModelRow("awake", card="{}", starts=1))
        for _ in range(3):
            models.look()
            await asyncio.gather(*models._opening)
        assert (broken.tried, whole.tried) == (1, 1)
        assert models.known() is models.find("b")
        assert "tokenizer.json" in models.describe()[0]["error"]
        assert isinstance(models.find("a").problem(), ModelFailedError)
        broken.error = ""
        board.write(0, ModelRow("awake", card="{}", starts=2))
        models.look()
        await asyncio.gather(*models._opening)
        assert models.find("a").state == "awake"
        assert models.find("a").problem() is None

    asyncio.run(life())


def test_a_request_plane_serves_once_it_serves_any_model():
    memories = [create_board(1), create_board(1)]
    links = [Links(None, memory, None) for memory in memories]
    keeper = FrontendKeeper(0, {}, links, None, 0, None, 10.0)
    assert not keeper.serves()
    Board(memories[1], 0).write(Counts())
    assert keeper.serves()


def test_an_order_that_nobody_carries_out_ends():
    async def orders() -> None:
        models, board = plane(Making())
        with pytest.raises(EngineDeadError, match=r"after 0\.05 s"):
            await models.find("a").order(LOAD, 0.05)
        board.write(0, ModelRow(answers={0: OrderAnswer(2)}))
        await models.find("a").order(LOAD, 60.0)

    asyncio.run(orders())
