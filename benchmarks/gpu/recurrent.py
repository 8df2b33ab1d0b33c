"""Recurrent layers in shapes of real models against the reference, and the times of their kernels.

A decode has to read and write the state of each of its rows; nothing else of it is as large.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
from figures import figure, note
from peaks import clock_of, report_bandwidth
from smoke import apart

from weft.kernels.conv import ConvParts, ConvShape
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.mamba2 import Mamba2Parts, Mamba2Shape
from weft.kernels.reference_conv import ReferenceConv
from weft.kernels.reference_delta import ReferenceDelta
from weft.kernels.reference_mamba2 import ReferenceMamba2
from weft.kernels.triton.conv import TritonConv
from weft.kernels.triton.delta import TritonDelta
from weft.kernels.triton.device import copies_beyond_caches
from weft.kernels.triton.mamba2 import TritonMamba2

Shape = DeltaShape | ConvShape | Mamba2Shape
SHAPES: dict[str, Shape] = {
    "Qwen3.6-35B-A3B, delta rule": DeltaShape(16, 32, 128, 128, 4),
    "Kimi-Linear-48B-A3B, KDA": DeltaShape(32, 32, 128, 128, 4, by_channel=True),
    "Granite-4.0-H-Small, Mamba-2": Mamba2Shape(128, 64, 1, 128, 4),
    "LFM2-2.6B, convolution": ConvShape(2048, 3),
}
TINY: dict[str, Shape] = {
    "tiny delta rule": DeltaShape(1, 2, 16, 16, 4),
    "tiny KDA": DeltaShape(2, 2, 16, 16, 4, by_channel=True),
    "tiny Mamba-2": Mamba2Shape(2, 16, 1, 16, 4),
    "tiny convolution": ConvShape(32, 3),
}
ROWS, PROMPT = (1, 16, 128), 2048
TINY_ROWS, TINY_PROMPT = (1, 2), 3
LAYERS: dict[type, tuple[Any, Any]] = {
    DeltaParts: (ReferenceDelta, TritonDelta),
    ConvParts: (ReferenceConv, TritonConv),
    Mamba2Parts: (ReferenceMamba2, TritonMamba2),
}


def random_parts(shape: Shape) -> DeltaParts | ConvParts | Mamba2Parts:
    """Random parameters of a layer, on the host."""
    conv = torch.randn(shape.channels, shape.taps) / shape.taps
    if isinstance(shape, ConvShape):
        return ConvParts(shape, conv, None)
    if isinstance(shape, DeltaShape):
        steps = torch.randn(shape.value_heads), torch.randn(shape.decays)
        gating = "sigmoid" if shape.by_channel else "silu"
        return DeltaParts(shape, conv, *steps, torch.ones(shape.value_dim), 1e-6, gating)
    heads = (torch.randn(shape.heads) for _ in range(3))
    return Mamba2Parts(
        shape, conv, torch.randn(shape.channels), *heads, torch.ones(shape.values), 1e-6
    )


def moved(parts: Any, device: torch.device) -> Any:
    """The same parameters on a device."""
    given = (part.to(device) if torch.is_tensor(part) else part for part in vars(parts).values())
    return type(parts)(*given)


def random_inputs(shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer mixes and its gates, bfloat16, on the host."""
    if isinstance(shape, ConvShape):
        return torch.randn(tokens, 3 * shape.channels, dtype=torch.bfloat16), None
    delta = isinstance(shape, DeltaShape)
    opening = shape.value_heads + shape.decays if delta else shape.heads
    wide = shape.channels + shape.values
    return tuple(torch.randn(tokens, each, dtype=torch.bfloat16) for each in (wide, opening))


def random_states(shape: Shape, slots: int, device: torch.device) -> LayerStates:
    """Slots of states on a device."""
    sizes = shape.matrix, shape.kept_inputs
    return LayerStates(*(torch.randn(slots, *size, device=device) for size in sizes))


def rows_alike(rows: int, tokens: int, device: torch.device) -> StateBatch:
    """Rows of so many tokens, each of which reads a slot and writes one of the next ``rows``."""
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    bounds = tokens * torch.arange(rows + 1, dtype=torch.int32, device=device)
    marks = torch.full((rows * tokens,), -1, dtype=torch.int32, device=device)
    return StateBatch(bounds, slots, slots + rows, marks)


def compare(name: str, shape: Shape, device: torch.device) -> None:
    """Compare a layer with the reference on the host: what it gives, and the states behind it.

    Raises:
        AssertionError: they are too far apart.
    """
    parts, host = random_parts(shape), torch.device("cpu")
    reference, kernels = LAYERS[type(parts)]
    plain, layer = reference(parts), kernels(moved(parts, device))
    for rows, tokens in ((3, 1), (2, 5)):
        x, gates = random_inputs(shape, rows * tokens)
        states = random_states(shape, 2 * rows, host)
        there = LayerStates(*(part.to(device) for part in states))
        given = x.to(device), None if gates is None else gates.to(device)
        found = layer(*given, there, rows_alike(rows, tokens, device))
        batch = rows_alike(rows, tokens, host)
        unmarked = replace(batch, marks=batch.marks[:0].reshape(0, 2))
        words = f"{name}, {tokens} new tokens a row"
        apart(words, found, plain(x, gates, states, unmarked))
        for part, own, other in zip(LayerStates._fields, there, states, strict=True):
            if own.numel():
                apart(f"{words}, {part} of states", own, other)


def measure(name: str, shape: Shape, device: torch.device, bandwidth: float) -> None:
    """Print the times of a layer's kernels. States of a decode are not in the caches."""
    tiny = device.type == "cpu"
    batches, prompt = (TINY_ROWS, TINY_PROMPT) if tiny else (ROWS, PROMPT)
    parts, clock = moved(random_parts(shape), device), clock_of(device)
    layer = LAYERS[type(parts)][1](parts)
    for rows, tokens in [*((rows, 1) for rows in batches), (1, prompt)]:
        inputs = random_inputs(shape, rows * tokens)
        x, gates = (None if part is None else part.to(device) for part in inputs)
        moves = 2 * rows * shape.state_bytes
        copies = copies_beyond_caches(moves, device)
        states = [random_states(shape, 2 * rows, device) for _ in range(copies)]
        batch = rows_alike(rows, tokens, device)

        def call(copy: int, states: Any = states, given: Any = (x, gates, batch)) -> None:
            layer(given[0], given[1], states[copy], given[2])

        seconds = clock(call, copies)
        if tokens > 1:
            figure(f"{name}: a prompt of {tokens} tokens", 1e6 * seconds, "us")
            continue
        figure(f"{name}: decode, {rows} rows, time", 1e6 * seconds, "us")
        figure(f"{name}: decode, {rows} rows", moves / seconds / bandwidth, "of bandwidth")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    device, failed = torch.device(options.device), 0
    tiny = device.type == "cpu"  # in the interpreter
    torch.manual_seed(0)
    with torch.inference_mode():
        bandwidth = report_bandwidth(device, 2**12 if tiny else 2**29)
        for name, shape in (TINY if tiny else SHAPES).items():
            try:
                compare(name, shape, device)
                measure(name, shape, device, bandwidth)
            except Exception as error:  # the others may run
                traceback.print_exc()
                note(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                failed += 1
            gc.collect()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
