"""Captured steps stay on the device: no reads by the host, no data from it.

A real GPU would refuse to capture it, or replay old numbers. Here the device is ``meta``, where
torch follows shapes and types alone, with the choices of a GPU of capability 9.0; kernels are not
launched, but all that they are given must be on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from checkpoints import ATTENTIVE, CASES, RECURRENT
from served import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from weft.core.plan import RowAdd
from weft.core.types import SamplingParams
from weft.exec import hosted_experts
from weft.exec.device import tensor_memory
from weft.exec.functions import StepFunctions
from weft.exec.grammar import GrammarRows
from weft.exec.halves_pass import HalvesSetup
from weft.exec.input_batch import MOST_EDITS, InputBatch
from weft.exec.states import StateStore
from weft.exec.step_layout import LaneSizes, PairSizes, sample_layout
from weft.exec.step_packer import StepPacker
from weft.exec.store import KVStore
from weft.kernels.arrays import dtype_name
from weft.kernels.hosted import HostedExperts
from weft.kernels.interface import OpTable
from weft.kernels.kv_storage import KV_DTYPES
from weft.kernels.ops import _triton_ops
from weft.kernels.sampling import RowState
from weft.kernels.triton import attention, device, matrix, tuned
from weft.kernels.tuning import Heuristic
from weft.models.decoder import Decoder
from weft.models.layout import is_kept_float32, parameters, storage_of
from weft.models.spec_reader import spec_from_config

GPU = torch.device("meta")
BLOCK_SIZE, ROWS, LENGTH = 16, 8, 112


COPIES = ("aten.copy_.default", "aten.clone.default", "aten._to_copy.default")


class OnlyOnTheDevice(TorchDispatchMode):
    """No operation has tensors of the host and of the device; ``called`` are their names.

    And no kernel may begin while a copy before it runs, which programmatic launch does not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.copied = False  # by what was ordered last

    def launch(self, name: str, *, early: bool) -> None:
        """Note the launch of a kernel, perhaps one that begins while the work before it ends."""
        assert not (early and self.copied), f"{name} is launched programmatically behind a copy"
        self.copied = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.dim() or "copy" in str(function)}
        assert len(devices) < 2, f"{function} has tensors of the host and of the device"
        self.called.add(str(function))
        if str(function) in COPIES:
            self.copied = True
        elif not function.is_view and "empty" not in str(function):
            self.copied = False
        return found


@pytest.fixture
def launches(monkeypatch) -> Iterator[list[str]]:
    """The names of the kernels that are to run."""
    names: list[str] = []

    def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **more: Any) -> None:
            assert all(isinstance(size, int) for size in grid)
            for x in (*args, *more.values()):
                assert not isinstance(x, Tensor) or x.device == GPU, f"{kernel} gets {x.device}"
            name = getattr(kernel, "fn", kernel).__name__
            names.append(name)
            watching = _get_current_dispatch_mode()
            if isinstance(watching, OnlyOnTheDevice):
                watching.launch(name, early=more.get("launch_pdl", False))

        return launch

    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", getitem)
    for module in (device, matrix):
        monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    monkeypatch.setattr(attention, "shared_bytes", lambda _: 227 * 1024)
    monkeypatch.setattr(tuned, "find_tuning", lambda *_: Heuristic(132, 227 * 1024))
    matrix._rowwise.cache_clear()
    yield names
    matrix._rowwise.cache_clear()


def decoder_of(name: str, dtype: torch.dtype, quantize: str, *, hosted: bool = False) -> Decoder:
    """A decoder of a case of ``checkpoints`` whose weights have no numbers."""
    config = CASES[name].config()
    config.architectures = [CASES[name].architecture]
    spec = spec_from_config(config.to_dict(), LENGTH)
    ops: OpTable = _triton_ops(str(GPU), dtype_name(dtype), {}, "auto")
    weights: dict[str, Any] = {}
    for parameter in parameters(spec, stacked_experts=True):
        tied = parameter.name == "embed" and spec.tied_embeddings
        label = "lm_head" if tied else parameter.name
        storage = storage_of(label, quantize, 64)
        if storage is None:
            floats = torch.float32 if is_kept_float32(label) else dtype
            tensor = torch.empty(parameter.shape, dtype=floats, device=GPU)
            weights[parameter.name] = ops.pack(label, tensor)
        else:
            kind = dtype_name(dtype)
            weights[parameter.name] = ops.quantise(label, parameter.shape, kind, storage)
        if hosted and parameter.name.endswith("expert_down"):
            experts = HostedExperts(*[(None,) * parameter.shape[0]] * 2, spec.activation)
            weights |= dict.fromkeys((parameter.name, weights_before(parameter.name)), experts)
    return Decoder(spec, weights, ops)


