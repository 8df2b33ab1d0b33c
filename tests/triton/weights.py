"""Matrices of every kind, and launches of any blocks, for the tests of products."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.arrays import dtype_name
from weft.kernels.storage import Storage
from weft.kernels.triton import matrix
from weft.kernels.triton.matrix import TritonMatrix
from weft.kernels.tuning import Launch, LaunchShape

KINDS = ("float32", "bfloat16", "fp8", "fp8 weights", "int8")


class Fixed:
    """One launch for everything."""

    source = "the test"

    def __init__(self, block_m: int, block_n: int, block_k: int, splits: int) -> None:
        self._launch = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        self._launch |= {"num_warps": 4, "num_stages": 3}
        self._splits = splits

    def launch(self, shape: LaunchShape, rows: int) -> Launch:  # noqa: ARG002
        return self._launch | ({"SPLITS": self._splits} if shape.op == "gemm" else {})


def make(kind: str, weight: Tensor, tuning, parameter: str = "down") -> TritonMatrix:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    if kind in ("float32", "bfloat16"):
        return matrix.pack(parameter, weight.to(dtype), tuning)
    storage = {
        "fp8": Storage(8, None, format="e4m3"),
        "fp8 weights": Storage(8, None, format="e4m3", inputs="float"),
        "int8": Storage(8, None),
    }[kind]
    made = matrix.quantised(
        parameter, weight.shape, dtype_name(dtype), storage, device=weight.device, tuning=tuning
    )
    assert isinstance(made, TritonMatrix)
    places = zip(made, weight, strict=True) if weight.dim() == 3 else [(made, weight)]
    for one, rows in places:
        one.write(0, rows[:5])
        one.write(5, rows[5:])
    return made


def without_ties(x: Tensor, group: int) -> Tensor:
    """The same rows in bfloat16, of which no group has a number amid two neighbours of E4M3.

    By the scale of their group, whose largest number is one of 8 bits that has no multiple there.
    The division of a GPU is off by up to two of its last bits, so a tie would fall to either side.
    """
    x = x.clamp(-3.9, 3.9)
    x[:, ::group] = 255 / 64
    return x
