"""The instruction set of the native kernels: the widest that runs here, or that of WEFT_ISA."""

from __future__ import annotations

import logging
import os

from weft.kernels.cpu import _native
from weft.kernels.unavailable import KernelUnavailable

logger = logging.getLogger("weft")


def chosen_isa() -> str:
    """Follow WEFT_ISA, if it is set, and return the instruction set in use.

    Warns where the machine has a wider one than the kernels were compiled for.

    Raises:
        KernelUnavailable: WEFT_ISA names none that this machine and this build have.
    """
    wish, built, machine = os.environ.get("WEFT_ISA"), _native.isas(), _native.machine_isas()
    if wish is not None:
        if wish not in built:
            where = "this build has" if wish in machine else "this machine can run"
            raise KernelUnavailable(f"WEFT_ISA is {wish!r}; {where}: {', '.join(built)}")
        _native.use_isa(wish)
    elif built[0] != machine[0]:
        logger.warning(
            "The kernels were built for another machine and run as %s on this one, which has %s; "
            "run make setup, which builds them for all machines.",
            built[0],
            machine[0],
        )
    return _native.isa()
