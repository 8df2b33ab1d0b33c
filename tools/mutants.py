"""Proves that the tests find bugs: puts known bugs into a copy of weft, one at a time.

    python tools/mutants.py                      # all bugs
    python tools/mutants.py swapped-block ...    # these
    python tools/mutants.py --list               # which test finds which bug, in Markdown

``mutants.toml`` has the bugs. The working tree is never touched: a temporary folder gets a copy of
it, with links to the compiled modules. The tests must pass there before any bug is put in. The exit
code is 1 if a bug survives its tests, or does not fit the code any more; 2 on wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
FOLDERS = ("benchmarks", "docs", "scripts", "src", "tests", "tools")
FILES = ("Makefile", "README.md", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "node_modules")
TEST_S = 120  # that a test may take; a hung one fails then
RUN_S = 300  # that the tests of one bug may take together
EDITABLE = re.compile(r"_+editable_+\w*weft\w*")  # modules that lead imports to a working tree
# Tests that fail for these reasons have not looked at what the code does.
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")


class MutantError(Exception):
    """A bug cannot be put in, or its tests prove nothing."""


@dataclass(frozen=True)
class Mutant:
    """A bug; ``mutants.toml`` describes the fields."""

    name: str
    bug: str
    file: str
    old: str
    new: str
    found_by: tuple[str, ...]

    def misfit(self, root: Path) -> str:
        """Why the bug does not fit the code; empty if it does."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}; change the mutant as the code changed."
        count = path.read_text(encoding="utf-8").count(self.old)
        if count == 1:
            return ""
        return (
            f"{self.name}: its old text occurs {count} times in {self.file} instead of once; "
            "change the mutant as the code changed."
        )

    def changed(self, text: str) -> str:
        """The text of its file with the bug."""
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """The result of a run of tests.

    Attributes:
        failed: the first test that failed, and why.
        trouble: why the run says nothing about the code; empty if it does.
    """

    failed: tuple[str, str] | None
    trouble: str
    seconds: float


def read(table: Path) -> list[Mutant]:
    """Return the bugs of a table. Raises MutantError if two have one name."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**{**row, "found_by": tuple(row["found_by"])}) for row in rows]
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise MutantError(f"{table.name}: two mutants have the same name.")
    return mutants


class Copy:
    """A copy of the tree, in which the tests can be run.

    Raises:
        MutantError: Python would import weft from somewhere else.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "weft"
        shadows = folder / "shadows"
        shadows.mkdir()
        for name in filter(lambda name: (root / name).is_dir(), FOLDERS):
            shutil.copytree(root / name, self.root / name, ignore=LEFT_OUT)
        for name in filter(lambda name: (root / name).is_file(), FILES):
            shutil.copy2(root / name, self.root / name)
        modules = ["weft", *self._link_compiled()]
        # The finder of an editable install goes before PYTHONPATH, so its module is replaced by an
        # empty one; nothing but PYTHONPATH reaches the processes that tests start.
        for name in filter(EDITABLE.fullmatch, list(sys.modules)):
            (shadows / f"{name}.py").touch()
        paths = [str(shadows), str(self.root / "src"), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CI": "1",  # the same examples of hypothesis each time, and whole lines from pytest
            "CUDA_VISIBLE_DEVICES": "",
            "WEFT_TEST_DEVICE": "cpu",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to load some takes longer than most tests
        }
        self._check_imports(modules)

    def _link_compiled(self) -> list[str]:
        """Link the compiled modules that the running Python finds; each has a stub in the tree."""
        source, names = self.root / "src", []
        for stub in sorted(source.rglob("_native.pyi")):
            name = ".".join(stub.relative_to(source).with_suffix("").parts)
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise MutantError(f"{name} is not built for {sys.executable}.")
            compiled = Path(spec.origin).resolve()
            (stub.parent / compiled.name).symlink_to(compiled)
            names.append(name)
        return names

    def _check_imports(self, modules: Sequence[str]) -> None:
        code = f"import {', '.join(modules)}; print(weft.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = Path(done.stdout.strip())
        if done.returncode or not found.is_relative_to(self.root):
            raise MutantError(
                f"The copy in {self.root} cannot be tested: its Python finds weft in '{found}'. "
                f"{done.stderr.strip()}"
            )

    @contextlib.contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """Put a bug in, and take it out again."""
        path = self.root / mutant.file
        before = path.read_text(encoding="utf-8")
        _write(path, mutant.changed(before))
        try:
            yield
        finally:
            _write(path, before)

    def run(self, tests: Iterable[str]) -> Outcome:
        """Run tests up to the first that fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE"]
        command += ["-p", "no:cacheprovider", "-p", "timeout", f"--timeout={TEST_S}", *tests]
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=RUN_S)
            except subprocess.TimeoutExpired:
                _kill_family(process.pid)
                return Outcome(None, f"did not end in {RUN_S} s", time.monotonic() - began)
        return _outcome(process.returncode, said, time.monotonic() - began)


def _write(path: Path, text: str) -> None:
    """Change a module, and remove its compiled form, which might pass for that of the new text."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _kill_family(pid: int) -> None:
    """Kill a child of this process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(pid)
        for process in [child, *child.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _outcome(code: int, said: str, seconds: float) -> Outcome:
    """Read pytest's exit code and short summary."""
    if code == 0:
        passed = re.search(r"\d+ passed", said)
        return Outcome(None, "" if passed else "no test was run, all were skipped", seconds)
    failed = re.search(r"^FAILED (.*?)(?: - (.*))?$", said, flags=re.MULTILINE)
    if code == 1 and failed is not None:
        test, why = failed[1], failed[2] or ""
        trouble = f"{test} is broken: {why}" if why.startswith(BROKEN) else ""
        return Outcome((test, why), trouble, seconds)
    return Outcome(None, f"pytest said: {said.strip()[-500:]}", seconds)


