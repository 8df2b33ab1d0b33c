"""Resource sheets: each kernel has one, and stays within registers and shared memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_attention import SHARED

from depth import deep

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "resource_sheet.py"
MOST_SPILLED = 64  # bytes of a thread; more say that a tile is too large for the registers


@pytest.fixture(scope="module")
def sheet():
    spec = importlib.util.spec_from_file_location("resource_sheet", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["resource_sheet"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def check(sheet, rows) -> None:
    for row in rows:
        assert 0 < row.registers <= 255, row
        assert row.shared_bytes <= SHARED[row.target], row
        assert row.spilled_bytes <= MOST_SPILLED, row
    files = {row.file for row in rows}
    assert {str(path.relative_to(ROOT)) for path in sheet.sources().values()} - files == NO_KERNELS
    assert sheet.cuda_sources().keys() <= files


# Files with functions for kernels of other files only.
HELPERS = ("expert_pairs", "loop", "pdl", "recurrent", "storage")
NO_KERNELS = {f"src/weft/kernels/triton/{name}.py" for name in HELPERS}


def test_no_kernel_is_without_a_sheet(sheet) -> None:
    """Add a launch in ``launch_*.py`` for a kernel that is named here."""
    rows = sheet.sheet([90], first=True)
    assert not sheet.without_a_launch(rows)
    check(sheet, rows)
    text = sheet.table(rows)
    for _, kernel in sheet.triton_kernels():
        assert f"| `{kernel}` |" in text
    for row in rows:
        assert f"**{row.file}**" in text


@deep
@pytest.mark.parametrize("target", [80, 89, 100])
def test_kernels_fit_the_other_targets(sheet, target: int) -> None:
    """One launch of each; all launches: the tool without ``--first``, for minutes."""
    rows = sheet.sheet([target], first=True)
    assert not sheet.without_a_launch(rows)
    check(sheet, rows)


def test_a_kernel_without_a_launch_is_named(sheet, tmp_path, monkeypatch) -> None:
    (tmp_path / "new.py").write_text(
        "import triton\n"
        "@triton.jit\n"
        "def helper(x): return x\n"
        "@triton.jit(do_not_specialize=['n'])\n"
        "def forgotten(x, n): helper(x)\n"
        "@triton.jit\n"
        "def both(x): return x\n"
        "@triton.jit\n"
        "def calls(x): both(x)\n"
        "def host(x): both[(1,)](x)\n"
    )
    monkeypatch.setattr(sheet, "TRITON_SOURCES", (tmp_path,))
    lacking = sheet.without_a_launch([sheet.Row("src/new.py", "calls", 90, 1, 1, 0, 0)])
    assert lacking == ["both (new.py)", "forgotten (new.py)"]


def test_what_the_assembler_tells_is_read(sheet) -> None:
    source = "__global__ void __launch_bounds__(32, 1) tight(int* p) {}\n__global__ void plain() {}"
    told = (
        "ptxas info    : Compiling entry function '_Z5tightPi' for 'sm_90'\n"
        "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem\n"
        "ptxas info    : Compiling entry function 'plain' for 'sm_90'\n"
        "ptxas info    : Used 6 registers\n"
    )
    assert list(sheet.read_ptxas("a.cu", 90, source, told)) == [
        sheet.Row("a.cu", "tight", 90, 1, 40, 2048, 12),
        sheet.Row("a.cu", "plain", 90, 1, 6, 0, 0),
    ]


def test_unknown_targets_are_refused() -> None:
    command = [sys.executable, str(TOOL), "--target", "75"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 75 (choose from" in done.stderr


@deep
def test_the_tool_writes_what_it_prints(tmp_path) -> None:
    command = [sys.executable, str(TOOL), "--target", "90", "--first", "--json"]
    done = subprocess.run([*command, str(tmp_path / "sheet.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sheet.json").read_text())["rows"]
    assert all(f"`{row['kernel']}`" in done.stdout for row in rows)
