"""Facts of GPUs that choices of kernels depend on: of the one at hand, or of one that is absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.errors import look_up

MiB = 2**20


@dataclass(frozen=True)
class Gpu:
    """What kernels are chosen and compiled by.

    Attributes:
        name: as the driver gives it.
        capability: the compute capability, major and minor.
        processors: multiprocessors.
        shared_bytes: shared memory that a program may have.
        memory_bytes: of the device, in all.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared_bytes: int
    memory_bytes: int

    @property
    def sm(self) -> str:
        """The capability as compilers write it, such as ``sm_90``."""
        return "sm_{}{}".format(*self.capability)

    @property
    def arch(self) -> int:
        """The capability as one number, such as 90."""
        return 10 * self.capability[0] + self.capability[1]


# Shared memory of a program: CUDA C++ programming guide, technical specifications per capability.
_SHARED_80, _SHARED_86, _SHARED_90 = 163 * 1024, 99 * 1024, 227 * 1024

# Names, multiprocessors and memory as the driver reports them.
KNOWN: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, _SHARED_80, 81920 * MiB),
    "a10g": Gpu("NVIDIA A10G", (8, 6), 80, _SHARED_86, 23028 * MiB),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, _SHARED_86, 24576 * MiB),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, _SHARED_86, 23034 * MiB),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, _SHARED_86, 46068 * MiB),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, _SHARED_86, 24564 * MiB),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, _SHARED_90, 81559 * MiB),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", (9, 0), 114, _SHARED_90, 81559 * MiB),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, _SHARED_90, 143771 * MiB),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, _SHARED_90, 183359 * MiB),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, _SHARED_86, 32607 * MiB),
}
# What a capability alone stands for: its usual GPU in servers.
USUAL = {"sm_80": "a100", "sm_86": "a10g", "sm_89": "l40s", "sm_90": "h100", "sm_100": "b200"}
USUAL |= {"sm_120": "rtx5090"}
TARGETS: Mapping[str, Gpu] = {**KNOWN, **{sm: KNOWN[name] for sm, name in USUAL.items()}}


def target_of(wish: str) -> Gpu:
    """Return the GPU of a name of ``KNOWN``, or the usual one of a capability such as ``sm_90``.

    Raises:
        ConfigError: it is not known; the message lists those that are.
    """
    return look_up(wish, TARGETS, "target")
