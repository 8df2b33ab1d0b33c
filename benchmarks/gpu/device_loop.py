"""Decode steps that a GPU goes on with by itself: host code for ``resident/cuda_port.hpp``.

``LoopMemory`` is what the loop reads and writes, laid out as the header has it. ``DeviceLoop``
makes the graphs that run it; that needs a GPU, and has not run on one yet.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from probes import DEVICE_LAUNCH, UPLOAD, check, conditional_node, kernel_node
from torch import Tensor

from weft.exec.device import CudaDevice
from weft.exec.graphs import GraphExecutor
from weft.exec.step_packer import PackedStep

SOURCE = Path(__file__).parents[2] / "src" / "weft" / "resident" / "cuda_loop.cu"
ENDS = ("none", "steps", "row", "asked", "late", "numbers", "failed", "paused")
LANES, BUCKETS, MOST_ROWS, EXECUTABLES = 256, 40, 512, 2
PATIENCE_S = 15.0

Word, Number = ctypes.c_uint64, ctypes.c_int64


class GroupRows(ctypes.Structure):
    """As ``GroupRows`` of loop.hpp."""

    _fields_ = [("tables", Word), ("max_blocks", Number), ("slots", Word), ("begins", Word)]


class Rows(ctypes.Structure):
    """As ``Rows`` of loop.hpp."""

    _fields_ = [
        ("count", Number), ("row", Word), ("tokens", Word), ("max_tokens", Number),
        ("length", Word), ("stop_ids", Word), ("stop_from", Word), ("ids", Word),
        ("positions", Word), ("counters", Word), ("seq_lens", Word), ("groups", Word),
        ("num_groups", Number), ("block_size", Number), ("given", Word), ("finite", Word),
    ]  # fmt: skip


class Board(ctypes.Structure):
    """As ``Board`` of cuda_port.hpp."""

    _fields_ = [
        ("bell", ctypes.c_uint32), ("end", ctypes.c_int32), ("published", Number),
        ("done", Number), ("tokens", Word), ("finite", Word),
    ]  # fmt: skip


class LoopState(ctypes.Structure):
    """As ``LoopState`` of cuda_port.hpp."""

    _fields_ = [
        ("done", Number), ("deadline_ns", Number), ("launched", ctypes.c_uint32),
        ("computed", ctypes.c_uint32),
    ]  # fmt: skip


class Loop(ctypes.Structure):
    """As ``Loop`` of cuda_port.hpp, with executables of graphs."""

    _fields_ = [
        ("rows", Rows), ("steps", Number), ("limit_ns", Number), ("results", Word),
        ("board", Word), ("state", Word), ("buckets", Word),
        ("graphs", (Word * EXECUTABLES) * BUCKETS),
    ]  # fmt: skip


class LoopMemory:
    """What the loop reads and writes for the rows of a decode step that has been computed.

    Args:
        executor: on whose device all of it lies.
        packed: the step, with room for ``steps`` more in its tables.
        starts: [R] the position that each row has computed in it.
        stop_ids: end any row.
        limit_s: seconds after which the loop ends.

    Attributes:
        loop: to be read where the steps are computed.
        board: on the host.
    """

    def __init__(
        self,
        executor: GraphExecutor,
        packed: PackedStep,
        starts: list[int],
        stop_ids: list[int],
        steps: int,
        limit_s: float,
    ) -> None:
        assert packed.sample is not None
        functions, packer, device = executor._functions, executor._packer, executor._device
        self._count, self._steps, count = len(starts), steps, len(starts)
        self._kept: list[Tensor] = []
        uploaded, pivot = functions.uploaded, packer.layout.pivot
        tokens = packed.forward.views(uploaded, pivot)
        samples = packed.sample.views(uploaded, packer.sample_at(packed.sample))
        tables = uploaded[pivot + packed.forward.words :]
        groups = [
            GroupRows(tables.data_ptr(), 0, slots.data_ptr(), begins.data_ptr())
            for slots, begins in zip(tokens["slot_mapping"], tokens["table_start"], strict=True)
        ]
        where = device.where
        samples["counter"][:count] += 1  # the token that the step has given
        given = torch.zeros(steps + 1, count, dtype=torch.int64, device=where)
        given[0] = functions.results[1 : 1 + count, 0]
        self._tokens = device.exchange_memory((steps + 1) * count, torch.int64)
        self._finite = device.exchange_memory(count, torch.uint8)
        self._memory = device.exchange_memory(ctypes.sizeof(Board), torch.uint8)
        self.board = Board.from_buffer(self._memory.numpy())
        self.board.tokens, self.board.finite = self._tokens.data_ptr(), self._finite.data_ptr()
        ends = torch.arange(count + 1, device=where) * len(stop_ids)
        rows = Rows(
            count=count,
            row=self._at(torch.arange(count, device=where)),
            length=self._at(torch.tensor(starts, device=where) + 2),
            stop_ids=self._at(torch.tensor(stop_ids * count, dtype=torch.int64, device=where)),
            stop_from=self._at(ends),
            ids=tokens["ids"].data_ptr(),
            positions=tokens["positions"].data_ptr(),
            counters=samples["counter"].data_ptr(),
            seq_lens=tokens["seq_lens"].data_ptr(),
            groups=self._at(on_device((GroupRows * len(groups))(*groups), where)),
            num_groups=len(groups),
            block_size=executor._store.block_size,
            given=self._at(given),
            finite=self._at(torch.ones(count, dtype=torch.bool, device=where)),
        )
        self.state = on_device(LoopState(), where)
        self.loop = Loop(
            rows=rows,
            steps=steps,
            limit_ns=int(limit_s * 1e9),
            results=functions.results.data_ptr(),
            board=self._memory.data_ptr(),
            state=self.state.data_ptr(),
            buckets=self._at(torch.zeros(MOST_ROWS + 1, dtype=torch.uint8, device=where)),
        )

    def _at(self, tensor: Tensor) -> int:
        """The address of a tensor, which lives on."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def outcome(self) -> tuple[list[list[int]], str]:
        """Tokens of each step that was computed, first those of the given one, and the end."""
        done = self.board.done
        found = self._tokens.view(self._steps + 1, self._count)[: done + 1]
        return found.tolist(), ENDS[self.board.end]

    def wait(self) -> None:
        """Wait for the end. Raises RuntimeError if it does not come, and rings the bell then."""
        until = time.monotonic() + PATIENCE_S
        while self.board.end == 0:
            if time.monotonic() > until:
                self.board.bell = 1
                raise RuntimeError(f"no end after {self.board.published} published steps")
            time.sleep(20e-6)


