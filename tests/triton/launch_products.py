"""Launches products and mixtures of experts in shapes of real models, for ``ahead``."""

from __future__ import annotations

import torch
from coded_weights import drawn_weight
from launch_attention import SHARED
from weights import make

from weft.kernels.triton import coded, fp8, matrix, pdl
from weft.kernels.triton.coded_matrix import TILE, CodedMatrix
from weft.kernels.triton.gated import gated_product
from weft.kernels.triton.matrix import TritonMatrix
from weft.kernels.triton.moe import moe
from weft.kernels.tuning import Heuristic

OUTPUTS, INPUTS, WIDTH = 4608, 3584, 18_944  # projections of Qwen2.5-7B, and its MLP
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768  # of Qwen3-30B-A3B
KINDS = ("bfloat16", "float32", "fp8", "fp8 weights", "int8")
CODED = ("int4 by 32", "int4 by 128, zeros", "int8 by 64", "int4 by row, zeros", "mxfp4")
CODED += ("e4m3 by 128", "e4m3 weights by 64")
OPS = {"gemm": (*KINDS, *CODED), "gated": KINDS, "moe": (*KINDS, *CODED)}
EVERY = [
    f"{op}/{kind}/{rows}" for op, kinds in OPS.items() for kind in kinds for rows in (8, 64, 300)
]


def launch(capability: int, *cases: str) -> None:
    """Launch cases such as ``gemm/fp8/64``: op, kind of weights, rows; none for all of them."""
    matrix.has_fp8 = fp8.has_fp8 = coded.has_fp8 = lambda _: capability >= 89
    fp8.interpreted = lambda: False
    pdl.facts.capability = lambda _: divmod(capability, 10)
    tuning = Heuristic(132, SHARED[capability])
    for case in cases or EVERY:
        op, kind, rows = case.split("/")
        {"gemm": gemm, "gated": mlp, "moe": experts}[op](kind, int(rows), tuning)


def of_size(
    kind: str, shape: tuple[int, ...], tuning: Heuristic, parameter: str
) -> TritonMatrix | CodedMatrix:
    """A matrix of one number, or of one row of codes, in a shape: more is not read."""
    if kind in CODED:
        few, _ = drawn_weight(kind, (*(1,) * (len(shape) - 2), 6, 264), tuning, parameter=parameter)
        few._sizes = shape
        pieces, *experts = few.form.pieces(shape[-1]), *shape[:-2]
        tiles = (*experts, -(-shape[-2] // TILE), pieces, TILE, few.form.row_bytes)
        few.codes = few.codes.flatten()[: few.form.row_bytes].expand(tiles)
        return few
    made = make(kind, torch.ones(*(1,) * (len(shape) - 2), 6, 8), tuning, parameter)
    made.values = made.values.flatten()[:1].expand(shape)
    return made


def gemm(kind: str, rows: int, tuning: Heuristic) -> None:
    made = of_size(kind, (OUTPUTS, INPUTS), tuning, "qkv")
    x, bias = torch.ones(rows, INPUTS, dtype=made.dtype), torch.ones(OUTPUTS, dtype=made.dtype)
    matrix.linear(x, made, bias, torch.ones(rows, OUTPUTS, dtype=made.dtype))
    if isinstance(made, CodedMatrix):
        matrix.product(x, made, bias)
        coded.gather(made, torch.zeros(rows, dtype=torch.int64))


def mlp(kind: str, rows: int, tuning: Heuristic) -> None:
    """Gate and up in one product, the projection behind it, and that of what attention gives."""
    gate_up = of_size(kind, (2 * WIDTH, INPUTS), tuning, "gate_up")
    down = of_size(kind, (INPUTS, WIDTH), tuning, "down")
    x = torch.ones(rows, INPUTS, dtype=down.dtype)
    matrix.product(gated_product(x, gate_up, None, "silu", down.inputs), down, None)
    if rows <= matrix.ROUNDED_WITHIN:
        matrix.product(x, of_size(kind, (INPUTS, INPUTS), tuning, "output"), None)


def experts(kind: str, rows: int, tuning: Heuristic) -> None:
    """``rows`` for each expert."""
    gate_up = of_size(kind, (EXPERTS, 2 * INNER, HIDDEN), tuning, "expert_gate_up")
    down = of_size(kind, (EXPERTS, HIDDEN, INNER), tuning, "expert_down")
    tokens = rows * EXPERTS // TOP_K
    chosen = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    x = torch.ones(tokens, HIDDEN, dtype=down.dtype)
    moe(x, torch.ones(tokens, TOP_K), chosen, gate_up, down, "silu")
