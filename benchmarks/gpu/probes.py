"""Probes for loops on a GPU without the host: graphs launched by the device, conditions, flags.

Each question is asked in a process of its own, as a wrong answer may hang or break the context.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import figure, note

STEPS = 500
BUCKETS = 4
LIMIT_S, LEAST_S = 14.0, 4.0  # of a question
DEVICE_LAUNCH = 4  # cudaGraphInstantiateFlagDeviceLaunch
UPLOAD = 2  # cudaGraphInstantiateFlagUpload
KERNELS = r"""
#ifdef __CUDACC_RTC__  // the run-time compiler has no headers of its own
typedef unsigned long long cudaGraphConditionalHandle;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUstream_st* cudaStream_t;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned);
extern "C" __device__ int cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
#endif

// counters: steps done, steps wanted, buckets, error
extern "C" __global__ void choose(
    cudaGraphConditionalHandle loop, cudaGraphConditionalHandle bucket, int* counters) {
  cudaGraphSetConditional(bucket, counters[0] % counters[2]);
  counters[0] += 1;
  cudaGraphSetConditional(loop, counters[0] < counters[1]);
}

extern "C" __global__ void launch_next(cudaGraphExec_t step, int* counters) {
  const cudaStream_t tail = (cudaStream_t)0x0100000000000000ull;
  if (counters[0]++ >= counters[1]) return;
  unsigned long long self;
  asm("mov.u64 %0, %%current_graph_exec;" : "=l"(self));
  int error = cudaGraphLaunch(step, tail);
  if (!error) error = cudaGraphLaunch((cudaGraphExec_t)self, tail);
  if (error) counters[3] = error;
}
"""


def check(answer: Any) -> Any:
    """The values of a call of cuda-bindings. Raises RuntimeError for an error code."""
    error, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


class Steps:
    """Captured graphs that stand for a step each: some products, and a count of their runs."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        device = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(64, 4096, **device)
        self.w = torch.randn(4096, 4096, **device)
        self.y = torch.empty_like(self.x)
        self.ran = torch.zeros(BUCKETS, device="cuda")
        self.counters = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.graphs = [self._captured(bucket) for bucket in range(BUCKETS)]
        self.stream = torch.cuda.current_stream().cuda_stream

    def _step(self, bucket: int) -> None:
        hidden = self.x
        for _ in range(8):
            hidden = self.torch.mm(hidden, self.w) * 1e-3
        self.y.copy_(hidden)
        self.ran[bucket].add_(1)

    def _captured(self, bucket: int) -> Any:
        cuda = self.torch.cuda
        stream = cuda.Stream()
        with cuda.stream(stream):
            for _ in range(3):
                self._step(bucket)
        cuda.synchronize()
        graph = cuda.CUDAGraph(keep_graph=True)
        with cuda.graph(graph, stream=stream):
            self._step(bucket)
        cuda.synchronize()
        return graph

    def timed(self, launch: Callable[[], None]) -> float:
        """Microseconds a step of something that runs ``STEPS`` of them."""
        self.ran.zero_()
        self.counters.copy_(self.torch.tensor([0, STEPS, BUCKETS, 0]))
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - start) / STEPS * 1e6


