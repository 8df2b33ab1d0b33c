"""The two parts of a layer around attention, each as one native call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.kernels.arrays import (
    Array,
    address,
    contiguous,
    dtype_name,
    empty,
    strides,
    to_numpy,
)
from weft.kernels.cpu import _native
from weft.kernels.cpu.experts import bind_experts, correction, native_routing
from weft.kernels.cpu.rows import GATINGS, native_activation
from weft.kernels.parts import LatentParts, LayerParts, LayerShape, RoutedExperts, check_parts


class CpuLayer:
    """Native ``pre`` and ``post`` of one layer, bound to its weights.

    Attributes:
        native: for the stack.
        mixer: of a recurrent layer; else None.
    """

    def __init__(self, parts: LayerParts) -> None:
        """Bind a layer; its ``gate_up`` is packed as a gated matrix, and so are those of experts.

        Raises:
            ValueError: a part is missing, or shapes or dtypes do not fit together.
        """
        check_parts(parts)
        shape, matrices = parts.shape, parts.matrices
        if "gate_up" in matrices and not matrices["gate_up"].gated:
            raise ValueError("gate_up must be packed as a gated matrix")
        self._shape, self._rotated = shape, shape.head_dim
        self._hidden = matrices["qkv"].shape[1]
        self._dtype = matrices["qkv"].dtype
        self._width = matrices["input_gate"].shape[0] if "input_gate" in matrices else 0
        self.native = _native.Layer()
        self._kept: list[object] = [matrices]  # what the native side points to
        for name, matrix in matrices.items():
            setattr(self.native, "gate_up" if name == "up" else name, matrix.native)
        for name, weight in vars(parts.norms).items():
            if weight is not None:
                one = np.float32(shape.norm_plus_one and name != "router_scale")
                self._point_to(name, to_numpy(weight).astype(np.float32) + one)
        for name, bias in vars(parts.biases).items():
            if bias is not None:
                self._point_to(name, to_numpy(bias))
        if parts.experts is not None:
            self._bind_experts(parts.experts)
        if parts.scalar is not None:
            self.native.scalar = float(parts.scalar[0])
        if parts.activation is not None:
            self._point_to("activation_numbers", to_numpy(parts.activation))
        if parts.latent is not None:
            self._bind_latent(parts.latent)
        self.mixer = None if parts.mixed is None else parts.mixed.mixer
        if parts.mixed is not None:
            self.native.mixer = parts.mixed.mixer.native
            self.native.mixer_inputs = parts.mixed.inputs
            self.native.mixer_gates = parts.mixed.gates
        self._bind_shape(shape)

    def _bind_latent(self, latent: LatentParts) -> None:
        native = _native.Latent()
        native.rotated, native.epsilon = latent.rotated, latent.norm_eps
        if latent.query_up is not None:
            native.query_up = latent.query_up.native
        for name in ("query_norm", "row_norm"):
            weight = getattr(latent, name)
            if weight is not None:
                numbers = np.ascontiguousarray(to_numpy(weight).astype(np.float32))
                setattr(native, name, address(numbers))
                self._kept.append(numbers)
        for key_up, value_up in zip(latent.key_up, latent.value_up, strict=True):
            native.add_head(key_up.native, value_up.native)
        self.native.latent = native
        self._rotated = latent.rotated
        self._kept += [native, latent]

    def _bind_shape(self, shape: LayerShape) -> None:
        native = self.native
        native.heads = shape.heads
        native.kv_heads = shape.kv_heads
        native.head_size = shape.head_dim
        native.value_is_key = shape.value_is_key
        native.value_norm = shape.value_norm
        native.value_size = shape.value_dim or 0
        native.value_scale = shape.value_scale
        native.qk_norm_whole = shape.qk_norm_whole
        native.qk_norm_rotated = shape.qk_norm_rotated
        native.residual_scale = shape.residual_scale
        native.centred = shape.norm_centred
        native.parallel = shape.parallel_block
        native.norms_sums = shape.norms_sums
        native.own_query_angles = shape.own_query_angles
        native.epsilon = shape.norm_eps
        native.post_epsilon = shape.norm_eps if shape.post_eps is None else shape.post_eps
        native.activation, native.limit = native_activation(shape.activation)
        if shape.gating is not None:
            native.gating = GATINGS[shape.gating]

    def _bind_experts(self, experts: RoutedExperts) -> None:
        native, count = self.native, len(experts.down)
        biases = [
            None if bias is None else np.ascontiguousarray(to_numpy(bias))
            for bias in (experts.gate_up_bias, experts.down_bias)
        ]
        bound = bind_experts(experts.gate_up, experts.down, experts.activation, *biases)
        one = experts.down[0]
        if one.shape[0] != self._hidden or one.dtype != self._dtype:
            raise ValueError(
                f"experts of {one.shape[0]} in {one.dtype} do not fit a layer of {self._hidden} in "
                f"{self._dtype}"
            )
        bias = experts.correction_bias
        numbers = None if bias is None else correction(bias, count)
        native.experts = bound
        native.routing = native_routing(experts.routing, count, numbers)
        native.float_scores, native.mlp_gate = numbers is not None, experts.mlp_gate
        native.router_factor = self._hidden**-0.5
        if experts.router_bias is not None:
            self._point_to("router_bias", to_numpy(experts.router_bias))
        if experts.scale is not None:
            self._point_to("expert_scale", to_numpy(experts.scale).astype(np.float32))
        self._kept += [bound, experts, biases, numbers]

    def _point_to(self, name: str, numbers: NDArray[Any]) -> None:
        numbers = np.ascontiguousarray(numbers)
        setattr(self.native, name, address(numbers))
        self._kept.append(numbers)

    def pre(self, residual: Array, cos: Array, sin: Array) -> Array:
        """Norm, QKV, QK norm and rotation: [T, H + 2 Hkv, D], the heads of Q, of K, of V.

        Args:
            residual: [T, C].
            cos, sin: [T, R] float32; the first 2R dimensions of a head are rotated. [T, 2R], those
                of keys first, of a layer whose queries have angles of their own.

        Raises:
            ValueError: shapes or dtypes do not fit, or the layer is recurrent: only a stack
                computes what precedes its mixer.
        """
        self.check(residual, cos, sin)
        tokens, shape, half = residual.shape[0], self._shape, cos.shape[1]
        residual, cos, sin = contiguous(residual), contiguous(cos), contiguous(sin)
        heads = shape.heads + 2 * shape.kv_heads
        qkv = empty(residual, (tokens, heads, shape.head_dim))
        self.native.pre(address(residual), tokens, address(cos), address(sin), half, address(qkv))
        return qkv

    def post(self, attended: Array, residual: Array, inputs: Array | None = None) -> Array:
        """Output projection, MLP, experts, norms and sums: the new residual [T, C].

        Args:
            attended: [T, H, D], or [T, H * D].
            residual: [T, C].
            inputs: [T, P], of a layer with per-layer inputs.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        tokens, shape = self._rows(residual), self._shape
        wide = ((tokens, shape.heads, shape.head_dim), (tokens, shape.heads * shape.head_dim))
        if tuple(attended.shape) not in wide or dtype_name(attended.dtype) != self._dtype:
            raise ValueError(f"attended {list(attended.shape)} does not fit {tokens} tokens")
        attended, residual = contiguous(attended), contiguous(residual)
        out = empty(residual, residual.shape)
        rows, stride = self._inputs(inputs, tokens)
        self.native.post(address(attended), address(residual), rows, stride, tokens, address(out))
        return out

    def _inputs(self, inputs: Array | None, tokens: int) -> tuple[int, int]:
        """Return address and stride of per-layer inputs."""
        shape = (tokens, self._width) if self._width else None
        if inputs is None or shape is None:
            if inputs is not None or shape is not None:
                raise ValueError(f"per-layer inputs of {self._width} numbers are needed, or none")
            return 0, 0
        contiguous_rows = strides(inputs)[-1] == 1
        if inputs.shape != shape or dtype_name(inputs.dtype) != self._dtype or not contiguous_rows:
            raise ValueError(
                f"inputs {list(inputs.shape)} of {inputs.dtype}: expected {list(shape)} of "
                f"{self._dtype}"
            )
        return address(inputs), strides(inputs)[0]

    def check(self, residual: Array, cos: Array, sin: Array) -> None:
        """Raise ValueError if ``pre`` cannot take these."""
        if self.mixer is not None:
            raise ValueError("a recurrent layer has neither queries nor angles; run it in a stack")
        tokens, half = self._rows(residual), cos.shape[1]
        if (
            cos.shape != (tokens, half)
            or sin.shape != cos.shape
            or not dtype_name(cos.dtype) == dtype_name(sin.dtype) == "float32"
            or 2 * half > self._rotated * (1 + self._shape.own_query_angles)
        ):
            raise ValueError(f"angles {list(cos.shape)} do not fit {tokens} tokens")

    def _rows(self, residual: Array) -> int:
        tokens = int(residual.shape[0])
        if residual.shape != (tokens, self._hidden) or dtype_name(residual.dtype) != self._dtype:
            raise ValueError(
                f"residual {list(residual.shape)} of {residual.dtype} does not fit a layer of "
                f"{self._hidden} in {self._dtype}"
            )
        return tokens
