"""Short convolutions and Mamba-2 against transformers: cut anywhere, in any batch, each kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from test_delta import SLOTS, TOKENS, batch_of
from torch import Tensor, nn
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import (
    GraniteMoeHybridConfig,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from weft.kernels.conv import ConvParts, ConvShape
from weft.kernels.cpu.conv import CpuConv
from weft.kernels.cpu.mamba2 import CpuMamba2
from weft.kernels.delta import LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts, Mamba2Shape
from weft.kernels.reference_conv import ReferenceConv
from weft.kernels.reference_mamba2 import ReferenceMamba2

HIDDEN = 48
SHAPES = {
    "conv": ConvShape(HIDDEN, 3, bias=True),
    "conv-two-taps": ConvShape(HIDDEN, 2),
    "mamba2": Mamba2Shape(3, 32, 1, 16, 4),
    "mamba2-groups": Mamba2Shape(6, 16, 2, 48, 3, conv_bias=False),
}
NAMES = {"reference": (ReferenceConv, ReferenceMamba2), "cpu": (CpuConv, CpuMamba2)}


@dataclass
class Layer:
    """A layer of transformers, its parts for weft, and what both compute with."""

    parts: ConvParts | Mamba2Parts
    x: Tensor
    gates: Tensor | None
    out_proj: nn.Module
    expected: Tensor  # [T, C], the module's own output

    def bind(self, kernels: str) -> Callable[..., Tensor]:
        of_conv, of_mamba2 = NAMES[kernels]
        return of_conv(self.parts) if isinstance(self.parts, ConvParts) else of_mamba2(self.parts)

    def at(self, part: slice) -> tuple[Tensor, Tensor | None]:
        return self.x[part], None if self.gates is None else self.gates[part]

    def states(self) -> LayerStates:
        """Slots of garbage: whatever is read must have been written."""
        shape = self.parts.shape
        numbers = (torch.full((SLOTS, *s), 7e3) for s in (shape.matrix, shape.kept_inputs))
        return LayerStates(*numbers)


def drawn(module: nn.Module, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    module.requires_grad_(False)
    for tensor in module.state_dict().values():
        tensor.add_(torch.randn_like(tensor) * 0.4)
    return module.to(dtype)


def conv_layer(shape: ConvShape, dtype: torch.dtype) -> Layer:
    config = Lfm2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["conv"],
        conv_L_cache=shape.taps,
        conv_bias=shape.bias,
    )
    module = drawn(Lfm2ShortConv(config, 0), dtype)
    hidden = torch.randn(1, TOKENS, HIDDEN).to(dtype)
    parts = ConvParts(shape, module.conv.weight.squeeze(1), module.conv.bias)
    return Layer(parts, module.in_proj(hidden)[0], None, module.out_proj, module(hidden)[0])


def mamba2_layer(shape: Mamba2Shape, dtype: torch.dtype) -> Layer:
    config = GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mamba_n_heads=shape.heads,
        mamba_d_head=shape.head_dim,
        mamba_n_groups=shape.groups,
        mamba_d_state=shape.state_dim,
        mamba_d_conv=shape.taps,
        mamba_conv_bias=shape.conv_bias,
        time_step_limit=[0.2, 3.0],
    )
    module = drawn(GraniteMoeHybridMambaLayer(config, 0), dtype)
    hidden = torch.randn(1, TOKENS, HIDDEN).to(dtype)
    sizes = [shape.values, shape.channels, shape.heads]
    z, mixed, gates = module.in_proj(hidden)[0].split(sizes, -1)
    parts = Mamba2Parts(
        shape,
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        module.A_log,
        module.dt_bias,
        module.D,
        module.norm.weight,
        module.norm.variance_epsilon,
        (0.2, 3.0),
    )
    return Layer(parts, torch.cat((mixed, z), -1), gates, module.out_proj, module(hidden)[0])


def make(name: str, dtype: torch.dtype = torch.float32) -> Layer:
    shape = SHAPES[name]
    if isinstance(shape, ConvShape):
        return conv_layer(shape, dtype)
    return mamba2_layer(shape, dtype)


def same(kernels: str, found: Tensor, expected: Tensor) -> bool:
    """Whether numbers are equal: to the bit but in torch, whose rows depend on where they lie."""
    if kernels == "cpu":
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[(n, k) for n in SHAPES for k in NAMES], ids="-".join)
def case(request):
    name, kernels = request.param
    layer = make(name)
    return layer, layer.bind(kernels), kernels


WHOLE = slice(0, TOKENS)


def test_equals_transformers(case):
    layer, mix, _ = case
    found = mix(*layer.at(WHOLE), layer.states(), batch_of([TOKENS], [-1], [3]))
    out = layer.out_proj(found.flatten(1))
    assert layer.expected.std() > 0.3
    assert (out - layer.expected).abs().max() < 5e-6 * layer.expected.abs().max()


def test_cut_at_every_position_gives_the_same(case):
    layer, mix, kernels = case
    whole, states = layer.states(), layer.states()
    expected = mix(*layer.at(WHOLE), whole, batch_of([TOKENS], [-1], [0]))
    for cut in range(1, TOKENS):
        first = mix(*layer.at(slice(0, cut)), states, batch_of([cut], [-1], [1]))
        rest = batch_of([TOKENS - cut], [1], [2])
        second = mix(*layer.at(slice(cut, TOKENS)), states, rest)
        assert same(kernels, torch.cat((first, second)), expected)
        for part, of_whole in zip(states, whole, strict=True):
            assert same(kernels, part[2], of_whole[0])


def test_token_by_token_gives_the_same(case):
    layer, mix, kernels = case
    states = layer.states()
    expected = mix(*layer.at(WHOLE), states, batch_of([TOKENS], [-1], [5]))
    for token in range(TOKENS):
        at = slice(token, token + 1)
        read = -1 if token == 0 else token % 2
        found = mix(*layer.at(at), states, batch_of([1], [read], [(token + 1) % 2]))
        assert same(kernels, found, expected[at])
    for part in states:
        assert same(kernels, part[TOKENS % 2], part[5])


def test_marks_keep_the_state_after_their_token(case):
    layer, mix, kernels = case
    states = layer.states()
    marks = [(0, 4), (1, 9), (15, 2), (TOKENS - 1, 7)]
    plain = mix(*layer.at(WHOLE), states, batch_of([TOKENS], [-1], [0]))
    marked = mix(*layer.at(WHOLE), states, batch_of([TOKENS], [-1], [1], marks))
    assert same(kernels, marked, plain)
    for token, slot in marks:
        stop = token + 1
        mix(*layer.at(slice(0, stop)), states, batch_of([stop], [-1], [3]))
        for part in states:
            assert same(kernels, part[slot], part[3])


def test_rows_of_a_batch_do_not_touch_each_other(case):
    """Rows that begin, that share a state, and that go on, with marks; what else is stays."""
    layer, mix, kernels = case
    counts, reads, writes = [9, 1, 20, 7], [-1, 0, 0, 1], [2, 3, 4, 5]
    marks = [(3, 6), (9, 7), (TOKENS - 1, 8)]
    states = layer.states()
    mix(*layer.at(slice(0, 5)), states, batch_of([5], [-1], [0]))
    mix(*layer.at(slice(5, 8)), states, batch_of([3], [-1], [1]))
    before = [part.clone() for part in states]
    found = mix(*layer.at(WHOLE), states, batch_of(counts, reads, writes, marks))
    again = mix(*layer.at(WHOLE), states, batch_of(counts, reads, writes, marks))
    assert torch.equal(found, again)  # a step may be computed twice
    start = 0
    for count, read, write in zip(counts, reads, writes, strict=True):
        rows, alone = slice(start, start + count), LayerStates(*(part.clone() for part in before))
        expected = mix(*layer.at(rows), alone, batch_of([count], [read], [11]))
        assert same(kernels, found[rows], expected)
        for part, single in zip(states, alone, strict=True):
            assert same(kernels, part[write], single[11])
        start += count
    for part, old in zip(states, before, strict=True):
        for untouched in (0, 1, 9, 10, 11):
            assert torch.equal(part[untouched], old[untouched])


@pytest.mark.parametrize("name", SHAPES)
def test_native_kernels_in_bfloat16(name):
    layer = make(name, torch.bfloat16)
    found, expected = (
        layer.bind(kernels)(*layer.at(WHOLE), layer.states(), batch_of([TOKENS], [-1], [0]))
        for kernels in ("cpu", "reference")
    )
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found.float() - expected.float()).abs().max() < 0.01 * expected.float().abs().max()


@pytest.mark.parametrize("name", SHAPES)
def test_native_kernels_take_numpy(name):
    layer = make(name)
    step = batch_of([TOKENS], [-1], [0], [(4, 1)])
    expected = layer.bind("cpu")(*layer.at(WHOLE), layer.states(), step)
    numbers = {k: v.numpy() for k, v in vars(layer.parts).items() if isinstance(v, Tensor)}
    layer.parts = replace(layer.parts, **numbers)
    own = LayerStates(*(part.numpy().copy() for part in layer.states()))
    rows = StateBatch(
        *(getattr(step, name).numpy() for name in ("bounds", "reads", "writes", "marks"))
    )
    given = [None if part is None else part.numpy() for part in layer.at(WHOLE)]
    found = layer.bind("cpu")(*given, own, rows)
    assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("counts", "reads", "writes", "message"),
    [
        ([TOKENS], [SLOTS], [0], "beyond"),
        ([TOKENS], [0], [0], "written and read"),
        ([TOKENS - 1], [-1], [0], "cover"),
        ([20, 17], [-1, -1], [3, 3], "written twice"),
    ],
)
def test_malformed_calls_are_refused(name, counts, reads, writes, message):
    layer = make(name)
    states, mix = layer.states(), layer.bind("cpu")
    with pytest.raises(ValueError, match=message):
        mix(*layer.at(WHOLE), states, batch_of(counts, reads, writes))
    with pytest.raises(ValueError, match="expected"):
        mix(layer.x[:, 1:], layer.gates, states, batch_of([TOKENS], [-1], [0]))
    if layer.gates is not None:
        with pytest.raises(ValueError, match="gates"):
            mix(layer.x, layer.gates[:, 1:], states, batch_of([TOKENS], [-1], [0]))
    assert all((part == 7e3).all() for part in states)


@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(40, 3),
        ConvShape(48, 17),
        Mamba2Shape(3, 24, 1, 16, 4),
        Mamba2Shape(3, 32, 1, 272, 4),
        Mamba2Shape(3, 32, 1, 16, 17),
    ],
)
def test_shapes_without_a_kernel_are_refused(shape):
    layer = make("conv" if isinstance(shape, ConvShape) else "mamba2")
    layer.parts = replace(layer.parts, shape=shape)
    with pytest.raises(ValueError, match="no kernel"):
        layer.bind("cpu")
