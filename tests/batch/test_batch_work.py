"""The batch process in this one, before somebody whose every answer a test decides."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answering import Answering, planned_by, read, request

from weft.batch import forecast, journal, order, orders, pace, process, session
from weft.batch.database import DataFolderError
from weft.batch.demand import Demand
from weft.batch.folder import StoreLimits
from weft.batch.intake import Forecaster, file_demand
from weft.batch.journal import Journal, ResultsError
from weft.batch.lines import InputFile
from weft.batch.pace import Observed
from weft.batch.pool import Pool
from weft.batch.ports import NobodyAnswersError
from weft.batch.process import BatchWork
from weft.batch.prompts import guess_prompt
from weft.batch.records import UNFINISHED, BatchRecord
from weft.batch.session import Desk
from weft.batch.store import BatchStore
from weft.core.errors import ConfigError

LIMITS = StoreLimits(reserve_bytes=0)


class Working:
    """A data folder with batches, and whoever answers them."""

    def __init__(
        self, folder: Path, answering: Any, at_once: int = 8, promotion: str = "flex"
    ) -> None:
        self.store = BatchStore(folder, LIMITS)
        self.other = BatchStore(folder, LIMITS)  # as a request plane has it
        self.thread = ThreadPoolExecutor(1)
        self.marks: list[Any] = []
        pool = Pool(at_once)

        def make(mark: Any, payer: str) -> Any:  # noqa: ARG001
            self.marks.append(mark)
            return answering

        self.planner = ThreadPoolExecutor(1)
        orders = planned_by(self.planner, at_once)
        self.desk = Desk(self.store, self.thread, pool, make, orders, 50, True, promotion)

    def create(self, lines: list[Any], owner: bytes = b"k", **given: Any) -> BatchRecord:
        upload = self.other.begin_upload(owner)
        upload.write("".join(f"{json.dumps(item)}\n" for item in lines).encode())
        upload.keep()
        file = self.other.add_file(upload, owner, "batch", "in.jsonl", None)
        chosen = {"window": "24h", "window_s": 86400, "model": "m", "served": "here", **given}
        judge = Forecaster(self.other, file_demand(self.other, owner, file.id), False).judge
        return self.other.create_batch(owner, "/v1/completions", file.id, judge=judge, **chosen)

    def weft(self, record: BatchRecord) -> dict[str, Any]:
        """What only weft says of a batch."""
        found: dict[str, Any] = self.other.reload(record.id).to_object()["weft"]
        return found

    def create_messages(self, bodies: list[Any], **given: Any) -> BatchRecord:
        upload = self.other.begin_upload(b"k")
        for number, body in enumerate(bodies):
            upload.write(json.dumps(request(f"{number}", url="/v1/messages", body=body)).encode())
            upload.write(b"\n")
        upload.keep()
        chosen = {"window": "24h", "window_s": 86400, "keep_s": 60, "model": "m", "served": "here"}
        chosen |= {"lines": len(bodies), **given}
        return self.other.create_message_batch(upload, b"k", **chosen)

    def status(self, record: BatchRecord) -> str:
        return self.other.reload(record.id).status

    def results(self, record: BatchRecord) -> tuple[list[str], list[str]]:
        """Sorted names in the output and codes in the errors."""
        path = self.other.files_folder.path
        answers, errors = read(path(record.output_name)), read(path(record.errors_name))
        return (
            sorted(line["custom_id"] for line in answers),
            sorted(line["error"]["code"] for line in errors),
        )

    def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        async def both() -> None:
            working = asyncio.create_task(BatchWork(self.desk, "here").run())
            try:
                async with asyncio.timeout(30):
                    await meanwhile()
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

        asyncio.run(both())

    def run_to_end(self, *records: BatchRecord) -> None:
        async def meanwhile() -> None:
            while any(self.status(record) in UNFINISHED for record in records):
                await asyncio.sleep(0.02)

        self.run(meanwhile)

    def close(self) -> None:
        self.store.close()
        self.other.close()
        self.thread.shutdown()
        self.planner.shutdown()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "AGAIN_S", 0.1)
    monkeypatch.setattr(process, "LOOK_S", 0.02)
    monkeypatch.setattr(session, "RETRY_S", 0.1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Working]]:
    made: list[Working] = []

    def starting(answering: Any = None, **given: Any) -> Working:
        made.append(Working(tmp_path, answering or Answering(), **given))
        return made[-1]

    yield starting
    for working in made:
        working.close()


def test_batches_of_many_keys_end_with_all_their_lines(started):
    working = started()
    batches = [
        working.create([request(f"{i}") for i in range(10 + k)], owner=f"k{k}".encode())
        for k in range(4)
    ]
    working.run_to_end(*batches)
    for k, record in enumerate(batches):
        assert working.status(record) == "completed"
        assert working.results(record) == (sorted(f"{i}" for i in range(10 + k)), [])
        shown = working.other.reload(record.id)
        assert (shown.completed, shown.input_tokens) == (10 + k, 3 * (10 + k))


def test_prefixes_are_shared_within_a_key_only(started):
    from weft.core.types import Request, SamplingParams

    working = started()
    records = [working.create([request("a")], owner=owner) for owner in (b"k", b"l", b"k", b"")]
    working.run_to_end(*records)
    plain = Request(1, (1,), SamplingParams(), (), cache_salt=b"")
    marked = [mark(plain) for mark in working.marks]
    assert {request.service_class for request in marked} == {"batch"}
    assert len({request.cache_salt for request in marked}) == 3
    assert b"" in {request.cache_salt for request in marked}


def test_too_many_lines_fail(started):
    working = started()
    record = working.create([request(f"{i}") for i in range(51)])
    right = working.create([request(f"{i}") for i in range(50)])
    working.run_to_end(record, right)
    assert working.status(right) == "completed"
    assert working.status(record) == "failed"
    assert json.loads(working.other.reload(record.id).errors)[0]["code"] == "too_many_lines"


def test_an_input_that_is_gone_fails(started):
    working = started()
    record = working.create([request("a")])
    working.other.files_folder.remove(record.input_file_id)
    working.run_to_end(record)
    assert working.status(record) == "failed"


def test_batches_of_other_models_wait_unless_they_are_over(started):
    working = started()
    other = working.create([request("a")], served="elsewhere")
    cancelled = working.create([request("a")], served="elsewhere")
    late = working.create([request("a"), request("b")], served="elsewhere", window_s=0)
    mine = working.create([request("a")])
    working.other.cancel_batch(b"k", cancelled.id)
    working.run_to_end(cancelled, late, mine)
    assert [working.status(r) for r in (other, cancelled, late, mine)] == [
        "validating",
        "cancelled",
        "expired",
        "completed",
    ]
    assert working.results(late) == ([], ["batch_expired"] * 2)


def test_a_message_batch_fails_by_the_request_and_keeps_no_input(started):
    working = started()
    record = working.create_messages([{}, {"stream": True}, {}])
    path = working.other.files_folder.path(record.input_file_id)
    assert path.exists()
    working.run_to_end(record)
    shown = working.other.reload(record.id)
    assert (shown.status, shown.completed, shown.failed, shown.given_up) == ("completed", 2, 1, 0)
    assert working.results(record) == (["0", "2"], ["unsupported_parameter"])
    assert not path.exists()
    assert working.other.used_bytes(b"k") == 0


def test_every_request_of_a_message_batch_has_a_result_whenever_it_is_cancelled(started):
    working = started()
    early = working.create_messages([{}] * 5, served="elsewhere")
    late = working.create_messages([{}] * 4, served="elsewhere", window_s=0)
    working.other.cancel_batch(b"k", early.id)
    working.run_to_end(early, late)
    for record, code in ((early, "batch_cancelled"), (late, "batch_expired")):
        shown = working.other.reload(record.id)
        assert (shown.failed, shown.given_up) == (shown.total, shown.total)
        assert working.results(record) == ([], [code] * shown.total)


def test_a_batch_that_another_process_answers_is_left_alone_until_that_has_gone(started):
    working = started()
    record = working.create([request("a")])
    path = working.other.files_folder.path(record.output_name)
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)

    async def meanwhile() -> None:
        await asyncio.sleep(0.4)
        assert working.status(record) == "validating"
        os.close(held)
        while working.status(record) != "completed":
            await asyncio.sleep(0.02)

    working.run(meanwhile)


def test_a_full_disk_is_waited_for(started, monkeypatch):
    working = started()
    failures = [ResultsError("No space left on device.")] * 3
    put = Journal.put

    def failing(self: Journal, index: int, result: Any) -> None:
        if index == 5 and failures:
            raise failures.pop()
        put(self, index, result)

    monkeypatch.setattr(Journal, "put", failing)
    record = working.create([request(f"{i}") for i in range(10)])
    working.run_to_end(record)
    assert not failures
    assert working.results(record) == (sorted(f"{i}" for i in range(10)), [])


def test_what_a_failed_fsync_may_have_lost_is_asked_again(started, monkeypatch):
    """Linux drops pages that it could not write, and the next fsync knows nothing of them."""
    working = started()
    lines = [request(f"{i}") for i in range(10)]
    record = working.create(lines)
    failed: list[int] = []
    fsync = os.fsync

    def failing(fd: int) -> None:
        size = os.fstat(fd).st_size
        if size > 0 and not failed and os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            failed.append(size)
            os.truncate(path, 0)
            os.truncate(path, size)  # its pages are gone
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    name = record.output_name
    path = working.other.files_folder.path(name)
    monkeypatch.setattr(journal.os, "fsync", failing)
    working.run_to_end(record)
    assert failed
    assert working.results(record) == (sorted(f"{i}" for i in range(10)), [])
    assert working.other.reload(record.id).completed == 10


def test_an_input_that_cannot_be_read_for_a_while_is_waited_for(started, monkeypatch):
    working = started()
    record = working.create([request("a")])
    failures = [ConfigError("Too many open files.")] * 2

    def opening(*given: Any) -> InputFile:
        if failures:
            raise failures.pop()
        return InputFile(*given)

    monkeypatch.setattr(session, "InputFile", opening)
    working.run_to_end(record)
    assert not failures
    assert working.status(record) == "completed"


def test_nothing_is_asked_while_the_reserve_is_touched(started, monkeypatch):
    answering = Answering()
    working = started(answering)
    record = working.create([request("a")])
    room = [False]
    monkeypatch.setattr(working.store.files_folder, "has_room", lambda: room[0])

    async def meanwhile() -> None:
        await asyncio.sleep(0.4)
        assert working.status(record) == "in_progress"
        assert not answering.asked
        room[0] = True
        while working.status(record) != "completed":
            await asyncio.sleep(0.02)

    working.run(meanwhile)


def test_an_engine_that_is_gone_is_waited_for(started):
    away = [NobodyAnswersError("The engine has gone.")] * 2
    working = started(Answering(lambda number: away.pop() if number == 3 and away else None))
    record = working.create([request(f"{i}") for i in range(6)])
    working.run_to_end(record)
    assert not away
    assert working.results(record) == (sorted(f"{i}" for i in range(6)), [])


def test_the_last_line_may_come_with_the_end_of_the_window(started):
    """All lines are done: that the time is over means nothing any more."""
    working = started()
    record = working.create([request("a")])
    working.run_to_end(record)
    with closing(BatchStore(working.store.files_folder.path("").parent, LIMITS)) as store:
        store._base.execute("DELETE FROM files WHERE id = ?", (record.output_name,))
        store.update(record.id, status="in_progress", expires_at=1)
    working.run_to_end(record)
    assert working.status(record) == "completed"


def test_it_ends_by_itself_when_there_is_nothing_to_do(started, monkeypatch):
    monkeypatch.setattr(process, "IDLE_S", 0.2)
    working = started()
    asyncio.run(asyncio.wait_for(BatchWork(working.desk, "here").run(), 20))


def test_a_batch_that_would_have_too_many_tokens_queued_fails(started):
    held = asyncio.Event()
    working = started(Held(held))
    limited = {"account": b"a", "queued_limit": 200}
    first = working.create([request(f"{i}") for i in range(40)], **limited)
    second = working.create([request(f"{i}") for i in range(40)], owner=b"l", **limited)

    async def meanwhile() -> None:
        while {working.status(first), working.status(second)} != {"failed", "in_progress"}:
            await asyncio.sleep(0.02)
        held.set()
        while {working.status(first), working.status(second)} != {"failed", "completed"}:
            await asyncio.sleep(0.02)

    working.run(meanwhile)
    failed = next(r for r in (first, second) if working.status(r) == "failed")
    [error] = json.loads(working.other.reload(failed.id).errors)
    assert (error["code"], error["line"]) == ("token_limit_exceeded", None)
    assert "counts as 120 tokens" in error["message"]  # forty times one of prompt and two of output
    after = working.create([request(f"{i}") for i in range(40)], **limited)
    working.run_to_end(after)
    assert working.status(after) == "completed"


class Held(Answering):
    """Answers nothing before it is let go."""

    def __init__(self, until: asyncio.Event, first: int = 0) -> None:
        super().__init__()
        self._until = until
        self._first = first  # lines that are answered at once
        self.open = 0

    async def ask(self, number: int, line: Any) -> Any:
        if number > self._first:
            self.open += 1
            await self._until.wait()
        return await super().ask(number, line)


@pytest.mark.parametrize(
    ("promotion", "promotable", "wanted"),
    [
        ("interactive", "flex interactive", ["flex", "interactive"]),
        ("interactive", "interactive", ["interactive"]),
        ("flex", "flex interactive", ["flex"]),
        ("none", "flex interactive", []),
        ("interactive", "", []),
    ],
)
def test_a_late_batch_goes_on_in_better_classes(
    started, monkeypatch, caplog, promotion, promotable, wanted
):
    """By the rates of others at first; each further step only by what it did in the last one.

    Nothing ends, so after a second the lines that are left would need more than the window has.
    """
    monkeypatch.setattr(process, "PROGRESS_S", 0.02)
    monkeypatch.setattr(forecast, "WINDOW_S", 0.3)
    held = asyncio.Event()
    working = started(Held(held, first=3), at_once=1, promotion=promotion)
    working.store.paces.add("here", Observed(20, Demand(1, 1, 1)))
    given = {"promotable": promotable, "window_s": 30}
    record = working.create([request(f"{i}") for i in range(40)], **given)
    assert working.weft(record)["warning"] is not None
    predictions: list[Any] = []

    async def meanwhile() -> None:
        while [step["service_class"] for step in working.weft(record)["promotions"]] != wanted:
            predictions.append(working.weft(record)["predicted_from"])
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.8)  # it goes no further, however late it is
        held.set()
        while working.status(record) != "completed":
            await asyncio.sleep(0.02)

    working.run(meanwhile)
    assert [step["service_class"] for step in working.weft(record)["promotions"]] == wanted
    assert working.weft(record)["service_class"] == (["batch", *wanted])[-1]
    said = [message for message in caplog.messages if "would miss its window of 24h" in message]
    assert [message.rsplit("'", 2)[1] for message in said] == wanted


@pytest.fixture
def _soon_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second without an end tells of a batch."""
    monkeypatch.setattr(process, "PROGRESS_S", 0.02)
    monkeypatch.setattr(forecast, "WINDOW_S", 0.1)


