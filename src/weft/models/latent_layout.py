"""The parameters that make keys and values of the latents of MLA; see ``layout``. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from weft.models.parameter import Parameter, Piece, whole
from weft.models.spec import LatentSpec, ModelSpec


def latent_up(spec: ModelSpec, latent: LatentSpec) -> Iterator[Parameter]:
    """Yield what makes keys and values of latents, for each head."""
    heads, rank = spec.num_heads, latent.rank
    key, value = (heads, rank, latent.plain_dim), (heads, latent.value_dim, rank)
    if spec.layout.split_latent:
        yield whole("key_up", "self_attn.k_b_proj.weight", key)
        yield whole("value_up", "self_attn.v_b_proj.weight", value)
        return
    each = latent.plain_dim + latent.value_dim
    keys, values = [], []
    for head in range(heads):
        start, middle = head * each, head * each + latent.plain_dim
        tensor, of_key = "self_attn.kv_b_proj.weight", (slice(None), slice(start, middle))
        keys.append(Piece(tensor, (rank, heads * each), (head,), of_key, transposed=True))
        of_value = (slice(middle, start + each),)
        values.append(Piece(tensor, (heads * each, rank), (head,), of_value))
    yield Parameter("key_up", key, tuple(keys))
    yield Parameter("value_up", value, tuple(values))
