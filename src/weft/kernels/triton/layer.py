"""The two parts of a layer around attention, made of fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.float8 import Rounded
from weft.kernels.hosted import HostedExperts
from weft.kernels.parts import LayerParts, RoutedExperts, check_parts
from weft.kernels.triton.activation import act_mul_for, gate
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.triton.gated import gated_product
from weft.kernels.triton.gemm import SplitProduct
from weft.kernels.triton.latent import LatentHeads
from weft.kernels.triton.matrix import TritonMatrix, linear, logits, not_by_gemm, product
from weft.kernels.triton.moe import moe
from weft.kernels.triton.norm import NormKind, add, add_norm, norm
from weft.kernels.triton.prologue import enter
from weft.kernels.triton.rope import HeadNorm, Places, rotate
from weft.kernels.triton.route import route

Matrix = TritonMatrix | CodedMatrix


@dataclass(frozen=True)
class Sum:
    """A residual that the next norm adds up.

    Attributes:
        base: [T, C].
        more: [T, C], what is still to be added, which may lie in parts; None for nothing.
        post: [C], the weight of a norm of ``more`` before that; None for none.
    """

    base: Tensor
    more: Tensor | SplitProduct | None = None
    post: Tensor | None = None


class TritonLayer:
    """``pre`` and ``post`` of one layer, bound to its weights; or ``begin`` and ``end``.

    These leave a sum to the norm that follows it, which is in the next layer, and write keys and
    values where they belong: two passes over memory less for a layer.
    """

    def __init__(self, parts: LayerParts) -> None:
        """Bind a layer with an MLP, with experts in its place, or with shared experts beside them.

        Raises:
            ValueError: a part is missing, shapes or dtypes do not fit together, or there are parts
                that these kernels do not compute.
        """
        check_parts(parts)
        matrices, shape, norms = parts.matrices, parts.shape, parts.norms
        beside = norms.dense_post_norm is not None
        odd = shape.kv_heads == 0 or shape.value_is_key or shape.value_norm
        if beside or odd or "input_gate" in matrices or parts.scalar is not None:
            raise ValueError("layers with the extras of Gemma 4 run op by op on a GPU")
        self._shape = shape
        self._norms = norms
        self._biases = parts.biases
        self._qkv: Matrix = matrices["qkv"]
        self._output: Matrix = matrices["output"]
        self._output_gate: Matrix | None = matrices.get("output_gate")
        self._gate_up: Matrix | None = matrices.get("gate_up")
        self._down: Matrix | None = matrices.get("down")
        self._router: Matrix | None = matrices.get("router")
        self._experts = parts.experts
        self._latent = None if parts.latent is None else LatentHeads(parts.latent, shape.heads)
        self._kind = NormKind(shape.norm_eps, shape.norm_plus_one)
        weight = norms.qk_norm
        self._head_norm = (
            None if weight is None else HeadNorm(weight, shape.norm_eps, shape.norm_plus_one)
        )

    @property
    def value_dim(self) -> int | None:
        """Of latent attention, the numbers of the row of a token that are its value."""
        return None if self._latent is None else self._latent.value_dim

    def pre(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm, QKV, QK norm and rotation: [T, H + 2 Hkv, D], the heads of Q, of K, of V.

        Of latent attention absorbed queries, and the row of each token twice.

        Args:
            residual: [T, C].
            cos, sin: [T, R] float32; the first 2R dimensions of a head are rotated.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        x = norm(residual, self._norms.input_norm, self._kind, self._qkv.inputs)
        return self._rotated(product(x, self._qkv, self._biases.qkv_bias), cos, sin, None)

    def post(self, attended: Tensor, residual: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Output projection, MLP or experts, norms and both sums: the new residual [T, C].

        Args:
            attended: [T, H, D].
            residual: [T, C].

        Raises:
            ValueError: shapes or dtypes do not fit, or there are per-layer inputs.
        """
        if inputs is not None:
            raise ValueError("this layer takes no per-layer inputs")
        total = self.end(attended, residual)
        assert total.more is not None
        return add(total.more, total.base, total.post, self._kind)

    def enter(
        self, ids: Tensor, in_flight: Tensor | None, table: Tensor | TritonMatrix, factor: float
    ) -> tuple[Tensor | Rounded, Tensor]:
        """``normed`` of the embeddings of ids [T] times a factor; see ``prologue.enter``."""
        norm_weight = self._norms.input_norm
        return enter(ids, in_flight, table, factor, norm_weight, self._kind, self._qkv.inputs)

    def normed(self, total: Sum) -> tuple[Tensor | Rounded, Tensor]:
        """Return what ``begin`` takes, and the residual [T, C]."""
        return add_up(total, self._norms.input_norm, self._kind, self._qkv)

    def begin(self, x: Tensor | Rounded, cos: Tensor, sin: Tensor, places: Places) -> Tensor:
        """Return the queries [T, H, D] of normalised x [T, C]; keys and values are written."""
        qkv = product(x, self._qkv, self._biases.qkv_bias)
        return self._rotated(qkv, cos, sin, places)

    def end(self, attended: Tensor, residual: Tensor) -> Sum:
        """``post`` but for its last sum."""
        norms, biases = self._norms, self._biases
        if self._latent is not None:
            attended = self._latent.outputs(attended)
        attended = self._gated_output(attended, residual)
        y = product(attended.flatten(1), self._output, biases.output_bias)  # [T, C]
        assert norms.mlp_norm is not None
        alone = self._gate_up if self._experts is None else None
        inputs = "float" if alone is None else alone.inputs
        x, residual = add_norm(
            y, residual, norms.post_attention_norm, norms.mlp_norm, self._kind, inputs
        )
        return Sum(residual, self._feed_forward(x), norms.post_mlp_norm)

    def _gated_output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention's output [T, H, D] times the gate that the layer's input opens."""
        matrix, kind = self._output_gate, self._shape.gating
        if matrix is None or kind is None:
            return attended
        x = norm(residual, self._norms.input_norm, self._kind, matrix.inputs)
        return gate(attended, linear(x, matrix, None), kind)

    def _feed_forward(self, x: Tensor | Rounded) -> Tensor | SplitProduct:
        if self._experts is not None:
            assert isinstance(x, Tensor)
            assert self._router is not None
            return self._mixture(x, self._experts, self._router)
        assert self._gate_up is not None
        assert self._down is not None
        biases = self._biases
        return product(self._gated(x, self._gate_up, self._down), self._down, biases.down_bias)

    def _mixture(self, x: Tensor, experts: RoutedExperts, router: Matrix) -> Tensor:
        """The sum of the routed experts of rows [T, C], and of the shared ones if there are any."""
        corrected = experts.correction_bias is not None
        scores = logits(x, router) if corrected else product(x, router, experts.router_bias)
        gates = None
        if experts.mlp_gate:
            gates = torch.empty(len(x), dtype=torch.float32, device=x.device)
        shares, ids = route(scores, experts.routing, experts.correction_bias, gates)
        # Multiplying by 1 puts a kernel behind what is copied to or from the host: what begins
        # early may follow no copy, see ``pdl``.
        hosted = isinstance(experts.down, HostedExperts)
        shared = None
        if hosted:
            experts.down.send(x, shares, ids)
            x = x if self._gate_up is None else x * 1
        if self._gate_up is not None and self._down is not None:
            rows = self._gated(x, self._gate_up, self._down)
            shared = linear(rows, self._down, self._biases.down_bias)
        if not hosted:
            of = experts.gate_up, experts.down, experts.activation
            biases = experts.gate_up_bias, experts.down_bias
            return moe(x, shares, ids, *of, *biases, shared, gates)
        y: Tensor = experts.down.receive(x)
        if shared is None:
            return y * 1
        return y + (shared if gates is None else (shared.float() * gates.unsqueeze(1)).to(y.dtype))

    def _gated(self, x: Tensor | Rounded, gate_up: Matrix, down: Matrix) -> Tensor | Rounded:
        """Activated gates times values [T, I], as ``down`` takes them if it is rounded here."""
        shape, bias = self._shape, self._biases.gate_up_bias
        rows = x.codes if isinstance(x, Rounded) else x
        if not_by_gemm(len(rows), gate_up, rows.device):
            y = linear(x, gate_up, bias)  # [T, 2 I]
            return act_mul_for(down.inputs, y, shape.activation)
        assert isinstance(gate_up, TritonMatrix)
        inputs = "float" if not_by_gemm(len(rows), down, rows.device) else down.inputs
        return gated_product(x, gate_up, bias, shape.activation, inputs)

    def _rotated(
        self, qkv: Tensor | SplitProduct, cos: Tensor, sin: Tensor, places: Places | None
    ) -> Tensor:
        shape = self._shape
        if self._latent is not None:
            return self._latent.queries(qkv, cos, sin, places)
        if isinstance(qkv, Tensor):
            qkv = qkv.view(len(qkv), shape.heads + 2 * shape.kv_heads, shape.head_dim)
        return rotate(qkv, shape.heads, shape.kv_heads, cos, sin, self._head_norm, places)


def add_up(
    total: Sum,
    weight: Tensor,
    kind: NormKind,
    matrix: Matrix | None,
    out: Tensor | None = None,
) -> tuple[Tensor | Rounded, Tensor]:
    """Return the norm of a sum, as ``matrix`` takes it, and the sum [T, C].

    Args:
        out: as of ``norm.add_norm``.
    """
    inputs = "float" if matrix is None else matrix.inputs
    if total.more is None:
        return norm(total.base, weight, kind, inputs, out), total.base
    return add_norm(total.more, total.base, total.post, weight, kind, inputs, out)