@pytest.mark.usefixtures("_soon_stalled")
def test_a_batch_that_waits_for_its_turn_is_not_promoted(started):
    held = asyncio.Event()
    answering = Held(held)
    working = started(answering, at_once=2, promotion="interactive")
    given = {"promotable": "flex interactive"}
    first = working.create([request(f"{i}") for i in range(30)], window_s=20, **given)

    async def meanwhile() -> None:
        while answering.open < 2:
            await asyncio.sleep(0.02)
        waiting = working.create([request(f"{i}") for i in range(30)], window_s=90_000, **given)
        while working.status(waiting) != "in_progress":
            await asyncio.sleep(0.02)
        while working.weft(first)["service_class"] != "interactive":
            await asyncio.sleep(0.02)
        held.set()
        while working.status(waiting) != "completed":
            await asyncio.sleep(0.02)
        assert working.weft(waiting)["promotions"] == []

    working.run(meanwhile)
    assert working.status(first) == "completed"


@pytest.mark.usefixtures("_soon_stalled")
@pytest.mark.parametrize("source", ["progress", "rates"])
def test_lines_that_take_long_are_no_reason_for_promotion(started, source):
    """Neither while there is time for all of them, nor while earlier rates say that there is."""
    held = asyncio.Event()
    working = started(Held(held), at_once=1, promotion="interactive")
    given = {"promotable": "flex interactive", "window_s": 86_400 if source == "progress" else 30}
    record = working.create([request(f"{i}") for i in range(50)], **given)
    if source == "rates":
        working.store.paces.add("here", Observed(15, working.other.reload(record.id).demand))

    async def meanwhile() -> None:
        while working.status(record) != "in_progress":
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.2)  # fifty times as long would be after the shorter window
        assert working.weft(record)["predicted_from"] == source
        assert working.weft(record)["promotions"] == []
        assert working.weft(record)["warning"] is None
        held.set()
        while working.status(record) != "completed":
            await asyncio.sleep(0.02)

    working.run(meanwhile)


