"""The process that compiles the kernels of an engine: ``python -m weft.engine.compile_process``.

It reads a ``CompileRequest`` as JSON from standard input, and writes what it does as lines of JSON
to standard output: the kernels and how many of them are kept already, then each task that has
ended, and at last that all have. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.config import EngineConfig
from weft.core.errors import WeftError
from weft.core.process import die_with, set_process_title
from weft.core.resolved import ResolvedConfig
from weft.kernels.gpus import Gpu
from weft.kernels.kernel_folder import KernelFolder

if TYPE_CHECKING:
    from weft.kernels.pool import CompileTask, TaskOutcome


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled, and where it is kept.

    Attributes:
        config: the settings of the engine.
        resolved: what it has decided; None: as the memory of the GPU allows.
        rank: of several, which share the work.
        spare: the folder for what the first one does not take.
        workers: processes that compile at once.
        products: op, kind, sizes, rows and launches of products and attention that are compiled
            instead, to be measured; what cannot be compiled is named by its place and the launch's.
    """

    config: dict[str, Any]
    resolved: dict[str, Any] | None
    gpu: dict[str, Any]
    folder: str
    spare: str
    workers: int
    rank: int = 0
    products: Seq[Seq[Any]] = ()

    def read_gpu(self) -> Gpu:
        """Return the GPU for which kernels are compiled."""
        return Gpu(**self.gpu | {"capability": tuple(self.gpu["capability"])})

    def read_resolved(self) -> ResolvedConfig | None:
        """Return what the engine has decided."""
        if self.resolved is None:
            return None
        lists = {name: tuple(v) for name, v in self.resolved.items() if isinstance(v, list)}
        return ResolvedConfig(**self.resolved | lists)


def _tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _tell_outcome(outcome: TaskOutcome) -> None:
    _tell(**asdict(outcome))


def _compile_products(request: CompileRequest) -> None:
    import torch

    from weft.kernels.pool import do_all
    from weft.kernels.triton import kernel_cache, tuned, tuned_attention
    from weft.kernels.triton.launches import note_launches
    from weft.kernels.tuning import DECODE, PREFILL, LaunchShape

    gpu = request.read_gpu()
    found, target = note_launches(gpu), kernel_cache.target_of(gpu)
    kernel_cache.use_folders(Path(request.folder), Path(request.spare))
    tasks: list[CompileTask] = []
    for place, (op, kind, sizes, rows, launches) in enumerate(request.products):
        shape, device = LaunchShape(op, kind, tuple(sizes)), torch.device("meta")
        if op in (DECODE, PREFILL):
            block_size = request.config["block_size"]
            each = tuned_attention.launch_each(shape, block_size, device, launches)
        else:
            each = tuned.launch_each(shape, rows, device, launches)
        for number, _ in enumerate(each):
            new, found.variants[:] = list(found.variants), []
            tasks += kernel_cache.compile_tasks(new, target, f"{place} {number} ")
    _tell(kernels=[], kept=0, tasks=len(tasks))
    do_all(tasks, request.workers, _tell_outcome)
    _tell(ended=True)


def _compile(request: CompileRequest) -> None:
    from weft.engine.absent import capture_absent
    from weft.kernels.pool import do_all
    from weft.kernels.triton import kernel_cache
    from weft.kernels.triton.launchers import c_compiler, launcher_tasks

    config, gpu = EngineConfig.from_mapping(request.config), request.read_gpu()
    executor, launches = capture_absent(config, gpu, request.read_resolved(), request.rank)
    executor.close()
    kernel_cache.use_folders(Path(request.folder), Path(request.spare))
    target, variants = kernel_cache.target_of(gpu), launches.variants
    tasks = kernel_cache.compile_tasks(variants, target)
    kept = len(variants) - len(tasks)
    tasks = _in_turns(tasks, request.rank, config.tensor_parallel)
    if c_compiler() is not None:
        tasks += launcher_tasks(variants)
    keys = [kernel_cache.files_of(variant, target).key for variant in variants]
    files = list(zip(keys, map(kernel_cache.metadata_name, variants), strict=True))
    _tell(kernels=files, kept=kept, tasks=len(tasks))
    do_all(tasks, request.workers, _tell_outcome)
    KernelFolder(Path(request.folder)).note_maker(kernel_cache.maker(gpu))
    _tell(ended=True)


def _in_turns(tasks: Seq[CompileTask], rank: int, ranks: int) -> list[CompileTask]:
    """Begin at another place on each rank, so that ranks do not wait for each other's kernels."""
    first = len(tasks) * rank // ranks
    return [*tasks[first:], *tasks[:first]]


def main() -> None:
    """Compile; exit code 1 after a typed error, which is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with(options.parent)
    set_process_title("weft-compile")
    logging.disable(logging.WARNING)  # the engine says the same
    try:
        request = CompileRequest(**json.load(sys.stdin))
        (_compile_products if request.products else _compile)(request)
    except WeftError as error:
        _tell(error={"type": type(error).__name__, "message": error.message})
        sys.exit(1)


if __name__ == "__main__":
    main()
