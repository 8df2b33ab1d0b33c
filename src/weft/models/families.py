"""All model families, by each of their names. A row of ``Family`` is all that a family needs."""

from __future__ import annotations

from collections.abc import Iterator

from weft.models.attention_families import ATTENTION_FAMILIES
from weft.models.bailing import BAILING
from weft.models.cohere import COHERE
from weft.models.conv_families import CONV_FAMILIES
from weft.models.encoders import ENCODERS
from weft.models.family import CLASSIFIER, Family, Reader
from weft.models.gemma import GEMMA
from weft.models.hybrids import HYBRIDS
from weft.models.kimi import KIMI
from weft.models.latent_families import LATENT_FAMILIES
from weft.models.llama_cousins import COUSINS
from weft.models.llama_like import LLAMA_LIKE
from weft.models.llama_variants import LLAMA_VARIANTS
from weft.models.mamba_families import MAMBA_FAMILIES
from weft.models.mimo import MIMO
from weft.models.mistrals import MISTRALS
from weft.models.moe_families import MOE_FAMILIES
from weft.models.step import STEP

ROWS = (
    *(*LLAMA_LIKE, *LLAMA_VARIANTS, *MISTRALS, *COHERE, *GEMMA, *COUSINS),
    *(*MOE_FAMILIES, *ATTENTION_FAMILIES, *HYBRIDS, *LATENT_FAMILIES),
    *(*KIMI, *MIMO, *STEP, *BAILING, *CONV_FAMILIES, *MAMBA_FAMILIES),
    *ENCODERS,
)
FAMILIES = {row.name: row for row in ROWS}


def _checkpoints() -> Iterator[tuple[str, str, tuple[Family, Reader]]]:
    """Architecture and model type of each kind of checkpoint, its family, and what reads it."""
    for row in FAMILIES.values():
        yield row.architecture, row.model_type, (row, row.read)
        for more in row.multimodal:
            yield more.architecture, more.model_type, (row, more.read)


BY_ARCHITECTURE = {architecture: found for architecture, _, found in _checkpoints()}
BY_ARCHITECTURE |= {alias: (row, row.read) for row in ROWS for alias in row.aliases}
BY_ARCHITECTURE |= {
    row.architecture.removesuffix("Model") + CLASSIFIER: (row, row.classifier)
    for row in ROWS
    if row.classifier is not None
}
BY_MODEL_TYPE = {model_type: found for _, model_type, found in _checkpoints()}
GGUF_FAMILIES = {
    name: row
    for row in FAMILIES.values()
    if row.gguf is not None
    for name in (row.gguf.name or row.name, *row.gguf.aliases)
}
