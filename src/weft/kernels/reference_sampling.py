"""Sampling in plain numpy and torch, a row at a time: the truth of the tests of every sampler.

``process_logits`` changes logits as requests ask for it, ``sample_rows`` chooses tokens, and
``verify_drafts`` takes those that were chosen.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.arrays import to_numpy
from weft.kernels.sampling import (
    EDIT,
    EDITED,
    HEADER,
    IN_PROMPT,
    LOWEST,
    LOWEST_ALLOWED,
    MASK_BITS,
    MASKED,
    NOT_FINITE,
    PENALISED,
    RowState,
    SampleBatch,
    count_taken,
    penalised,
)


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
    chosen, good = sample_rows(to_numpy(logits), settings.double().cpu().numpy(), numbers)
    tokens.copy_(torch.from_numpy(chosen))
    finite.copy_(torch.from_numpy(good))


def sample_rows(
    logits: NDArray[np.float32], settings: NDArray[np.float64], draws: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose a token for each row: the likeliest, or the one on which a number falls.

    A row's token depends on nothing but its own logits, settings and number. Tokens of rows that
    are not finite mean nothing.

    Args:
        logits: [S, V] float32.
        settings: [S, len(SETTINGS)] temperature (0 takes the likeliest token), top-k (0 keeps
            all), top-p and min-p, applied in this order; of equally likely tokens the first ones
            are kept.
        draws: [S] numbers in [0, 1).

    Returns:
        tokens [S], and whether all logits of the row are finite [S].
    """
    finite = np.array(np.isfinite(logits).all(axis=-1))
    rows = logits.astype(np.float64)
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


def process_logits(logits: Tensor, samples: SampleBatch, state: RowState) -> None:
    """Apply penalties, edits and masks to logits [S, V] float32 in place.

    Numbers that are not finite stay as they are, so that who chooses notices them.
    """
    for sample, changes in enumerate(samples.changes.tolist()):
        if not changes:
            continue
        row, raw = int(samples.rows[sample]), logits[sample].clone()
        asked = state.asked[row]
        if changes & PENALISED:
            counts = state.counts[row].clone()
            guess = sample
            while samples.guesses[guess] >= 0:
                counts[int(samples.guesses[guess])] += 1
                guess -= 1
            penalties = asked[: HEADER - 1].view(torch.float32)
            scores = penalised(raw.clone(), counts % IN_PROMPT, list(penalties))
            logits[sample] = torch.where(counts > 0, scores, raw)
        if changes & EDITED:
            ids, values, until = asked[HEADER:].view(-1, EDIT)[: int(asked[HEADER - 1])].unbind(1)
            wanted = logits[sample, ids.long()] + values.contiguous().view(torch.float32)
            forbidden = samples.counters[sample] < until
            logits[sample, ids.long()] = torch.where(forbidden, LOWEST, wanted)
        if changes & MASKED:
            bits = torch.arange(MASK_BITS, device=logits.device)
            allowed = (state.masks[row].unsqueeze(1) >> bits & 1).flatten()[: len(raw)]
            least = logits[sample].clamp(min=LOWEST_ALLOWED)
            logits[sample] = torch.where(allowed.bool(), least, LOWEST)
        logits[sample] = torch.where(torch.isfinite(raw), logits[sample], raw)


def verify_drafts(
    tokens: Tensor, finite: Tensor, samples: SampleBatch, state: RowState, results: Tensor
) -> None:
    """Take the tokens that were chosen, and of drafts those that came out as guessed.

    The tokens that are kept are counted where their row has penalties, and the last one becomes the
    row's ``last_token``; 0 if its logits were not finite.

    Args:
        tokens, finite: [S] as ``interface.Sample`` writes them.
        results: [S, 2] int64 gets the token of each sample or ``NOT_FINITE``, and for the first
            sample of a row how many of its samples are kept, else 0.
    """
    results.zero_()
    results[:, 0] = torch.where(finite, tokens, NOT_FINITE)
    chosen, good, guesses = tokens.tolist(), finite.tolist(), samples.guesses.tolist()
    firsts = [sample for sample, guess in enumerate(guesses) if guess < 0]
    for first, end in zip(firsts, [*firsts[1:], len(guesses)], strict=True):
        draft = guesses[first + 1 : end]
        taken = count_taken(chosen[first:end], good[first:end], draft) if good[first] else 1
        results[first, 1] = taken
        row = int(samples.rows[first])
        state.last_token[row] = chosen[first + taken - 1] if good[first] else 0
        if samples.changes[first] & PENALISED and good[first]:
            for token in chosen[first : first + taken]:
                state.counts[row, token] += 1


def log_softmax(logits: Tensor) -> Tensor:
    """Return log probabilities [S, V]; see ``interface.LogSoftmax``."""
    return torch.log_softmax(logits, dim=-1)


def top_k(numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row and their places; see ``interface.TopK``."""
    values, places = numbers.topk(k, dim=-1)
    return values, places
