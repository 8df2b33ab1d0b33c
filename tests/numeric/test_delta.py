"""The gated delta rule against transformers, cut anywhere, in any batch, and on every kernel.

So is the rule with a decay for each channel, of Kimi-Linear and, with a floor, of Ling 3.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BailingHybridConfig, KimiLinearConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from weft.kernels.cpu.delta import CpuDelta
from weft.kernels.delta import DeltaLayer, DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.reference_delta import ReferenceDelta

SHAPES = {
    "even": DeltaShape(2, 2, 16, 16, 4),
    "grouped": DeltaShape(2, 6, 32, 48, 4),
    "two-taps": DeltaShape(1, 4, 48, 16, 2),
    "tiled": DeltaShape(2, 6, 32, 16, 4, tiled=True),
    "by-channel": DeltaShape(3, 3, 32, 32, 4, by_channel=True),
    "by-channel-floor": DeltaShape(2, 2, 48, 48, 3, by_channel=True),
}
FLOOR = -5.0
HIDDEN = 40
TOKENS, SLOTS = 37, 12
KERNELS = {"reference": ReferenceDelta, "cpu": CpuDelta}


@dataclass
class Layer:
    """A layer of transformers, its parts for weft, and what both compute with."""

    output: nn.Module  # the module's own, behind what weft computes here
    parts: DeltaParts
    x: Tensor
    gates: Tensor
    expected: Tensor  # [T, C], the module's own output
    dtype: torch.dtype = torch.float32

    def states(self) -> LayerStates:
        """Slots of garbage: whatever is read must have been written."""
        shape = self.parts.shape
        numbers = (torch.full((SLOTS, *s), 7e3) for s in (shape.matrix, shape.kept_inputs))
        return LayerStates(*numbers)


def batch_of(
    counts: list[int], reads: list[int], writes: list[int], marks: list[tuple[int, int]] = ()
) -> StateBatch:
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lists = (torch.tensor(part, dtype=torch.int32) for part in (reads, writes))
    return StateBatch(bounds, *lists, torch.tensor(marks, dtype=torch.int32).reshape(-1, 2))


def make(name: str, dtype: torch.dtype = torch.float32) -> Layer:
    shape = SHAPES[name]
    torch.manual_seed(3)
    if shape.by_channel:
        return _by_channel(shape, FLOOR if name.endswith("floor") else None, dtype)
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
        linear_conv_kernel_dim=shape.taps,
    )
    module = _shaken(Qwen3_5GatedDeltaNet(config, 0), dtype)
    hidden = torch.randn(1, TOKENS, HIDDEN).to(dtype)
    x = torch.cat((module.in_proj_qkv(hidden), module.in_proj_z(hidden)), -1)[0]
    gates = torch.cat((module.in_proj_b(hidden), module.in_proj_a(hidden)), -1)[0]
    conv = module.conv1d.weight.squeeze(1)
    parts = DeltaParts(shape, conv, module.A_log, module.dt_bias, module.norm.weight, 1e-6)
    layer = Layer(module.out_proj, parts, x, gates, module(hidden)[0], dtype)
    return _tiled(layer) if shape.tiled else layer


def _tiled(layer: Layer) -> Layer:
    """The layer with heads of values as llama.cpp orders them: the first of each key head first."""
    shape, parts, output = layer.parts.shape, layer.parts, copy.deepcopy(layer.output)
    heads = torch.arange(shape.value_heads).view(shape.key_heads, -1).T.ravel()
    rows = torch.arange(shape.values).view(shape.value_heads, -1)[heads].ravel()
    values = torch.cat((torch.arange(2 * shape.keys), 2 * shape.keys + rows))
    mixed = torch.cat((values, shape.channels + rows))
    gates = torch.cat((heads, shape.value_heads + heads))
    output.weight = nn.Parameter(output.weight[:, rows], requires_grad=False)
    parts = replace(
        parts, conv=parts.conv[values], decay=parts.decay[heads], bias=parts.bias[heads]
    )
    return replace(
        layer, output=output, parts=parts, x=layer.x[:, mixed], gates=layer.gates[:, gates]
    )


def _shaken(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with values that matter."""
    for tensor in module.requires_grad_(False).state_dict().values():
        tensor.add_(torch.randn_like(tensor) * 0.4)
    return module.to(dtype)


