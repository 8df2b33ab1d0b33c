"""Specs of encoders beside their layers, and of the layers behind pooling. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderSpec:
    """A model that reads a text in both directions, whole in one step (Devlin et al. 2018, BERT).

    Without norms before attention and the MLP its layers normalise residual sums.

    Attributes:
        positions: rows of the table of positions; 0: it has none.
        first_position: the row of the first token.
        token_types: rows of the table of kinds of tokens, of which texts have the first; 0: it has
            none.
        typed_pairs: tokens of the second text of a pair have the second kind.
        embedding_norm: embeddings are normalised, with a weight.
        norm_bias: norms have biases.
    """

    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    typed_pairs: bool = False
    embedding_norm: bool = False
    norm_bias: bool = False


@dataclass(frozen=True)
class DenseSpec:
    """A product that pooled states go through: of a classifier, or sentence-transformers' Dense.

    Attributes:
        tensor: its name on disk, without ``weight`` or ``bias``.
        activation: ``identity``, ``tanh`` or ``gelu``.
        norm: the name of a LayerNorm that follows; empty: none does.
        folder: of the model folder, that has its weights; empty: they are the checkpoint's.
    """

    tensor: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"
    norm: str = ""
    folder: str = ""
