"""The models of a server, in memory that its supervisor and its request planes share.

    rows:  for each model 2 x JSON                       (the supervisor writes them in turn)
    cells: for each model and plane open | used | order  (a request plane writes its own)

A row says what state a model is in, and has the facts of its engine once there was one. A cell says
how many requests a plane has open for a model, and what its administrator asks for. Whoever wants
a model that is not awake rings the bell, an eventfd at which the supervisor waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from typing import NamedTuple

from msgspec import Struct, json

from weft.core.errors import InvariantError
from weft.core.states import LoadState
from weft.ring.checked_texts import CheckedTexts

ROW_BYTES = 256 * 1024  # pages that are never written take no room
_WORD, _CELL = struct.Struct("<Q"), struct.Struct("<QQQ")
LOAD, UNLOAD = 1, 2  # orders
MOST_SLEEPS = 16  # that a row has; a ring has as many recoveries


class OrderAnswer(Struct, frozen=True):
    """What has become of an order.

    Attributes:
        order: its number.
        code, message: of the error; empty if it was carried out.
    """

    order: int
    code: str = ""
    message: str = ""


class ModelRow(Struct, frozen=True):
    """One model.

    Attributes:
        bytes: memory that it takes awake, by estimate until it was awake once.
        card: the facts of its engine as JSON; empty until it was awake once.
        starts: engines that were started to wake it.
        wake_s: seconds that the last of them took; 0 for none.
        blocked_ns: since when it is wanted, and the others that are in use leave no memory for it,
            on the monotonic clock; 0 if it is not so.
        error: why it could not be loaded.
        retry_ns: when that is tried again if it is wanted, on the monotonic clock.
        answers: by request plane, to its last order.
        sleeps: the latest, each from when to when, on the monotonic clock; 0 while it lasts.
    """

    state: LoadState = "asleep"
    bytes: int = 0
    card: str = ""
    starts: int = 0
    wake_s: float = 0.0
    blocked_ns: int = 0
    error: str = ""
    retry_ns: int = 0
    answers: dict[int, OrderAnswer] = {}
    sleeps: tuple[tuple[int, int], ...] = ()

    def slept(self, from_ns: int, to_ns: int) -> bool:
        """Whether it was asleep all that time."""
        return any(
            began <= from_ns and (not ended or to_ns <= ended) for began, ended in self.sleeps
        )


class Cell(NamedTuple):
    """What one request plane has to do with a model.

    Attributes:
        open: requests.
        used_ns: when one was last begun or ended, on the monotonic clock.
        order: number of its last order, four times, and the kind.
    """

    open: int = 0
    used_ns: int = 0
    order: int = 0


class ModelFds(NamedTuple):
    """Descriptors of a board and its bell, and its sizes.

    Attributes:
        memory: of the board.
        bell: the eventfd.
    """

    memory: int
    bell: int
    models: int
    planes: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> ModelFds:
        """Read what ``str`` wrote."""
        return cls(*map(int, text.split(",")))


class ModelBoard:
    """The view of the supervisor, or of a request plane."""

    def __init__(self, fds: ModelFds) -> None:
        self._fds = fds
        self._map = mmap.mmap(fds.memory, 0)
        self._texts = CheckedTexts(self._map, 0, ROW_BYTES)
        self._seen: dict[int, tuple[int, ModelRow]] = {}

    # -- rows ---------------------------------------------------------------------------------

    def row(self, model: int) -> ModelRow:
        """The latest row of a model."""
        places = [(self._texts.number(place), place) for place in (2 * model, 2 * model + 1)]
        for number, place in sorted(places, reverse=True):
            seen = self._seen.get(model)
            if seen is not None and seen[0] == number:
                return seen[1]
            text = self._texts.read(place)
            if text is not None:  # else it is being written, and the one before it counts
                row = json.decode(text, type=ModelRow)
                self._seen[model] = number, row
                return row
        return ModelRow()

    def write(self, model: int, row: ModelRow) -> None:
        """Show a row; for the supervisor."""
        number = 1 + max(self._texts.number(2 * model), self._texts.number(2 * model + 1))
        text = json.encode(row)
        if not self._texts.fits(text):
            raise InvariantError(f"{len(text)} bytes are too many for the row of a model")
        self._texts.write(2 * model + number % 2, number, text)

    # -- cells --------------------------------------------------------------------------------

    def _at(self, model: int, plane: int) -> int:
        rows = 2 * self._fds.models * ROW_BYTES
        return rows + (model * self._fds.planes + plane) * _CELL.size

    def cell(self, model: int, plane: int) -> Cell:
        return Cell(*_CELL.unpack_from(self._map, self._at(model, plane)))

    def cells(self, model: int) -> list[Cell]:
        """Of all request planes."""
        return [self.cell(model, plane) for plane in range(self._fds.planes)]

    def show_open(self, model: int, plane: int, count: int) -> None:
        """Show how many requests are open; for the request plane."""
        cell = self.cell(model, plane)
        if cell.open != count or count:
            self._put(model, plane, open=count, used_ns=time.monotonic_ns())

    def order(self, model: int, plane: int, kind: int) -> int:
        """Give an order, for the request plane; returns its number."""
        cell = self.cell(model, plane)
        number = cell.order // 4 + 1
        self._put(model, plane, order=4 * number + kind)
        self.ring()
        return number

    def forget(self, plane: int) -> None:
        """The plane has died, and its requests with it; for the supervisor."""
        for model in range(self._fds.models):
            self._put(model, plane, open=0)

    def _put(self, model: int, plane: int, **words: int) -> None:
        """Write words of a cell, each at once, so that nobody reads one that is half written."""
        for name, value in words.items():
            at = self._at(model, plane) + Cell._fields.index(name) * _WORD.size
            self._map[at : at + _WORD.size] = _WORD.pack(value)

    # -- the bell -----------------------------------------------------------------------------

    def ring(self) -> None:
        """Have the supervisor look."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fds.bell, 1)


def create_model_board(models: int, planes: int) -> ModelFds:
    """Make a board for so many models and request planes."""
    memory = os.memfd_create("weft-models", os.MFD_CLOEXEC)
    os.ftruncate(memory, 2 * models * ROW_BYTES + models * planes * _CELL.size)
    return ModelFds(memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), models, planes)
