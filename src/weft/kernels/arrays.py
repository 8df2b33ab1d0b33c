"""Arrays of numpy or torch: what the two libraries write differently, and nothing else.

The CPU path runs on numpy arrays, with ``ml_dtypes`` for bfloat16 and FP8; the GPU path and the
reference on torch tensors. Code that both run is written against the op table, the operators and
methods that arrays share, and these functions. None imports torch: who passes a tensor has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any  # numpy.ndarray or torch.Tensor
View: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Shared with `DType` in tensor.hpp.
CODES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int32": 3,
    "int64": 4,
    "int8": 5,
    "float8_e4m3fn": 6,
}
NAMES = {code: name for name, code in CODES.items()}
_FROM_ML_DTYPES = ("bfloat16", "float8_e4m3fn")
_BITS = {1: "uint8", 2: "int16"}  # types of the same size that torch and numpy both know


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return a numpy dtype by its name, also ``bfloat16`` and ``float8_e4m3fn``."""
    return np.dtype(getattr(ml_dtypes, name) if name in _FROM_ML_DTYPES else name)


@cache
def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of numpy or torch, such as ``bfloat16``.

    Kept, as numpy puts a name together anew each time, and each native call asks for several.
    """
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def is_numpy(x: Array) -> bool:
    """Whether an array is numpy's."""
    return isinstance(x, np.ndarray)


def on_cpu(x: Array) -> bool:
    """Whether an array lies in the host's memory."""
    return is_numpy(x) or bool(x.is_cpu)


def code_of(name: str, x: Array) -> int:
    """Return the type code of an array for native calls; ValueError if it has none."""
    code = CODES.get(dtype_name(x.dtype))
    if code is None or not on_cpu(x):
        where = "the host" if on_cpu(x) else x.device
        raise ValueError(f"{name} of shape {list(x.shape)} has type {x.dtype} on {where}")
    return code


def address(x: Array) -> int:
    """Return where the numbers of an array begin."""
    if is_numpy(x):
        found: int = x.__array_interface__["data"][0]
        return found
    return int(x.data_ptr())


def strides(x: Array) -> tuple[int, ...]:
    """Return the strides of an array in elements."""
    if is_numpy(x):
        size = x.itemsize
        return tuple([stride // size for stride in x.strides])
    return tuple(x.stride())


def view(name: str, x: Array) -> View:
    """Return address, type code, shape and strides; ValueError for a type without a code."""
    return address(x), code_of(name, x), tuple(x.shape), strides(x)


def contiguous(x: Array) -> Array:
    """Return an array whose numbers lie one behind the other: the same one if they do."""
    return np.ascontiguousarray(x) if is_numpy(x) else x.contiguous()


def dense_rows(x: Array) -> Array:
    """Return an array whose last dimension is contiguous: the same one if it is."""
    return x if strides(x)[-1] == 1 or x.shape[-1] == 1 else contiguous(x)


def empty(like: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
    """Return an array of the library of another one, and of its type if none is named."""
    if is_numpy(like):
        return np.empty(shape, like.dtype if dtype is None else numpy_dtype(dtype))
    if dtype is None:
        return like.new_empty(shape)
    return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))


def to_numpy(x: Array) -> NDArray[Any]:
    """Return an array as numpy's: the same memory if it lies on the host."""
    if is_numpy(x):
        return x  # type: ignore[no-any-return]
    x, name = x.detach().cpu(), dtype_name(x.dtype)
    if name in _FROM_ML_DTYPES:
        bits = getattr(sys.modules["torch"], _BITS[x.element_size()])
        return x.view(bits).numpy().view(numpy_dtype(name))  # type: ignore[no-any-return]
    return x.numpy()  # type: ignore[no-any-return]


def from_numpy(like: Array, array: NDArray[Any]) -> Array:
    """Return numpy's array in the library and on the device of another one."""
    return array if is_numpy(like) else to_torch(array).to(like.device)


def to_torch(array: NDArray[Any]) -> Any:
    """Return numpy's array as a torch tensor on the host, of the same memory."""
    torch, name = sys.modules["torch"], array.dtype.name
    if not array.flags.writeable:
        array = array.copy()
    if name in _FROM_ML_DTYPES:
        return torch.from_numpy(array.view(_BITS[array.itemsize])).view(getattr(torch, name))
    return torch.from_numpy(array)


def scaled(x: Array, factor: float) -> Array:
    """Return an array times a factor that is first rounded to its type."""
    if factor == 1.0:
        return x
    if is_numpy(x):
        return x * x.dtype.type(factor)
    return x * sys.modules["torch"].tensor(factor, dtype=x.dtype).item()


def times(x: Array, factor: float) -> Array:
    """Return an array times a factor, computed in float32 and rounded to its type."""
    if is_numpy(x):
        return (x.astype(np.float32) * np.float32(factor)).astype(x.dtype)
    return x * factor


def times_rows(x: Array, factors: Array) -> Array:
    """Return rows [T, C] times a factor each [T, 1] float32, rounded once to the type of ``x``."""
    if is_numpy(x):
        return (x.astype(np.float32) * factors).astype(x.dtype)
    return (x.float() * factors).to(x.dtype)


def where(condition: Array, x: Any, y: Any) -> Array:
    """Return the numbers of ``x`` where a condition holds, else those of ``y``."""
    if is_numpy(condition):
        return np.where(condition, x, y)
    return sys.modules["torch"].where(condition, x, y)


def nan_to_num(x: Array) -> Array:
    """Return an array with 0 for NaN and the largest numbers for infinities; it is overwritten."""
    return np.nan_to_num(x, copy=False) if is_numpy(x) else x.nan_to_num_()


def isfinite(x: Array) -> Array:
    """Return which numbers are finite."""
    return np.isfinite(x) if is_numpy(x) else x.isfinite()


def concatenate(arrays: Sequence[Array], axis: int) -> Array:
    """Return arrays side by side along an axis."""
    if is_numpy(arrays[0]):
        return np.concatenate(arrays, axis=axis)
    return sys.modules["torch"].cat(tuple(arrays), dim=axis)


def as_float32(x: Array) -> Array:
    """Return an array in float32: the same one if it is."""
    return x.astype(np.float32, copy=False) if is_numpy(x) else x.float()


def as_float64(x: Array) -> Array:
    """Return an array in float64."""
    return x.astype(np.float64) if is_numpy(x) else x.double()
