"""The runner of the checks on a GPU, with real processes that crash, hang and print garbage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from parts import HERE, LAST, OUT, PARTS, ROOT, TOTAL_S, TROUBLE, Part, dry_run, select

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
FIGURE = """print('{"name": "rate", "value": 3.5, "unit": "tok/s"}', flush=True)"""


def python(name: str, code: str, limit_s: float = 120.0, **more: Any) -> Part:
    return Part(name, [sys.executable, "-c", code], limit_s, **more)


def pretended(kind: str, limit_s: float = 120.0, **more: Any) -> Part:
    return Part(kind, [sys.executable, str(HERE / "pretend.py"), kind], limit_s, **more)


def run(folder: Path, *parts: Part, total_s: float = 300.0, skip_done: bool = False, dry=False):
    """Run parts; return what is in the folder afterwards: outcomes by name, and the lines."""
    import check
    from journal import Journal

    journal = Journal(folder, dry=dry)
    environment = check.environment_of(os.environ, dry=dry)
    check.Check(parts, journal, environment, folder, total_s).run(skip_done=skip_done)
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    return {each["name"]: each for each in summary["parts"]}, lines


def test_figures_of_a_part_are_kept_at_once(tmp_path):
    """Also those of a part that is killed: each is in the file before the next line is printed."""
    code = f"{FIGURE}; import time; time.sleep(600)"
    for limit_s in (2.0, 10.0, 60.0):  # a busy machine may need longer to start Python
        found, lines = run(tmp_path, python("slow", code, limit_s, least_s=1.0))
        assert found["slow"]["status"] == "too long"
        if found["slow"]["figures"]:
            break
    assert found["slow"]["figures"] == [{"name": "rate", "value": 3.5, "unit": "tok/s"}]
    assert [line["value"] for line in lines if line.get("name") == "rate"] == [3.5]


def test_what_goes_wrong_is_told_and_what_follows_runs(tmp_path):
    parts = [
        pretended("crash"),
        pretended("half"),
        pretended("garbage"),
        pretended("flood"),
        python("words", "print('half way'); raise SystemExit('no kernel')"),
        python("good", FIGURE),
    ]
    found, lines = run(tmp_path, *parts)
    told = {name: (each["status"], each["why"]) for name, each in found.items()}
    assert told == {
        "crash": ("failed", "signal 11"),
        "half": ("failed", "exit code 1"),
        "garbage": ("passed", ""),
        "flood": ("passed", ""),
        "words": ("failed", "exit code 1"),
        "good": ("passed", ""),
    }
    for kind in ("crash", "half", "garbage", "flood"):
        assert found[kind]["figures"][0]["name"] == f"before the {kind}"
    assert found["half"]["last_lines"] == ['{"name": "half a line", "val']
    assert found["words"]["last_lines"] == ["half way", "no kernel"]
    assert [each["value"] for each in found["garbage"]["figures"]] == [1.0, "nan"]
    assert sum(line.get("part") == "flood" for line in lines) == 3  # it begins, a figure, it ends
    log = (tmp_path / "log.txt").read_text()
    assert len(log) < 2**20  # a flood's beginning
    assert "[words] half way\n[words] no kernel\n" in log


def test_a_flood_shows_its_beginning_only(tmp_path, capfd):
    run(tmp_path, pretended("flood"))
    shown = capfd.readouterr().out
    assert len(shown) < 100_000
    assert "[flood] ... the rest is in the log" in shown
    assert '"before the flood"' in shown


def test_limits_end_a_part_that_ignores_them_with_its_children(tmp_path):
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(600)"
    )
    for limit_s in (1.0, 8.0, 60.0):  # a busy machine may need longer to start Python
        started = time.monotonic()
        found, _ = run(tmp_path, python("deaf", code, limit_s, least_s=0.5))
        took = time.monotonic() - started
        assert found["deaf"]["status"] == "too long"
        assert found["deaf"]["why"] == f"ended after {limit_s:.0f} s"
        if found["deaf"]["last_lines"]:
            break
    assert took < limit_s + 30
    child = int(found["deaf"]["last_lines"][0])
    for _ in range(600):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child of the part lives on")


def test_a_process_that_nothing_ends_is_left_behind(tmp_path, monkeypatch):
    """As one that is stuck in a driver, which no signal reaches."""
    import running

    monkeypatch.setattr(running, "kill_group", lambda *_: None)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    for limit_s in (1.0, 10.0):
        found, _ = run(
            tmp_path, python("stuck", code, limit_s, least_s=0.5), python("good", FIGURE)
        )
        if found["stuck"]["last_lines"]:
            break
    process = int(found["stuck"]["last_lines"][0])
    try:
        assert Path(f"/proc/{process}").exists()
        assert found["stuck"]["status"] == "too long"
        assert found["stuck"]["notes"][0].startswith(f"left behind: process {process}, state S")
        assert found["good"]["status"] == "passed"
    finally:
        os.kill(process, signal.SIGKILL)


def test_a_process_that_leaves_its_group_holds_nothing_up(tmp_path):
    code = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(child, start_new_session=True).pid, flush=True)"
    )
    found, _ = run(tmp_path, python("strays", code))
    assert found["strays"]["status"] == "passed"
    os.kill(int(found["strays"]["last_lines"][0]), signal.SIGKILL)  # it still runs


def test_a_part_beside_others_holds_up_only_what_needs_it(tmp_path):
    mark = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.05)"
    parts = [
        python("build", waits, beside=True),
        python("first", f"open({str(mark)!r}, 'w')"),
        python("second", FIGURE, needs=["build"]),
    ]
    found, lines = run(tmp_path, *parts)
    assert {each["status"] for each in found.values()} == {"passed"}
    ends = [line["part"] for line in lines if "status" in line]
    assert ends.index("build") < ends.index("second")


def test_a_part_does_not_run_without_what_it_needs(tmp_path):
    parts = [
        python("build", "raise SystemExit(1)", beside=True),
        python("needs it", FIGURE, needs=["build"]),
        python("needs more", FIGURE, modules=["no_such_package"]),
        python("needs nothing", FIGURE),
    ]
    found, _ = run(tmp_path, *parts)
    assert found["needs it"]["why"] == "it needs 'build', which has not passed"
    assert found["needs more"]["why"] == "this Python has no no_such_package"
    assert found["needs nothing"]["status"] == "passed"


def test_nothing_runs_where_the_gpu_cannot_be_used(tmp_path):
    found, _ = run(tmp_path, python("facts", "raise SystemExit('no GPU')"), python("x", FIGURE))
    assert found["x"]["why"] == "the GPU cannot be used, as 'facts' says"


def test_time_is_kept_for_the_last_part(tmp_path):
    parts = [
        python("long", "import time; time.sleep(600)", 500.0, least_s=1.0),
        python("late", FIGURE),
        python(LAST, FIGURE, 30.0),
    ]
    started = time.monotonic()
    found, _ = run(tmp_path, *parts, total_s=45.0)
    assert time.monotonic() - started < 75
    told = {name: (each["status"], each["why"]) for name, each in found.items()}
    assert told["long"][0] == "too long"
    assert told["late"] == ("not run", "no time is left")
    assert told[LAST] == ("passed", "")


def test_a_run_goes_on_where_another_was_killed(tmp_path):
    found, _ = run(tmp_path, python("one", FIGURE), python("two", "raise SystemExit(1)"))
    assert [each["status"] for each in found.values()] == ["passed", "failed"]
    with (tmp_path / "figures.jsonl").open("a") as lines:
        lines.write('{"part": "one", "name": "cut o')
    parts = python("one", "raise SystemExit(1)"), python("two", FIGURE)
    import check
    from journal import Journal

    journal = Journal(tmp_path, dry=False)
    environment = check.environment_of(os.environ)
    check.Check(parts, journal, environment, tmp_path, 300).run(skip_done=True)
    statuses = {name: each.status for name, each in journal.outcomes.items()}
    assert statuses == {"one": "done before", "two": "passed"}
    assert journal.outcomes["one"].figures == [{"name": "rate", "value": 3.5, "unit": "tok/s"}]


def test_what_passed_elsewhere_is_left_out(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    words = "--dry-run", "--only", "facts"
    assert script(*words, "--out", str(first)).returncode == 0
    done = script(*words, "--out", str(second), "--skip-done", str(first / "figures.jsonl"))
    assert done.returncode == 0
    assert "| **facts** | done before | " in done.stdout
    assert "| | CPU | stand-in |  |" in done.stdout
    done = script(*words, "--out", str(second), "--skip-done", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert f"there is no file {tmp_path / 'absent'}" in done.stderr


def test_a_dry_run_is_no_reason_to_skip_a_part(tmp_path):
    run(tmp_path, python("one", FIGURE), dry=True)
    found, _ = run(tmp_path, python("one", FIGURE), skip_done=True)
    assert found["one"]["status"] == "passed"
    assert found["one"]["figures"][0]["value"] == 3.5


def test_a_summary_is_whole_at_every_moment(tmp_path):
    """Somebody who reads it while figures come finds an old one or a new one."""
    import check
    from journal import Journal

    code = f"for _ in range(300): {FIGURE}"
    journal = Journal(tmp_path, dry=False)
    taken = []

    def take(outcome, line):
        is_figure = journal.take(outcome, line)
        taken.append(
            len(json.loads((tmp_path / "summary.json").read_text())["parts"][0]["figures"])
        )
        return is_figure

    work = check.Check([python("many", code)], journal, dict(os.environ), tmp_path, 300)
    work._runner._take = take
    work.run(skip_done=False)
    assert taken == list(range(1, 301))
    assert not list(tmp_path.glob("summary.json.*"))


def test_tables_say_which_goals_are_missed_and_what_was_not_measured():
    import tables
    from running import Outcome

    name = "qwen2.5-7b fp8, batch 128: decode"
    rate = {"name": name, "value": 24_000.0, "unit": "tok/s", "goal": 25_000, "better": "more"}
    rate["gpu"] = "H200"
    time_ = {"name": "time", "value": 10.0, "unit": "ms", "goal": 20, "better": "less"}
    outcomes = [
        Outcome("decode", "passed", 3.0, figures=[rate, time_]),
        Outcome("sweep", "not run", why="no time is left"),
    ]
    figures = tables.of_figures(outcomes, "NVIDIA H200")
    assert f"| | {name} | 24,000 tok/s | MISSED (at least 25,000) |" in figures
    assert "| | time | 10 ms | reached (at most 20) |" in figures
    assert "| **sweep** | not run: no time is left | 0 s | |" in figures
    assert f"| {name} | 24,000 tok/s | at least 25,000 on an H200 |" in tables.of_figures(
        outcomes, "NVIDIA H100"
    )
    goals = tables.of_goals(outcomes, "NVIDIA H200")
    assert f"| {name} | at least 25,000 tok/s on an H200 | 24,000 | MISSED |" in goals
    assert (
        "| qwen2.5-7b fp8, batch 512: decode | at least 55,000 tok/s on an H200 | not measured | "
        "not among the figures of 'decode' |"
    ) in goals
    assert "not measured | sweep: no time is left |" in goals
    assert "transformers" not in goals


def test_of_several_figures_the_worst_stands_for_a_goal():
    import tables
    from running import Outcome

    figures = [
        {"name": f"x decode attention, bf16, context 4096, batch {batch}", "value": share}
        for batch, share in ((1, 0.9), (128, 0.7))
    ]
    time_ = {"name": "x decode attention, bf16, context 4096, batch 1: time", "value": 0.1}
    goals = tables.of_goals([Outcome("sweep", "passed", figures=[*figures, time_])], "any")
    assert "| 0.7, the worst of 2 | MISSED |" in goals


def test_goals_are_those_of_figures():
    """Each goal has the name of something that a part prints."""
    from decode import CASES, Case
    from goals import GOALS, goal_of
    from sweep import FULL

    assert CASES[0] == Case("qwen2.5-7b", "fp8", (128, 1, 512, 256))
    named = {
        *(f"qwen2.5-7b fp8, batch {batch}: decode" for batch in (128, 512, 256)),
        *(f"qwen2.5-7b fp8, int8 KV, batch {batch}: decode" for batch in (512, 256)),
        "qwen2.5-7b fp8, batch 1: share of the bandwidth bound",
        "qwen2.5-7b fp8, batch 128: TTFT, last",
        "qwen2.5-7b fp8, batch 128: GPU idle",
        "qwen2.5-7b: 70 captured graphs, ready",
        "qwen2.5-7b FP8 products of a layer, prefill, 2048 rows",
        *(
            f"qwen2.5-7b decode attention, int8, context {context}, batch {rows}"
            for rows, context in FULL.decodes
            if context >= 4096
        ),
    }
    assert {goal_of(name) for name in named} == set(GOALS)
    assert goal_of("qwen2.5-7b decode attention, int8, context 4096, batch 1: time") is None


def test_what_the_parts_run_is_there():
    for each in PARTS:
        for word in (word.removeprefix("--ignore=") for word in (*each.command, *each.dry)):
            if word.startswith("tests/") or word.endswith(".py"):
                assert (ROOT / word).exists(), f"{each.name}: {word}"


def test_parts_up_to_the_tests_have_time_whatever_happens():
    names = [each.name for each in PARTS]
    assert names[:2] == ["facts", "build"]
    assert names[-1] == LAST
    first = [each for each in PARTS[: names.index("tests")] if not each.beside]
    kept = sum(each.limit_s for each in first) + PARTS[-1].limit_s
    assert kept < TOTAL_S
    assert TOTAL_S < 600 - 20  # what starts and ends it


def test_without_a_gpu_it_says_so_and_fails():
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is one")
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "no NVIDIA GPU" in done.stderr
    assert "--dry-run" in done.stderr


def script(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=environment)


def test_a_dry_run_of_the_script_ends_with_the_tables(tmp_path):
    done = script("--dry-run", "--only", "facts,build,decode,pack", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| | tiny bf16, batch 2: decode | stand-in |  |" in done.stdout
    assert "| **pretended deaf** | too long: ended after 3 s | " in done.stdout
    name = "qwen2.5-7b fp8, batch 1: share of the bandwidth bound"
    assert f"| {name} | at least 0.85 | stand-in |  |" in done.stdout
    assert "A dry run: nothing was measured." in done.stdout
    assert (tmp_path / "table.md").read_text().count("\n| **") == 4 + len(TROUBLE)
    summary = json.loads((tmp_path / "summary.json").read_text())
    values = {figure["value"] for part in summary["parts"] for figure in part["figures"]}
    assert values == {"stand-in"}


def test_a_dry_run_fails_where_a_part_ends_otherwise_than_it_must(tmp_path, capsys):
    import check
    from journal import Journal

    parts = [python("bad", "raise SystemExit(1)"), python("dead", "raise SystemExit(1)")]
    parts[1] = Part("dead", parts[1].command, 60.0, ends="failed")
    journal = Journal(tmp_path, dry=True)
    check.Check(parts, journal, dict(os.environ), tmp_path, 300).run(skip_done=False)
    assert check.say(journal, tmp_path, parts, dry=True) == 1
    assert "'bad' should have ended as 'passed', not 'failed'\n" in capsys.readouterr().out


def test_an_interrupted_run_still_ends_with_the_tables(tmp_path):
    command = [sys.executable, str(HERE / "check.py"), "--dry-run", "--out", str(tmp_path)]
    command += ["--only", "facts,sweep,lanes"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("== sweep (at most"):
            child.terminate()
            break
    told = child.stdout.read()
    assert child.wait(60) == 1
    assert "| **lanes** | not run: interrupted | 0 s | |" in told
    assert "| **facts** | passed |" in told


def test_an_unknown_part_is_named_before_anything_runs():
    with pytest.raises(SystemExit, match="no part is called decod; they are: facts"):
        select(PARTS, "decod")


def test_parts_that_must_be_asked_for_run_only_then():
    assert "transformers" not in {each.name for each in select(PARTS, "")}
    assert [each.name for each in select(PARTS, "transformers")] == ["transformers"]


def test_results_that_cannot_be_written_are_told_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    done = script("--dry-run", "--only", "facts", "--out", str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot write results into {tmp_path / 'file'} (")
    assert "name another with --out" in done.stderr


def test_parts_test_on_the_gpu_with_compiled_kernels():
    import check

    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": "/wheels", "HOME": "/home"}
    found = check.environment_of(given)
    assert found["WEFT_TEST_DEVICE"] == "cuda"
    assert found["PYTHONPATH"] == f"{ROOT / 'src'}:{HERE}:/wheels"
    assert found["HOME"] == "/home"
    assert "TRITON_INTERPRET" not in found
    assert check.environment_of({}, dry=True)["TRITON_INTERPRET"] == "1"


def test_the_page_names_the_parts_and_options_as_they_are():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = re.findall("`([a-z]+)`", "".join(row.split("|")[1] for row in rows))
    assert named == [each.name for each in PARTS if not each.asked]
    usage = script("--help").stdout
    for option in re.findall(r"gpu_check\.sh.*", page):
        for word in re.findall(r"--[a-z-]+", option):
            assert word in usage, word
    assert f"{TOTAL_S:.0f} seconds" in page
    for path in re.findall(r"(?<![\w/.-])(?:scripts|tools|tests)/[\w/.]*\w", page):
        assert (ROOT / path).exists(), path


def test_whatever_has_a_goal_is_looked_into_in_a_dry_run():
    """A part with goals keeps traces of those that it misses; its dry run misses all."""
    from goals import GOALS

    parts = {each.name: each for each in PARTS}
    for goal in GOALS:
        each = parts[goal.part]
        assert f"{OUT}/traces.tar" in each.command, goal
        assert f"{OUT}/traces.tar" in each.dry, goal
        assert "--every-trace" in each.dry, goal


def test_every_part_runs_dry():
    found = {each.name: each for each in dry_run(select(PARTS, ""))}
    assert {f"pretended {kind}" for kind in TROUBLE} < found.keys()
    pretended = {name for name, each in found.items() if "pretend.py" in each.command[1]}
    assert pretended & {"facts", "warm", "smoke", "decode", "sweep", "tests", "pack"} == set()
    assert list(found)[-1] == LAST
