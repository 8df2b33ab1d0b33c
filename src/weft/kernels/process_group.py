"""Collectives over the processes of a machine, by torch.distributed."""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.kernels.arrays import Array, is_numpy, to_numpy, to_torch
from weft.kernels.collectives import ONE_EXCHANGE_BYTES, in_order
from weft.kernels.unavailable import KernelUnavailable

if TYPE_CHECKING:
    from weft.kernels.triton.peer_sum import PeerSum

logger = logging.getLogger("weft")

TIMEOUT_S = 300  # of one collective; a rank that has ended is noticed before
FEW_RANKS = 4  # between which messages of ONE_EXCHANGE_BYTES go by peer memory; of more half of it


class Group:
    """Collectives over processes of this machine: NCCL for CUDA tensors, gloo for those of the CPU.

    GPUs that can read each other's memory make small sums so, in one exchange without NCCL
    (``triton.peer_sum``).

    Args:
        meeting_point: a file that does not exist yet, the same for every rank of the group.

    Raises:
        KernelUnavailable: torch was built without NCCL.
        RuntimeError: the others did not come, or a rank has ended; also from every method.
    """

    def __init__(self, rank: int, size: int, meeting_point: Path, device: str) -> None:
        self.rank, self.size = rank, size
        on_gpu = device.startswith("cuda")
        self._aborts = on_gpu  # gloo fails by itself
        self.by_rows = on_gpu  # ranks of a CPU share its cores: what one is spared, others lose
        connect = _nccl if on_gpu else _gloo
        self._group = connect(meeting_point, rank, size)
        self._peers = _peer_sum(meeting_point, rank, size, device) if on_gpu else None
        # Connects both ways of a sum, before any is captured.
        for numbers in (1, size * (ONE_EXCHANGE_BYTES // 4)):
            self._sum_of_group(torch.zeros(numbers, device=device))

    def sum(self, x: Array) -> Array:
        return to_numpy(self._sum(to_torch(x))) if is_numpy(x) else self._sum(x)

    def gather(self, x: Array) -> Array:
        return to_numpy(self._gather(to_torch(x))) if is_numpy(x) else self._gather(x)

    def splits(self, x: Array) -> bool:
        return self.by_rows and x.nbytes > ONE_EXCHANGE_BYTES and len(x) % self.size == 0

    def sum_rows(self, x: Array) -> Array:
        if is_numpy(x):
            return to_numpy(self.sum_rows(to_torch(x)))
        return self._own_sums(x.contiguous()).view(-1, *x.shape[1:])

    def gather_rows(self, x: Array) -> Array:
        return to_numpy(self._all(to_torch(x))) if is_numpy(x) else self._all(x.contiguous())

    def own(self, x: Array) -> Array:
        return x

    def enter(self, x: Array) -> Array:
        return x

    def _sum(self, x: Tensor) -> Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers(x)
        return self._sum_of_group(x)

    def _sum_of_group(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.nbytes <= ONE_EXCHANGE_BYTES or x.numel() % self.size:
            return self._added(self._all(x.view(-1))).view(x.shape)
        return self._all(self._own_sums(x)).view(x.shape)

    def _own_sums(self, x: Tensor) -> Tensor:
        """This rank's share [n / size] of the sums of every rank's ``x`` of n numbers."""
        mine = torch.empty_like(x).view(-1)  # each rank's numbers of this rank's share
        self._group.alltoall_base(mine, x.view(-1), [], []).wait()
        return self._added(mine)

    def _gather(self, x: Tensor) -> Tensor:
        return self._all(x.contiguous()).view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def abort(self) -> None:
        """End what waits for ranks that have ended. For another thread."""
        if self._peers is not None:
            self._peers.end_waits()
        if self._aborts:
            self._group.abort()

    def _all(self, x: Tensor) -> Tensor:
        """Return the parts [size * n, ...] of all ranks, each [n, ...]."""
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._group._allgather_base(parts, x).wait()
        return parts

    def _added(self, parts: Tensor) -> Tensor:
        """Return the sum [n] of parts [size * n]."""
        total: Tensor = in_order(parts.view(self.size, -1).unbind())
        return total


class Pipe:
    """Hidden states from stage to stage over processes: NCCL for CUDA tensors, gloo for others.

    Args:
        rank: of all processes: those of the first stage come first.
        size: of all processes.
        meeting_point: see ``Group``.

    Raises:
        KernelUnavailable, RuntimeError: see ``Group``.
    """

    def __init__(self, rank: int, size: int, stages: int, meeting_point: Path, device: str) -> None:
        width = size // stages
        self.stage, self.stages = rank // width, stages
        self._before, self._after = rank - width, rank + width
        on_gpu = device.startswith("cuda")
        self._aborts = on_gpu
        # Sends that gloo has not ended. A stage goes on while the next one is still computing.
        self._sending: deque[tuple[Any, Array]] = deque()
        self._at_once = 0 if on_gpu else stages  # as many steps as are in flight
        connect = _nccl if on_gpu else _gloo
        self._group = connect(meeting_point, rank, size)
        self._connect(torch.zeros(1, device=device))

    def _connect(self, one: Tensor) -> None:
        """Send something through all stages, which connects them, and wait until it has arrived."""
        if self.stage:
            self.receive(one)
        if self.stage < self.stages - 1:
            self.send(one)
        everyone = one.new_empty(self._group.size())
        self._group._allgather_base(everyone, one).wait()

    def send(self, x: Array) -> None:
        tensor = to_torch(x) if is_numpy(x) else x
        self._sending.append((self._group.send([tensor], self._after, 0), tensor))
        self._wait(self._at_once)

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        self._wait(0)

    def _wait(self, remain: int) -> None:
        while len(self._sending) > remain:
            self._sending.popleft()[0].wait()

    def receive(self, into: Array) -> Array:
        tensor = to_torch(into) if is_numpy(into) else into
        self._group.recv([tensor], self._before, 0).wait()
        return into

    def abort(self) -> None:
        """End what waits for stages that have ended. For another thread."""
        if self._aborts:
            self._group.abort()


def _gloo(meeting_point: Path, rank: int, size: int) -> Any:
    c10d = _torch_distributed()
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    store = c10d.FileStore(str(meeting_point), size)
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(meeting_point: Path, rank: int, size: int) -> Any:
    c10d = _torch_distributed()
    if not c10d.is_nccl_available():
        raise KernelUnavailable("this torch has no NCCL, which several ranks need on GPUs")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    store = c10d.FileStore(str(meeting_point), size)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _peer_sum(meeting_point: Path, rank: int, size: int, device: str) -> PeerSum | None:
    """The sum by peer memory; None, alike on all ranks, where GPUs cannot read each other's.

    Ranks have neighbouring GPUs, in their order. The memory is zeros on every rank when all have
    met for the next collective.
    """
    from weft.kernels.triton.peer_sum import MOST_RANKS, PART_BYTES, PeerSum, memory_bytes

    first = torch.device(device).index - rank
    pairs = permutations(range(first, first + size), 2)
    if size > MOST_RANKS or not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        logger.warning("Small sums go through NCCL: the GPUs do not all read each other's memory.")
        return None
    from torch._C._distributed_c10d import _SymmetricMemory

    most = ONE_EXCHANGE_BYTES if size <= FEW_RANKS else ONE_EXCHANGE_BYTES // 2
    name = f"weft {meeting_point}"
    store = _torch_distributed().FileStore(f"{meeting_point}-peers", size)
    _SymmetricMemory.set_group_info(name, rank, size, store)
    shape = (memory_bytes(most, size),)
    where = torch.device(device)
    memory = _SymmetricMemory.empty_strided_p2p(shape, (1,), torch.uint8, where, name)
    memory.zero_()
    torch.cuda.synchronize(where)
    handle = _SymmetricMemory.rendezvous(memory)
    return PeerSum(
        rank,
        torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=where),
        most,
        torch.zeros(most // PART_BYTES, dtype=torch.int64, device=where),
        torch.zeros(1, dtype=torch.int32).pin_memory(),
        (memory, handle),
    )


def _torch_distributed() -> Any:
    """The module, most of which has no types; few engines need it."""
    from torch import distributed

    return distributed