def _by_channel(shape: DeltaShape, floor: float | None, dtype: torch.dtype) -> Layer:
    """A layer of Kimi-Linear, or where there is a floor one of Ling 3."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    if floor is None:
        config = KimiLinearConfig(
            linear_num_heads=shape.value_heads,
            linear_head_dim=shape.value_dim,
            linear_conv_kernel_dim=shape.taps,
            **sizes,
        )
        module: nn.Module = KimiLinearDeltaAttention(config, 0)
    else:
        config = BailingHybridConfig(
            num_attention_heads=shape.value_heads,
            head_dim=shape.value_dim,
            short_conv_kernel_size=shape.taps,
            kda_lower_bound=floor,
            **sizes,
        )
        module = BailingHybridDeltaAttention(config, 0)
    for tensor in module.state_dict().values():
        tensor.uniform_(-0.2, 0.2)  # some begin as memory had them
    _shaken(module, dtype)
    forget, hidden = module.forget_gate, torch.randn(1, TOKENS, HIDDEN).to(dtype)
    if floor is None:
        opening = module.g_b_proj(module.g_a_proj(hidden))
        times = forget.f_b_proj(forget.f_a_proj(hidden))
    else:
        opening, times = module.g_proj(hidden), forget.f_proj(hidden)
    mixed = (module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden))
    parts = DeltaParts(
        shape,
        module.conv1d.weight.squeeze(1),
        forget.A_log.reshape(-1),
        forget.dt_bias,
        module.o_norm.weight,
        config.rms_norm_eps,
        "sigmoid",
        floor,
    )
    x = torch.cat((*mixed, opening), -1)[0]
    gates = torch.cat((module.b_proj(hidden), times), -1)[0]
    return Layer(module.o_proj, parts, x, gates, module(hidden)[0], dtype)


def same(delta: DeltaLayer, found: Tensor, expected: Tensor) -> bool:
    """Whether numbers are equal: to the bit but in torch, whose rows depend on where they lie."""
    if isinstance(delta, CpuDelta):
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[(n, k) for n in SHAPES for k in KERNELS], ids="-".join)
def case(request):
    name, kernel = request.param
    layer = make(name)
    return layer, KERNELS[kernel](layer.parts)


def test_equals_transformers(case):
    layer, delta = case
    found = delta(layer.x, layer.gates, layer.states(), batch_of([TOKENS], [-1], [3]))
    out = layer.output(found.flatten(1))
    assert layer.expected.std() > 0.3
    assert (out - layer.expected).abs().max() < 5e-6 * layer.expected.abs().max()


def test_cut_at_every_position_gives_the_same(case):
    layer, delta = case
    whole, states = layer.states(), layer.states()
    expected = delta(layer.x, layer.gates, whole, batch_of([TOKENS], [-1], [0]))
    for cut in range(1, TOKENS):
        first = delta(layer.x[:cut], layer.gates[:cut], states, batch_of([cut], [-1], [1]))
        rest = batch_of([TOKENS - cut], [1], [2])
        second = delta(layer.x[cut:], layer.gates[cut:], states, rest)
        assert same(delta, torch.cat((first, second)), expected)
        for part, of_whole in zip(states, whole, strict=True):
            assert same(delta, part[2], of_whole[0])


def test_token_by_token_gives_the_same(case):
    layer, delta = case
    states = layer.states()
    expected = delta(layer.x, layer.gates, states, batch_of([TOKENS], [-1], [5]))
    for token in range(TOKENS):
        at = slice(token, token + 1)
        read = -1 if token == 0 else token % 2
        step = batch_of([1], [read], [(token + 1) % 2])
        found = delta(layer.x[at], layer.gates[at], states, step)
        assert same(delta, found, expected[at])
    for part in states:
        assert same(delta, part[TOKENS % 2], part[5])


def test_marks_keep_the_state_after_their_token(case):
    layer, delta = case
    states = layer.states()
    marks = [(0, 4), (1, 9), (15, 2), (TOKENS - 1, 7)]
    plain = delta(layer.x, layer.gates, states, batch_of([TOKENS], [-1], [0]))
    marked = delta(layer.x, layer.gates, states, batch_of([TOKENS], [-1], [1], marks))
    assert same(delta, marked, plain)
    for token, slot in marks:
        stop = token + 1
        delta(layer.x[:stop], layer.gates[:stop], states, batch_of([stop], [-1], [3]))
        for part in states:
            assert same(delta, part[slot], part[3])


def test_rows_of_a_batch_do_not_touch_each_other(case):
    """Rows that begin, that share a state, and that go on, with marks; what else is stays."""
    layer, delta = case
    counts, reads, writes = [9, 1, 20, 7], [-1, 0, 0, 1], [2, 3, 4, 5]
    marks = [(3, 6), (9, 7), (TOKENS - 1, 8)]
    states = layer.states()
    delta(layer.x[:5], layer.gates[:5], states, batch_of([5], [-1], [0]))
    delta(layer.x[5:8], layer.gates[5:8], states, batch_of([3], [-1], [1]))
    before = [part.clone() for part in states]
    found = delta(layer.x, layer.gates, states, batch_of(counts, reads, writes, marks))
    again = delta(layer.x, layer.gates, states, batch_of(counts, reads, writes, marks))
    assert torch.equal(found, again)  # a step may be computed twice
    start = 0
    for count, read, write in zip(counts, reads, writes, strict=True):
        rows, alone = slice(start, start + count), LayerStates(*(part.clone() for part in before))
        step = batch_of([count], [read], [11])
        expected = delta(layer.x[rows], layer.gates[rows], alone, step)
        assert same(delta, found[rows], expected)
        for part, single in zip(states, alone, strict=True):
            assert same(delta, part[write], single[11])
        start += count
    for part, old in zip(states, before, strict=True):
        for untouched in (0, 1, 9, 10, 11):
            assert torch.equal(part[untouched], old[untouched])


@pytest.mark.parametrize("name", SHAPES)
def test_native_kernel_in_bfloat16(name):
    layer = make(name, torch.bfloat16)
    found, expected = (
        kernel(layer.parts)(layer.x, layer.gates, layer.states(), batch_of([TOKENS], [-1], [0]))
        for kernel in (CpuDelta, ReferenceDelta)
    )
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found.float() - expected.float()).abs().max() < 0.01 * expected.float().abs().max()


@pytest.mark.parametrize("floor", [None, FLOOR])
def test_decays_from_none_to_all(floor):
    """Time steps so small or large that a channel keeps everything, or nothing."""
    layer = make("by-channel")
    times = torch.linspace(-120.0, 120.0, TOKENS)[:, None]
    gates = layer.gates + torch.cat((torch.zeros(TOKENS, 3), times.expand(-1, 96)), 1)
    parts = replace(layer.parts, floor=floor)
    found, expected = (
        kernel(parts)(layer.x, gates, layer.states(), batch_of([TOKENS], [-1], [0]))
        for kernel in (CpuDelta, ReferenceDelta)
    )
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < 5e-6 * expected.abs().max()


def test_key_heads_are_shared_by_channel():
    """Grouped heads with decays of their own, which no module of transformers has."""
    shape = DeltaShape(2, 6, 16, 32, 4, by_channel=True)
    torch.manual_seed(4)
    x, gates = torch.randn(TOKENS, shape.channels + shape.values), torch.randn(TOKENS, 6 + 96)
    conv, decay, bias = torch.randn(shape.channels, 4), torch.randn(6), torch.randn(96)
    parts = DeltaParts(shape, conv, decay, bias, torch.randn(32), 1e-6, "sigmoid")
    states = LayerStates(torch.zeros(1, *shape.matrix), torch.zeros(1, *shape.kept_inputs))
    found, expected = (
        kernel(parts)(x, gates, states, batch_of([TOKENS], [-1], [0]))
        for kernel in (CpuDelta, ReferenceDelta)
    )
    assert (found - expected).abs().max() < 5e-6 * expected.abs().max()


@pytest.mark.parametrize("name", ["grouped", "by-channel"])
def test_native_kernel_takes_numpy(name):
    layer, shape = make(name), SHAPES[name]
    states = layer.states()
    step = batch_of([TOKENS], [-1], [0], [(4, 1)])
    expected = CpuDelta(layer.parts)(layer.x, layer.gates, states, step)
    arrays = {
        name: getattr(layer.parts, name).numpy() for name in ("conv", "decay", "bias", "norm")
    }
    parts = replace(layer.parts, **arrays)
    own = LayerStates(*(part.numpy().copy() for part in layer.states()))
    rows = StateBatch(
        *(getattr(step, name).numpy() for name in ("bounds", "reads", "writes", "marks"))
    )
    found = CpuDelta(parts)(layer.x.numpy(), layer.gates.numpy(), own, rows)
    assert found.shape == (TOKENS, shape.value_heads, shape.value_dim)
    assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize(
    ("counts", "reads", "writes", "marks", "message"),
    [
        ([TOKENS], [SLOTS], [0], (), "beyond"),
        ([TOKENS], [0], [0], (), "written and read"),
        ([TOKENS], [-1], [-1], (), "beyond"),
        ([TOKENS - 1], [-1], [0], (), "cover"),
        ([TOKENS], [-1, -1], [0, 1], (), "bounds"),
        ([20, 17], [-1, -1], [3, 3], (), "written twice"),
        ([TOKENS], [-1], [0], [(5, 0)], "written twice"),
        ([TOKENS], [-1], [0], [(TOKENS, 1)], "order"),
        ([TOKENS], [-1], [0], [(6, 1), (5, 2)], "order"),
    ],
)
def test_malformed_calls_are_refused(counts, reads, writes, marks, message):
    layer = make("even")
    states = layer.states()
    with pytest.raises(ValueError, match=message):
        CpuDelta(layer.parts)(layer.x, layer.gates, states, batch_of(counts, reads, writes, marks))
    assert all((part == 7e3).all() for part in states)


def test_shapes_without_a_kernel_are_refused():
    layer = make("even")
    for odd in (DeltaShape(2, 2, 24, 16, 4), DeltaShape(2, 2, 16, 16, 17)):
        with pytest.raises(ValueError, match="no kernel"):
            CpuDelta(replace(layer.parts, shape=odd))
