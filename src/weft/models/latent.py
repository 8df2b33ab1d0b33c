"""Multi-head latent attention around the cache, absorbed (DeepSeek-V2 2024, appendix C)."""

from __future__ import annotations

from weft.core.errors import InvariantError
from weft.kernels.arrays import Array, concatenate, contiguous
from weft.kernels.interface import OpTable
from weft.models.layers import Angles, LayerWeights
from weft.models.spec import ModelSpec


def project_latent(
    spec: ModelSpec, weights: LayerWeights, x: Array, angles: Angles, ops: OpTable
) -> tuple[Array, Array, Array]:
    """Return absorbed queries [T, H, R] and the row [T, 1, R] that is key and value of all heads.

    A row has its rotated numbers first, then the normalised latent.

    Args:
        x: [T, C], normalised.
        angles: of the rotated numbers.
    """
    latent = spec.latent
    if latent is None or weights.key_up is None:
        raise InvariantError("a model without latent attention has no latent")
    tokens, heads, plain = len(x), spec.num_heads, latent.plain_dim
    joint = ops.linear(x, weights.qkv, weights.qkv_bias)  # [T, Q + rank + rotated]
    width = joint.shape[1] - latent.row_dim
    q = joint[:, :width]
    if weights.query_up is not None:
        q = ops.rms_norm(q, weights.query_norm, latent.norm_eps, False)
        q = ops.linear(q, weights.query_up, None)
    q = contiguous(q).reshape(tokens, heads, latent.query_dim)
    row = joint[:, width : width + latent.rank]
    row = ops.rms_norm(row, weights.latent_norm, latent.norm_eps, False)
    rotated = contiguous(joint[:, width + latent.rank :]).reshape(tokens, 1, latent.rotated_dim)
    rotated = ops.rope(concatenate((q[..., plain:], rotated), 1), *angles)  # [T, H + 1, rotated]
    absorbed = ops.heads(q[..., :plain], weights.key_up)  # [T, H, rank]
    key = concatenate((rotated[:, heads:], row.reshape(tokens, 1, latent.rank)), 2)
    return concatenate((rotated[:, :heads], absorbed), 2), key, key


def expand_latent(spec: ModelSpec, weights: LayerWeights, attended: Array, ops: OpTable) -> Array:
    """Return the heads' outputs [T, H, value] of weighted sums of rows [T, H, R]."""
    if spec.latent is None or weights.value_up is None:
        raise InvariantError("a model without latent attention has no latent")
    return ops.heads(attended[..., spec.latent.rotated_dim :], weights.value_up)