def test_a_cancelled_batch_leaves_its_memory_to_others(started):
    """Whether or not Python has collected what is left of it."""
    held = asyncio.Event()
    answering = Held(held)
    working = started(answering)
    long = [request(f"{i}", body={"prompt": f"{i} " + "x" * 8000}) for i in range(20)]
    first = working.create(long)

    async def meanwhile() -> None:
        while not answering.open:
            await asyncio.sleep(0.02)
        working.other.cancel_batch(b"k", first.id)
        while working.status(first) != "cancelled":
            await asyncio.sleep(0.02)
        held.set()
        second = working.create(long)
        while working.status(second) != "completed":
            await asyncio.sleep(0.02)

    gc.collect()
    gc.disable()
    try:
        working.run(meanwhile)
    finally:
        gc.enable()


def test_a_batch_that_waits_to_try_again_holds_up_no_other(started, monkeypatch, caplog):
    monkeypatch.setattr(session, "RETRY_S", 1000.0)
    refusing = Answering(lambda _: NobodyAnswersError("gone") if refusing.first else None)
    refusing.first = True
    working = started(refusing)
    first = working.create([request(f"{i}") for i in range(20)])

    async def meanwhile() -> None:
        while "waits: gone" not in caplog.text:
            await asyncio.sleep(0.02)
        refusing.first = False
        second = working.create([request(f"{i}") for i in range(20)], owner=b"l")
        while working.status(second) != "completed":
            await asyncio.sleep(0.02)

    working.run(meanwhile)
    assert working.status(first) == "in_progress"


