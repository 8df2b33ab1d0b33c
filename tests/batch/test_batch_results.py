"""Results on disk: whatever ends the program, each line has its result once, whole, or not yet."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.batch.lines import InputChangedError, InputFile
from weft.batch.ports import LineAnswer, Result
from weft.batch.results import Results, ResultsError
from weft.batch.usage import Usage, usage_of
from weft.core.errors import ConfigError, WeftError

LINES = 12
ERROR = {"message": "no", "type": "invalid_request_error", "param": None, "code": "x", "line": 1}


def body(index: int) -> bytes:
    text = "täxt\n" * (index + 1)
    usage = {"prompt_tokens": index, "completion_tokens": 2}
    return json.dumps({"text": text, "usage": usage}, indent=index % 2 or None).encode()


def put(results: Results, index: int, failed: bool) -> None:
    answer = LineAnswer(400 if failed else 200, "req_1", body(index))
    results.put(index, Result(f"r{index}", answer, ERROR if failed else None))


class Files:
    """An input of some lines, half of them after blank ones, and the files of its results."""

    def __init__(self, folder: str | Path) -> None:
        self.input = Path(folder, "in.jsonl")
        self.output, self.errors = Path(folder, "out.jsonl"), Path(folder, "err.jsonl")
        self.input.write_text("".join("\n" * (i % 2) + f'{{"n": {i}}}\n' for i in range(LINES)))

    def open(self, answered_by: str = "--model m", **options: Any) -> Results:
        source = InputFile(self.input)
        return Results(self.output, self.errors, source, answered_by, **options)

    def whole_lines(self, path: Path) -> list[bytes]:
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def test_what_was_put_is_done_and_its_lines_are_openais(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    put(results, 3, failed=False)
    put(results, 4, failed=True)
    results.put(5, Result(None, None, ERROR))
    results.close()
    [line] = [json.loads(line) for line in files.whole_lines(files.output)]
    assert line["id"].startswith("batch_req_")
    assert line["custom_id"] == "r3"
    assert line["error"] is None
    response = {"status_code": 200, "request_id": "req_1", "body": json.loads(body(3))}
    assert line["response"] == response
    refused, unread = [json.loads(line) for line in files.whole_lines(files.errors)]
    assert refused["response"]["status_code"] == 400
    assert refused["error"] == ERROR
    assert unread["custom_id"] is None
    assert unread["response"] is None
    again = files.open()
    assert [i for i in range(LINES) if again.done(i)] == [3, 4, 5]
    assert (again.answered, again.refused, again.resumed) == (1, 2, 3)
    again.close()


@given(
    ops=st.lists(st.tuples(st.integers(0, LINES - 1), st.booleans()), unique_by=lambda op: op[0]),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=3),
)
def test_wherever_files_are_cut_whole_lines_count_and_torn_ones_go(ops, cuts):
    """A kill leaves any beginning of each file; what is missing is put again, nothing twice."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        for cut in cuts:
            results = files.open()
            for index, failed in ops:
                if not results.done(index):
                    put(results, index, failed)
            results.close()
            for path, share in zip((files.output, files.errors), cut, strict=True):
                if path.exists():
                    data = path.read_bytes()
                    path.write_bytes(data[: int(share * len(data))])
            left = [json.loads(line)["custom_id"] for line in files.whole_lines(files.output)]
            left += [json.loads(line)["custom_id"] for line in files.whole_lines(files.errors)]
            results = files.open()
            assert sorted(left) == sorted(f"r{i}" for i in range(LINES) if results.done(i))
            results.close()
        results = files.open()
        for index, failed in ops:
            if not results.done(index):
                put(results, index, failed)
        results.close()
        for path, failed in ((files.output, False), (files.errors, True)):
            lines = [json.loads(line) for line in files.whole_lines(path)]
            expected = {f"r{index}": body(index) for index, wrong in ops if wrong is failed}
            assert len(lines) == len(expected)
            for line in lines:
                assert line["response"]["body"] == json.loads(expected[line["custom_id"]])


