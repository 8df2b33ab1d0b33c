"""Runs of batches with an asker whose answers each test scripts."""

from __future__ import annotations

import asyncio

import pytest
from answering import Answering, read, request

from weft.batch import progress
from weft.batch.order import InOrder
from weft.batch.ports import LineAnswer, NobodyAnswersError, Result
from weft.batch.results import Results
from weft.batch.runner import Runner, error_of
from weft.batch.usage import Usage
from weft.core.errors import ParameterError, WeftError


class Run:
    """A batch in a folder, run as often as a test likes."""

    def __init__(self, source):
        self.source = source
        folder = source.path.parent
        self.output, self.errors = folder / "out.jsonl", folder / "err.jsonl"

    def go(self, asker, at_once=4, watch=lambda *_: None) -> None:
        results = Results(self.output, self.errors, self.source, "m")

        async def run():
            order = InOrder(len(self.source), results, at_once)
            runner = Runner(
                self.source, results, asker, order, lambda result: watch(runner, result)
            )
            await runner.run()

        try:
            asyncio.run(run())
        finally:
            results.close()

    def names(self) -> list[str | None]:
        return [line["custom_id"] for line in read(self.output) + read(self.errors)]


@pytest.fixture
def batch(write) -> Run:
    return Run(write(*[request(f"r{i}") for i in range(20)]))


def test_every_line_is_asked_once_in_order_and_no_more_than_may_be_open(batch):
    asker = Answering()
    batch.go(asker, at_once=4)
    assert asker.asked == list(range(1, 21))
    assert asker.most == 4
    assert sorted(batch.names()) == sorted(f"r{i}" for i in range(20))
    assert all(r["response"]["body"]["text"] == r["custom_id"] for r in read(batch.output))
    assert not batch.errors.exists()


def test_failures_and_wrong_lines_are_noted_and_the_rest_goes_on(write):
    batch = Run(write(request("a"), "{", request("b"), request("a"), request("c"), request("d")))

    def react(number):
        errors = {3: ParameterError("too hot", param="temperature"), 5: ValueError("a bug")}
        return errors.get(number)

    asker = Answering(react)
    batch.go(asker)
    assert asker.asked == [1, 3, 5, 6]
    assert sorted(line["custom_id"] for line in read(batch.output)) == ["a", "d"]
    found = {line["error"]["line"]: line for line in read(batch.errors)}
    assert sorted(found) == [2, 3, 4, 5]
    assert found[2]["custom_id"] is None
    assert found[2]["response"] is None
    refused = found[3]
    assert refused["response"]["status_code"] == 400
    error = {"message": "too hot", "type": "invalid_request_error", "param": "temperature"}
    error |= {"code": "invalid_parameter"}
    assert refused["response"]["body"]["error"] == error
    assert refused["error"] == {**error, "line": 3}
    assert found[4]["error"]["code"] == "duplicate_custom_id"
    assert found[5]["response"]["status_code"] == 500
    assert "a bug" not in str(found[5])  # the log has it


def test_when_nobody_answers_the_run_ends_and_the_next_one_goes_on(batch):
    gone = NobodyAnswersError("gone")
    first = Answering(lambda number: gone if number == 9 else None)
    with pytest.raises(NobodyAnswersError, match="gone"):
        batch.go(first)
    done = len(batch.names())
    assert 5 <= done < 12
    second = Answering()
    batch.go(second)
    assert len(second.asked) == 20 - done
    assert sorted(batch.names()) == sorted(f"r{i}" for i in range(20))


def test_after_stop_what_is_open_is_answered_and_nothing_else(batch):
    asker = Answering()

    def watch(runner, result):
        if result.custom_id == "r3":
            runner.stop()

    batch.go(asker, watch=watch)
    assert len(asker.asked) < 12
    assert len(batch.names()) == len(asker.asked)
    batch.go(asker)
    assert sorted(asker.asked) == list(range(1, 21))


def test_a_result_that_cannot_be_kept_ends_the_run(batch, monkeypatch):
    def full(*_):
        raise WeftError("the disk is full")

    monkeypatch.setattr(Results, "_append", full)
    with pytest.raises(WeftError, match="the disk is full"):
        batch.go(Answering())


def test_usage_is_counted_by_either_name_of_its_fields(write):
    batch = Run(write(request("a"), request("b")))
    seen: list[Result] = []
    batch.go(Answering(), watch=lambda _, result: seen.append(result))
    assert [(r.usage.input_tokens, r.usage.output_tokens) for r in seen] == [(3, 2)] * 2
    results = Results(batch.output, batch.errors, batch.source, "m")
    assert (results.usage.input_tokens, results.usage.output_tokens) == (6, 4)
    results.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no", "code": 3, "extra": 1}}', "no"),
        (b'{"error": "no"}', "The server answered 418."),
        (b"teapot", "The server answered 418."),
        (b"[]", "The server answered 418."),
    ],
)
def test_errors_of_strange_servers_have_openais_form(body, message):
    error = error_of(LineAnswer(418, "x", body))
    assert error is not None
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == message
    assert error_of(LineAnswer(200, "x", body)) is None


def test_a_log_gets_a_line_now_and_then(batch, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SAY_EVERY_S", 0.0)
    results = Results(batch.output, batch.errors, batch.source, "m")
    shown = progress.ProgressBar(results, len(batch.source))
    shown.start("somebody answers")
    for index in range(2):
        error = {"message": "no"} if index else None
        result = Result("x", LineAnswer(200, "x", b"{}"), error, Usage(30, 10))
        results.put(index, result)
        shown.watch(result)
    shown.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "weft: 20 lines; somebody answers."
    assert told[2].startswith("weft: 2 of 20 lines, about 0 min left, tokens/s: ")
    assert told[2].endswith(" out, 1 failed")
    assert "20 lines: 1 answered, 1 with an error, 18 left." in shown.summary()
    results.close()
