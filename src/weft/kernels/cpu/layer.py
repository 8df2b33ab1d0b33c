"""The two parts of a layer around attention, each as one native call."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from weft.kernels.cpu import _native
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.parts import Biases, LayerShape, Norms, check_parts

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # the numbers of `Activation` in panel.hpp


class CpuLayer:
    """Native ``pre`` and ``post`` of one layer, bound to its weights."""

    def __init__(
        self,
        shape: LayerShape,
        matrices: dict[str, CpuMatrix],
        norms: Norms,
        biases: Biases,
        moe: object = None,
    ) -> None:
        """Bind the matrices ``qkv``, ``output``, ``gate_up`` (gated) and ``down``.

        Raises:
            ValueError: shapes or dtypes do not fit together, or there is a ``moe`` of experts.
        """
        if moe is not None:
            raise ValueError("layers of experts run op by op on a CPU")
        check_parts(shape, matrices, norms, biases)
        if not matrices["gate_up"].gated:
            raise ValueError("gate_up must be packed as a gated matrix")
        self._shape = shape
        self._hidden = matrices["qkv"].shape[1]
        self._dtype = matrices["qkv"].dtype
        native = _native.Layer()
        kept: list[object] = []  # what the native side points to
        for name, matrix in matrices.items():
            setattr(native, name, matrix.native)
            kept.append(matrix)
        for part in (norms, biases):
            for field in fields(part):
                tensor = getattr(part, field.name)
                if tensor is None:
                    continue
                tensor = tensor.contiguous()
                if part is norms:
                    tensor = 1.0 + tensor.float() if shape.norm_plus_one else tensor.float()
                setattr(native, field.name, tensor.data_ptr())
                kept.append(tensor)
        native.heads = shape.heads
        native.kv_heads = shape.kv_heads
        native.head_size = shape.head_dim
        native.epsilon = shape.norm_eps
        native.activation = ACTIVATIONS[shape.activation]
        self.native, self._kept = native, kept

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm, QKV, QK norm and rotation: [T, H + 2 Hkv, D], the heads of Q, of K, of V.

        Args:
            residual: [T, C].
            cos, sin: [T, R] float32; the first 2R dimensions of a head are rotated.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        self.check(residual, cos, sin)
        tokens, shape, half = residual.shape[0], self._shape, cos.shape[1]
        residual, cos, sin = residual.contiguous(), cos.contiguous(), sin.contiguous()
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.empty((tokens, heads, shape.head_dim), dtype=self._dtype)
        self.native.pre(
            residual.data_ptr(), tokens, cos.data_ptr(), sin.data_ptr(), half, qkv.data_ptr()
        )
        return qkv

    def post(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, MLP, norms and both residual sums: the new residual [T, C].

        Args:
            attended: [T, H, D].
            residual: [T, C].

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        tokens, shape = self._rows(residual), self._shape
        if attended.shape != (tokens, shape.heads, shape.head_dim) or attended.dtype != self._dtype:
            raise ValueError(f"attended {list(attended.shape)} does not fit {tokens} tokens")
        attended, residual = attended.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        self.native.post(attended.data_ptr(), residual.data_ptr(), tokens, out.data_ptr())
        return out

    def check(self, residual: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Raise ValueError if ``pre`` cannot take these."""
        tokens, half = self._rows(residual), cos.shape[1]
        if (
            cos.shape != (tokens, half)
            or sin.shape != cos.shape
            or not cos.dtype == sin.dtype == torch.float32
            or 2 * half > self._shape.head_dim
        ):
            raise ValueError(f"angles {list(cos.shape)} do not fit {tokens} tokens")

    def _rows(self, residual: Tensor) -> int:
        tokens = residual.shape[0]
        if residual.shape != (tokens, self._hidden) or residual.dtype != self._dtype:
            raise ValueError(
                f"residual {list(residual.shape)} of {residual.dtype} does not fit a layer of "
                f"{self._hidden} in {self._dtype}"
            )
        return tokens
