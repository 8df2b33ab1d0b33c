"""The parameters of recurrent layers, as checkpoints store them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from weft.kernels.conv import ConvShape
from weft.kernels.delta import DeltaShape
from weft.kernels.mamba2 import Mamba2Shape
from weft.models.kda_layout import kda_parameters
from weft.models.parameter import Parameter, Piece, stack, whole
from weft.models.spec import ModelSpec, StateSpec


def recurrence(spec: ModelSpec, state: StateSpec) -> Iterator[Parameter]:
    """Yield what takes attention's place in a recurrent layer."""
    match state.shape:
        case DeltaShape(by_channel=True):
            return kda_parameters(spec, state.shape, state.gate_rank)
        case DeltaShape():
            return _delta(spec, state.shape)
        case ConvShape():
            return _convolution(spec, state.shape)
        case Mamba2Shape():
            return _mamba2(spec, state.shape)


def _convolution(spec: ModelSpec, shape: ConvShape) -> Iterator[Parameter]:
    """Yield the parameters of a gated short convolution, as LFM2 stores them."""
    hidden, channels, home = spec.hidden_size, shape.channels, "conv"
    yield whole("qkv", f"{home}.in_proj.weight", (3 * channels, hidden))
    yield whole("output", f"{home}.out_proj.weight", (hidden, channels))
    yield whole("state_conv", f"{home}.conv.weight", (channels, 1, shape.taps))
    if shape.bias:
        yield whole("qkv_bias", f"{home}.in_proj.bias", (3 * channels,))
        yield whole("output_bias", f"{home}.out_proj.bias", (hidden,))
        yield whole("state_conv_bias", f"{home}.conv.bias", (channels,))


def _mamba2(spec: ModelSpec, shape: Mamba2Shape) -> Iterator[Parameter]:
    """Yield the parameters of a layer by Mamba-2, whose input product has three parts on disk.

    These are the gate of the norm, what the convolution reads, and the time steps, which stay in
    floats as they decide for how long a state lasts.
    """
    hidden, values, channels, home = spec.hidden_size, shape.values, shape.channels, "mamba"
    stored = (values + channels + shape.heads, hidden)

    def rows(first: int, count: int, to: int = 0) -> Piece:
        index, part = (slice(to, to + count),), (slice(first, first + count),)
        return Piece(f"{home}.in_proj.weight", stored, index, part)

    pieces = (rows(values, channels), rows(0, values, channels))
    yield Parameter("qkv", (channels + values, hidden), pieces)
    yield Parameter("state_gates", (shape.heads, hidden), (rows(values + channels, shape.heads),))
    yield whole("output", f"{home}.out_proj.weight", (hidden, values))
    yield whole("state_conv", f"{home}.conv1d.weight", (channels, 1, shape.taps))
    if shape.conv_bias:
        yield whole("state_conv_bias", f"{home}.conv1d.bias", (channels,))
    yield whole("state_decay", f"{home}.A_log", (shape.heads,))
    yield whole("state_bias", f"{home}.dt_bias", (shape.heads,))
    yield whole("state_skip", f"{home}.D", (shape.heads,))
    yield whole("state_norm", f"{home}.norm.weight", (values,))


def _delta(spec: ModelSpec, shape: DeltaShape) -> Iterator[Parameter]:
    """Yield the parameters of a layer by the delta rule, as Qwen3-Next and 3.5 store them."""
    hidden, home = spec.hidden_size, "linear_attn"
    heads, rows = shape.value_heads, shape.channels + shape.values
    each = heads // shape.key_heads
    if spec.layout.fused_state:
        values = each * shape.value_dim
        inside = (shape.key_dim, shape.key_dim, values, values)
        yield _by_key_head("qkv", f"{home}.in_proj_qkvz.weight", inside, shape.key_heads, hidden)
    else:
        parts = [("in_proj_qkv", shape.channels), ("in_proj_z", shape.values)]
        yield stack("qkv", [(f"{home}.{name}.weight", n) for name, n in parts], hidden)
    if spec.layout.fused_state_gates:
        yield _by_key_head(
            "state_gates", f"{home}.in_proj_ba.weight", (each, each), shape.key_heads, hidden
        )
    else:
        parts = [("in_proj_b", heads), ("in_proj_a", heads)]
        yield stack("state_gates", [(f"{home}.{name}.weight", n) for name, n in parts], hidden)
    yield whole("output", f"{home}.out_proj.weight", (hidden, rows - shape.channels))
    conv = Piece(f"{home}.conv1d.weight", (shape.channels, 1, shape.taps))
    yield Parameter("state_conv", (shape.channels, 1, shape.taps), (conv,))
    yield whole("state_decay", f"{home}.A_log", (heads,))
    yield whole("state_bias", f"{home}.dt_bias", (heads,))
    yield whole("state_norm", f"{home}.norm.weight", (shape.value_dim,))


def _by_key_head(
    name: str, tensor: str, sizes: tuple[int, ...], heads: int, columns: int
) -> Parameter:
    """Return a parameter whose parts a tensor has for one key head after the other.

    Args:
        sizes: rows of each part, of a head.
    """
    width = sum(sizes)
    shape, pieces, begin = (heads * width, columns), [], 0
    for place, size in enumerate(sizes):
        first = sum(sizes[:place])
        for head in range(heads):
            start, to = head * width + first, begin + head * size
            part = (slice(start, start + size),)
            pieces.append(Piece(tensor, shape, (slice(to, to + size),), part))
        begin += heads * size
    return Parameter(name, shape, tuple(pieces))
