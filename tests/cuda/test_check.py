"""The runner of the checks on a GPU: parts that pass, fail and take too long, and their figures."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import where
from depth import deep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    path = ROOT / "benchmarks" / "gpu" / "check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def part(check, name, code, limit_s=120.0):
    return check.Part(name, [sys.executable, "-c", code], limit_s)


def test_figures_of_a_part_are_kept(check):
    code = (
        """print('hello'); print('{"name": "rate", "value": 3.5, "unit": "tok/s"}'); print('{no')"""
    )
    outcome = check.run(part(check, "fine", code), dict(os.environ))
    assert outcome.status == "passed"
    assert outcome.figures == [{"name": "rate", "value": 3.5, "unit": "tok/s"}]
    assert outcome.last_lines == ["hello", "{no"]


def test_a_part_that_fails_keeps_its_last_words(check):
    outcome = check.run(part(check, "bad", "raise SystemExit('no kernel')"), dict(os.environ))
    assert outcome.status == "failed"
    assert outcome.last_lines[-1] == "no kernel"


def test_a_part_that_hangs_is_killed_with_its_children(check):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    for limit_s in (2.0, 10.0, 60.0):  # a busy machine may need longer to start the child
        outcome = check.run(part(check, "slow", code, limit_s), dict(os.environ))
        assert outcome.status == "too long"
        if outcome.last_lines:
            break
    child = int(outcome.last_lines[0])
    for _ in range(600):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child of the part lives on")


def test_table_says_which_goals_are_missed(check):
    figures = [
        {"name": "rate", "value": 10.0, "unit": "tok/s", "goal": 20, "better": "more"},
        {"name": "time", "value": 10.0, "unit": "ms", "goal": 20, "better": "less"},
    ]
    text = check.table([check.Outcome("decode", "passed", 3.0, figures)])
    assert "| | rate | 10 tok/s | MISSED (at least 20) |" in text
    assert "| | time | 10 ms | reached (at most 20) |" in text


def test_what_the_parts_run_is_there(check):
    for each in check.parts():
        for word in (word.removeprefix("--ignore=") for word in each.command):
            if word.startswith("tests/") or word.endswith(".py"):
                assert (ROOT / word).exists(), f"{each.name}: {word}"


def test_limits_leave_the_whole_under_ten_minutes(check):
    assert sum(each.limit_s for each in check.parts()) < 600


def test_without_a_gpu_it_says_so_and_fails():
    script = ROOT / "scripts" / "gpu_check.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([script], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "no NVIDIA GPU" in done.stderr


def test_a_process_that_leaves_its_group_holds_nothing_up(check, monkeypatch):
    monkeypatch.setattr(check, "GRACE_S", 2.0)
    code = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(child, start_new_session=True).pid, flush=True)"
    )
    outcome = check.run(part(check, "strays", code), dict(os.environ))
    assert outcome.status == "passed"
    os.kill(int(outcome.last_lines[0]), signal.SIGKILL)  # it still runs


def test_parts_run_after_one_that_fails_and_its_last_lines_are_told(
    check, monkeypatch, tmp_path, capsys
):
    parts = [
        part(check, "bad", "print('half way'); raise SystemExit('no kernel')"),
        part(check, "good", """print('{"name": "rate", "value": 3.5}')"""),
    ]
    monkeypatch.setattr(check, "parts", lambda: parts)
    monkeypatch.setattr(check, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path / "out.json")])
    assert check.main() == 1
    told = capsys.readouterr().out
    assert "| | rate | 3.5  |  |" in told
    assert told.endswith("bad: failed\n  half way\n  no kernel\n")
    saved = json.loads((tmp_path / "out.json").read_text())
    assert [each["status"] for each in saved["parts"]] == ["failed", "passed"]


def test_parts_test_on_the_gpu_with_compiled_kernels(check):
    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": "/wheels", "HOME": "/home"}
    found = check.environment_of(given)
    assert found["WEFT_TEST_DEVICE"] == "cuda"
    assert found["PYTHONPATH"] == f"{ROOT / 'src'}:/wheels"
    assert found["HOME"] == "/home"
    assert "TRITON_INTERPRET" not in found


def test_a_gpu_that_is_not_there_is_an_error_not_a_skip():
    if where.THERE:
        device, words = "gpu", "WEFT_TEST_DEVICE is 'gpu'; it must be cpu or cuda"
    else:
        device, words = "cuda", "WEFT_TEST_DEVICE is cuda, but this machine has no NVIDIA GPU"
    environment = {**os.environ, "WEFT_TEST_DEVICE": device, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr


# What the machines with GPUs, which have no network, lack of weft's own requirements.
# Python imports it by its name when it starts.
ABSENT = """
import sys

