"""The parts of the checks on a GPU: they run, on the CPU with tiny shapes, and need little."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from parts import OUT, PARTS, ROOT

import where
from depth import deep


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


def figures_of(told: str) -> dict[str, float | str]:
    lines = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
    return {each["name"]: each["value"] for each in lines if "name" in each}


# What some parts must find with tiny shapes; all others just have to run.
FOUND = {
    "smoke": [
        "FP8 product, 300 rows: error",
        "e4m3/128 product, 33 rows: error",
        *(f"experts in {kind}, 40 rows: error" for kind in ("bf16", "int4", "e2m1")),
        *(f"attention, {kv} KV, 40 new tokens a row: error" for kv in ("bf16", "fp8", "int8")),
        *(f"latent attention, {kv} KV, 1 new tokens a row: error" for kv in ("bf16", "int8")),
        "product by head, 40 rows: error",
    ],
    "warm": ["tiny none, 4 rows of 4 tokens: first step"],
    "decode": ["tiny bf16, batch 2: decode"],
    "sweep": [
        "tiny FP8 products of a layer, 70 rows, Triton",
        *(f"tiny decode attention, {kv}, context 40, batch 3" for kv in ("bf16", "fp8", "int8")),
        "tiny decode splits of 256, bf16, context 40, batch 3",
        "sampling 3 x 200, greedy",
    ],
    "lanes": ["tiny bf16, batch 2, 3 rows of the host: step with them"],
    "overlap": ["tiny bf16, batch 2, 3 rows of the host: step with them in another one"],
    "leases": ["tiny bf16, batch 2: steps replayed"],
    "recurrent": [
        figure
        for kind in ("delta rule", "KDA", "Mamba-2", "convolution")
        for figure in (
            f"tiny {kind}, 5 new tokens a row: error",
            f"tiny {kind}, 1 new tokens a row, inputs of states: error",
            f"tiny {kind}: decode, 2 rows",
            f"tiny {kind}: a prompt of 3 tokens",
        )
    ],
}
NOTHING = {
    "smoke": [
        "sampling: tokens that differ from the reference",
        "captured steps: tokens that differ from uncaptured ones",
    ],
    "leases": ["tiny bf16, batch 2: tokens of steps replayed that differ"],
}
DRY = {each.name: each for each in PARTS if each.dry and each.name not in ("tests", "kernels")}


@pytest.mark.parametrize("name", DRY)
def test_parts_run_with_tiny_shapes(name, tmp_path):
    """On the CPU, kernels in the interpreter: that all is called as it is."""
    command = [word.replace(OUT, str(tmp_path)) for word in DRY[name].dry]
    command += ["--seconds", "300"] if "--seconds" in command else []  # of a busy machine
    empty = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path / "none")}
    found = figures_of(run_without(tmp_path, *command, **empty))
    assert set(FOUND.get(name, [])) <= found.keys()
    assert all(found[each] == 0 for each in NOTHING.get(name, []))


def test_what_parts_must_find_is_of_parts():
    assert FOUND.keys() | NOTHING.keys() <= DRY.keys()


def test_every_product_and_prompt_of_the_sweep_can_be_measured(monkeypatch, capsys):
    """With the shortest clock: those that a dry run has no time for."""
    import sweep
    import torch

    monkeypatch.setattr(sweep, "clock_of", lambda _: lambda call, copies: call(copies - 1) or 1.0)
    model, device = sweep.QUICK.models[0], torch.device("cpu")
    tuning = sweep.find_tuning("auto", device)
    kinds = sweep.prefill_trials, sweep.other_product_trials
    for kind in kinds:
        every = kind(sweep.QUICK, model, device, tuning, sweep.Peaks())
        assert sweep.measure(every, device, float("inf")) == 0
    found = figures_of(capsys.readouterr().out)
    assert "tiny prefill attention, bf16, 24 tokens" in found
    assert "tiny FP8 products of a layer, prefill, 80 rows" in found
    assert "tiny bf16 output head, 70 rows" in found


def test_a_figure_that_cannot_be_measured_stops_no_other(capsys):
    import sweep
    import torch

    def fail():
        raise ValueError("no such shape")

    every = [
        sweep.Trial("bad", fail, lambda _: None),
        sweep.Trial("good", lambda: (lambda _: None, 1), lambda _: sweep.figure("good", 1)),
    ]
    assert sweep.measure(iter(every), torch.device("cpu"), float("inf")) == 1
    told = capsys.readouterr().out
    assert '{"note": "bad: ValueError: no such shape"}' in told
    assert figures_of(told) == {"good": 1}
    assert sweep.measure(iter(every), torch.device("cpu"), 0.0) == 0
    assert "no time left for 2 of the sweep's figures" in capsys.readouterr().out


def test_a_batch_that_fails_stops_no_other(monkeypatch, capsys):
    import decode

    measured = []

    def measure(_, batch, *__):
        measured.append(batch)
        if batch == 1:
            raise RuntimeError("no memory for it")

    monkeypatch.setattr(decode, "measure", measure)
    words = ["decode.py", "--device", "cpu", "--model", "tiny", "--batch", "2,1,3"]
    monkeypatch.setattr(sys, "argv", words)
    assert decode.main() == 1
    assert measured == [2, 1, 3]
    assert "tiny bf16, batch 1: RuntimeError: no memory for it" in capsys.readouterr().out


def test_decodes_are_measured_with_8_bit_kv(tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "decode.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--output", "4", "--kv", "int8")
    found = figures_of(run_without(tmp_path, sys.executable, script, *tiny))
    assert "tiny bf16, int8 KV, batch 2: decode" in found


def traces_of(archive: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of each trace of an archive, by its name."""
    with tarfile.open(archive) as tar:
        texts = {name: gzip.decompress(tar.extractfile(name).read()) for name in tar.getnames()}
    return {name: json.loads(text)["traceEvents"] for name, text in texts.items()}


