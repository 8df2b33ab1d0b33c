"""Kernels compiled before they are launched: in other processes, for a GPU that is not here."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from weft import cli
from weft.core.config import EngineConfig
from weft.core.errors import KernelError
from weft.engine import kernels_ahead
from weft.engine.compile_process import CompileRequest
from weft.engine.kernels_ahead import Compilation, LostCompilerError, compile_ahead, request_for
from weft.engine.model import resolve_settings
from weft.kernels.gpus import KNOWN
from weft.kernels.kernel_folder import GROUP, MAKERS, STARTS, KernelFolder
from weft.kernels.triton.device import stand_in

H100 = KNOWN["h100"]
# Few sizes of steps, and so few kernels.
SETTINGS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
SETTINGS |= {"kv_memory": 2**20, "model": "builtin"}
STARTED = Path(__file__).parent / "started.py"


def config(folder: Path, **more: Any) -> EngineConfig:
    return EngineConfig.from_mapping({**SETTINGS, "kernel_cache": str(folder), **more})


def request(folder: Path) -> CompileRequest:
    return request_for(config(folder), H100)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that is needed, filled by two at once, as by engines that start so."""
    folder = tmp_path_factory.mktemp("filled")
    told: list[str] = []
    both = [
        Compilation(replace(request(folder), workers=1), lambda *words: told.append(words[2])),
        Compilation(replace(request(folder), workers=1, rank=0)),
    ]
    first, second = (compilation.wait() for compilation in both)
    assert len(first.kernels) == len(second.kernels) > 10
    assert first.is_kept()
    assert all("error" not in line.lower() for line in told)
    assert any(line.startswith("launcher of gemm") for line in told)
    return folder


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "copied"))


def a_kernel(folder: Path, name: str = "gemm") -> Path:
    """The folder of one kernel."""
    return next(folder.glob(f"*/{GROUP}{name}.json")).parent


