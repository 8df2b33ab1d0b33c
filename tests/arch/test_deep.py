"""The runner of the deep tests, and budgets: each folder in a part; parts that end, or do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import budgets

TESTS = Path(__file__).parents[1]
FAIL = "raise SystemExit(1)"
SLOW = "import time; time.sleep(60)"


@pytest.fixture(scope="module")
def deep():
    spec = importlib.util.spec_from_file_location("tools_deep", TESTS.parent / "tools" / "deep.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tools_deep"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tools_deep"]


def folders() -> list[str]:
    return sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})


def test_each_folder_of_tests_is_in_one_part(deep):
    named = Counter(word for part in deep.PARTS for word in part.command if "tests/" in word)
    del named["tests/referees/clients/run.py"], named["tests/referees/page/run.py"]
    missing = {f"tests/{folder}" for folder in folders()} - named.keys()
    assert not missing
    assert set(named.values()) == {1}


def test_each_folder_of_tests_has_a_budget():
    assert sorted(budgets.seconds()) == folders()


def test_parts_that_fail_and_pass_are_told(deep):
    parts = [
        deep.Part("bad", "nothing", ("-c", FAIL), 0),
        deep.Part("good", "nothing", ("-c", "pass"), 0),
        deep.Part("once", "nothing", ("-c", FAIL), 0, again=("-c", "pass")),
        deep.Part("twice", "nothing", ("-c", FAIL), 0, again=("-c", FAIL)),
    ]
    outcomes = [(outcome.part.name, outcome.status) for outcome in deep.run_all(parts, None)]
    assert outcomes == [
        ("bad", "failed"),
        ("good", "passed"),
        ("once", "unsteady"),
        ("twice", "failed"),
    ]


def test_what_failed_runs_again_alone(deep, tmp_path):
    """As pytest does it: only the test that failed, without other workers."""
    (tmp_path / "test_some.py").write_text(
        "import pathlib\n"
        "def test_good(): pathlib.Path('good').open('a').write('.')\n"
        "def test_unsteady():\n"
        "    file = pathlib.Path('unsteady')\n"
        "    before, _ = file.exists(), file.touch()\n"
        "    assert before\n"
    )
    again = deep.tests("any", "nothing", 0, "ring").again
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True)
    options = [word for word in again if word.startswith("--last-failed")]
    second = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True)
    assert (first.returncode, second.returncode) == (1, 0)
    assert (tmp_path / "good").read_text() == "."


def test_a_part_without_time_is_left_out_and_one_without_end_is_cut_off(deep, tmp_path):
    file = tmp_path / "pid"
    child = f"import os, pathlib; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); {SLOW}"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parts = [
        deep.Part("long", "nothing", ("-c", SLOW), 1000),
        deep.Part("endless", "nothing", ("-c", start), 0),
    ]
    outcomes = [(outcome.part.name, outcome.status) for outcome in deep.run_all(parts, 3)]
    assert outcomes == [("long", "left out"), ("endless", "cut off")]
    if file.exists():  # the machine may be so busy that it did not come so far
        process = Path(f"/proc/{file.read_text()}")
        end = time.monotonic() + 20
        while process.exists() and "Z" not in (process / "stat").read_text():
            assert time.monotonic() < end, "what a part has started lives on"
            time.sleep(0.05)


def test_offline_leaves_out_what_downloads(deep, monkeypatch, capsys):
    parts = [
        deep.Part("far", "nothing", ("-c", "raise SystemExit(1)"), 0, downloads=True),
        deep.Part("near", "nothing", ("-c", "pass"), 0),
    ]
    monkeypatch.setattr(deep, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["deep.py", "--offline"])
    assert deep.main() == 0
    told = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["far", "left"] in told
    assert ["near", "passed"] in told


def test_an_unknown_part_is_named(deep, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["deep.py", "mutant"])
    with pytest.raises(SystemExit) as ended:
        deep.main()
    assert ended.value.code == 2
    assert "no part is called mutant; they are: mutants, schedulers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "slowness", "words"),
    [
        ({"ring": 19.0, "text": 1.0}, 1.0, []),
        ({"ring": 21.0, "text": 1.0}, 1.0, ["tests/ring took 21 s; 20 s are allowed"]),
        ({"ring": 21.0, "text": 1.0}, 1.5, []),
        ({"ring": 21.0, "text": 1.0}, 0.5, ["tests/ring took 21 s; 20 s are allowed"]),
        ({"ring": 1.0}, 1.0, ["tests/text has a budget and no tests"]),
        ({"ring": 1.0, "text": 1.0, "new": 1.0}, 1.0, ["tests/new has no budget in budgets.toml"]),
    ],
)
def test_folders_that_exceed_their_budgets_are_named(seconds, slowness, words):
    assert budgets.over(seconds, {"ring": 10.0, "text": 10.0}, slowness) == words
