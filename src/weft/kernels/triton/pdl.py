"""Programmatic dependent launch: a kernel is set up while the one before it in the stream ends.

A host function passes ``**pdl.options(device)`` to its launch, and its kernel takes the constant
``PDL`` and passes it to ``wait`` and ``launch_dependents``. For such a kernel holds:

- Every program waits, whether it has work or not: who waits for this kernel takes those before it
  for ended, too.
- Before the wait nothing is read that a kernel of the same replay writes, and nothing is written.
  Weights may be fetched, as no step changes them.

Launches stay in order beside kernels without the attribute: these begin when all before them has
ended. Stream capture makes a programmatic edge of it, which may join kernels only (CUDA 13,
``driver_types.h``: ``cudaGraphDependencyTypeProgrammatic``), so the launch right before must be a
kernel, not a copy.

Source: PTX ISA, ``griddepcontrol``; ``launch_pdl`` of ``CUDAOptions`` and
``triton.language.extra.cuda.gdc``, the same in Triton 3.6 and later.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.kernels.triton import device as facts

PDL_CAPABILITY = (9, 0)  # the first with ``griddepcontrol``

if triton.knobs.runtime.interpret:

    def wait(PDL: Any) -> None:
        """Interpreted kernels run one after the other."""

    def launch_dependents(PDL: Any) -> None:
        """Interpreted kernels run one after the other."""

else:

    @triton.jit
    def wait(PDL: triton.language.constexpr):
        """Wait until the kernels before this one have ended and what they wrote is to be seen."""
        if PDL:
            gdc_wait()

    @triton.jit
    def launch_dependents(PDL: triton.language.constexpr):
        """Let the next kernel be set up once every program of this one has come here or ended."""
        if PDL:
            gdc_launch_dependents()


def options(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a launch on a device: ``PDL``, and ``launch_pdl`` with it."""
    if facts.capability(device) < PDL_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