def started(folder: Path, *more: str) -> str:
    """What an engine says of its start; Triton looks for each kernel that it launches."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    settings = SETTINGS | {"kernel_cache": str(folder), "packed_cache": 0}
    command = [sys.executable, str(STARTED), "h100", json.dumps(settings), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words, seconds = json.loads(done.stdout)
    assert list(seconds) == ["settings", "weights", "kernels", "KV and capture", "ready"]
    return words


def test_an_engine_finds_them_when_it_launches(copied: Path) -> None:
    """It says where kernels came from, and those that it had to compile itself."""
    kernels = len([*copied.glob(f"*/{GROUP}*")])
    words = started(copied)
    assert f"({kernels} kernels, {kernels} of them kept in {copied}), KV and capture" in words
    for key in (MAKERS, STARTS):
        shutil.rmtree(copied / key)
    shutil.rmtree(a_kernel(copied))
    assert "kernels 0.0" in (words := started(copied, "/bin/false"))
    assert "(1 compiled one by one), KV and capture" in words


def test_a_folder_that_takes_nothing_lends_to_another(copied: Path, tmp_path: Path) -> None:
    """As one that is read-only or full: what it lacks goes to the spare folder."""
    shutil.rmtree(a_kernel(copied))
    blocked = tmp_path / "file" / "folder"
    (tmp_path / "file").write_text("not a folder")
    asked = replace(request(blocked), spare=str(copied))
    found = Compilation(asked).wait()
    assert found.kept == len(found.kernels) - 1
    assert not found.is_kept()
    nowhere = replace(asked, spare=str(blocked))
    with pytest.raises(KernelError, match="cannot be kept in "):
        Compilation(nowhere).wait()


@pytest.fixture
def a_gpu() -> Iterator[None]:
    """``meta`` stands for a GPU; what is told to Triton is taken back."""
    stand_in(H100)
    yield
    stand_in(None)
    for knobs, name in (
        (triton.knobs.cache, "manager_class"),
        (triton.knobs.compilation, "listener"),
        (triton.knobs.compilation, "store_binary_only"),
    ):
        vars(knobs).pop(name, None)


def ahead_of(folder: Path) -> Any:
    asked = config(folder)
    model, resolved = resolve_settings(asked, absent=H100)
    return compile_ahead(asked, resolved, model)


@pytest.mark.usefixtures("a_gpu")
def test_a_copy_has_all_and_what_is_damaged_is_compiled_again(copied: Path, caplog) -> None:
    first = ahead_of(copied)
    assert first.compilation is not None
    first.wait()
    assert first.compiled.kept == len(first.compiled.kernels)
    assert first.compiled.compiled == 0, "even the host code is there"
    assert f"of them kept in {copied}" in first.describe()
    second = ahead_of(copied)
    assert second.compilation is None, "nobody needs to look"
    second.wait()
    assert second.describe() == first.describe()
    (a_kernel(copied) / "gemm.cubin").write_bytes(b"")
    (a_kernel(copied, "_sample") / f"{GROUP}_sample.json").write_bytes(b"{")
    third = ahead_of(copied)
    third.wait()
    assert "2 compiled in" in third.describe()
    assert f"{copied} lacked 2 of {len(third.compiled.kernels)} kernels" in caplog.text


@pytest.mark.usefixtures("a_gpu")
def test_a_folder_of_other_versions_is_told(copied: Path, monkeypatch, caplog) -> None:
    kernels = [path.parent for path in copied.glob(f"*/{GROUP}*")]
    for folder in kernels:
        folder.rename(folder.with_name(folder.name[::-1]))  # as of other hashes
    shutil.rmtree(copied / MAKERS)
    KernelFolder(copied).note_maker({"weft": "0.0.1", "Triton": "3.5.0", "for": "sm_90"})
    monkeypatch.setattr(Compilation, "wait", lambda _: kernels_ahead.Compiled(copied, [("a", "b")]))
    ahead_of(copied).wait()
    assert "are of other versions (weft 0.0.1, Triton 3.5.0, for sm_90)" in caplog.text
    assert f"anew for weft {cli.__version__}" in caplog.text


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "exit code 3"),
        ("echo garbage; sleep 60", "it said b'garbage"),
        ("kill -9 $$", "signal SIGKILL"),
        ("sleep 60", "it has said nothing"),
    ],
)
def test_a_start_goes_on_without_its_compiler(
    tmp_path: Path, monkeypatch, caplog, script: str, why: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(kernels_ahead.sys, "executable", str(program))
    monkeypatch.setattr(kernels_ahead, "SILENCE_S", 1.0)
    found = ahead_of(tmp_path / "kernels")
    with caplog.at_level(logging.WARNING):
        found.wait()
    assert f"is lost ({why}" in caplog.text
    assert found.describe() == ""
    with pytest.raises(LostCompilerError):
        Compilation(request(tmp_path)).wait()


def command(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_command_fills_a_folder(copied: Path, capsys) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    code, out, err = command(capsys, *flags, "--target", "sm_90", f"--kernel-cache={copied}")
    assert code == 0, err
    assert f"of them kept in {copied}" in out
    assert err == "compiling builtin for NVIDIA H100 80GB HBM3 (sm_90)\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "sm_70"], "Unknown target 'sm_70'. Did you mean 'sm_90'?"),
        ([], "There is no GPU here; name one with --target: a100, "),
        (["/no/such/model", "--target", "h100"], "'/no/such/model' does not exist"),
        (["--target", "h100", "--device", "cpu"], "those of a CPU are not"),
        (["--target", "h100", "--no-graphs"], "leave graphs on"),
        (["--target", "h100", "--pipeline-parallel", "2"], "by the engine that needs them"),
        (["--target", "h100", "--kernel-cache", "/proc/no/kernels"], "cannot be kept in '/proc/no"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], said: str, tmp_path, capsys) -> None:
    if not words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = command(capsys, f"--kernel-cache={tmp_path}", *words)
    assert code in (1, 2)
    assert said in err


def test_the_command_needs_triton(monkeypatch, capsys) -> None:
    monkeypatch.setattr(kernels_ahead, "find_spec", lambda name: None if name == "triton" else name)
    code, _, err = command(capsys, "--target", "h100")
    assert code == 1
    assert "Kernels are compiled with triton, which is not installed: pip install" in err