def test_a_line_that_breaks_the_planning_is_asked_all_the_same(started, caplog):
    def prompt(line: Any) -> Any:
        if line.custom_id == "3":
            raise ZeroDivisionError
        return guess_prompt(line)

    answering = Answering()
    answering.prompt = prompt
    working = started(answering)
    record = working.create([request(f"{i}") for i in range(20)])
    working.run_to_end(record)
    assert len(working.results(record)[0]) == 20
    assert "Line 4 cannot be put in order" in caplog.text


def test_lines_that_cannot_be_planned_go_as_they_come(started, caplog, monkeypatch):
    def failing(kind: str, *given: Any) -> Any:
        if kind != "fcfs":
            raise ZeroDivisionError
        return order.plan(kind, *given)

    monkeypatch.setattr(orders, "plan", failing)
    answering = Answering()
    working = started(answering, at_once=1)
    record = working.create([request(f"{i}") for i in range(20)])
    working.run_to_end(record)
    assert answering.asked == list(range(1, 21))
    assert "20 lines go as in the file" in caplog.text


def test_lengths_that_could_not_be_saved_are_saved_later(started, monkeypatch):
    monkeypatch.setattr(process, "SAVE_S", 0.05)
    monkeypatch.setattr(process, "PROGRESS_S", 0.02)
    working = started()
    failures: list[Any] = [DataFolderError("away")] * 3
    save = working.store.lengths.save

    def saving(*given: Any) -> None:
        if failures:
            raise failures.pop()
        save(*given)

    monkeypatch.setattr(working.store.lengths, "save", saving)
    record = working.create([request(f"{i}", body={"prompt": "x" * 200}) for i in range(40)])

    async def meanwhile() -> None:
        while failures or working.status(record) != "completed":
            await asyncio.sleep(0.02)
        while working.other.lengths.load("here").snapshot().told()[2][0] < 40:
            await asyncio.sleep(0.02)

    working.run(meanwhile)


