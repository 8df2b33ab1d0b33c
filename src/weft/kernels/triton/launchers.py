"""The host code with which Triton launches kernels, built before there is a driver.

Triton compiles a little C for each list of argument types, with the compiler of the machine that
serves. Built beforehand, a machine needs none. It is linked with the driver's library by its name
alone, for which an empty library stands where there is no driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from triton.backends.nvidia import driver
from triton.runtime.build import _build, platform_key

from weft.kernels.pool import CompileTask
from weft.kernels.triton.kernel_cache import KernelFiles, key_of
from weft.kernels.triton.launches import Variant

LAUNCHER, UTILITIES = "__triton_launcher", "cuda_utils"
DRIVER = "libcuda.so.1"


def c_compiler() -> str | None:
    """The C compiler that Triton calls; None if there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def launcher_tasks(variants: Iterable[Variant]) -> list[CompileTask]:
    """Return tasks that build what is not there of the launchers of variants, each once."""
    sources = {UTILITIES: (Path(driver.dirname) / "driver.c").read_text()}
    for variant in variants:
        source = driver.make_launcher(variant.constants, variant.signature, None)
        sources.setdefault(f"launcher of {variant.name}, {len(sources)}", source)
    unique = {source: name for name, source in reversed(sources.items())}
    return [
        CompileTask(name, partial(_build_into, files, source))
        for source, name in unique.items()
        if (files := _files_of(source)).get_file(_library(source)) is None
    ]


def _files_of(source: str) -> KernelFiles:
    """Return where Triton looks for a library; see ``runtime.build.compile_module_from_src``."""
    return KernelFiles(key_of((source + platform_key()).encode()))


def _name(source: str) -> str:
    return LAUNCHER if f'"{LAUNCHER}"' in source else UTILITIES


def _library(source: str) -> str:
    return f"{_name(source)}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _build_into(files: KernelFiles, source: str, alone: bool) -> None:
    with nullcontext() if alone else files.locked():
        if files.get_file(_library(source)) is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{_name(source)}.c"
            path.write_text(source)
            stub = ["-shared", f"-Wl,-soname,{DRIVER}", "-x", "c", os.devnull, "-o"]
            subprocess.run([c_compiler() or "cc", *stub, f"{folder}/{DRIVER}"], check=True)
            built = _build(
                _name(source), str(path), folder, [driver.libdevice_dir, folder],
                driver.include_dirs, [], ["-Wl,--no-as-needed", f"-l:{DRIVER}"],
            )  # fmt: skip
            files.put(Path(built).read_bytes(), _library(source))
