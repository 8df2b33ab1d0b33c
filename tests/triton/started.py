"""Starts an engine whose GPU is absent, and prints what its start took and where kernels came from.

``python started.py GPU SETTINGS [PYTHON]``: all is as on a GPU, but that weights and steps have no
numbers, and that launches go into Triton up to the launch itself. PYTHON is what kernels are to be
compiled by beforehand, if not this one. Triton must not interpret then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(name: str, settings: str, python: str = sys.executable) -> None:
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    from weft.core.config import EngineConfig
    from weft.engine import build, kernels_ahead, model
    from weft.kernels.gpus import target_of
    from weft.kernels.triton import device, launches
    from weft.models.empty import empty_model

    def load_model(source: Path, kept: Any, **more: Any) -> Any:
        assert kept is None
        assert more.pop("host") is None
        assert more.pop("layers") is None
        return empty_model(source, **more)

    gpu = target_of(name)
    device.stand_in(gpu)
    triton.runtime.driver.set_active(launches.AbsentDriver(gpu.arch))
    run = JITFunction.run
    JITFunction.run = lambda *args, **more: run(*args, **more | {"warmup": True})
    kernels_ahead.sys.executable = python
    model.pick_device = lambda *_: model.ABSENT
    model.free_memory = lambda _: gpu.memory_bytes
    torch.cuda.get_device_name = lambda *_: gpu.name
    build.load_model = load_model
    engine = build.build_engine(EngineConfig.from_mapping(json.loads(settings)))
    print(json.dumps([engine.started, engine.start_s]))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