class Absent:
    names = {
        "anthropic", "compressed_tensors", "fastokens", "gguf", "httptools", "jsonschema",
        "llguidance", "msgspec", "openai", "opentelemetry", "orjson", "pydantic", "schemathesis",
        "setproctitle", "starlette", "trustme", "uvicorn",
    }

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without(tmp_path: Path, *command: str, **variables: str) -> str:
    """What a command prints where packages are missing that it must not need."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path), str(ROOT / "benchmarks" / "gpu")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_parts_need_no_package_that_machines_with_gpus_lack(tmp_path):
    """The other modules of the parts run below, and this one in the deep tests."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_timeout"]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    every = ("tests/triton", "tests/gpu", "-k", "as_it_is_served")  # all are imported
    assert "1 passed" in run_without(tmp_path, *pytest, *every, **alone)
    run_without(tmp_path, sys.executable, "-c", "import probes, transformers_decode")


def test_packages_that_machines_with_gpus_lack_are_not_found(tmp_path):
    code = "import importlib.util as u; print(u.find_spec('uvicorn'))"
    with pytest.raises(AssertionError, match="No module named 'uvicorn'"):
        run_without(tmp_path, sys.executable, "-c", code)


def figures_of(check, told: str) -> list[str]:
    found = [check.read_figure(line) for line in told.splitlines()]
    return [each["name"] for each in found if each is not None]


def test_shares_of_kernels_are_measured(check, tmp_path):
    """On the CPU with tiny shapes, in the interpreter: that the kernels are called as they are."""
    script = str(ROOT / "benchmarks" / "gpu" / "kernels.py")
    command = (sys.executable, script, "--device", "cpu", "--quick")
    names = figures_of(check, run_without(tmp_path, *command, TRITON_INTERPRET="1"))
    for kind in ("bf16", "fp8", "int8"):
        assert f"tiny decode attention, {kind}, context 40, batch 3" in names
    assert "tiny prefill attention, bf16, 24 tokens" in names
    assert "tiny FP8 products of a layer, 70 tokens" in names
    assert "tiny bf16 products of a layer, 16 tokens" in names
    assert "sampling 3 x 200, greedy" in names


def test_decodes_are_measured(check, tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "decode.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--output", "6")
    names = figures_of(check, run_without(tmp_path, sys.executable, script, *tiny))
    assert "tiny bf16, batch 2: decode" in names


def test_rows_of_the_host_are_measured(check, tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "lanes.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--rows", "5", "--context", "40")
    tiny += ("--threads", "1", "--steps", "2")
    names = figures_of(check, run_without(tmp_path, sys.executable, script, *tiny))
    assert "tiny bf16, batch 2, 5 rows of the host: step with them" in names


def test_rows_that_steps_wait_for_are_measured(check, tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "overlap.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--rows", "3", "--context", "40")
    tiny += ("--threads", "1", "--steps", "2")
    names = figures_of(check, run_without(tmp_path, sys.executable, script, *tiny))
    assert "tiny bf16, batch 2, 3 rows of the host: step with them in another one" in names


def test_leases_are_measured(check, tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "leases.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--steps", "5")
    told = run_without(tmp_path, sys.executable, script, *tiny)
    found = {each["name"]: each for each in map(check.read_figure, told.splitlines()) if each}
    assert found["tiny bf16, batch 2: tokens of steps replayed that differ"]["value"] == 0
    assert found["tiny bf16, batch 2: steps replayed"]["value"] > 0


def test_a_way_that_takes_too_long_stops_no_other():
    script = str(ROOT / "benchmarks" / "gpu" / "leases.py")
    command = [sys.executable, script, "--limit", "0.01"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    told = [line.split(":")[0] for line in done.stdout.splitlines() if "timed out" in line]
    assert told == ["steps replayed", "steps looping", "steps resident"]


@deep
def test_transformers_is_measured(check, tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "transformers_decode.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "3", "--steps", "4")
    told = run_without(tmp_path, sys.executable, script, *tiny, "--ways", "eager,continuous")
    assert figures_of(check, told) == [
        "tiny bf16, batch 3: transformers, eager",
        "tiny bf16, batch 3: transformers, continuous batching",
    ]


def test_a_profile_names_the_kernels_that_took_most():
    from decode import Span, idle_share, profile_of

    spans = [
        Span("void cutlass::device_kernel<int, 4>(float*)", 0.0, 6.0),
        Span("gemm", 6.0, 8.0),
        Span("gemm", 8.0, 9.0),
        Span("Memcpy HtoD (Pinned -> Device)", 10.0, 11.0),
    ]
    assert profile_of(spans) == [
        ("cutlass::device_kernel", 0.6, 1), ("gemm", 0.3, 2), ("Memcpy HtoD", 0.1, 1)
    ]  # fmt: skip
    assert idle_share(spans) == pytest.approx(1 / 11)


def test_an_unknown_part_is_named_before_anything_runs(check):
    with pytest.raises(SystemExit, match="no part is called decod; they are: build"):
        check.select(check.parts(), "decod")


def test_results_are_one_json_object(check, tmp_path):
    import report

    outcome = check.Outcome("build", "passed", 1.0)
    report.save(tmp_path / "out.json", machine={}, parts=[vars(outcome)])
    assert json.loads((tmp_path / "out.json").read_text())["parts"][0]["name"] == "build"
