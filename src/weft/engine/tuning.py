"""``weft profile --tune``: measures launches of matrix products and attention on this GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.engine.devices import is_cpu
from weft.engine.kernels_ahead import (
    Compilation,
    LostCompilerError,
    kernel_folder,
    request_for,
    spare_folder,
)
from weft.engine.model import find_model
from weft.engine.weights import attention_shapes, head_shape, product_shapes
from weft.kernels.candidates import MOST, candidates, computed_by_torch
from weft.kernels.gpus import Gpu
from weft.kernels.tuning import EVERY, ROWS, Heuristic, Launch, LaunchShape, load, save
from weft.kernels.unavailable import KernelUnavailable

logger = logging.getLogger("weft")


def tune_kernels(config: EngineConfig, tell: Callable[[str], None] = print) -> Path:
    """Measure launches and write them to the file of the setting ``tuning``.

    What the file has already for the same GPU and kernels stays, so that several models share it;
    shapes of this model are measured again. No weights are loaded. Launches are compiled in
    parallel before they are measured.

    Raises:
        ConfigError: no file is named, or it cannot be written.
        KernelError: there is no GPU, the file is of another one, or no launch of a shape runs.
    """
    if config.tuning in ("auto", "heuristic"):
        raise ConfigError("Name the file for the launches: --tuning FILE.", param="tuning")
    path = Path(config.tuning)
    if not path.parent.is_dir():
        raise ConfigError(f"tuning: the folder '{path.parent}' does not exist.", param="tuning")
    model = find_model(replace(config, tuning="heuristic"))
    if is_cpu(model.device):
        raise KernelError(
            f"Launches are measured on a GPU, and this engine runs on '{model.device}'; set device "
            "to cuda on a machine with one."
        )
    import torch
    import triton

    from weft.kernels.triton.device import gpu_at
    from weft.kernels.triton.kernel_cache import use_folders
    from weft.kernels.triton.tuned import graph_seconds, tune
    from weft.kernels.triton.tuned_attention import launches_to_measure, tune_attention

    device = torch.device(model.device)
    gpu = gpu_at(device)
    assert gpu is not None
    folder = kernel_folder(config)
    use_folders(folder, spare_folder())
    asked = config, model.spec, model.dtype, model.source
    head = head_shape(*asked)
    products = products_to_measure(product_shapes(*asked), gpu, head)
    try:
        entries = dict(load(path, gpu.name, triton.__version__).entries) if path.exists() else {}
        shapes = attention_shapes(*asked[:3])
        attention = {(shape, EVERY): launches_to_measure(shape, gpu) for shape in shapes}
        every = products | attention
        tell(f"compiling {sum(map(len, every.values()))} launches into {folder}")
        _compile(config, gpu, every)
        for (shape, rows), launches in products.items():
            if computed_by_torch(shape, rows, gpu.capability, is_head=shape == head):
                entries[shape, rows] = launches[0]
                continue
            launch, seconds = tune(shape, rows, device, launches, graph_seconds)
            entries[shape, rows] = launch
            tell(f"{shape} with up to {rows} rows: {seconds * 1e6:.1f} us, {dict(launch)}")
        for key, launches in attention.items():
            shape, _ = key
            prepare = partial(_compile_more, config, gpu, key)
            measured = config.block_size, device, launches, graph_seconds, prepare
            launch, share = tune_attention(shape, *measured)
            entries[key] = launch
            tell(f"{shape}: {share:.2f} of the time by the rule, {dict(launch)}")
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    save(path, gpu.name, triton.__version__, entries)
    return path


def products_to_measure(
    shapes: Iterable[LaunchShape], gpu: Gpu, head: LaunchShape
) -> dict[tuple[LaunchShape, int], list[Launch]]:
    """Return the launches of each shape and number of rows that are worth measuring on a GPU.

    Where torch computes the product, that is the rule's alone, which a file has to have.

    Args:
        head: the product of the output head.
    """
    device, found = Heuristic(gpu.processors, gpu.shared_bytes), {}
    for shape in shapes:
        for rows in ROWS:
            alone = computed_by_torch(shape, rows, gpu.capability, is_head=shape == head)
            found[shape, rows] = candidates(device, shape, rows, 1 if alone else MOST)
    return found


def _compile_more(
    config: EngineConfig, gpu: Gpu, key: tuple[LaunchShape, int], launches: list[Launch]
) -> None:
    _compile(config, gpu, {key: launches})


def _compile(
    config: EngineConfig, gpu: Gpu, products: dict[tuple[LaunchShape, int], list[Launch]]
) -> None:
    """Compile launches in other processes, and remove those that cannot be compiled."""
    measured = {key: launches for key, launches in products.items() if len(launches) > 1}
    asked = [
        (shape.op, shape.kind, shape.sizes, rows, [dict(launch) for launch in launches])
        for (shape, rows), launches in measured.items()
    ]
    failed: list[str] = []
    try:
        Compilation(replace(request_for(config, gpu), products=asked)).wait(failed)
    except LostCompilerError as error:
        logger.warning("Launches are compiled one by one (%s).", error.message)
    gone = [tuple(map(int, name.split()[:2])) for name in failed]
    for place, launches in enumerate(measured.values()):
        launches[:] = [x for number, x in enumerate(launches) if (place, number) not in gone]