class Slow(Answering):
    """Takes its time for each line."""

    async def ask(self, number: int, line: Any) -> Any:
        await asyncio.sleep(0.05)
        return await super().ask(number, line)


def test_what_was_measured_predicts_the_next_batch(started, monkeypatch):
    monkeypatch.setattr(process, "PROGRESS_S", 0.02)
    for name in ("SHORTEST_S", "OBSERVED_S", "ROW_S"):
        monkeypatch.setattr(pace, name, 0.05)
    working = started(Slow(), at_once=4)
    first = working.create([request(f"{i}") for i in range(50)])
    assert working.weft(first)["predicted_from"] is None
    working.run_to_end(first)
    measured = working.other.paces.pace("here")
    seconds = measured.seconds(working.other.reload(first.id).demand)
    assert seconds >= 50 / 4 * 0.05, "no more than four lines were open"
    second = working.other.reload(working.create([request("a")] * 3).id)
    assert second.predicted_from == "rates"
    assert second.predicted_at - second.created_at <= seconds


def test_lengths_are_kept_for_the_next_batches(started):
    working = started()
    record = working.create([request(f"{i}", body={"prompt": "x" * 200}) for i in range(40)])
    working.run_to_end(record)
    known = working.other.lengths.load("here").snapshot()
    assert known.told()[2][0] == 40, "all ends, of two tokens each"
