"""``weft profile --tune``: measures launches of matrix products and attention on this GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, KernelError
from weft.engine.devices import device_name, is_cpu
from weft.engine.model import find_model
from weft.engine.weights import attention_shapes, product_shapes
from weft.kernels.tuning import EVERY, ROWS, load, save
from weft.kernels.unavailable import KernelUnavailable


def tune_kernels(config: EngineConfig, tell: Callable[[str], None] = print) -> Path:
    """Measure launches and write them to the file of the setting ``tuning``.

    What the file has already for the same GPU and kernels stays, so that several models share it;
    shapes of this model are measured again. No weights are loaded.

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

    from weft.kernels.triton.tuned import graph_seconds, tune
    from weft.kernels.triton.tuned_attention import tune_attention

    device = torch.device(model.device)
    name = device_name(model.device)
    try:
        entries = dict(load(path, name, triton.__version__).entries) if path.exists() else {}
        for shape in product_shapes(config, model.spec, model.dtype):
            for rows in ROWS:
                launch, seconds = tune(shape, rows, device, graph_seconds)
                entries[shape, rows] = launch
                tell(f"{shape} with up to {rows} rows: {seconds * 1e6:.1f} us, {dict(launch)}")
        for shape in attention_shapes(config, model.spec, model.dtype):
            launch, share = tune_attention(shape, config.block_size, device, graph_seconds)
            entries[shape, EVERY] = launch
            tell(f"{shape}: {share:.2f} of the time by the rule, {dict(launch)}")
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    save(path, name, triton.__version__, entries)
    return path
