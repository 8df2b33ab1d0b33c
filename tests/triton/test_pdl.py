"""Programmatic dependent launch: where it is on, and that no kernel can forget to wait."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import launch_pdl
import pytest
import torch
from ahead import compiled

from weft.kernels.triton import pdl

SOURCES = sorted(Path(pdl.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("capability", [80, 90])
def test_programmatic_launches_begin_with_hopper(capability: int) -> None:
    (kernel,) = compiled("launch_pdl.launch", capability)
    assert kernel.programmatic == (capability >= 90)


def test_programmatic_kernels_are_interpreted() -> None:
    numbers = torch.arange(3.0)
    launch_pdl.double(numbers)
    assert numbers.tolist() == [0, 2, 4]


def dependent_kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Kernels with the constant ``PDL``, but for the helpers themselves."""
    functions = (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef))
    for function in functions:
        named = "PDL" in [argument.arg for argument in function.args.args]
        if named and function.name not in ("wait", "launch_dependents"):
            yield function


def waits(kernel: ast.FunctionDef) -> bool:
    """Whether all programs wait, and none has written or ended before."""
    for statement in kernel.body:
        text = ast.unparse(statement)
        if text == "pdl.wait(PDL)":
            return True
        if any(word in text for word in ("return", "store", "atomic")):
            return False
    return False


def test_every_program_of_a_dependent_kernel_waits() -> None:
    """A program that ends without it lets later kernels begin before earlier ones have ended."""
    found = {
        kernel.name: waits(kernel)
        for path in SOURCES
        for kernel in dependent_kernels(path.read_text())
    }
    assert {"list_kernel", "decode_kernel", "gemm", "coded_gemm"} <= set(found)
    assert all(found.values()), found


@pytest.mark.parametrize(
    "body",
    [
        "tl.store(x, 1)\n    pdl.wait(PDL)",
        "if x:\n        return\n    pdl.wait(PDL)",
        "if x:\n        pdl.wait(PDL)",
        "pdl.launch_dependents(PDL)",
    ],
)
def test_a_kernel_that_does_not_wait_is_noticed(body: str) -> None:
    (kernel,) = dependent_kernels(f"def kernel(x, PDL):\n    {body}\n")
    assert not waits(kernel)
