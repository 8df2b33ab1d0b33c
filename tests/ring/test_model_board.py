"""The board of models: rows and cells as several processes see them."""

from __future__ import annotations

import os

from weft.ring.checked_texts import HEAD_BYTES
from weft.ring.model_board import (
    LOAD,
    ROW_BYTES,
    ModelBoard,
    ModelFds,
    ModelRow,
    OrderAnswer,
    create_model_board,
)


def test_rows_and_cells_are_seen_by_others():
    fds = create_model_board(3, 2)
    supervisor, plane = ModelBoard(fds), ModelBoard(ModelFds.parse(str(fds)))
    assert plane.row(2) == ModelRow()
    for starts in range(5):
        row = ModelRow(
            "awake", 10, "{}" * 1000, starts, 1.5, answers={1: OrderAnswer(starts, "no")}
        )
        supervisor.write(2, row)
        assert plane.row(2) == row
    assert plane.row(1) == plane.row(0) == ModelRow()
    plane.show_open(1, 0, 3)
    plane.show_open(1, 1, 2)
    assert [cell.open for cell in supervisor.cells(1)] == [3, 2]
    assert not any(cell.used_ns for cell in supervisor.cells(2))
    assert plane.order(1, 1, LOAD) == 1
    assert divmod(supervisor.cell(1, 1).order, 4) == (1, LOAD)
    assert os.eventfd_read(fds.bell) == 1
    before = supervisor.cell(1, 1)
    supervisor.forget(1)
    assert supervisor.cell(1, 1) == before._replace(open=0)
    assert [cell.open for cell in plane.cells(1)] == [3, 0]


def test_a_row_knows_when_its_model_slept():
    row = ModelRow(sleeps=((10, 20), (30, 0)))
    assert row.slept(10, 20)
    assert row.slept(35, 99)
    assert not row.slept(5, 15)
    assert not row.slept(22, 25)


def test_a_row_that_is_being_written_leaves_the_one_before():
    fds = create_model_board(1, 1)
    supervisor, plane = ModelBoard(fds), ModelBoard(fds)
    supervisor.write(0, ModelRow("loading"))
    supervisor.write(0, ModelRow("awake"))
    latest = max((0, 1), key=supervisor._texts.number)
    supervisor._map[latest * ROW_BYTES + HEAD_BYTES] ^= 1
    assert plane.row(0).state == "loading"
    supervisor.write(0, ModelRow("failed"))
    assert plane.row(0).state == "failed"
