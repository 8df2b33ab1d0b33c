"""The bugs that tests must find fit the code, and ``tools/mutants.py`` tells which survive."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "mutants.py"

CODE = """
def total(numbers):
    return sum(numbers)


def first(numbers):
    return numbers[0]
"""
TESTS = """
from weft.sums import first, total


def test_total():
    assert total([2, 3]) == 5


def test_first():
    assert first([7]) == 7
"""
ENTRY = """
[[mutant]]
name = "{name}"
bug = "It is wrong."
file = "src/weft/sums.py"
old = "{old}"
new = "{new}"
found_by = ["tests/test_sums.py::{test}"]
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path) -> Path:
    """A project of its own by the name of weft."""
    root = tmp_path / "tree"
    for name, text in (
        ("src/weft/__init__.py", ""),
        ("src/weft/sums.py", CODE),
        ("tests/test_sums.py", TESTS),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(tool: ModuleType, tree: Path, *arguments: str, **entries: tuple[str, str, str]) -> int:
    """Run the tool on bugs by name: old text, new text, and the test that finds them."""
    table = tree / "mutants.toml"
    texts = [ENTRY.format(name=n, old=o, new=w, test=t) for n, (o, w, t) in entries.items()]
    table.write_text("".join(texts))
    return tool.main(arguments, tree, table)


def test_every_bug_fits_the_code_and_names_tests_that_are_there(tool):
    mutants = tool.read(tool.TABLE)
    assert len(mutants) >= 12
    for mutant in mutants:
        assert not mutant.misfit(ROOT)
        assert mutant.old != mutant.new
        ast.parse(mutant.changed((ROOT / mutant.file).read_text(encoding="utf-8")))
        assert mutant.found_by
        for test in mutant.found_by:
            file, *names = test.partition("[")[0].split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            kinds = [*["class"] * (len(names) - 1), "def"][: len(names)]
            for kind, name in zip(kinds, names, strict=True):
                assert f"{kind} {name}" in text, test


def test_bugs_that_are_found_and_that_survive(tool, tree, capsys):
    code = run(
        tool,
        tree,
        found=("return sum(numbers)", "return sum(numbers[1:])", "test_total"),
        missed=("return numbers[0]", "return numbers[-1]", "test_first"),
        broken=("def first(", "def second(", "test_first"),
    )
    said = capsys.readouterr().out
    assert code == 1
    assert "| found | `tests/test_sums.py::test_total` |" in said
    assert "| missed | **nothing** |" in said
    assert "missed survived: tests/test_sums.py::test_first pass with it" in said
    assert "broken survived: pytest said:" in said  # a test that cannot be collected finds nothing
    assert (tree / "src" / "weft" / "sums.py").read_text() == CODE


def test_bugs_that_are_all_found(tool, tree, capsys):
    same_length = ("return numbers[0]", "return numbers[9]", "test_first")
    assert run(tool, tree, "one", one=same_length, other=("sum", "max", "test_total")) == 0
    said = capsys.readouterr().out
    assert "| one | `tests/test_sums.py::test_first` |" in said
    assert "other" not in said


def test_a_bug_that_hangs_is_found_by_the_limit_of_a_test(tool, tree, capsys, monkeypatch):
    monkeypatch.setattr(tool, "TEST_S", 1)
    hangs = ("return sum(numbers)", "while True: pass", "test_total")
    assert run(tool, tree, hangs=hangs) == 0
    assert "| hangs | `tests/test_sums.py::test_total` |" in capsys.readouterr().out


def test_tests_that_do_not_end_find_nothing(tool, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "RUN_S", 0.5)
    (tree / "tests" / "test_sums.py").write_text("import time\ntime.sleep(60)\n")
    outcome = tool.Copy(tree, tmp_path).run(["tests"])
    assert (outcome.failed, outcome.trouble) == (None, "did not end in 0.5 s")
    assert outcome.seconds < 30


def test_a_bug_must_fit_the_code(tool, tree, capsys):
    assert run(tool, tree, gone=("return 1", "return 2", "test_total")) == 1
    assert "gone: its old text occurs 0 times in src/weft/sums.py" in capsys.readouterr().err
    assert run(tool, tree, twice=("return", "yield", "test_total")) == 1
    assert "twice: its old text occurs 2 times in src/weft/sums.py" in capsys.readouterr().err


def test_tests_that_fail_without_a_bug_prove_nothing(tool, tree, capsys):
    (tree / "tests" / "test_sums.py").write_text("def test_total():\n    assert False\n")
    assert run(tool, tree, any=("sum", "max", "test_total")) == 1
    said = capsys.readouterr()
    assert "must pass without a bug, but: tests/test_sums.py::test_total" in said.err
    assert "| any |" not in said.out


def test_bugs_are_listed_and_chosen_by_name(tool, tree, capsys):
    bugs = {"one": ("sum", "max", "test_total"), "two": ("numbers[0]", "0", "test_first")}
    assert run(tool, tree, "--list", "two", **bugs) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "| two | It is wrong. | `tests/test_sums.py::test_first` |"
    with pytest.raises(SystemExit) as ended:
        run(tool, tree, "three", **bugs)
    assert ended.value.code == 2
    assert "unknown: three" in capsys.readouterr().err
