"""Prints what each GPU kernel needs: registers, shared memory and spills, for GPUs that are absent.

    python tools/resource_sheet.py [--target 90 ...] [--first] [--json FILE]

Triton's kernels are compiled as ``tests/triton/launch_*.py`` launch them, those in CUDA by nvcc.
``--first`` compiles one launch of each kernel only. Needs the packages of the extra ``test``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRITON_TESTS = ROOT / "tests" / "triton"
TRITON_SOURCES = (ROOT / "src" / "weft" / "kernels" / "triton", ROOT / "benchmarks" / "gpu")
CUDA_SOURCES = (ROOT / "src" / "weft", ROOT / "benchmarks" / "gpu")
TARGETS = (80, 89, 90, 100)  # A100; RTX 40 and L40; H100 and H200; B200
sys.path[:0] = [str(ROOT / "tests"), str(TRITON_TESTS)]

import ahead  # noqa: E402

from cuda_toolkit import toolkit  # noqa: E402


@dataclass(frozen=True, order=True)
class Row:
    """The most that any variant of a kernel needs.

    Attributes:
        file: of its source, as seen from the repository.
        target: the capability, 90 for sm_90.
        registers: of a thread.
        spilled_bytes: of a thread.
        units: what multiplies matrices; empty: nothing.
    """

    file: str
    kernel: str
    target: int
    variants: int
    registers: int
    shared_bytes: int
    spilled_bytes: int
    units: str = ""


def sources() -> dict[str, Path]:
    """The files of kernels in Triton, by name."""
    found = [path for folder in TRITON_SOURCES for path in sorted(folder.glob("*.py"))]
    return {path.name: path for path in found if "triton.jit" in path.read_text()}


def triton_kernels() -> set[tuple[str, str]]:
    """All kernels in Triton as (file, name), found in the sources.

    They are the functions that Triton compiles and no other such function calls; those that the
    host launches by name count in any case.
    """
    compiled, called, launched = set(), set(), set()
    for name, path in sources().items():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _is_kernel(function):
                compiled.add((name, function.name))
                called |= {word for word in _calls(function) if word != function.name}
    for folder in TRITON_SOURCES:
        for path in folder.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    launched.add(_name(node.func.value))
    return {(file, name) for file, name in compiled if name not in called or name in launched}


def _is_kernel(function: ast.FunctionDef) -> bool:
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return any(ast.unparse(each) == "triton.jit" for each in calls)


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    """The functions that one calls or hands to others, such as the combination of a scan."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute):
            yield _name(node)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def launchers() -> list[str]:
    """The functions that launch all of Triton's kernels, as ``ahead`` names them."""
    files = sorted(TRITON_TESTS.glob("launch_*.py"))
    return [f"{file.stem}.launch" for file in files if "\ndef launch(" in file.read_text()]


def triton_rows(target: int, *, first: bool) -> list[Row]:
    """Compile all launches for a target. Raises AssertionError: one does not compile."""
    found = [each for name in launchers() for each in ahead.compiled(name, target, first=first)]
    return summary(found, target)


def summary(found: Iterable[ahead.Compiled], target: int) -> list[Row]:
    """One row for all variants of a kernel; those that tests define have none."""
    by_kernel: dict[tuple[str, str], list[ahead.Compiled]] = {}
    for each in found:
        by_kernel.setdefault((each.file, each.kernel), []).append(each)
    paths = sources()
    by_kernel = {key: made for key, made in by_kernel.items() if key[0] in paths}
    return [
        Row(
            file=str(paths[file].relative_to(ROOT)),
            kernel=kernel,
            target=target,
            variants=len(variants),
            registers=max(each.registers for each in variants),
            shared_bytes=max(each.shared_bytes for each in variants),
            spilled_bytes=max(each.spilled_bytes for each in variants),
            units="+".join(sorted({each.units for each in variants} - {""})),
        )
        for (file, kernel), variants in by_kernel.items()
    ]


def cuda_sources() -> dict[str, Path | str]:
    """The sources of kernels in CUDA: files, and texts within Python."""
    found: dict[str, Path | str] = {}
    for folder in CUDA_SOURCES:
        for path in sorted(folder.rglob("*.cu")):
            found[str(path.relative_to(ROOT))] = path
        for path in sorted(folder.rglob("*.py")):
            texts = re.findall(r'r"""(.*?)"""', path.read_text(), flags=re.DOTALL)
            code = "\n".join(text for text in texts if "__global__" in text)
            if code:
                found[str(path.relative_to(ROOT))] = code
    return found