def run_main(module: ModuleType, monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    return module.main()


TINY = ("--device", "cpu", "--model", "tiny", "--batch", "2", "--output", "4")


STEPS, FIRST, START = (f"tiny_bf16_{x}" for x in ("batch_2", "batch_2_first_tokens", "start"))


@pytest.mark.parametrize(
    ("missed", "traces"),
    [
        (["decode", "ready", "TTFT, last"], {STEPS, FIRST, START}),
        (["TTFT, last"], {FIRST}),  # all others are reached
    ],
)
def test_what_misses_its_goal_leaves_a_table_and_a_trace(
    missed, traces, monkeypatch, tmp_path, capsys
):
    """Of what it is made of: steps of decodes, those with prompts, or the start on the host."""
    import decode
    import figures
    from goals import Goal

    def goal_of(name: str) -> Goal:
        return Goal("decode", name, 1e12 if name.endswith(tuple(missed)) else 0.0, "more")

    monkeypatch.setattr(figures, "goal_of", goal_of)
    archive = tmp_path / "traces.tar"
    assert run_main(decode, monkeypatch, *TINY, "--traces", archive) == 0
    found = traces_of(archive)
    assert {name.removesuffix(".json.gz") for name in found} == traces
    assert all(len(events) > 3 for events in found.values())
    told = [name for name in figures_of(capsys.readouterr().out) if ": time in " in name]
    assert len({name.split(": time")[0] for name in told}) == len(traces)


def test_a_sweeps_figure_that_misses_its_goal_leaves_a_table_and_a_trace(
    monkeypatch, tmp_path, capsys
):
    """All products of a layer are in the trace of what they take together."""
    import figures
    import sweep
    import torch
    from goals import Goal
    from tracing import Missing

    names = ("tiny FP8 products of a layer, prefill, 80 rows",)
    names += ("tiny decode attention, int8, context 40, batch 3",)
    monkeypatch.setattr(
        figures, "goal_of", lambda x: Goal("", x, 9.9, "more") if x in names else None
    )
    model, device = sweep.QUICK.models[0], torch.device("cpu")
    tuning = sweep.find_tuning("auto", device)
    archive = tmp_path / "traces.tar"
    for kind in (sweep.decode_trials, sweep.other_product_trials):
        every = kind(sweep.QUICK, model, device, tuning, sweep.Peaks(1e30, 1e30, 1e30))
        chosen = [
            each for each in every if any(x in (each.whole or (each.name,))[0] for x in names)
        ]
        left = float("inf"), Missing(archive)
        assert sweep.measure(iter(chosen), device, *left) == 0
    assert set(traces_of(archive)) == {
        f"{x.replace(',', '').replace(' ', '_')}.json.gz" for x in names
    }
    told = [name for name in figures_of(capsys.readouterr().out) if ": time in " in name]
    assert {name.split(": time")[0] for name in told} == set(names)


def test_traces_have_a_limit(monkeypatch, tmp_path, capsys):
    import tracing

    archive, other = tmp_path / "traces.tar", tmp_path / "other.json.gz"
    other.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    for _ in range(2):
        tracing.keep_trace(other, archive)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["other.json.gz"] * 2
    monkeypatch.setattr(tracing, "MOST_TRACE_BYTES", archive.stat().st_size)
    tracing.keep_trace(other, archive)
    assert "there is no room for the trace other.json.gz" in capsys.readouterr().out
    tracing.keep_trace(other, None)  # nobody wants one


def test_stacks_tell_what_the_host_did(tmp_path):
    import tracing

    def waits(seconds: float) -> None:
        time.sleep(seconds)

    with tracing.Stacks(0.001) as stacks:
        waits(0.3)
    (name, share, _), *_ = tracing.profile_of(stacks.innermost())
    assert name.endswith("test_stacks_tell_what_the_host_did.")
    assert share > 0.5
    stacks.save(tmp_path / "stacks.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "stacks.json.gz").read_bytes()))["traceEvents"]
    longest = max(each["dur"] for each in events if each["name"].endswith(".waits"))
    assert longest > 0.15e6


def test_counters_are_read_from_the_profilers_table(capsys):
    import counters

    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"\n'
        '"","","us","register/thread"\n'
        '"0","gemm","1,234.5","168"\n'
        '"1","decode_kernel","n/a","255"\n'
    )
    assert counters.tell("1 row", text) == 2
    assert figures_of(capsys.readouterr().out) == {
        "1 row, 1. gemm: time": 1234.5,
        "1 row, 1. gemm: registers": 168.0,
        "1 row, 2. decode_kernel: registers": 255.0,
    }
    assert counters.tell("1 row", "==ERROR== ERR_NVGPUCTRPERM") == 0


def test_failures_are_told_when_they_happen(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_end(): os._exit(3)\n"  # as a part whose time is up
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tell_failures", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks" / "gpu")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 3
    assert '{"note": "failed: test_some.py::test_bad: assert 1 == 2"}' in done.stdout


def test_compiled_kernels_are_packed_in_pieces(tmp_path, monkeypatch, capsys):
    import pack

    cache, out = tmp_path / "cache", tmp_path / "out"
    (cache / "KEY").mkdir(parents=True)
    out.mkdir()
    (cache / "KEY" / "gemm.cubin").write_bytes(os.urandom(5000))
    (cache / "KEY" / "gemm.ttir").write_text("is not loaded")
    (out / "triton-cache.tar.gz.07").write_text("of an earlier run")
    monkeypatch.setattr(pack, "PIECE_BYTES", 2000)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(sys, "argv", ["pack.py", "--out", str(out)])
    pack.main()
    pieces = sorted(out.iterdir())
    assert [piece.stat().st_size for piece in pieces[:2]] == [2000, 2000]
    with tarfile.open(fileobj=io.BytesIO(b"".join(each.read_bytes() for each in pieces))) as found:
        assert found.getnames() == ["KEY/gemm.cubin"]
    assert figures_of(capsys.readouterr().out)["compiled kernels"] == 1


def test_a_build_names_what_is_missing(monkeypatch, capsys):
    import build

    monkeypatch.setattr(build, "missing_tools", lambda: ["cmake", "nanobind"])
    monkeypatch.setattr(build, "there", lambda: True)
    build.main()
    assert "not built, as there is no cmake, nanobind" in capsys.readouterr().out
    monkeypatch.setattr(build, "there", lambda: False)
    with pytest.raises(SystemExit, match="cannot build the native parts without cmake, nanobind"):
        build.main()


def test_a_way_that_takes_too_long_stops_no_other():
    script = str(ROOT / "benchmarks" / "gpu" / "leases.py")
    command = [sys.executable, script, "--limit", "0.01"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    told = [line.split(":")[0] for line in done.stdout.splitlines() if "timed out" in line]
    assert told == ["steps replayed", "steps looping", "steps resident"]


@deep
def test_transformers_is_measured(tmp_path):
    script = str(ROOT / "benchmarks" / "gpu" / "transformers_decode.py")
    tiny = ("--device", "cpu", "--model", "tiny", "--batch", "3", "--steps", "4")
    told = run_without(tmp_path, sys.executable, script, *tiny, "--ways", "eager,continuous")
    assert list(figures_of(told)) == [
        "tiny bf16, batch 3: transformers, eager",
        "tiny bf16, batch 3: transformers, continuous batching",
    ]


def test_a_profile_names_the_kernels_that_took_most():
    from tracing import Span, idle_share, profile_of

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
