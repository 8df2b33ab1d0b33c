"""Notes which variants of kernels are launched, for a GPU that is absent; nothing runs.

Triton compiles a kernel anew for each combination of types, constants and options, and of which
arguments are 1 or divisible by 16. Where it would compile, that is kept instead, and the kernel
passes for compiled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from weft.kernels.gpus import Gpu
from weft.kernels.triton.device import stand_in

WARP = 32  # threads


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch specialises it.

    Attributes:
        kernel: Triton's function.
        signature: the types of its parameters by name; ``constexpr`` of constants.
        constants: by place.
        attributes: by place, of arguments that are divisible by 16 (or 1, which is a constant).
        options: of the compiler.
    """

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    def source(self) -> Any:
        """Return it as Triton's compiler takes it."""
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)


@dataclass
class Launches:
    """What was launched.

    Attributes:
        variants: each once, in the order in which they came.
        counts: launches by the name of the kernel.
    """

    variants: list[Variant] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class AbsentDriver:
    """As much of a driver as compiling for a GPU asks for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class _Noted:
    """Passes for a compiled kernel: its launches are counted."""

    function = packed_metadata = None

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def launch_metadata(self, *_: Any) -> None:
        """There is none."""

    def run(self, *_: Any) -> None:
        self._counts[self._name] += 1


def note_launches(gpu: Gpu) -> Launches:
    """Note launches of this process from now on, instead of running them.

    Tensors of ``meta`` stand for those of the GPU. There is no way back, so this is for processes
    that do nothing else.
    """
    found = Launches()

    def note(
        kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any,
        attributes: Any, _: bool,
    ) -> _Noted:  # fmt: skip
        chosen = dict(vars(options))
        found.variants.append(Variant(kernel, signature, constants, attributes, chosen))
        passes = _Noted(kernel.__name__, found.counts)
        kernel.device_caches[device][0][key] = passes
        return passes

    JITFunction._do_compile = note
    stand_in(gpu)
    triton.runtime.driver.set_active(AbsentDriver(gpu.arch))
    return found
