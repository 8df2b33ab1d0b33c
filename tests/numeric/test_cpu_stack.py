"""A CPU runs every family as one native call, which gives the bits of its parts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    CASES,
    RECURRENT,
    build,
    likeliest_by_reference,
    prompt,
    save,
    save_with_tokenizer,
)
from paged import PagedRunner
from torch import Tensor

from depth import deep
from weft.kernels.arrays import to_numpy
from weft.kernels.cpu import attention
from weft.kernels.cpu.layer import CpuLayer
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.stack import CpuStack
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.ops import select_ops
from weft.kernels.parts import (
    Biases,
    LayerInputs,
    LayerParts,
    LayerShape,
    Norms,
    RoutedExperts,
    StackParts,
)
from weft.kernels.routing import Routing
from weft.models.decoder import Decoder
from weft.models.fused import describe_layers
from weft.models.layout import storage_of
from weft.models.loader import load_model

EXTRAS = [n for n in CASES if "moe" in n or "gemma4" in n or n in RECURRENT]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, save(build(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _threads():
    threads = attention.threads()
    yield
    attention.set_threads(threads)


def load(
    folder: tuple[str, Path], dtype: str, quantize: str = "none", *, fused: bool = True
) -> Decoder:
    name, path = folder
    ops = select_ops("cpu", dtype, "cpu")
    ops = ops if fused else replace(ops, fused=None)
    rounding = partial(storage_of, quantize=quantize, group=32)
    return load_model(path, dtype, CASES[name].max_model_len, ops, rounding)


def steps(runner: PagedRunner) -> list[Tensor]:
    """The logits of a prompt, of one token and of a chunk, in company of other prompts."""
    tokens, others = prompt(90, 3), [prompt(5 + 3 * i, i) for i in range(3)]
    found = []
    for first, last in ((0, 30), (30, 31), (31, 90)):
        rows = [("a", tokens[first:last])]
        rows += [(f"{first}-{i}", other) for i, other in enumerate(others)]
        found += runner.step(rows)
    return found


@pytest.mark.parametrize("folder", CASES, indirect=True)
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [
        ("float32", "none"),
        ("bfloat16", "int4"),
        pytest.param("bfloat16", "none", marks=deep),
        pytest.param("bfloat16", "int8", marks=deep),
        pytest.param("float32", "int8", marks=deep),
        pytest.param("float32", "int4", marks=deep),
    ],
)
def test_one_native_call_gives_the_bits_of_its_parts(folder, dtype, quantize) -> None:
    """Of layers as two calls, and of one op after the other."""
    decoder = load(folder, dtype, quantize)
    assert describe_layers(decoder.spec, decoder.ops) == "all in one native call"
    bound = PagedRunner(decoder, bound=True)
    together = steps(bound)
    for parts in (decoder, load(folder, dtype, quantize, fused=False)):
        for found, expected in zip(together, steps(PagedRunner(parts)), strict=True):
            assert torch.equal(found, expected)
    for wrong in (-1, max(decoder.spec.vocab_size, decoder.spec.per_layer_vocab_size)):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            bound.step([("z", [wrong])])


@pytest.mark.parametrize("folder", EXTRAS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_the_same_on_any_number_of_threads(folder, dtype) -> None:
    decoder = load(folder, dtype)
    attention.set_threads(1)
    alone = steps(PagedRunner(decoder, bound=True))
    attention.set_threads(3)
    for found, expected in zip(steps(PagedRunner(decoder, bound=True)), alone, strict=True):
        assert torch.equal(found, expected)


GENERATE = """
import sys
from weft import LLM, SamplingParams
settings = {"threads": 1, "kv_memory": "16MiB", "max_model_len": 128, "dtype": "float32"}
with LLM.in_process(sys.argv[1], max_num_seqs=2, **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (result,) = llm.generate([list(range(40, 70))], params, progress=False)
assert "torch" not in sys.modules
print(*result.token_ids)
"""


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe",
        "gemma4-shared-kv",
        "gemma4-moe-key-is-value",
        "glm4-moe",
        "qwen3-next",
        "nemotron-h-moe",
    ],
)
def test_an_engine_needs_no_torch_for_it(tmp_path, name) -> None:
    model = build(name)
    command = [sys.executable, "-c", GENERATE, str(save_with_tokenizer(model, tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = [int(word) for word in done.stdout.split()]
    assert len(tokens) == 12
    assert tokens == likeliest_by_reference(model, list(range(40, 70)), tokens)


def layer_parts() -> LayerParts:
    """A layer with all there is: experts beside an MLP, per-layer inputs, a scalar."""

    def matrix(outputs: int, inputs: int) -> CpuMatrix:
        return CpuMatrix(torch.ones(outputs, inputs))

    vector = torch.ones(16)
    return LayerParts(
        LayerShape(2, 1, 8, 1e-6, norm_plus_one=False, activation="silu", value_norm=True),
        {
            "qkv": matrix(32, 16),
            "output": matrix(16, 16),
            "gate_up": CpuMatrix(torch.ones(24, 16), gated=True),
            "down": matrix(16, 12),
            "router": matrix(3, 16),
            "input_gate": matrix(5, 16),
            "input_projection": matrix(16, 5),
        },
        Norms(vector, vector, torch.ones(3, 8), vector, vector, *[vector] * 5),
        Biases(None, None, None, None),
        RoutedExperts(
            tuple(CpuMatrix(torch.ones(8, 16), gated=True) for _ in range(3)),
            tuple(matrix(16, 4) for _ in range(3)),
            Routing(2, normalise=True),
            "silu",
            scale=torch.ones(3),
        ),
        torch.ones(1),
    )


def test_a_layer_of_which_a_part_is_missing_is_an_error() -> None:
    parts = layer_parts()
    CpuLayer(parts)
    for name in parts.matrices:
        if name == "input_gate":  # then there are no per-layer inputs
            continue
        matrices = {key: value for key, value in parts.matrices.items() if key != name}
        with pytest.raises(ValueError, match="lacks"):
            CpuLayer(replace(parts, matrices=matrices))
    for name in ("router_scale", "dense_post_norm", "expert_norm", "expert_post_norm"):
        with pytest.raises(ValueError, match=f"lacks {name}"):
            CpuLayer(replace(parts, norms=replace(parts.norms, **{name: None})))
    with pytest.raises(ValueError, match="lacks post_input_norm"):
        CpuLayer(replace(parts, norms=replace(parts.norms, post_input_norm=None)))
    with pytest.raises(ValueError, match="lacks experts"):
        CpuLayer(replace(parts, experts=None))


def test_parts_that_do_not_fit_are_an_error() -> None:
    parts = layer_parts()
    assert parts.experts is not None
    for name, outputs, inputs in (("router", 4, 16), ("input_projection", 16, 4), ("qkv", 24, 16)):
        matrices = {**parts.matrices, name: CpuMatrix(torch.ones(outputs, inputs))}
        with pytest.raises(ValueError, match=name):
            CpuLayer(replace(parts, matrices=matrices))
    with pytest.raises(ValueError, match="scalar"):
        CpuLayer(replace(parts, scalar=torch.ones(2)))
    for changes, words in (
        ({"scale": torch.ones(4)}, "expert_scale"),
        ({"routing": Routing(4)}, "4 of 3 experts"),
        ({"gate_up": parts.experts.down}, "expert 0"),
    ):
        with pytest.raises(ValueError, match=words):
            CpuLayer(replace(parts, experts=replace(parts.experts, **changes)))
    layer, attended, residual = CpuLayer(parts), torch.ones(2, 2, 8), torch.ones(2, 16)
    assert layer.post(attended, residual, torch.ones(2, 5)).shape == (2, 16)
    for inputs in (None, torch.ones(2, 4), torch.ones(1, 5), torch.ones(2, 5).bfloat16()):
        with pytest.raises(ValueError, match="inputs"):
            layer.post(attended, residual, inputs)


def test_per_layer_inputs_that_do_not_fit_are_an_error() -> None:
    inputs = LayerInputs(torch.ones(9, 10), CpuMatrix(torch.ones(10, 16)), torch.ones(5))
    parts = StackParts(torch.ones(9, 16), 1.0, torch.ones(16), 1e-6, norm_plus_one=False)
    CpuStack(replace(parts, inputs=inputs))
    for changes in (
        {"table": torch.ones(9, 15)},
        {"table": torch.ones(9, 10).bfloat16()},
        {"projection": CpuMatrix(torch.ones(10, 15))},
        {"norm": torch.ones(4)},
    ):
        with pytest.raises(ValueError, match="per-layer inputs"):
            CpuStack(replace(parts, inputs=replace(inputs, **changes)))


@pytest.mark.parametrize("folder", ["qwen3-next"], indirect=True)
def test_recurrent_layers_without_slots_that_fit_are_refused(folder) -> None:
    """And nothing is written: the step may be computed with those that do."""
    decoder = load(folder, "float32")
    runner = PagedRunner(decoder, bound=True)
    stack, states = runner._stack, runner._states
    assert isinstance(stack, CpuStack)
    assert states is not None
    ids, positions = np.array([3, 4]), np.arange(2)
    batches = [runner._batch(group, [("a", [3, 4])], [0]) for group in runner.groups]
    with pytest.raises(ValueError, match="need the slots"):
        stack.run(ids, positions, batches)
    none = np.zeros((0, 2), np.int32)
    for bounds, reads, writes, words in (
        ([0, 2], [-1], [128], "beyond"),
        ([0, 2], [5], [5], "written and read"),
        ([0, 1], [-1], [0], "cover"),
        ([0, 1, 2], [-1, -1], [0, 0], "written twice"),
    ):
        given = (np.array(part, np.int32) for part in (bounds, reads, writes))
        with pytest.raises(ValueError, match=words):
            stack.run_recurrent(ids, positions, batches, StateBatch(*given, none))
    assert all(np.isnan(to_numpy(part)).all() for layer in states.layers.values() for part in layer)
    few = LayerStates(*(part[:1] for part in states.layers[0]))
    recurrent, attending = decoder._fused[0], decoder._fused[3]
    for layer, wrong, words in (
        (recurrent, few, "equal numbers of slots"),
        (recurrent, LayerStates(few.matrices, few.matrices), "expected"),
        (attending, states.layers[0], "attends"),
    ):
        with pytest.raises(ValueError, match=words):
            stack.add_recurrent(layer, wrong)
    with pytest.raises(ValueError, match="run it in a stack"):
        recurrent.pre(*[torch.zeros(1, decoder.spec.hidden_size)] * 3)
    plain = CpuStack(StackParts(torch.ones(9, 16), 1.0, torch.ones(16), 1e-6, norm_plus_one=False))
    with pytest.raises(ValueError, match="no layer of the stack"):
        plain.run_recurrent(ids, positions, [], StateBatch(none, none, none, none))
    assert decoder.bind([], []) is None


def test_recurrent_layers_stay_op_by_op_where_no_stack_mixes(tmp_path) -> None:
    name = "qwen3.5"
    path = save(build(name), tmp_path)
    ops = select_ops("cpu", "float32", "cpu")
    assert ops.fused is not None
    ops = replace(ops, fused=replace(ops.fused, mixes=False))
    decoder = load_model(path, "float32", CASES[name].max_model_len, ops)
    assert describe_layers(decoder.spec, ops) == "op by op, 1 of 4 fused"
    assert decoder.bind([], [], {0: LayerStates(None, None)}) is None
