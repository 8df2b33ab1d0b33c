"""Counts what an engine compiles at its start and launches in a step, for a GPU that is absent.

``python variants.py MODEL SETTINGS GPU [SIZE ...]`` prepares an engine with captured steps of every
size and computes nothing. For each variant of a kernel it prints the kernel's name, its types and
constants, and the arguments that 16 divides or that are 1, as lines of JSON. Then for each size a
line with what decode steps of so many rows launch: kernels of Triton by name, products of torch's
libraries, and its other operations. Triton must not interpret then.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm.")


def _launches(executor: Any, launched: Counter[str], size: int) -> dict[str, int]:
    """What a decode step of so many rows launches, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from weft.exec.step_layout import sample_layout

    class Operations(TorchDispatchMode):
        """Counts those that do more than make a view or take memory."""

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
            if str(func).startswith(PRODUCTS):
                launched["library"] += 1
            else:
                launched["torch"] += not view and "empty" not in str(func)
            return func(*args, **(kwargs or {}))

    executor._steps._pad(size)
    launched.clear()
    with Operations():
        executor._functions.forward(executor._packer.forward_layout(size), 1, False)
        executor._functions.sample(sample_layout(size), False)
    return dict(launched)


def main(model: str, settings: str, gpu: str, *sizes: str) -> None:
    from weft.core.config import EngineConfig
    from weft.engine.absent import capture_absent
    from weft.kernels.gpus import target_of

    config = EngineConfig.from_mapping({"model": model, **json.loads(settings)})
    executor, found = capture_absent(config, target_of(gpu))
    for variant in found.variants:
        types = list(variant.signature.values())
        constants = [str(value) for value in variant.constants.values()]
        options = sorted((name, str(value)) for name, value in variant.options.items())
        facts = sorted(variant.attributes), [str(place) for place in variant.constants]
        print(json.dumps((variant.name, types, constants, facts, options)))
    for size in map(int, sizes):
        print(json.dumps(_launches(executor, found.counts, size)))
    executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
