"""Demand of lines, the pace at which they were answered lately, and the ends predicted by it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from answering import request
from older import write_older_base
from test_batch_pool import Lines

from weft.batch import database
from weft.batch import pace as paces
from weft.batch.database import BASE, open_base
from weft.batch.demand import UNLIMITED_TOKENS, Demand, demand_of, sample_demand
from weft.batch.folder import StoreLimits
from weft.batch.forecast import LATEST_S, predict_end
from weft.batch.intake import Forecaster, QueuedTokensError, WindowError, begin_batch, file_demand
from weft.batch.lines import parse_line
from weft.batch.pace import Observed, PaceMeter, TokenPace, fit_pace
from weft.batch.pool import Pool
from weft.batch.promotion import next_class
from weft.batch.records import BATCH_COLUMNS, BatchRecord
from weft.batch.store import BatchStore

HOUR_S = 3600


def demand(**fields: Any) -> Demand:
    return demand_of(parse_line(json.dumps(request("x", **fields)).encode()))


@pytest.mark.parametrize(
    ("url", "body", "wanted"),
    [
        ("completions", {"prompt": "x" * 38, "max_tokens": 7}, (10, 7)),  # 40 with its quotes
        ("completions", {"prompt": "x" * 38}, (10, 16)),
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 7, "n": 3}, (3, 21)),
        ("chat/completions", {"messages": []}, (1, UNLIMITED_TOKENS)),
        ("chat/completions", {"messages": [], "max_completion_tokens": 5}, (1, 5)),
        ("responses", {"instructions": "abc", "input": "x", "max_output_tokens": 9}, (2, 9)),
        ("embeddings", {"input": "x" * 38}, (10, 0)),
        ("completions", {"prompt": "x", "max_tokens": "many"}, (9, 0)),  # by its bytes
    ],
)
def test_what_a_line_asks_for(url, body, wanted):
    found = demand(url=f"/v1/{url}", body=body)
    assert (found.lines, found.input_tokens, found.output_tokens) == (1, *wanted)


def lines_of(count: int, draw: random.Random) -> Iterator[str]:
    for i in range(count):
        body = {"prompt": "x" * draw.randrange(300), "max_tokens": draw.randrange(1, 200)}
        yield json.dumps(request(str(i), body=body))


def test_a_short_file_is_read_whole_and_a_long_one_by_a_sample(tmp_path):
    path = tmp_path / "in.jsonl"
    texts = list(lines_of(400, random.Random(1)))
    path.write_text("\n\n".join(texts) + "\nthis is no line\n")
    exact = sum((demand_of(parse_line(text.encode())) for text in texts), Demand(1))
    assert sample_demand(path) == exact
    texts += list(lines_of(4000, random.Random(2)))
    path.write_text("\n".join(texts))
    exact = sum((demand_of(parse_line(text.encode())) for text in texts), Demand())
    found = sample_demand(path)
    assert found != exact, "it was not sampled"
    assert found.lines == pytest.approx(exact.lines, rel=0.1)
    assert found.input_tokens == pytest.approx(exact.input_tokens, rel=0.05)
    assert found.output_tokens == pytest.approx(exact.output_tokens, rel=0.1)


def test_a_sample_of_one_endless_line_needs_no_memory(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(2**31)
    assert sample_demand(path).input_tokens == 0


def rows(pace: TokenPace, *mixes: tuple[float, float]) -> list[Observed]:
    """Ten seconds of each mix of input and output, at a pace."""
    found = []
    for x, y in mixes:
        lines = 10 / (pace.seconds(Demand(1, x, y)) or 1)
        found.append(Observed(10, Demand(1, x, y) * lines))
    return found


def test_prices_of_tokens_are_found_where_mixes_differ():
    pace = TokenPace(0.001, 0.05)
    fitted = fit_pace(rows(pace, (1000, 10), (100, 100), (1000, 10), (50, 200)))
    assert fitted is not None
    assert fitted.input_s == pytest.approx(0.001, rel=0.1)
    assert fitted.output_s == pytest.approx(0.05, rel=0.1)


def test_one_mix_gives_the_time_of_that_mix():
    fitted = fit_pace(rows(TokenPace(0.001, 0.05), *[(100, 20)] * 5))
    assert fitted is not None
    assert fitted.seconds(Demand(50, 5000, 1000)) == pytest.approx(55)
    assert fitted.input_s == pytest.approx(fitted.output_s)


def test_noise_of_one_mix_makes_no_price_absurd():
    draw = random.Random(3)
    noisy = [
        Observed(10, Demand(1, 100, 20) * draw.uniform(80, 120) + Demand(0, draw.uniform(0, 90)))
        for _ in range(50)
    ]
    fitted = fit_pace(noisy)
    assert fitted is not None
    total = sum((row.demand for row in noisy), Demand())
    assert fitted.seconds(total) == pytest.approx(500)
    assert (fitted.seconds(Demand(1, 100, 0)) or 0) / (fitted.seconds(Demand(1, 0, 100)) or 1) > 0.2


def test_what_was_never_seen_is_not_predicted():
    assert fit_pace([]) is None
    assert fit_pace([Observed(5, Demand(9, 90, 90))]) is None, "too short"
    assert fit_pace([Observed(50, Demand())]) is None
    embeddings = fit_pace([Observed(10, Demand(10, 100, 0))])
    assert embeddings is not None
    assert embeddings.seconds(Demand(1, 50, 0)) == pytest.approx(5)
    assert embeddings.seconds(Demand(1, 50, 1)) is None


class Busy:
    """A pool with one batch, whose lines end when they are told to."""

    def __init__(self, count: int, at_once: int = 4) -> None:
        self.pool = Pool(at_once)
        self.share = self.pool.join(b"k", 0, Lines(count), Demand(1, 10, 5))
        self.meter = PaceMeter(self.pool)

    def fill(self) -> None:
        while self.share.remaining and self.share.next() is not None:
            pass

    def end(self, count: int) -> None:
        for _ in range(count):
            self.share.ended(0, 1)
            self.fill()


def test_the_meter_waits_until_the_first_lines_are_through():
    busy = Busy(1000)
    busy.fill()
    assert busy.meter.look(0.0) is None
    busy.end(3)
    assert busy.meter.look(5.0) is None
    busy.end(1)  # four were open at first
    assert busy.meter.look(6.0) is None
    busy.end(20)
    assert busy.meter.look(6.0 + paces.ROW_S - 0.1) is None
    assert busy.meter.look(6.0 + paces.ROW_S) == Observed(paces.ROW_S, Demand(20, 200, 100))
    assert busy.meter.look(6.0 + 2 * paces.ROW_S) is None, "nothing ended: the time goes on"
    busy.end(30)
    row = busy.meter.look(6.0 + 3 * paces.ROW_S)
    assert row == Observed(2 * paces.ROW_S, Demand(30, 300, 150))


def test_the_last_lines_of_a_batch_do_not_count():
    """They are fewer than can be open, so they say nothing of a longer batch."""
    busy = Busy(12)
    busy.fill()
    busy.meter.look(0.0)
    busy.end(4)
    busy.meter.look(1.0)
    busy.end(4)
    assert not busy.pool.waiting
    assert busy.meter.look(3.0) == Observed(2.0, Demand(4, 40, 20))
    busy.end(4)
    assert busy.meter.look(50.0) is None


def test_a_batch_that_fits_at_once_says_nothing():
    busy = Busy(3)
    busy.fill()
    for now in range(30):
        assert busy.meter.look(float(now)) is None


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., BatchStore]]:
    stores: list[BatchStore] = []

    def opening() -> BatchStore:
        clock = lambda: 1_000_000.0  # noqa: E731
        stores.append(BatchStore(tmp_path / "data", StoreLimits(reserve_bytes=0), clock))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def test_paces_outlive_the_process_and_are_kept_by_model(opened, monkeypatch):
    monkeypatch.setattr(paces, "MOST_ROWS", 3)
    store = opened()
    for seconds in (1000, 10, 10, 10):
        store.paces.add("here", Observed(seconds, Demand(1, 100, 100)))
        store.paces.add("there", Observed(30, Demand(1, 600, 0)))
    again = opened().paces
    fitted = again.pace("here")
    assert fitted is not None
    assert fitted.seconds(Demand(1, 100, 100)) == pytest.approx(10), "the oldest is forgotten"
    assert again.pace("there") == TokenPace(0.05, None)
    assert again.pace("nowhere") is None


def upload(store: BatchStore, count: int, owner: bytes = b"k", tokens: int = 50, n: int = 1) -> str:
    """Lines that each count as fifty tokens of prompt and so many of output."""
    body = {"prompt": [5] * 50, "max_tokens": tokens, "n": n}
    texts = [json.dumps(request(str(i), body=body)) for i in range(count)]
    writing = store.begin_upload(owner)
    writing.write("".join(f"{text}\n" for text in texts).encode())
    writing.keep()
    return store.add_file(writing, owner, "batch", "in.jsonl", None).id


def create(
    store: BatchStore,
    count: int,
    owner: bytes = b"k",
    strict: bool = False,
    tokens: int = 50,
    n: int = 1,
    **given: Any,
) -> BatchRecord:
    file_id = upload(store, count, owner, tokens, n)
    chosen = {"window": "1h", "window_s": HOUR_S, "model": "m", "served": "here", **given}
    judge = Forecaster(store, file_demand(store, owner, file_id), strict).judge
    return store.create_batch(owner, "/v1/completions", file_id, judge=judge, **chosen)


def minutes(record: BatchRecord) -> float | None:
    """Until the predicted end."""
    end = record.predicted_at
    return None if end is None else (end - record.created_at) / 60


def test_the_end_of_a_new_batch_is_unknown_until_others_were_answered(opened):
    store = opened()
    first = create(store, 60, strict=True, window_s=1)
    assert (first.predicted_at, first.predicted_from, first.warning) == (None, None, None)
    store.paces.add("there", Observed(60, Demand(1, 50, 50)))
    assert create(store, 60).predicted_at is None
    store.paces.add("here", Observed(60, Demand(1, 50, 50)))
    other = create(store, 60, owner=b"l", served="there")
    assert minutes(other) == pytest.approx(60), "batches for other models do not count"


def test_what_is_due_before_and_other_keys_shares_count(opened):
    store = opened()
    store.paces.add("here", Observed(60, Demand(1, 50, 50)))  # a line a minute
    assert minutes(create(store, 10)) == 10
    assert minutes(create(store, 5)) == 15, "the same key, due at the same time"
    assert minutes(create(store, 5, window_s=60)) == 5, "due before the others"
    third = create(store, 4, owner=b"l")
    assert minutes(third) == 8, "the other key gets as much meanwhile"
    assert minutes(create(store, 100, owner=b"m")) == 100 + 20 + 4
    [late] = [r for r in store.unfinished() if r.demand_lines == 100]
    assert late.warning is not None
    assert late.to_object()["weft"]["predicted_from"] == "rates"
    store.update(third.id, completed=3, status="in_progress")
    pace = store.paces.pace("here")
    third = store.reload(third.id)
    found = predict_end(pace, third, store.unfinished(), 0.0)
    assert found == pytest.approx(180), "a line of each key"


def test_strict_windows_refuse_and_leave_nothing(opened):
    store = opened()
    store.paces.add("here", Observed(60, Demand(1, 50, 50)))
    create(store, 59, strict=True)
    with pytest.raises(WindowError, match=r"1970-01-12 14:48:40 UTC.* window of 1h.* 14:46:40 UTC"):
        create(store, 3, strict=True)
    assert len(store.unfinished()) == 1


def test_queued_tokens_of_an_account_have_their_limit(opened):
    store = opened()
    planes = opened()
    limited = {"account": b"a", "queued_limit": 1000}
    whole = Demand(5, 250, 250)
    first = create(store, 5, **limited)
    second = create(planes, 5, owner=b"another key of it", **limited)
    third = create(store, 5, **limited)
    other = create(store, 5, account=b"b", queued_limit=1000)
    assert begin_batch(store, first, 5, whole)
    assert begin_batch(planes, second, 5, whole)
    assert begin_batch(store, other, 5, whole)
    with pytest.raises(QueuedTokensError, match=r"counts as 500 tokens.* 1,000 are queued"):
        begin_batch(store, third, 5, whole)
    assert store.reload(third.id).status == "validating"
    store.update(first.id, status="completed")
    assert begin_batch(planes, third, 5, whole)
    assert not begin_batch(planes, third, 5, whole), "it has begun"
    huge = create(store, 5, **limited)
    with pytest.raises(QueuedTokensError, match=r"1,001 tokens.* Split the file"):
        begin_batch(store, huge, 5, Demand(5, 501, 500))
    free = create(store, 5, account=b"a")
    assert begin_batch(store, free, 5, whole * 100)


def test_a_data_base_from_before_gets_what_is_missing(tmp_path):
    path = tmp_path / BASE
    later = [column for column in BATCH_COLUMNS if column in dict(database._FORECAST)]
    row = "INSERT INTO batches (id, owner, status) VALUES ('batch_1', x'00', 'expired')"
    write_older_base(path, "paces", row)
    with closing(open_base(path)) as base:
        found = base.execute(f"SELECT {', '.join(later)} FROM batches").fetchone()
        defaults = {column.name: column.default for column in fields(BatchRecord)}
        assert found == tuple(defaults[name] for name in later)
        assert base.execute("SELECT * FROM paces").fetchall() == []
        assert base.execute("PRAGMA user_version").fetchone() == (database.VERSION,)


def test_message_batches_are_counted_and_refused_when_they_come(opened):
    store = opened()
    limited = {"account": b"a", "queued_limit": 1000}

    def create_messages(count: int) -> BatchRecord:
        body = {"max_tokens": 50, "messages": [{"role": "user", "content": "x" * 165}]}
        writing = store.begin_upload(b"k")
        lines = [json.dumps(request(str(i), url="/v1/messages", body=body)) for i in range(count)]
        writing.write("".join(f"{line}\n" for line in lines).encode())
        writing.keep()
        demand = sample_demand(store.files_folder.path(writing.id))
        assert demand == Demand(count, 50 * count, 50 * count)
        judge = Forecaster(store, demand, False).judge
        given = {"window": "24h", "window_s": 86400, "keep_s": 60, "model": "m", "served": "here"}
        return store.create_message_batch(
            writing, b"k", lines=count, judge=judge, **given, **limited
        )

    first = create_messages(6)
    with pytest.raises(QueuedTokensError, match="600 are queued"):
        create_messages(5)
    other = create(store, 5, **limited)
    with pytest.raises(QueuedTokensError):
        begin_batch(store, other, 5, Demand(5, 250, 250))
    assert begin_batch(store, first, 6, first.demand)
    assert store.reload(first.id).queued_tokens == 600


def test_classes_of_late_batches_come_step_by_step():
    both = ("flex", "interactive")
    assert next_class("batch", "none", both) is None
    assert next_class("batch", "flex", both) == "flex"
    assert next_class("flex", "flex", both) is None
    assert next_class("batch", "interactive", both) == "flex"
    assert next_class("flex", "interactive", both) == "interactive"
    assert next_class("interactive", "interactive", both) is None
    assert next_class("batch", "interactive", ["interactive"]) == "interactive"
    assert next_class("batch", "interactive", []) is None


def test_a_warning_is_there_while_the_batch_is_late_and_open():
    record = BatchRecord(
        "batch_1", b"", "/v1/completions", "m", "s", "f", "24h", "in_progress", 0, 100
    )
    assert record.warning is None
    assert replace(record, predicted_at=100).warning is None
    late = replace(record, predicted_at=101)
    assert late.warning == (
        "This batch is predicted to end at 1970-01-01 00:01:41 UTC, after its window of 24h, "
        "which ends at 1970-01-01 00:01:40 UTC."
    )
    assert replace(late, status="completed").warning is None


@pytest.mark.parametrize("limit", [10**15, 10**25, 10**400])
def test_absurd_limits_are_late_but_no_errors(opened, limit):
    store = opened()
    store.paces.add("here", Observed(20, Demand(10, 100, 100)))
    record = create(store, 500, tokens=limit, n=limit)
    found = store.reload(record.id).to_object()
    assert found["weft"]["warning"] is not None
    assert found["weft"]["predicted_end_at"] <= record.created_at + LATEST_S
    line = request("a", body={"prompt": "x", "max_tokens": limit, "n": limit})
    assert begin_batch(store, record, 500, demand_of(parse_line(json.dumps(line).encode())) * 500)


def test_a_batch_that_is_cancelled_while_it_is_validated_does_not_fail(opened):
    store = opened()
    record = create(store, 1, account=b"a", queued_limit=1)
    store.cancel_batch(record.owner, record.id)
    assert not begin_batch(store, record, 1, Demand(1, 100, 100))


def test_the_meter_does_not_begin_before_a_line_is_open():
    busy = Busy(100)
    assert busy.meter.look(0.0) is None
    busy.fill()
    busy.meter.look(1.0)
    busy.end(1)
    assert busy.meter.look(2.0) is None
    busy.end(3)
    busy.meter.look(3.0)
    busy.end(20)
    assert busy.meter.look(3.0 + paces.ROW_S) == Observed(paces.ROW_S, Demand(20, 200, 100))
