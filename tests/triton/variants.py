"""Counts what an engine compiles at its start and launches in a step, for a GPU that is absent.

``python variants.py MODEL SETTINGS [SIZE ...]`` prepares an engine with captured steps of every
size, on plain CPU tensors, and computes nothing. For each variant of a kernel it prints the
kernel's name, its types and constants, and the arguments that 16 divides or that are 1, as lines
of JSON. Then for each size a line with what decode steps of so many rows launch: kernels of Triton
by name, products of torch's libraries, and its other operations. Triton must not interpret then.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LAUNCHED: Counter[str] = Counter()
H100 = (9, 0), 132, 232_448  # capability, multiprocessors, bytes of shared memory for a program


def _pretend() -> None:
    """Have host functions of kernels see a GPU, and launches note what they would compile."""
    import torch
    import triton
    from ahead import _Absent
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from weft.kernels.triton import device

    triton.runtime.driver.set_active(_Absent(GPUTarget("cuda", 90, 32)))
    for name, fact in zip(("capability", "processors", "shared_bytes"), H100, strict=True):
        setattr(device, name, lambda _, fact=fact: fact)
    seen = set()

    def getitem(self: Any, _: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            LAUNCHED[self.__name__] += 1
            binder = self.device_caches[0][-1]
            _, found, options = binder(*args, debug=False, instrumentation_mode="", **kwargs)
            types = [kind for kind, _ in found]
            constants = [str(value) for kind, value in found if kind == "constexpr"]
            facts = [str(value) for kind, value in found if kind != "constexpr"]
            variant = self.__name__, types, constants, facts, str(options)
            if str(variant) not in seen:
                seen.add(str(variant))
                print(json.dumps(variant))

        return launch

    JITFunction.__getitem__ = getitem

    def product(a: Any, b: Any, *_: Any, out_dtype: Any = None, **__: Any) -> Any:
        LAUNCHED["library"] += 1
        return torch.empty(len(a), b.shape[1], dtype=out_dtype or a.dtype)

    torch._scaled_mm = torch.mm = product


def _launches(executor: Any, size: int) -> dict[str, int]:
    """What a decode step of so many rows launches, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from weft.exec.step_layout import sample_layout

    class Operations(TorchDispatchMode):
        """Counts those that do more than make a view or take memory."""

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
            LAUNCHED["torch"] += not view and "empty" not in str(func)
            return func(*args, **(kwargs or {}))

    executor._steps._pad(size)
    LAUNCHED.clear()
    with Operations():
        executor._functions.forward(executor._packer.forward_layout(size), 1, False)
        executor._functions.sample(sample_layout(size), False)
    return dict(LAUNCHED)


def main(model: str, settings: str, *sizes: str) -> None:
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "numeric")]
    _pretend()
    import graphed
    import pytest

    from weft.core.config import EngineConfig
    from weft.engine.build import build_engine
    from weft.exec import step_layout
    from weft.kernels.triton import launch, stack  # noqa: F401 - before what is pretended

    launch.interpreted = lambda: True  # to ``select_ops``: kernels may run on a CPU
    graphed.SIZES = step_layout.SIZES
    with pytest.MonkeyPatch.context() as patch:
        graphed.use_graphs(patch)
        common = {"model": model, "kernels": "triton", "device": "cpu"}
        engine = build_engine(EngineConfig.from_mapping(common | json.loads(settings)))
    for size in map(int, sizes):
        print(json.dumps(_launches(engine.executor, size)))


if __name__ == "__main__":
    main(*sys.argv[1:])
