"""The port between a graph executor and its device: copies, captured work and events, in order.

Blocks of KV are copied beside that order, from a place in it until ``join``. Work of a fork runs
beside what follows it, also when both are captured, and work of another thread in an order of its
own (``beside``). Of a fork only the latest place is awaited; each branch has a result, and is
joined by itself while others go on. ``HostDevice`` is the stand-in where there is none: it replays
what was captured by calling it again, and lets copies and branches arrive as late as they may.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from weft.core.errors import InvariantError
from weft.exec.memory import pinned_zeros
from weft.exec.store import Memory, host_memory
from weft.kernels.arrays import to_torch
from weft.kernels.block_arrays import BlockArrays, block_pairs

Replay = Callable[[], None]


def tensor_memory(device: str) -> Memory:
    """Return what makes zeros as tensors on a device."""

    def memory(shape: Seq[int], dtype: str) -> Tensor:
        if device == "cpu":
            tensor: Tensor = to_torch(host_memory(shape, dtype))
            return tensor
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)

    return memory


class Event(Protocol):
    """A place in the order of a device's work."""

    def wait(self) -> None:
        """Block until all that was ordered before it is done."""


class Branch(Protocol):
    """Work that runs beside what follows it."""

    def join(self) -> Tensor:
        """Order what comes from now on after the branch; return its result, which is there then."""


class Device(Protocol):
    """Runs work asynchronously, in the order of submission.

    Attributes:
        where: where tensors of the device lie.
    """

    where: torch.device

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [size] on the host, from and to which copies run beside the caller."""

    def work(self) -> AbstractContextManager[object]:
        """Order all torch operations within it as work of this device."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device; ``source`` must not change before an event after it."""

    def download(self, source: Tensor, target: Tensor) -> None:
        """Copy to the host; ``target`` is valid after a later event has completed."""

    def send(self, source: Tensor) -> Tensor:
        """Return a copy on the device of a tensor of the host, which may change at once."""

    def copy_blocks(
        self,
        sources: BlockArrays,
        targets: BlockArrays,
        source_blocks: Seq[int],
        target_blocks: Seq[int],
    ) -> None:
        """Copy blocks between device and host beside what is ordered from now on.

        It begins after all that is ordered so far, other copies of blocks included. Until ``join``,
        what it reads must not change, and what it writes must not be read.

        Raises:
            ValueError: see ``block_pairs``.
        """

    def join(self) -> None:
        """Order what comes from now on after the copies of blocks."""

    def exchange_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [size] on the host that steps write, or threads beside them, at any time."""

    def fork(self) -> AbstractContextManager[object]:
        """Run torch operations within it beside what follows, and after all that precedes them.

        They end before those of the next fork begin, and before what follows ``rejoin``. Until then
        what they read must not change. Forks and ``rejoin`` may be captured together.
        """

    def rejoin(self) -> None:
        """Order what comes from now on after the latest fork."""

    def branch(self, body: Callable[[], Tensor]) -> Branch:
        """Run torch operations of ``body`` beside what follows, and after all that precedes them.

        Branches run one after the other. Until one is joined, what it reads must not change. What
        ``body`` holds is not given to others before. All are joined before a capture ends.
        """

    def beside(self) -> AbstractContextManager[object]:
        """Order torch operations within it one after the other, beside all other work.

        For one thread, which may be another than that of ``work``.
        """

    def deliver(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device within ``beside``; ``source`` must not change before ``delivered``."""

    def delivered(self) -> Event:
        """Mark this place in the order of ``beside``."""

    def record(self) -> Event:
        """Mark this place in the order."""

    def synchronize(self) -> None:
        """Block until all torch operations have ended, those of this device and others."""

    def capture(self, body: Replay) -> Replay:
        """Return what does all that ``body`` does on the device, without its Python.

        It must read and write nothing but tensors that stay where they are. It may run now as well.
        """


