"""Parameters of encoders beside their layers, and of what pooled states go through. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from weft.models.encoder_spec import DenseSpec
from weft.models.parameter import Parameter, renamed_on_disk, whole
from weft.models.spec import ModelSpec


def beside_tokens(spec: ModelSpec) -> Iterator[Parameter]:
    """What an encoder adds to embeddings of tokens, and the norm of the sum."""
    encoder, hidden, names = spec.encoder, spec.hidden_size, spec.layout.renamed
    if encoder is None:
        return
    tables = {"embed_positions": encoder.positions, "embed_types": encoder.token_types}
    for name, rows in tables.items():
        if rows:
            yield whole(name, renamed_on_disk(f"{name}.weight", names), (rows, hidden))
    if encoder.embedding_norm:
        yield whole("embed_norm", renamed_on_disk("embed_norm.weight", names), (hidden,))
        if encoder.norm_bias:
            yield whole("embed_norm_bias", renamed_on_disk("embed_norm.bias", names), (hidden,))


def dense(spec: ModelSpec) -> Iterator[Parameter]:
    """What pooled states go through, with names as ``dense.0.dense``."""
    for number, one in enumerate(spec.dense):
        for name, (tensor, shape) in _tensors(one).items():
            yield whole(f"dense.{number}.{name}", tensor, shape)


def dense_tensors(spec: ModelSpec) -> set[str]:
    """Names on disk of what pooled states go through."""
    return {tensor for one in spec.dense for tensor, _ in _tensors(one).values()}


def _tensors(one: DenseSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    home = f"{one.folder}/" if one.folder else ""
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "dense": (f"{home}{one.tensor}.weight", (one.outputs, one.inputs))
    }
    if one.bias:
        found["dense_bias"] = (f"{home}{one.tensor}.bias", (one.outputs,))
    if one.norm:
        found["dense_norm"] = (f"{one.norm}.weight", (one.outputs,))
    return found