def functions_of(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    tokens: int,
    lanes: int = 0,
    halves: HalvesSetup | None = None,
) -> StepFunctions:
    groups = decoder.spec.kv_groups
    kind, memory = dtype_name(kv_dtype), tensor_memory(str(GPU))
    store = KVStore(groups, [9] * len(groups), BLOCK_SIZE, kind, memory)
    if decoder.spec.states is not None:
        store.states = StateStore(decoder.spec, 9, memory)
    table = InputBatch(ROWS, LENGTH, [LENGTH // BLOCK_SIZE] * len(groups))
    host = SimpleNamespace(
        where=GPU,
        host_memory=lambda size, dtype: torch.zeros(size, dtype=dtype),
        # A step may write it, so it passes as memory of the device.
        exchange_memory=lambda size, dtype: torch.zeros(size, dtype=dtype, device=GPU),
        fork=nullcontext,
        rejoin=lambda: None,
        branch=branch,
    )
    windows = [group.window for group in groups]
    sizes = LaneSizes(decoder.spec.num_layers, lanes, ROWS) if lanes else None
    pairs = None if halves is None else PairSizes.halves(halves.sizes)
    packer = StepPacker(
        table,
        BLOCK_SIZE,
        windows,
        host,
        tokens,
        (1, 16, 128),
        sizes,
        pairs,
        states=store.states is not None,
    )
    state = RowState.empty(ROWS, MOST_EDITS, decoder.spec.vocab_size, GPU)
    return StepFunctions(decoder, store, packer, host, state, halves)


def branch(body: Callable[[], Tensor]) -> SimpleNamespace:
    """Run a branch at once."""
    found = body()
    return SimpleNamespace(join=lambda: found)


KINDS = [
    *((name, torch.bfloat16, "none", None) for name in ATTENTIVE),
    ("llama-gqa", torch.float32, "none", None),
    *(("llama-gqa", torch.bfloat16, "fp8", kv) for kv in (None, "fp8", "int8")),
    ("qwen3-moe", torch.bfloat16, "fp8", "fp8"),
    ("qwen3-moe", torch.bfloat16, "int8", None),
]


RECURRENT_KINDS = [(name, torch.bfloat16, "none", None) for name in RECURRENT]
OF_RECURRENT = {"delta": "_delta_rule", "conv": "_short_convolution", "mamba2": "_mamba2"}


@pytest.mark.parametrize(
    "kind", [*KINDS, *RECURRENT_KINDS], ids=lambda kind: "-".join(map(str, kind))
)
def test_steps_need_nothing_of_the_host(kind, launches) -> None:
    name, dtype, quantize, kv = kind
    decoder = decoder_of(name, dtype, quantize)
    functions = functions_of(decoder, KV_DTYPES.get(kv, dtype), 128)
    layouts = [functions._packer.forward_layout(size) for size in (1, 16, 128)]
    with OnlyOnTheDevice() as watched:
        for layout in layouts:
            for most in (None, 1) if layout.size <= ROWS else (None,):
                functions.forward(layout, most)
        for size in (1, 16, 128):
            functions.sample(sample_layout(size))
    products = "aten._scaled_mm.default" if quantize == "fp8" else "aten.mm"
    assert any(name.startswith(products) for name in watched.called) or quantize == "int8"
    assert {"list_kernel", "decode_kernel", "prefill_kernel", "_sample", "gemm"} <= set(launches)
    passes = sum(2 if layout.size <= ROWS else 1 for layout in layouts)
    spec = decoder.spec
    groups = enumerate(spec.kv_groups)
    shapes = {(n, spec.heads(spec.layers[i])) for n, group in groups for i in group.layers}
    assert launches.count("list_kernel") == passes * len(shapes)  # one for all layers of a shape
    recurrent = Counter(layer.state.kind for layer in spec.layers if layer.state is not None)
    for kind, kernel in OF_RECURRENT.items():
        assert launches.count(kernel) == passes * recurrent[kind]
    assert launches.count("decode_kernel") == passes * (spec.num_layers - recurrent.total())


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] in ("llama-gqa", "gemma3")], ids=str)
def test_steps_with_lanes_need_nothing_of_the_host(kind, launches) -> None:
    name, dtype, quantize, kv = kind
    decoder = decoder_of(name, dtype, quantize)
    functions = functions_of(decoder, KV_DTYPES.get(kv, dtype), 128, lanes=4)
    with OnlyOnTheDevice():
        for size in (1, 16, 128):
            for most in (None, 1) if size <= ROWS else (None,):
                functions.forward(functions._packer.forward_layout(size), most, True)
            functions.sample(sample_layout(size), True)
    layers = decoder.spec.num_layers
    lanes = [name for name in launches if name.endswith("_lanes")]
    assert lanes[:4] == ["_keep_lanes", "_send_lanes", "_choose_lanes", "_join_lanes"]
    assert len(lanes) == 4 * 4 * layers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_halves_need_nothing_of_the_host_and_launch_what_whole_steps_do(kind, launches) -> None:
    """Each half the kernels of a whole step of its size, attention with few programs."""
    name, dtype, quantize, kv = kind
    decoder = decoder_of(name, dtype, quantize)
    setup = HalvesSetup((16, 128), 2)
    functions = functions_of(decoder, KV_DTYPES.get(kv, dtype), 256, halves=setup)
    for sizes in ((16, 128), (128, 128)):
        for size in sizes:
            functions.forward(functions._packer.forward_layout(size), None)
        whole = Counter(launches)
        launches.clear()
        with OnlyOnTheDevice():
            functions.overlapped(sizes, None)
        assert Counter(launches) == whole
        launches.clear()


