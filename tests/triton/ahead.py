"""Compiles the kernels that host functions launch, for a GPU that is absent.

``python ahead.py [--first] MODULE.FUNCTION CAPABILITY [ARGUMENT ...]`` calls a function of a module
of this folder with the capability (90 for sm_90) and the arguments. The function calls host
functions with plain CPU tensors. For each kernel that these launch, what it needs of the GPU is
printed as a line of JSON; nothing runs. With ``--first`` only the first launch of each kernel is
compiled. Triton must not interpret then, so tests call ``compiled``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src" / "weft" / "kernels"


@dataclass(frozen=True)
class Compiled:
    """A kernel as one launch specialises it."""

    kernel: str
    file: str  # of its source
    constants: dict[str, str]
    warps: int
    stages: int
    shared_bytes: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    wgmma: bool  # Hopper's products of whole warp groups are used
    mma: bool  # products of warps are used
    tcgen05: bool  # Blackwell's products with their own memory are used
    programmatic: bool  # it waits for kernels that may still run when it is launched

    @property
    def units(self) -> str:
        """What multiplies matrices, empty if nothing does."""
        return next((name for name in ("tcgen05", "wgmma", "mma") if getattr(self, name)), "")


def compiled(
    function: str, capability: int, *arguments: str, first: bool = False
) -> list[Compiled]:
    """Call ``module.function`` in a process of its own, without Triton's interpreter.

    Equal calls of equal kernels compile once: see ``builds``.

    Args:
        first: compile only the first launch of each kernel.
    """
    import builds  # for tests, not for the process that compiles

    options = ["--first"] if first else []
    command = [sys.executable, str(HERE / "ahead.py"), *options, function, str(capability)]
    command += arguments

    def make(target: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        with tempfile.TemporaryDirectory() as cache:
            environment["TRITON_CACHE_DIR"] = cache
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        target.write_text(done.stdout)

    packages = [f"{name} {version(name)}" for name in ("triton", "torch")]
    sources = [HERE / "ahead.py", HERE / "weights.py", *sorted(HERE.glob("launch_*.py")), KERNELS]
    lines = builds.kept([*command, sys.version, *packages, *sources], make).read_text()
    return [Compiled(**json.loads(line)) for line in lines.splitlines()]


def _main(name: str, capability: int, *arguments: str, first: bool = False) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    from weft.kernels.triton.launches import AbsentDriver

    assert not triton.knobs.runtime.interpret
    triton.runtime.driver.set_active(AbsentDriver(capability))
    triton.knobs.compilation.always_compile = True  # else there is no log
    triton.knobs.nvidia.dump_ptxas_log = True
    seen, names = set(), set()

    def getitem(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            if first and self.__name__ in names:
                return
            names.add(self.__name__)
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                print(json.dumps(asdict(_describe(self, kernel, kwargs, log.getvalue()))))

        return launch

    JITFunction.__getitem__ = getitem
    module, function = name.split(".")
    getattr(importlib.import_module(module), function)(capability, *arguments)


def _describe(function: Any, kernel: Any, kwargs: dict[str, Any], log: str) -> Compiled:
    found = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    registers, spilled = (int(match[1]) for match in found if match)
    ptx = kernel.asm["ptx"]
    return Compiled(
        kernel=function.__name__,
        file=Path(function.fn.__code__.co_filename).name,
        constants={k: str(v) for k, v in kwargs.items() if k.isupper()},
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
        wgmma="wgmma" in ptx,
        mma="mma.sync" in ptx,
        tcgen05="tcgen05.mma" in ptx,
        programmatic=_programmatic(kernel),
    )


def _programmatic(kernel: Any) -> bool:
    """Whether a kernel is launched programmatically; it must then wait."""
    ptx = kernel.asm["ptx"]
    waits = [f"griddepcontrol.{part}" in ptx for part in ("wait", "launch_dependents")]
    assert waits == [kernel.metadata.launch_pdl] * 2, kernel.name
    return bool(kernel.metadata.launch_pdl)


if __name__ == "__main__":
    words = sys.argv[1:]
    if first := words[0] == "--first":
        del words[0]
    _main(words[0], int(words[1]), *words[2:], first=first)
