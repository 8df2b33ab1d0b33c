"""The input of a batch: valid request lines, and the errors of invalid ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from answering import request

from weft.batch import lines
from weft.batch.lines import InputChangedError, InputFile
from weft.core.errors import ConfigError, ParameterError


def test_lines_are_found_again_by_index_and_by_number(write):
    source = write(request("a"), "", "   ", request("b"), request("c"))
    assert len(source) == 3
    assert [source.number(i) for i in range(3)] == [1, 4, 5]
    assert [source.index(number) for number in range(7)] == [-1, 0, -1, -1, 1, 2, -1]
    assert [source.line(i).custom_id for i in range(3)] == ["a", "b", "c"]
    assert json.loads(bytes(source.line(1).body))["prompt"] == "b"


def test_the_last_line_needs_no_end(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes("\r\n".join(json.dumps(request(name)) for name in "ab").encode())
    source = InputFile(path)
    assert [source.line(i).custom_id for i in range(2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "param", "code", "words"),
    [
        ("{", None, "invalid_json", "The line is not valid JSON"),
        ("[1]", None, "invalid_parameter", "The line is wrong: expected object"),
        ("\udcff", None, "invalid_json", "The line is not valid JSON"),
        ({"url": "/v1/completions"}, "custom_id", "missing_required_parameter", "custom_id"),
        (request("a", custom_id=3), "custom_id", "invalid_parameter", "expected str"),
        (request(""), "custom_id", "invalid_parameter", "1 to 1024 characters"),
        (request("x" * 1025), "custom_id", "invalid_parameter", "1 to 1024 characters"),
        (request("a", method="GET"), "method", "invalid_parameter", "must be POST, not 'GET'"),
        (request("a", url="/v1/chat"), "url", "unknown_url", "Did you mean '/v1/chat/completions'"),
        (request("a", body="x"), "body", "invalid_parameter", "expected object"),
        (request("a", body={"stream": True}), "stream", "unsupported_parameter", "stream"),
        (request("a", body={"stream": 3}), "body.stream", "invalid_parameter", "expected bool"),
        (request("a", priority=1), "priority", "unknown_parameter", "priority"),
    ],
)
def test_what_is_no_request_is_refused_by_name(tmp_path, line, param, code, words):
    path = tmp_path / "in.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(text.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ParameterError) as caught:
        InputFile(path).line(0)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert words in caught.value.message


def test_a_repeated_custom_id_is_told_with_the_line_that_had_it(write):
    source = write(request("a"), request("b"), "{", request("a"), request("a"), "{")
    assert [source.line(i).custom_id for i in (0, 1)] == ["a", "b"]
    for index in (3, 4):
        with pytest.raises(ParameterError, match="Line 1 has the same custom_id") as caught:
            source.line(index)
        assert caught.value.code == "duplicate_custom_id"
        assert source.custom_id(index) == "a"
    assert source.custom_id(2) is None


def test_equal_hashes_are_no_repeats(write, monkeypatch):
    monkeypatch.setattr(lines, "_id_hash", lambda _: 1)
    source = write(request("a"), request("b"), request("a"))
    assert [source.line(i).custom_id for i in (0, 1)] == ["a", "b"]
    with pytest.raises(ParameterError, match="Line 1 has"):
        source.line(2)


def test_a_line_that_is_too_long_is_refused_and_the_next_ones_are_read(write, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    long = request("a", body={"prompt": "x" * 1000})
    source = write(long, request("b"), long, request("c"))
    assert [source.line(i).custom_id for i in (1, 3)] == ["b", "c"]
    for index in (0, 2):
        with pytest.raises(ParameterError, match="more than 200 bytes"):
            source.line(index)


def test_a_file_that_changes_meanwhile_is_noticed(write):
    source = write(request("a"), request("b"))
    with open(source.path, "r+b") as file:
        file.seek(len(json.dumps(request("a"))) + 3)
        file.write(b"X")
    assert source.line(0).custom_id == "a"
    with pytest.raises(InputChangedError, match=r"in\.jsonl:2: the line was changed"):
        source.line(1)


def test_equal_files_have_equal_digests(write):
    assert write(request("a")).digest == write(request("a"), name="other").digest
    assert write(request("a")).digest != write(request("b"), name="other").digest


def test_a_line_costs_20_bytes_and_not_its_length(write):
    source = write(*[request(f"r{i}", body={"prompt": "x" * 500}) for i in range(2000)])
    arrays = (source._numbers, source._crcs, source._lengths, source._offsets)
    assert sum(len(kept) * kept.itemsize for kept in arrays) == 20 * 2000
    assert not source._repeats


def test_what_cannot_be_read_is_refused(tmp_path):
    for path, words in ((tmp_path / "no", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"Cannot read '.*': {words}"):
            InputFile(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keep_open = os.open(pipe, os.O_RDWR)
    with pytest.raises(ConfigError, match="cannot be read twice"):
        InputFile(Path(pipe))
    os.close(keep_open)
