"""Facts of the served model that the API layer uses, and the bounds of its requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft import __version__
from weft.core.images import ImageInput
from weft.core.pooling import TEXT_MODEL, Pooling
from weft.core.served import ServedModel
from weft.core.types import DEFAULT_CLASSES, ServiceClass


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Facts of a model's weights.

    Attributes:
        family: of the architecture, as configs name it.
        parameters: how many numbers they are.
        num_bytes: memory that they take.
        stored: how most of them are stored; see `ServedModel.weights`.
        device: where they lie: ``cpu``, or the name of a GPU.
    """

    family: str = "unknown"
    parameters: int = 0
    num_bytes: int = 0
    stored: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of the served model.

    Attributes:
        served_names: names that requests may use; answers to ``/v1/models`` list all of them.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
        eos_token_ids: ids that end a sequence.
        sampling_defaults: what ``SamplingParams`` takes for fields that a request leaves open.
        created: Unix time in seconds.
        system_fingerprint: changes when the same seed may give other tokens.
        base_seed: makes the seeds of requests without one repeatable.
        hidden_size: numbers of an embedding.
        classes: the class table.
        pooling: what the model can be asked for.
        images, no_images: see `ServedModel`.
    """

    served_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = 0
    system_fingerprint: str = "weft"
    base_seed: int | None = None
    hidden_size: int = 0
    classes: tuple[ServiceClass, ...] = DEFAULT_CLASSES
    weights: WeightFacts = WeightFacts()
    pooling: Pooling = TEXT_MODEL
    images: ImageInput | None = None
    no_images: str = ""

    @classmethod
    def of(
        cls, served: ServedModel, names: tuple[str, ...] = (), base_seed: int | None = None
    ) -> ModelCard:
        """The card of an engine's model, by other names if there are any."""
        return cls(
            served_names=names or (served.name,),
            vocab_size=served.vocab_size,
            max_model_len=served.max_model_len,
            eos_token_ids=served.eos_token_ids,
            sampling_defaults=served.sampling_defaults,
            created=int(time.time()),
            system_fingerprint=f"weft-{__version__}-{served.dtype}",
            base_seed=base_seed,
            hidden_size=served.hidden_size,
            classes=served.classes,
            pooling=served.pooling,
            images=served.images,
            no_images=served.no_images,
            weights=WeightFacts(
                served.family,
                served.parameters,
                served.weight_bytes,
                served.weights,
                served.device,
            ),
        )

    @property
    def identity(self) -> str:
        """What the model is: servers that say the same go on with each other's work."""
        facts = (self.served_names[0], self.system_fingerprint, self.vocab_size, self.hidden_size)
        return " ".join(map(str, facts))


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds of one request, checked before anything is computed.

    Attributes:
        max_sequences: prompts times ``n``.
        max_prompt_bytes: UTF-8 bytes of all prompts or messages together, before tokenising.
        request_templates: requests may bring chat templates of their own.
    """

    max_sequences: int = 512
    max_prompt_bytes: int = 8 * 2**20
    request_templates: bool = False
