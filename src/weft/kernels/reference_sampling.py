"""Sampling in plain numpy, row by row: the reference of every sampler's tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sample(
    logits: Tensor,
    settings: Tensor,
    seeds: Tensor,
    counters: Tensor,
    tokens: Tensor,
    finite: Tensor,
) -> None:
    """Write the tokens of ``sample_rows`` (``interface.Sample``) on any device."""
    from weft.kernels.cpu.sample import uniform  # the table of ops says it if that is not built

    numbers = uniform(seeds.cpu().numpy(), counters.cpu().numpy())
    chosen, good = sample_rows(logits.cpu(), settings.double().cpu().numpy(), numbers)
    tokens.copy_(torch.from_numpy(chosen))
    finite.copy_(torch.from_numpy(good))


def sample_rows(
    logits: Tensor, settings: NDArray[np.float64], draws: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose a token for each row: the likeliest, or the one on which a number falls.

    A row's token depends on nothing but its own logits, settings and number. Tokens of rows that
    are not finite mean nothing.

    Args:
        logits: [S, V] float32; changed in place.
        settings: [S, 4] temperature (0 takes the likeliest token), top-k (0 keeps all), top-p
            and min-p, applied in this order; of equally likely tokens the first ones are kept.
        draws: [S] numbers in [0, 1).

    Returns:
        tokens [S], and whether all logits of the row are finite [S].
    """
    finite: NDArray[np.bool_] = torch.isfinite(logits).all(dim=-1).numpy()
    rows = logits.double().numpy()
    tokens = [_sample(*row) for row in zip(rows, settings, draws, strict=True)]
    return np.array(tokens, np.int64), finite


def _sample(logits: NDArray[np.float64], settings: NDArray[np.float64], draw: float) -> int:
    if settings[0] <= 0 or not np.isfinite(logits.max()):
        return int(logits.argmax())
    kept = weights_kept(logits, settings)
    cumulative = np.cumsum(kept)
    target = min(draw * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(np.searchsorted(cumulative, target, side="right"))


def weights_kept(logits: NDArray[np.float64], settings: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights [V] that the tokens of a row [V] are drawn with, 0 for those left out."""
    temperature, top_k, top_p, min_p = settings
    weights: NDArray[np.float64] = np.exp(
        (logits - logits.max()) / max(temperature, np.finfo(np.float32).tiny)
    )
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[int(top_k) :]] = 0
    if top_p < 1:
        ranked = weights[order]
        before = np.cumsum(ranked) - ranked
        kept = max(1, int(np.count_nonzero(before < top_p * ranked.sum())))
        weights[order[kept:]] = 0
    weights[weights < min_p] = 0
    return weights