def cuda_rows(target: int) -> list[Row]:
    """Compile all sources in CUDA for a target. Raises CalledProcessError."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in cuda_sources().items():
            path = source if isinstance(source, Path) else Path(folder) / "kernels.cu"
            if isinstance(source, str):
                path.write_text(source)
            rows += read_ptxas(name, target, path.read_text(), _ptxas(path, target, folder))
    return rows


def _ptxas(path: Path, target: int, folder: str) -> str:
    """What the assembler says about the kernels of a file."""
    cuda = toolkit()
    command = [str(cuda / "bin" / "nvcc"), "-std=c++20", f"-arch=sm_{target}", "-rdc=true"]
    command += ["-cubin", "-Xptxas", "-v", f"-I{cuda / 'include'}", f"-I{ROOT / 'src' / 'weft'}"]
    command += [str(path), "-o", f"{folder}/out.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{path.name} does not compile for sm_{target}:\n{done.stderr}")
    return done.stdout + done.stderr


def read_ptxas(file: str, target: int, source: str, told: str) -> Iterator[Row]:
    """The kernels of a source, as the assembler tells of them; names are those of the source."""
    names = re.findall(r"__global__\s+void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\s*\(", source)
    for part in told.split("Compiling entry function '")[1:]:
        entry = part.partition("'")[0]
        numbers = {
            what: int(found[1]) if (found := re.search(pattern, part)) else 0
            for what, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("shared_bytes", r"(\d+) bytes smem"),
                ("spilled_bytes", r"(\d+) bytes spill stores"),
            )
        }
        mangled = [name for name in names if entry == name or f"{len(name)}{name}" in entry]
        yield Row(file, mangled[0] if mangled else entry, target, 1, **numbers)


def sheet(targets: Sequence[int], *, first: bool) -> list[Row]:
    """All kernels for all targets, by file."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        triton = pool.map(lambda target: triton_rows(target, first=first), targets)
        rows = [row for found in triton for row in found]
    return sorted([*rows, *(row for target in targets for row in cuda_rows(target))])


def without_a_launch(rows: Sequence[Row]) -> list[str]:
    """Kernels that nothing launches, with their files."""
    there = {(Path(row.file).name, row.kernel) for row in rows}
    return [f"{name} ({file})" for file, name in sorted(triton_kernels() - there)]


def table(rows: Sequence[Row]) -> str:
    """The sheet in Markdown, a line a kernel, a part a file."""
    targets = sorted({row.target for row in rows})
    by_kernel: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_kernel.setdefault((row.file, row.kernel), {})[row.target] = row
    lines = ["registers / shared bytes / spilled bytes of a thread, the most of all variants", ""]
    file = ""
    for (path, kernel), found in sorted(by_kernel.items()):
        if path != file:
            lines += ["", f"**{path}**", ""] if file else [f"**{path}**", ""]
            lines.append("| kernel | variants |" + "".join(f" sm_{x} |" for x in targets))
            lines.append("|---|---|" + "---|" * len(targets))
            file = path
        variants = max(row.variants for row in found.values())
        cells = "".join(f" {_cell(found.get(target))} |" for target in targets)
        lines.append(f"| `{kernel}` | {variants} |{cells}")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    units = f" {row.units}" if row.units else ""
    return f"{row.registers} / {row.shared_bytes} / {row.spilled_bytes}{units}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=int, nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--first", action="store_true", help="one launch of each kernel")
    parser.add_argument("--json", type=Path, help="write the rows into a file as well")
    options = parser.parse_args()
    rows = sheet(options.target, first=options.first)
    print(table(rows))
    if options.json:
        sys.path.append(str(ROOT / "benchmarks"))
        import report

        facts: dict[str, Any] = {"rows": [asdict(row) for row in rows]}
        report.save(options.json, versions=versions(), **facts)
    lacking = without_a_launch(rows)
    for each in lacking:
        print(f"no launch in tests/triton/launch_*.py: {each}", file=sys.stderr)
    return int(bool(lacking))


def versions() -> dict[str, str]:
    """The compilers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("triton", "torch", "nvidia-cuda-nvcc")}


if __name__ == "__main__":
    sys.exit(main())