def test_another_input_is_refused_with_both_named(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    put(results, 0, failed=False)
    results.close()
    before = files.output.read_bytes()
    files.input.write_text('{"n": 0}\n')
    with pytest.raises(InputChangedError, match=r"12 lines, SHA-256 .*; now 1 lines.*--restart"):
        files.open()
    assert files.output.read_bytes() == before
    results = files.open(restart=True)
    assert not results.done(0)
    results.close()
    assert files.output.read_bytes() == b""


def test_another_model_is_refused(tmp_path):
    files = Files(tmp_path)
    files.open().close()
    with pytest.raises(ConfigError, match="begun with --model m, not with --url"):
        files.open("--url")


def test_files_that_no_batch_has_begun_are_left_alone(tmp_path):
    files = Files(tmp_path)
    files.output.write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        files.open()
    assert files.output.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("first", [3, 70, 4000])
def test_from_a_hole_on_all_lines_are_asked_again(tmp_path, first):
    """Power went when later bytes were on the disk, and earlier ones were not."""
    files = Files(tmp_path)
    with closing(files.open()) as results:
        for index in range(LINES):
            put(results, index, failed=False)
    data = bytearray(files.output.read_bytes())
    first = min(first, len(data) - 300)
    data[first : first + 200] = bytes(200)
    files.output.write_bytes(data)
    with closing(files.open()) as again:
        left = [index for index in range(LINES) if not again.done(index)]
        assert left == list(range(data[:first].count(b"\n"), LINES))
        for index in left:
            put(again, index, failed=False)
    assert len({json.loads(line)["id"] for line in files.whole_lines(files.output)}) == LINES


@pytest.mark.parametrize("line", ['{"a": 1}', "{}", "torn\n{}"])
def test_lines_of_others_are_told_and_not_cut_off(tmp_path, line):
    files = Files(tmp_path)
    results = files.open()
    put(results, 0, failed=False)
    results.close()
    with files.output.open("a") as file:
        file.write(f"{line}\n")
    before = files.output.read_bytes()
    with pytest.raises(ResultsError, match=r"out\.jsonl:2: this line is no result"):
        files.open()
    assert files.output.read_bytes() == before


def test_two_results_of_one_line_are_told(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    put(results, 0, failed=False)
    results.close()
    files.errors.write_bytes(files.output.read_bytes())
    with pytest.raises(ResultsError, match=r"err\.jsonl:1: .* the second one of its line"):
        files.open()


def test_errors_are_asked_again_when_that_is_wished(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    put(results, 0, failed=False)
    put(results, 1, failed=True)
    results.close()
    results = files.open(retry_errors=True)
    assert [results.done(0), results.done(1)] == [True, False]
    put(results, 1, failed=False)
    results.close()
    assert not files.errors.exists()


def test_old_errors_are_gone_for_good_before_a_line_is_asked_again(tmp_path, monkeypatch):
    """After a loss of power an old error stood beside the new answer, and no run could go on."""
    files = Files(tmp_path)
    results = files.open()
    put(results, 1, failed=True)
    results.close()
    done: list[tuple[str, str]] = []

    def watched(name):
        real = getattr(os, name)

        def watching(fd, *more):
            if os.readlink(f"/proc/self/fd/{fd}") == str(files.errors):
                done.append((name, os.stat(files.errors).st_size))
            return real(fd, *more)

        return watching

    for name in ("ftruncate", "fsync"):
        monkeypatch.setattr(os, name, watched(name))
    results = files.open(retry_errors=True)
    assert [name for name, _ in done[:2]] == ["ftruncate", "fsync"]
    assert done[0][1] > done[1][1] == 0
    results.close()


def test_only_one_may_write(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    with pytest.raises(ResultsError, match="Another weft batch is writing"):
        files.open()
    results.close()
    files.open().close()


def test_no_file_overwrites_another(tmp_path):
    files = Files(tmp_path)
    source = InputFile(files.input)
    for output, errors, words in (
        (files.input, files.errors, "both input and output"),
        (files.output, files.input, "both input and errors"),
        (files.output, files.output, "both output and errors"),
        (files.output, state_of(files.output), "both errors and state"),
        (tmp_path, files.errors, "is a folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            Results(output, errors, source, "m", restart=True)
    assert files.input.exists()
    assert not files.output.exists()
    assert not state_of(files.output).exists()
    with pytest.raises(ResultsError, match="No such file or directory"):
        Results(tmp_path / "no" / "out", files.errors, source, "m")


def state_of(output: Path) -> Path:
    return output.with_name(output.name + ".state")


@pytest.mark.parametrize("link", ["symbolic", "hard", "dangling", "folder"])
def test_no_file_overwrites_another_by_a_link(tmp_path, link):
    files = Files(tmp_path)
    source = InputFile(files.input)
    there = {"input": files.input, "output": files.output, "state": state_of(files.output)}
    for name, target in there.items():
        other = tmp_path / f"{link}-{name}"
        if link == "folder":
            (tmp_path / "again").unlink(missing_ok=True)
            (tmp_path / "again").symlink_to(tmp_path)
            other = tmp_path / "again" / target.name
        elif link != "dangling" or name == "input":
            target.touch()
        if link == "hard":
            other.hardlink_to(target)
        elif link != "folder":
            other.symlink_to(target)
        with pytest.raises(ConfigError, match=rf"both ({name} and errors|errors and {name})"):
            Results(files.output, other, source, "m", restart=True)
    linked = tmp_path / "linked"
    linked.symlink_to(files.input)
    with pytest.raises(ConfigError, match="both input and output"):
        Results(linked, files.errors, source, "m", restart=True)
    state_of(linked).symlink_to(files.input)
    with pytest.raises(ConfigError, match="both input and"):
        Results(linked, files.errors, source, "m", restart=True)
    linked.unlink()
    with pytest.raises(ConfigError, match="both input and state"):
        Results(linked, files.errors, source, "m", restart=True)
    assert files.input.exists()


def test_a_full_disk_is_an_error_of_the_run(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, results._files[files.output])
    os.close(full)
    with pytest.raises(WeftError, match=r"Cannot write '.*out\.jsonl': No space left on device"):
        put(results, 0, failed=False)
    assert not results.done(0)
    results.close()


@pytest.mark.parametrize(
    ("usage", "wanted"),
    [
        (
            {"prompt_tokens": 9, "completion_tokens": 4,
             "prompt_tokens_details": {"cached_tokens": 3},
             "completion_tokens_details": {"reasoning_tokens": 2}},
            Usage(9, 4, 3, 2),
        ),
        (
            {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 3},
             "output_tokens_details": {"reasoning_tokens": 2}},
            Usage(9, 4, 3, 2),
        ),
        (
            {"input_tokens": 5, "output_tokens": 4, "cache_read_input_tokens": 3,
             "cache_creation_input_tokens": 1},
            Usage(9, 4, 3, 0),
        ),
        (None, Usage()),
        ("much", Usage()),
    ],
)  # fmt: skip
def test_usage_is_read_from_answers_of_each_api(usage, wanted):
    """Anthropic's input tokens are those that the cache did not have."""
    assert usage_of(json.dumps({"usage": usage}).encode()) == wanted


def test_a_number_as_a_servers_code_does_not_keep_a_batch_from_going_on(tmp_path):
    files = Files(tmp_path)
    results = files.open()
    results.put(0, Result("r0", None, {**ERROR, "code": 400}))
    results.close()
    again = files.open()
    assert again.done(0)
    again.close()
