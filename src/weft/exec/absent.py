"""A device that is absent: its tensors have shapes and no numbers, and captured functions run once.

What they launch can be noted then, so that kernels are compiled before there is a device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.exec.device import Branch, Event, Replay
from weft.kernels.block_arrays import BlockArrays, block_pairs


class AbsentDevice:
    """Implements ``Device`` on ``meta``; memory of the host is real, and copies change nothing."""

    where = torch.device("meta")

    def __init__(self) -> None:
        self._exchanges = False

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def work(self) -> AbstractContextManager[object]:
        if not self._exchanges:
            return nullcontext()
        return _WithoutDownloads()  # type: ignore[no-untyped-call]

    def upload(self, source: Tensor, target: Tensor) -> None:
        """There are no numbers."""

    def download(self, source: Tensor, target: Tensor) -> None:
        """There are no numbers."""

    def send(self, source: Tensor) -> Tensor:
        return source.to(self.where)

    def copy_blocks(
        self,
        sources: BlockArrays,
        targets: BlockArrays,
        source_blocks: Seq[int],
        target_blocks: Seq[int],
    ) -> None:
        from weft.kernels.triton.blocks import copy_blocks

        pairs = block_pairs(sources, targets, source_blocks, target_blocks)
        copy_blocks(sources, targets, pairs, self.send)

    def join(self) -> None:
        """Nothing is on its way."""

    def exchange_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        self._exchanges = True
        return self.host_memory(size, dtype)

    def fork(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rejoin(self) -> None:
        """Nothing is on its way."""

    def branch(self, body: Callable[[], Tensor]) -> Branch:
        return _Joined(body())

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def deliver(self, source: Tensor, target: Tensor) -> None:
        """There are no numbers."""

    def delivered(self) -> Event:
        return _Past()

    def record(self) -> Event:
        return _Past()

    def synchronize(self) -> None:
        """Nothing is on its way."""

    def capture(self, body: Replay) -> Replay:
        with self.work():
            body()
        return body


class _WithoutDownloads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies to the host do nothing, as there are no numbers."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device.type == "cpu":
            return args[0]
        return func(*args, **(kwargs or {}))


class _Joined:
    def __init__(self, result: Tensor) -> None:
        self._result = result

    def join(self) -> Tensor:
        return self._result


class _Past:
    def wait(self) -> None:
        """Nothing is on its way."""
