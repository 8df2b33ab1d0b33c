"""A small Gemma 3 that reads images, as its checkpoints lie on the hub, and pictures for it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
SIZE, TOKENS = 56, 16  # pixels of a side, tokens of the prompt
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    """A byte-level tokeniser with the marks of Gemma 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def mark(name: str) -> int:
    """The id of a special token."""
    found = tokenizer().token_to_id(name)
    assert found is not None
    return found


def model(seed: int = 0, **vision: Any) -> Any:
    """A random reference model, float32."""
    config = transformers.Gemma3Config(
        text_config={
            "vocab_size": 264,
            "hidden_size": 64,
            "intermediate_size": 88,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 12,
            "max_position_embeddings": 512,
            "bos_token_id": mark("<bos>"),
            "eos_token_id": mark("<end_of_turn>"),
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 36,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": 7,
            "vision_use_head": False,
            **vision,
        },
        mm_tokens_per_image=TOKENS,
        image_token_id=mark("<image_soft_token>"),
        boi_token_id=mark("<start_of_image>"),
        eoi_token_id=mark("<end_of_image>"),
        eos_token_id=mark("<end_of_turn>"),
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    made = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim == 1:
            parameter.add_(noise * 0.2)
        else:
            looked_up = "embed_tokens" in name or "mm_input_projection" in name
            parameter.copy_(noise * (0.4 if looked_up else 1.3 / parameter.shape[-1] ** 0.5))
    return made


def save(made: Any, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint with tokeniser, template, and what its images are prepared by."""
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def processor() -> Any:
    """The reference's image processor."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def picture(seed: int = 0, size: tuple[int, int] = (70, 43), mode: str = "RGB") -> Image.Image:
    """A picture of coloured blocks."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (5, 7, 3), np.uint8))
    return small.resize(size, Image.Resampling.NEAREST).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    """The data URL of a picture."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def pixels(image: Image.Image) -> bytes:
    """What is left of a picture once it has the model's size."""
    return image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR).tobytes()


@torch.inference_mode()
def reference_logits(made: Any, ids: list[int], images: list[Image.Image]) -> Tensor:
    """The reference's float32 logits [n, V] of a prompt with images, computed in one piece."""
    tokens = torch.tensor([ids])
    given: dict[str, Any] = {}
    if images:
        given["pixel_values"] = processor()(images=images, return_tensors="pt")["pixel_values"]
    kinds = (tokens == mark("<image_soft_token>")).long()
    return made(tokens, token_type_ids=kinds, **given).logits[0].float()
