"""Looks up the kernels of a start as an engine on a GPU does, in a folder that was filled before.

``python lookups.py FOLDER GPU SETTINGS`` has Triton's own launch code look for every kernel that an
engine launches when it captures its steps, and prints how many are compiled and how many are not,
as JSON. Nothing runs. Triton must not interpret then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str, gpu: str, settings: str) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    from weft.core.config import EngineConfig
    from weft.engine import absent
    from weft.kernels.gpus import Gpu, target_of
    from weft.kernels.triton import device, kernel_cache, launches

    found = {"compiled": 0, "missing": 0}

    def count(*, cache_hit: bool, **_: Any) -> None:
        found["compiled" if cache_hit else "missing"] += 1

    def look_up(gpu: Gpu) -> launches.Launches:
        """Stands for ``note_launches``: launches go on into Triton, up to the launch itself."""
        device.stand_in(gpu)
        triton.runtime.driver.set_active(launches.AbsentDriver(gpu.arch))
        run = JITFunction.run
        JITFunction.run = lambda *args, **more: run(*args, **more | {"warmup": True})
        triton.knobs.compilation.listener = count
        return launches.Launches()

    kernel_cache.use_folders(Path(folder), Path("/nowhere"))
    launches.note_launches = look_up
    absent.capture_absent(EngineConfig.from_mapping(json.loads(settings)), target_of(gpu))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