class CudaDevice:
    """One stream of an NVIDIA GPU, and one pool of memory that all captured graphs share.

    Graphs that share a pool must not overlap, which one stream guarantees. Captured largest first,
    the smaller ones fit into the memory of the largest.
    """

    def __init__(self, where: str) -> None:
        self.where = torch.device(where)
        self._stream = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        self._fork = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        # Streams of one priority may share a queue of the GPU, where this one's work would stand
        # behind kernels that wait for it.
        self._beside = torch.cuda.Stream(self.where, priority=-1)  # type: ignore[no-untyped-call]
        # First in line, as kernels that leave room for others must have begun before these.
        self._branches = torch.cuda.Stream(self.where, priority=-1)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._forked = False  # since the latest ``rejoin``

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self.where):
            return pinned_zeros(size * dtype.itemsize).view(dtype)

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def send(self, source: Tensor) -> Tensor:
        # The memory of the copy between is not given to others before this stream has read it.
        return source.pin_memory().to(self.where, non_blocking=True)

    def copy_blocks(
        self,
        sources: BlockArrays,
        targets: BlockArrays,
        source_blocks: Seq[int],
        target_blocks: Seq[int],
    ) -> None:
        from weft.kernels.triton.blocks import copy_blocks  # the stand-in does without Triton

        pairs = block_pairs(sources, targets, source_blocks, target_blocks)
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            copy_blocks(sources, targets, pairs, self.send)

    def join(self) -> None:
        self._stream.wait_stream(self._copies)

    def exchange_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.host_memory(size, dtype)

    def fork(self) -> AbstractContextManager[object]:
        if self._forked:  # else a capture would wait for what is not in it
            self._stream.wait_stream(self._fork)
        self._forked = True
        self._fork.wait_stream(self._stream)
        return torch.cuda.stream(self._fork)

    def rejoin(self) -> None:
        self._stream.wait_stream(self._fork)
        self._forked = False

    def branch(self, body: Callable[[], Tensor]) -> Branch:
        # Memory that a branch takes goes to a later one, which begins after all uses until then.
        self._branches.wait_stream(self._stream)
        with torch.cuda.stream(self._branches):
            result = body()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._branches)
        return _CudaBranch(self._stream, done, body, result)

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._beside)

    def deliver(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def delivered(self) -> Event:
        return self._event(self._beside)

    def record(self) -> Event:
        return self._event(self._stream)

    def _event(self, stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return _CudaEvent(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def capture(self, body: Replay) -> Replay:
        with self.work():
            body()  # compiles kernels and makes workspaces, neither of which can be captured
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of several ranks NCCL has a thread that asks for events meanwhile, which is no harm.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            body()
        return graph.replay


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _CudaBranch:
    """``body`` is kept, as other memory of its stream would be given to who asks next."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        done: torch.cuda.Event,
        body: Callable[[], Tensor],
        result: Tensor,
    ) -> None:
        self._stream, self._done, self._result = stream, done, result
        self._body: Callable[[], Tensor] | None = body

    def join(self) -> Tensor:
        self._stream.wait_event(self._done)
        self._body = None
        return self._result


class HostDevice:
    """A device that is the host.

    Until an event after it has come, a download shows garbage; and if the source of an upload has
    changed by then, that is an InvariantError. The same holds for copied blocks until ``join``, and
    for the results of branches and what these read until they are joined.

    Args:
        seed: of the order in which branches run beside what follows them: by turns at once, between
            other branches, or not before they are joined. None: always the last.
    """

    where = torch.device("cpu")

    def __init__(self, seed: int | None = None) -> None:
        self._draw = None if seed is None else random.Random(f"branches {seed}")
        self._branches: list[_HostBranch] = []
        self._unfinished: list[Callable[[], None]] = []
        self._downloads: dict[int, int] = {}  # storage of a target -> the place of the last one
        self._finished = 0
        self._copies: list[_BlockCopy] = []

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.where)

    def work(self) -> AbstractContextManager[object]:
        return nullcontext()

    def upload(self, source: Tensor, target: Tensor) -> None:
        self.finish(self._downloads.pop(source.untyped_storage().data_ptr(), 0))
        uploaded = source.clone()
        target.copy_(uploaded)

        def check() -> None:
            # By their bits, as what is no number equals nothing.
            if not torch.equal(source.view(torch.uint8), uploaded.view(torch.uint8)):
                raise InvariantError("what was uploaded changed before it had arrived")

        self._unfinished.append(check)

    def download(self, source: Tensor, target: Tensor) -> None:
        downloaded = source.clone()
        target.view(torch.uint8).fill_(0x80)

        def arrive() -> None:
            target.copy_(downloaded)

        self._unfinished.append(arrive)
        place = self._finished + len(self._unfinished)
        self._downloads[target.untyped_storage().data_ptr()] = place

    def send(self, source: Tensor) -> Tensor:
        return source.clone()

    def copy_blocks(
        self,
        sources: BlockArrays,
        targets: BlockArrays,
        source_blocks: Seq[int],
        target_blocks: Seq[int],
    ) -> None:
        if any(copy.targets is sources for copy in self._copies):
            self.join()  # in their order
        pairs = block_pairs(sources, targets, source_blocks, target_blocks)
        self._copies.append(_BlockCopy(sources, targets, *map(torch.from_numpy, pairs)))

    def join(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.arrive()

    def exchange_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.where)

    def fork(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rejoin(self) -> None:
        """Nothing runs beside what follows."""

    def branch(self, body: Callable[[], Tensor]) -> Branch:
        self._branches.append(_HostBranch(self, body))
        found = self._branches[-1]
        if self._draw is not None:
            self.run_branches(self._draw.randint(0, len(self._branches)))
        return found

    def run_branches(self, count: int) -> None:
        """Run the oldest of the branches that have not run."""
        ran, self._branches = self._branches[:count], self._branches[count:]
        for branch in ran:
            branch.run()

    def run_until(self, branch: _HostBranch) -> None:
        """Run a branch after those before it; none if it has run."""
        if branch in self._branches:
            self.run_branches(1 + self._branches.index(branch))

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def deliver(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def delivered(self) -> Event:
        return _HostEvent(self, 0)

    def record(self) -> Event:
        return _HostEvent(self, self._finished + len(self._unfinished))

    def synchronize(self) -> None:
        self._branches.clear()  # of a pass that ran out of memory: nobody reads their results
        self.finish(self._finished + len(self._unfinished))
        self.join()

    def finish(self, place: int) -> None:
        """Let everything arrive that was ordered before a place."""
        while self._finished < place:
            self._finished += 1
            self._unfinished.pop(0)()

    def capture(self, body: Replay) -> Replay:
        body()
        return body


class _HostBranch:
    """A branch whose result shows garbage until it has run.

    It is computed early, so that there is something to show, and again when it runs, from what it
    reads then.
    """

    def __init__(self, device: HostDevice, body: Callable[[], Tensor]) -> None:
        self._device, self._body = device, body
        self._result = body()
        self._early = self._result.clone()
        self._result.view(torch.uint8).fill_(0xFF)  # of floats what is no number

    @torch.inference_mode()
    def run(self) -> None:
        """Show the result. Raises InvariantError if what the branch reads has changed."""
        again = self._body().view(torch.uint8)
        if not torch.equal(again, self._early.view(torch.uint8)):
            raise InvariantError("what a branch reads has changed before it was joined")
        self._result.copy_(self._early)

    def join(self) -> Tensor:
        self._device.run_until(self)
        return self._result


class _BlockCopy:
    """A copy of blocks that has not arrived: its targets show garbage."""

    def __init__(
        self, sources: BlockArrays, targets: BlockArrays, source_blocks: Tensor, blocks: Tensor
    ) -> None:
        self.targets = targets
        self._sources, self._source_blocks, self._blocks = sources, source_blocks, blocks
        self._copied = self._read()
        for target in targets.arrays:
            target.view(torch.uint8)[blocks] = 0x80

    def _read(self) -> list[Tensor]:
        return [array.view(torch.uint8)[self._source_blocks] for array in self._sources.arrays]

    def arrive(self) -> None:
        """Show what was copied. Raises InvariantError if the sources have changed."""
        for target, copied, now in zip(
            self.targets.arrays, self._copied, self._read(), strict=True
        ):
            if not torch.equal(copied, now):
                raise InvariantError("blocks changed before they were copied")
            target.view(torch.uint8)[self._blocks] = copied


class _HostEvent:
    def __init__(self, device: HostDevice, place: int) -> None:
        self._device, self._place = device, place

    def wait(self) -> None:
        self._device.finish(self._place)
