"""How the ranks of a model meet, and how each reaches the others from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.core.config import EngineConfig
from weft.core.errors import EngineDeadError, KernelError
from weft.kernels.collectives import ALONE, ONE_STAGE, Collectives, Link
from weft.kernels.interface import OpTable
from weft.kernels.unavailable import KernelUnavailable

DEATH_S = 1.0  # in which a rank that has ended is found after a collective has failed
CHECK_S = 0.05  # between looks at whether all that are to meet still run


@dataclass(frozen=True)
class Ways:
    """How a rank reaches the others: those of its stage, and the next stage.

    Attributes:
        check: raises the error of a rank that has ended; of rank 0 alone.
    """

    ranks: Collectives
    link: Link
    abort: Callable[[], None]
    check: Callable[[], None] = lambda: None

    def among(self, ops: OpTable) -> OpTable:
        """The ops of a model that is cut so. Loading a weight looks whether ranks have ended."""

        def pack(*given: Any) -> Any:
            self.check()
            return ops.pack(*given)

        def quantise(*given: Any) -> Any:
            self.check()
            return ops.quantise(*given)

        return replace(ops, ranks=self.ranks, link=self.link, pack=pack, quantise=quantise)


def meet(rank: int, config: EngineConfig, meeting_point: str, device: str) -> Ways:
    """Meet the other ranks in a folder. Raises KernelError or EngineDeadError."""
    module, folder = process_group(), Path(meeting_point)
    width, stages = config.tensor_parallel, config.pipeline_parallel
    ranks: Collectives = ALONE
    link: Link = ONE_STAGE
    aborts = []
    try:
        if width > 1:
            group = module.Group(rank % width, width, folder / f"stage-{rank // width}", device)
            ranks, aborts = group, [group.abort]
        if stages > 1:  # where each is met when all have met the ranks of its stage
            pipe = module.Pipe(rank, width * stages, stages, folder / "stages", device)
            link, aborts = pipe, [*aborts, pipe.abort]
    except KernelUnavailable as error:
        raise KernelError(str(error)) from error
    except RuntimeError as error:
        raise EngineDeadError(f"Rank {rank} could not meet the others: {error}") from error

    def abort() -> None:
        for end in aborts:
            end()

    return Ways(ranks, link, abort)


def meet_watching(
    config: EngineConfig, meeting_point: str, device: str, check: Callable[[float], None]
) -> Ways:
    """Meet the others as rank 0, and ``check`` meanwhile that they are there.

    A rank that ends before all have met would be waited for, for minutes. Nothing ends that wait,
    so a thread waits, and is left alone where ``check`` raises.

    Args:
        check: raises the error of a rank that has ended, or does so in so many seconds.

    Raises:
        KernelError, EngineDeadError: see ``meet``; also what ``check`` raises.
    """
    met: Future[Ways] = Future()

    def wait_for_all() -> None:
        try:
            met.set_result(meet(0, config, meeting_point, device))
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=wait_for_all, name="weft-meeting", daemon=True).start()
    while not wait([met], CHECK_S).done:
        check(0.0)
    if isinstance(met.exception(), EngineDeadError):  # this rank has lost another one
        check(DEATH_S)
    return met.result()


def process_group() -> ModuleType:
    """The collectives of torch. Raises KernelError if it is not installed."""
    try:
        from weft.kernels import process_group
    except ImportError as error:
        raise KernelError(
            "tensor_parallel and pipeline_parallel need torch, which is not installed "
            f"({error}): pip install 'weft[cuda]'"
        ) from error
    return process_group