def kernels() -> tuple[Any, Any]:
    """The two kernels above, compiled at run time without a link step."""
    import torch
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability()
    target = f"--gpu-architecture=sm_{major}{minor}".encode()
    program = check(nvrtc.nvrtcCreateProgram(KERNELS.encode(), b"probes.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 1, [target]))
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = check(driver.cuModuleLoadData(cubin))
    return tuple(
        check(driver.cuModuleGetFunction(module, name)) for name in (b"choose", b"launch_next")
    )


def kernel_node(
    graph: Any, function: Any, arguments: list[Any], after: Sequence[Any] = (), threads: int = 1
) -> Any:
    """Add a kernel of one block; ``arguments`` are (value, ctypes type)."""
    from cuda.bindings import driver

    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernel = node.kernel
    kernel.func = function
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
    kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = threads, 1, 1
    values, types = zip(*arguments, strict=True)
    kernel.kernelParams = (values, types)
    before = [driver.CUgraphNode(int(each)) for each in after]
    return check(driver.cuGraphAddNode(graph, before, None, len(before), node))


def conditional_node(graph: Any, handle: Any, kind: Any, size: int, after: list[Any]) -> list[Any]:
    """Add a conditional node; returns its bodies."""
    from cuda.bindings import runtime

    node = runtime.cudaGraphNodeParams()
    node.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    node.conditional.handle, node.conditional.type, node.conditional.size = handle, kind, size
    before = [runtime.cudaGraphNode_t(int(each)) for each in after]
    check(runtime.cudaGraphAddNode(graph, before, None, len(before), node))
    return list(node.conditional.phGraph_out)


def kinds_of(graph: Any) -> Counter[str]:
    """How many nodes of each kind a graph has."""
    from cuda.bindings import runtime

    _, count = check(runtime.cudaGraphGetNodes(graph))
    nodes, _ = check(runtime.cudaGraphGetNodes(graph, count))
    kinds = (check(runtime.cudaGraphNodeGetType(node)).name for node in nodes[:count])
    return Counter(kind.rsplit("NodeType", 1)[-1] for kind in kinds)


def ask_nodes() -> None:
    """Which kinds of nodes a captured step has: device launch allows kernels and copies only."""
    steps = Steps()  # whose end is that of its graphs
    for kind, times in kinds_of(steps.graphs[0].raw_cuda_graph()).items():
        figure(f"nodes of a captured step, {kind}", times)


def ask_host() -> None:
    """What a step costs that the host launches."""
    steps = Steps()
    graph = steps.graphs[0]
    graph.instantiate()
    steps.timed(graph.replay)  # the first replay uploads it
    figure(
        "step, launched by the host",
        steps.timed(lambda: [graph.replay() for _ in range(STEPS)]),
        "us",
    )


def ask_tail() -> None:
    """What a step costs in a chain of launches by the device (tail launch)."""
    from cuda.bindings import runtime

    steps, (_, launch_next) = Steps(), kernels()
    params = runtime.cudaGraphInstantiateParams()
    params.flags, params.uploadStream = DEVICE_LAUNCH | UPLOAD, steps.stream
    graph = steps.graphs[0].raw_cuda_graph()
    step = check(runtime.cudaGraphInstantiateWithParams(graph, params))
    parent = check(runtime.cudaGraphCreate(0))
    pointers = [(int(step), ctypes.c_void_p), (steps.counters.data_ptr(), ctypes.c_void_p)]
    kernel_node(parent, launch_next, pointers)
    chain = check(runtime.cudaGraphInstantiate(parent, DEVICE_LAUNCH))
    check(runtime.cudaGraphUpload(chain, steps.stream))
    took = steps.timed(lambda: check(runtime.cudaGraphLaunch(chain, steps.stream)))
    ran, error = int(steps.ran[0]), int(steps.counters[3])
    if ran != STEPS or error:
        raise RuntimeError(f"the device ran {ran} of {STEPS} steps, error {error}")
    figure("step, launched by the device in a tail chain", took, "us")


def ask_while() -> None:
    """What a step costs in a WHILE node with a SWITCH over buckets."""
    from cuda.bindings import runtime

    steps, (choose, _) = Steps(), kernels()
    kind = runtime.cudaGraphConditionalNodeType
    graph = check(runtime.cudaGraphCreate(0))
    loop = check(runtime.cudaGraphConditionalHandleCreate(graph, 1, 1))
    (body,) = conditional_node(graph, loop, kind.cudaGraphCondTypeWhile, 1, [])
    bucket = check(runtime.cudaGraphConditionalHandleCreate(body, 0, 0))
    handles = [(int(loop), ctypes.c_ulonglong), (int(bucket), ctypes.c_ulonglong)]
    node = kernel_node(body, choose, [*handles, (steps.counters.data_ptr(), ctypes.c_void_p)])
    arms = conditional_node(body, bucket, kind.cudaGraphCondTypeSwitch, BUCKETS, [node])
    for arm, step in zip(arms, steps.graphs, strict=True):
        check(runtime.cudaGraphAddChildGraphNode(arm, None, 0, step.raw_cuda_graph()))
    ready = check(runtime.cudaGraphInstantiate(graph, 0))
    check(runtime.cudaGraphUpload(ready, steps.stream))
    took = steps.timed(lambda: check(runtime.cudaGraphLaunch(ready, steps.stream)))
    if int(steps.ran.sum()) != STEPS:
        raise RuntimeError(f"the loop ran {int(steps.ran.sum())} of {STEPS} steps")
    figure("step, in a WHILE with a SWITCH", took, "us")


def ask_flags() -> None:
    """How fast CPU and GPU signal each other (flags.cu)."""
    if shutil.which("nvcc") is None:
        note("nvcc is not installed: the flags between CPU and GPU were not timed")
        return
    source = Path(__file__).with_name("flags.cu")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/flags"
        options = ["-std=c++17", "-O3", "-arch=native", "-lcuda", "-o", program]
        subprocess.run(["nvcc", str(source), *options], check=True)
        subprocess.run([program], check=True)


def ask_step() -> None:
    """Which kinds of nodes a decode step of a model has, a layer of it."""
    import torch
    from leases import Rows
    from shapes import random_decoder, shape

    from weft.exec.device import CudaDevice, Replay
    from weft.kernels.ops import select_ops

    graphs: list[Any] = []

    class Recording(CudaDevice):
        """Keeps the graphs that it captures."""

        def capture(self, body: Replay) -> Replay:
            with self.work():
                body()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                body()
            graphs.append(graph)
            graph.instantiate()
            return graph.replay

    device = Recording("cuda:0")
    ops = select_ops("cuda:0", "bfloat16", "auto")
    with torch.inference_mode():
        spec = shape("qwen2.5-7b", 64, layers=1)
        decoder = random_decoder(spec, torch.bfloat16, device.where, ops, "fp8")
    Rows(decoder, device, 128, 4)
    kinds = sum((kinds_of(graph.raw_cuda_graph()) for graph in graphs), Counter())
    for kind, times in kinds.items():
        figure(f"nodes of all captured steps of a layer of Qwen2.5-7B in FP8, {kind}", times)


def ask_dependent() -> None:
    """What a small kernel costs in a captured chain, and with programmatic dependent launch."""
    import torch
    from dependent import chain

    for depends in (False, True):
        length = 200
        run, right = chain(length, depends=depends)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        took = (time.perf_counter() - start) / 10 / length * 1e6
        if not right():
            raise RuntimeError("a kernel has not waited for the one before it")
        how = "with dependent launch" if depends else "one after the other"
        figure(f"small kernel in a captured chain, {how}", took, "us")


QUESTIONS = {
    "step": ask_step,
    "dependent": ask_dependent,
    "nodes": ask_nodes,
    "host": ask_host,
    "tail": ask_tail,
    "while": ask_while,
    "flags": ask_flags,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", choices=QUESTIONS, help="one question, in this process")
    parser.add_argument("--seconds", type=float, default=100.0, help="for all questions")
    options = parser.parse_args()
    if options.ask:
        QUESTIONS[options.ask]()
        return 0
    unanswered, deadline = 0, time.perf_counter() + options.seconds
    for name in QUESTIONS:
        left = min(LIMIT_S, deadline - time.perf_counter())
        if left < LEAST_S:
            note(f"no time left to ask '{name}'")
            continue
        try:
            subprocess.run([sys.executable, __file__, "--ask", name], check=True, timeout=left)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            ended = "too long" if isinstance(error, subprocess.TimeoutExpired) else "an error"
            note(f"no answer to '{name}': {ended}")
            unanswered += 1
    return int(unanswered > 0)


if __name__ == "__main__":
    sys.exit(main())