def page(mutants: Sequence[Mutant]) -> str:
    """Return which bug is found by which test, as a table in Markdown."""
    lines = ["| bug | what it does | found by |", "|---|---|---|"]
    for mutant in mutants:
        tests = "<br>".join(f"`{test}`" for test in mutant.found_by)
        lines.append(f"| {mutant.name} | {mutant.bug} | {tests} |")
    return "\n".join(lines)


def prove(mutants: Sequence[Mutant], root: Path) -> int:
    """Run the tests with each of the bugs, and print which test found it; return the exit code."""
    if misfits := [misfit for mutant in mutants if (misfit := mutant.misfit(root))]:
        raise MutantError("\n".join(misfits))
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        copy = Copy(root, Path(folder))
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.found_by))
        print(f"{len(tests)} tests without a bug ...", flush=True)
        before = copy.run(tests)
        if before.failed is not None or before.trouble:
            why = before.trouble or " - ".join(before.failed or ())
            raise MutantError(f"The tests must pass without a bug, but: {why}")
        print(f"... pass in {before.seconds:.1f} s.\n\n| bug | found by | s |\n|---|---|---|")
        survivors = []
        for mutant in mutants:
            with copy.with_bug(mutant):
                outcome = copy.run(mutant.found_by)
            found = outcome.failed is not None and not outcome.trouble
            test = f"`{outcome.failed[0]}`" if outcome.failed and found else "**nothing**"
            print(f"| {mutant.name} | {test} | {outcome.seconds:.1f} |", flush=True)
            if not found:
                survivors.append((mutant, outcome))
    for mutant, outcome in survivors:
        why = outcome.trouble or f"{', '.join(mutant.found_by)} pass with it"
        print(f"\n{mutant.name} survived: {why}. No test notices this: {mutant.bug}")
    return 1 if survivors else 0


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, table: Path = TABLE) -> int:
    """Run the command; return the exit code, 1 if a bug survives or does not fit the code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs; all, if none is given")
    parser.add_argument("--list", action="store_true", help="print the bugs and run nothing")
    options = parser.parse_args(arguments)
    try:
        mutants = read(table)
        if unknown := sorted(set(options.names) - {mutant.name for mutant in mutants}):
            parser.error(f"unknown: {', '.join(unknown)}; --list names the bugs")
        chosen = [m for m in mutants if m.name in options.names or not options.names]
        if options.list:
            print(page(chosen))
            return 0
        return prove(chosen, root)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
