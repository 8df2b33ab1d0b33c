"""Perplexity on the held-out text, specified so that any implementation can recompute it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from builtin.model import Llama

WINDOW = 1023
METHOD = (
    "Tokenize heldout.txt as one string, without special tokens. Cut the ids into consecutive "
    "windows of `window` tokens, without overlap (stride = window); the last may be shorter. "
    "Put bos before each window and run the model on bos + window[:-1], which predicts each "
    "token of the window from those before it. Weights: the bf16 file; arithmetic: float32. "
    "nll = the sum of -ln p over all tokens of all windows; perplexity = exp(nll / tokens); "
    "bits_per_byte = nll / ln 2 / bytes, bytes being the UTF-8 length of heldout.txt."
)


@dataclass(frozen=True)
class Score:
    """A model's fit to a text; see `METHOD`."""

    window: int
    tokens: int
    bytes: int
    nll_nats: float
    perplexity: float
    bits_per_byte: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def score(model: Llama, ids: list[int], byte_count: int, bos: int, window: int = WINDOW) -> Score:
    """Score `model` on the token ids of a text that has `byte_count` bytes."""
    model.eval()
    nll = 0.0
    for start in range(0, len(ids), window):
        targets = torch.tensor(ids[start : start + window])
        inputs = torch.cat((torch.tensor([bos]), targets[:-1]))
        logits = model(inputs[None])[0]
        nll += float(functional.cross_entropy(logits.float(), targets, reduction="sum"))
    mean = nll / len(ids)
    return Score(
        window=window,
        tokens=len(ids),
        bytes=byte_count,
        nll_nats=nll,
        perplexity=math.exp(mean),
        bits_per_byte=nll / math.log(2) / byte_count,
    )
