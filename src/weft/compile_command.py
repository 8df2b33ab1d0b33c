"""The command ``weft compile``: fills a folder with the compiled kernels of a model."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.core.flags import given_settings

if TYPE_CHECKING:
    from weft.kernels.gpus import Gpu


def run_compile(options: dict[str, Any]) -> int:
    """Run the command; returns the exit status.

    Raises:
        ConfigError: the target is not known, or none is named and there is no GPU.
        WeftError: the model, its settings, the compiler or the folder are at fault.
    """
    (settings,) = given_settings(options, EngineConfig)
    config = EngineConfig.from_mapping(settings)
    from weft.engine.kernels_ahead import Compilation, check_compiler, request_for
    from weft.kernels.gpus import target_of
    from weft.models.hub import resolve_model

    if config.device == "cpu" or config.kernels in ("cpu", "reference"):
        raise ConfigError(
            "Kernels of a GPU are compiled, those of a CPU are not; leave device and kernels out.",
            param="device",
        )
    if not config.graphs:
        raise ConfigError(
            "Kernels are compiled for steps that are captured; leave graphs on.", param="graphs"
        )
    for name, usual in (("host_experts", "none"), ("pipeline_parallel", 1)):
        if getattr(config, name) != usual:
            raise ConfigError(
                f"Kernels are not compiled ahead with {name}, but by the engine that needs them; "
                "leave it out.",
                param=name,
            )
    gpu = target_of(options["target"]) if "target" in options else None
    check_compiler()
    gpu = gpu or _gpu_here()
    source = resolve_model(config.model, revision=config.revision, offline=config.offline)
    request = request_for(replace(config, model=str(source), revision=None), gpu)

    _check_takes_files(Path(request.folder))

    def tell(place: int, count: int, words: str) -> None:
        print(f"[{place}/{count}] {words}", file=sys.stderr, flush=True)

    print(f"compiling {config.model} for {gpu.name} ({gpu.sm})", file=sys.stderr, flush=True)
    compiled = Compilation(request, tell).wait()
    if not compiled.is_kept():
        raise KernelError(
            f"{compiled.folder} does not take all files: it is read-only, or its disk is full; "
            "name another folder with --kernel-cache."
        )
    print(compiled.describe())
    return 0


def _check_takes_files(folder: Path) -> None:
    """Raise ConfigError if a folder cannot be made or written, before minutes of work for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"Kernels cannot be kept in '{folder}': {error.strerror}; name another folder with "
            "--kernel-cache.",
            param="kernel_cache",
        ) from None


def _gpu_here() -> Gpu:
    """Return the facts of the GPU of this machine."""
    import torch

    from weft.kernels.gpus import TARGETS
    from weft.kernels.triton.device import gpu_at

    if not torch.cuda.is_available():
        raise ConfigError(
            f"There is no GPU here; name one with --target: {', '.join(sorted(TARGETS))}.",
            param="target",
        )
    gpu = gpu_at(torch.device("cuda", torch.cuda.current_device()))
    assert gpu is not None
    return gpu
