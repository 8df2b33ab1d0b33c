"""Kernels for GPUs on a CPU: in Triton's interpreter, patched to be faster."""

from __future__ import annotations

import os
import types

import where


def prepare() -> None:
    """Have kernels interpreted that are defined from now on, unless they run on a GPU."""
    if not where.ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
        _spare_the_interpreter()
        _sum_alike_in_each_row()
        _refuse_unknown_arguments()


def _spare_the_interpreter() -> None:
    """Swap the functions of the language once a kernel.

    The interpreter does so at every call of a function within a kernel, which takes longer than
    most of these functions.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    swap = interpreter._patch_lang
    if swap.__name__ == "<lambda>":  # done before
        return
    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda _kernel: swap(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **more: self.rewrite()(
        *args, **more
    )


def _sum_alike_in_each_row() -> None:
    """Have products of tiles sum in the same order wherever a row lies, as those of a GPU do.

    What numpy takes for them may not: OpenBLAS has other kernels for the last rows on some
    processors without AVX-512.
    """
    import numpy as np
    from triton.runtime import interpreter

    numpy = types.ModuleType("numpy")
    numpy.__dict__.update(np.__dict__)
    numpy.matmul = lambda a, b, dtype: np.einsum("...ik,...kj->...ij", a, b, dtype=dtype)
    interpreter.np = numpy


def _refuse_unknown_arguments() -> None:
    """Have launches fail whose keywords are neither arguments of the kernel nor options of CUDA.

    As they do where kernels are compiled; the interpreter leaves out what it does not know.
    """
    from dataclasses import fields

    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime import interpreter

    execute = interpreter.GridExecutor.__call__
    if execute.__name__ == "checked":  # done before
        return
    options = {field.name for field in fields(CUDAOptions)}

    def checked(self: interpreter.GridExecutor, *args: object, **more: object) -> None:
        unknown = more.keys() - options - set(self.arg_names)
        if unknown:
            raise KeyError(f"{self.fn.__name__} has no argument {', '.join(sorted(unknown))}")
        execute(self, *args, **more)

    interpreter.GridExecutor.__call__ = checked
