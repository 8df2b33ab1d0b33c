"""Vision towers: ``vision_config``, and the preprocessor's settings, to a ``VisionSpec``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.errors import UnsupportedModelError
from weft.core.images import ImageInput
from weft.core.json_files import read_object
from weft.models.config_reader import ConfigReader

MOST_SIDE = 4096  # pixels
RESAMPLING = (0, 1, 2, 3, 4, 5)  # the numbers of Pillow's filters
_PREPROCESSOR = "preprocessor_config.json"
_PROCESSOR = "processor_config.json"
# What processors say beside what is read here, without a change to what the model gets.
_IGNORED = """
data_format default_to_square device disable_grouping image_processor_type image_seq_length
input_data_format model_input_names processor_class return_tensors
"""
# Parts of an image as images of their own: nobody switches them on in the checkpoint.
_PAN_AND_SCAN = """
pan_and_scan_max_num_crops pan_and_scan_min_crop_size pan_and_scan_min_ratio_to_activate
"""


@dataclass(frozen=True)
class VisionSpec:
    """A SigLIP tower (Zhai et al. 2023) and Gemma 3's projector behind it.

    Attributes:
        image_size, patch_size: sides in pixels.
        tokens: of the prompt for an image, means of so many squares of patches.
        token_id, begin_id, end_id: see ``ImageInput``.
        resample: see ``ImageInput``.
        rescale: what a byte of a pixel is multiplied by.
        mean, std: of each colour, after that.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    output_size: int
    tokens: int
    token_id: int
    begin_id: int
    end_id: int
    resample: int = 2
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def input(self) -> ImageInput:
        """How the model takes images."""
        size, ids = self.image_size, (self.token_id, self.begin_id, self.end_id)
        return ImageInput(size, size, self.resample, self.tokens, *ids)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors of the checkpoint, by their names within its two modules."""
        width, wide, patch = self.hidden_size, self.intermediate_size, self.patch_size
        tower = "vision_tower"
        yield f"{tower}.embeddings.patch_embedding.weight", (width, 3, patch, patch)
        yield f"{tower}.embeddings.patch_embedding.bias", (width,)
        yield f"{tower}.embeddings.position_embedding.weight", (self.side**2, width)
        for number in range(self.num_layers):
            layer = f"{tower}.encoder.layers.{number}"
            for norm in ("layer_norm1", "layer_norm2"):
                yield f"{layer}.{norm}.weight", (width,)
                yield f"{layer}.{norm}.bias", (width,)
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield f"{layer}.self_attn.{part}.weight", (width, width)
                yield f"{layer}.self_attn.{part}.bias", (width,)
            yield f"{layer}.mlp.fc1.weight", (wide, width)
            yield f"{layer}.mlp.fc1.bias", (wide,)
            yield f"{layer}.mlp.fc2.weight", (width, wide)
            yield f"{layer}.mlp.fc2.bias", (width,)
        yield f"{tower}.post_layernorm.weight", (width,)
        yield f"{tower}.post_layernorm.bias", (width,)
        yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)
        yield (
            "multi_modal_projector.mm_input_projection_weight",
            (width, self.output_size),
        )

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(math.prod(shape) for _, shape in self.shapes())


def read_siglip(config: ConfigReader, hidden_size: int) -> VisionSpec:
    """Read the tower of a Gemma 3 from its config.

    Args:
        hidden_size: of the text model.

    Raises:
        UnsupportedModelError: it is another tower, or has what weft does not compute.
    """
    vision = config.section("vision_config")
    if vision is None:
        config.refuse("vision_config", None, "it must describe the tower for images")
    vision.choice("model_type", "siglip_vision_model", ("siglip_vision_model",))
    vision.choice("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    if vision.value("num_channels", 3) != 3:
        vision.refuse("num_channels", vision.value("num_channels"), "3 are needed")
    vision.ignore("vision_use_head", "projection_size")
    width, heads = vision.positive("hidden_size", 768), vision.positive("num_attention_heads", 12)
    size, patch = vision.positive("image_size", 224), vision.positive("patch_size", 16)
    tokens = config.positive("mm_tokens_per_image", 256)
    side, tokens_side = size // patch, math.isqrt(tokens)
    if size > MOST_SIDE or size % patch:
        vision.refuse("image_size", size, f"a multiple of {patch} up to {MOST_SIDE} is needed")
    if width % heads:
        vision.refuse("num_attention_heads", heads, f"it must divide {width}")
    if tokens_side**2 != tokens or side % tokens_side:
        config.refuse("mm_tokens_per_image", tokens, f"the square of a divisor of {side} is needed")
    found = VisionSpec(
        hidden_size=width,
        intermediate_size=vision.positive("intermediate_size", 3072),
        num_layers=vision.positive("num_hidden_layers", 12),
        num_heads=heads,
        image_size=size,
        patch_size=patch,
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        output_size=hidden_size,
        tokens=tokens,
        token_id=_token(config, "image", 262_144),
        begin_id=_token(config, "boi", 255_999),
        end_id=_token(config, "eoi", 256_000),
    )
    vision.finish()
    return found


def _token(config: ConfigReader, name: str, default: int) -> int:
    """The id of a token, under its newer name or the older one."""
    return config.count(f"{name}_token_id", config.count(f"{name}_token_index", default))


def prepared_as(spec: VisionSpec, folder: Path) -> VisionSpec:
    """The tower with what the preprocessor of a model folder does to images.

    Raises:
        UnsupportedModelError: it does what weft does not.
    """
    values = _processor(folder)
    config = ConfigReader(values, _PREPROCESSOR)
    config.ignore(*_IGNORED.split(), *_PAN_AND_SCAN.split())
    for switch in ("do_resize", "do_rescale", "do_normalize"):
        if not config.flag(switch, True):
            config.refuse(switch, False, "true is needed")
    if config.flag("do_pan_and_scan", False):
        config.refuse("do_pan_and_scan", True, "an image is read as a whole only")
    if not config.flag("do_convert_rgb", True):
        config.refuse("do_convert_rgb", False, "true is needed")
    size = config.value("size", {"height": spec.image_size, "width": spec.image_size})
    if size != {"height": spec.image_size, "width": spec.image_size}:
        config.refuse("size", size, f"height and width of {spec.image_size} are needed")
    resample = config.value("resample", spec.resample)
    if resample not in RESAMPLING or isinstance(resample, bool):
        config.refuse("resample", resample, "a number from 0 to 5 is needed")
    found = replace(
        spec,
        resample=resample,
        rescale=config.number("rescale_factor", spec.rescale),
        mean=_colours(config, "image_mean", spec.mean),
        std=_colours(config, "image_std", spec.std),
    )
    config.finish()
    return found


def _colours(config: ConfigReader, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    config.assume(**{key: list(default)})
    found = config.numbers(key)
    if len(found) != 3:
        config.refuse(key, list(found), "three numbers are needed, one a colour")
    return found


def _processor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor, under its own name or as part of the whole processor."""
    if (folder / _PREPROCESSOR).is_file():
        return read_object(folder / _PREPROCESSOR, UnsupportedModelError)
    if (folder / _PROCESSOR).is_file():
        found = read_object(folder / _PROCESSOR, UnsupportedModelError).get("image_processor", {})
        return found if isinstance(found, dict) else {}
    return {}