def on_device(part: Any, where: torch.device) -> Tensor:
    """Return a structure, or an array of them, as bytes on a device."""
    return torch.from_numpy(np.frombuffer(bytes(part), np.uint8).copy()).to(where)


def kernels() -> dict[str, Any]:
    """The kernels of cuda_loop.cu by name, compiled for the GPU of this machine."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/loop.cubin"
        words = ["-std=c++20", f"-arch=sm_{major}{minor}", f"-I{SOURCE.parents[1]}"]
        subprocess.run(["nvcc", *words, "-cubin", "-o", target, str(SOURCE)], check=True)
        module = check(driver.cuModuleLoadData(Path(target).read_bytes()))
    names = ("weft_serve", "weft_step_done", "weft_between")
    return {name: check(driver.cuModuleGetFunction(module, name.encode())) for name in names}


def captured(step: Callable[[], None], device: CudaDevice) -> torch.cuda.CUDAGraph:
    """Return a graph of what ``step`` orders, which is not instantiated yet."""
    with device.work():
        step()  # compiles kernels and makes workspaces
    device.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, pool=device._pool, stream=device._stream):
        step()
    device.synchronize()
    return graph


class DeviceLoop:
    """Graphs of a GPU that run leases of steps of one size.

    Args:
        step: computes one from its staged inputs; is captured.

    Attributes:
        resident: whether a block stays on the GPU and launches the steps; else a graph loops.
    """

    def __init__(self, step: Callable[[], None], device: CudaDevice, *, resident: bool) -> None:
        from cuda.bindings import runtime

        self._device, self.resident = device, resident
        self._loop = torch.zeros(ctypes.sizeof(Loop), dtype=torch.uint8, device=device.where)
        self._state = torch.zeros(ctypes.sizeof(LoopState), dtype=torch.uint8, device=device.where)
        self._kernels = kernels()
        self._captured = captured(step, device)
        self._stream = device._stream.cuda_stream
        self._executables: list[Any] = []
        make = self._resident_graph if resident else self._looping_graph
        self._graph = make(runtime)

    def run(self, memory: LoopMemory) -> None:
        """Launch the loop, and wait for its end."""
        from cuda.bindings import runtime

        for number, executable in enumerate(self._executables):
            memory.loop.graphs[0][number] = int(executable)
        memory.loop.state = self._state.data_ptr()
        with self._device.work():
            self._state.zero_()
            self._loop.copy_(on_device(memory.loop, self._device.where))
        self._device.synchronize()
        check(runtime.cudaGraphLaunch(self._graph, self._stream))
        memory.wait()
        self._device.synchronize()

    def _step(self, runtime: Any, graph: Any) -> Any:
        """Add a step as the only node of a graph."""
        child = self._captured.raw_cuda_graph()
        return check(runtime.cudaGraphAddChildGraphNode(graph, None, 0, child))

    def _resident_graph(self, runtime: Any) -> Any:
        """The graph of ``weft_serve``, and two executables of a step that says when it is done."""
        pointer = ctypes.c_void_p
        for _ in range(EXECUTABLES):
            graph = check(runtime.cudaGraphCreate(0))
            done = self._kernels["weft_step_done"]
            step = self._step(runtime, graph)
            kernel_node(graph, done, [(self._state.data_ptr(), pointer)], [step])
            params = runtime.cudaGraphInstantiateParams()
            params.flags, params.uploadStream = DEVICE_LAUNCH | UPLOAD, self._stream
            self._executables.append(check(runtime.cudaGraphInstantiateWithParams(graph, params)))
        parent = check(runtime.cudaGraphCreate(0))
        arguments = [(self._loop.data_ptr(), pointer)]
        kernel_node(parent, self._kernels["weft_serve"], arguments, threads=LANES)
        ready = check(runtime.cudaGraphInstantiate(parent, DEVICE_LAUNCH))
        check(runtime.cudaGraphUpload(ready, self._stream))
        return ready

    def _looping_graph(self, runtime: Any) -> Any:
        """A WHILE node: ``weft_between``, then a SWITCH node with the step."""
        kind, word = runtime.cudaGraphConditionalNodeType, ctypes.c_ulonglong
        graph = check(runtime.cudaGraphCreate(0))
        again = check(runtime.cudaGraphConditionalHandleCreate(graph, 1, 1))
        (body,) = conditional_node(graph, again, kind.cudaGraphCondTypeWhile, 1, [])
        bucket = check(runtime.cudaGraphConditionalHandleCreate(body, 0, 0))
        arguments = [
            (self._loop.data_ptr(), ctypes.c_void_p), (int(again), word), (int(bucket), word)
        ]  # fmt: skip
        node = kernel_node(body, self._kernels["weft_between"], arguments, threads=LANES)
        (arm,) = conditional_node(body, bucket, kind.cudaGraphCondTypeSwitch, 1, [node])
        self._step(runtime, arm)
        ready = check(runtime.cudaGraphInstantiate(graph, 0))
        check(runtime.cudaGraphUpload(ready, self._stream))
        return ready