def weights_before(down: str) -> str:
    """The name of the other matrices of the experts."""
    return down.replace("expert_down", "expert_gate_up")


@pytest.mark.parametrize(
    "name", ["qwen3-moe", "gemma4-moe-key-is-value", "glm4-moe", "deepseek-v3"]
)
def test_steps_with_experts_on_the_host_read_only_what_both_see(
    name, launches, monkeypatch
) -> None:
    monkeypatch.setattr(hosted_experts, "to_numpy", lambda tensor: tensor)
    monkeypatch.setattr(hosted_experts, "ExpertServer", lambda *_: SimpleNamespace())
    decoder = decoder_of(name, torch.bfloat16, "none", hosted=True)
    functions = functions_of(decoder, torch.bfloat16, 128)
    with OnlyOnTheDevice():
        for size in (1, 16, 128):
            functions.forward(functions._packer.forward_layout(size), None)
    layers = sum(layer.moe for layer in decoder.spec.layers)
    assert launches.count("_await_answer") == 3 * layers
    assert "_grouped" not in launches


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: x + torch.ones(4).to(GPU),
        lambda x: x.cpu(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.ones(4).copy_(x),
    ],
)
def test_what_a_capture_would_refuse_is_noticed(body) -> None:
    x = torch.empty(4, device=GPU)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), OnlyOnTheDevice():
        body(x)


class Even:
    """A matcher that allows tokens of even numbers."""

    def deep_copy(self) -> Even:
        return self

    def compute_bitmask(self) -> bytes:
        return bytes([0b01010101] * 4)

    def is_error(self) -> bool:
        return False


@pytest.mark.parametrize("where", [DEVICE, GPU], ids=str)
def test_grammars_forbid_tokens_where_the_logits_are(where) -> None:
    compiled: Future[Any] = Future()
    compiled.set_result(Even())
    rows = GrammarRows(SimpleNamespace(compile=lambda _: compiled))
    asked = SamplingParams(grammar="start: /x/").with_defaults({})
    rows.add(RowAdd(1, 7, (5,), 1, asked, frozenset(), ((0,),)))
    logits = torch.zeros(3, 30, device=where)
    assert rows.forbid(logits, [0, 1, 2]) == {}
    if where != GPU:  # which has no numbers
        assert logits[1].isinf().nonzero().flatten().tolist() == list(range(1, 30, 2))
        assert not logits[[0, 2]].any()
