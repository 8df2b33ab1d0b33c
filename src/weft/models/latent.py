"""Multi-head latent attention around the cache, absorbed (DeepSeek-V2 2024, appendix C)."""

from __future__ import annotations

from weft.core.errors import InvariantError
from weft.kernels.arrays import Array, concatenate, contiguous, times_rows, where
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
        angles: of the rotated numbers; where queries are scaled by position, theirs behind.
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
    turned = contiguous(joint[:, width + latent.rank :]).reshape(tokens, 1, latent.rotated_dim)
    held, asked = q[..., :plain], q[..., plain:]
    half = latent.rotated_dim // 2
    if angles[0].shape[1] > half:  # queries have angles of their own
        ours = (contiguous(part[:, half:]) for part in angles)
        asked, held = ops.rope(asked, *ours), times_rows(held, _query_factors(angles, half))
        turned = ops.rope(turned, *(contiguous(part[:, :half]) for part in angles))
    else:
        both = ops.rope(concatenate((asked, turned), 1), *angles)  # [T, H + 1, rotated]
        asked, turned = both[:, :heads], both[:, heads:]
    absorbed = ops.heads(held, weights.key_up)  # [T, H, rank]
    key = concatenate((turned, row.reshape(tokens, 1, latent.rank)), 2)
    return concatenate((asked, absorbed), 2), key, key


def _query_factors(angles: Angles, half: int) -> Array:
    """Return what the angles of queries are multiples of those of keys by: [T, 1, 1]."""
    (cos, queries_cos), (sin, queries_sin) = (
        (part[:, :1, None], part[:, half : half + 1, None]) for part in angles
    )
    large = abs(cos) >= abs(sin)
    return where(large, queries_cos, queries_sin) / where(large, cos, sin)


def expand_latent(spec: ModelSpec, weights: LayerWeights, attended: Array, ops: OpTable) -> Array:
    """Return the heads' outputs [T, H, value] of weighted sums of rows [T, H, R]."""
    if spec.latent is None or weights.value_up is None:
        raise InvariantError("a model without latent attention has no latent")
    return ops.heads(attended[..., spec.latent.rotated_dim :], weights.value_up)
