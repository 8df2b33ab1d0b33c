"""Sampling steps around the choice of a token: penalties and edits before, drafts after.

The references are those of ``kernels.sampling``: integers decide which numbers change, and these
change by the same float32 operations, none fused, so results are equal bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels import sampling
from weft.kernels.sampling import RowState, SampleBatch

_SPAN = 8192  # logits of one program
_BLOCK = 2048  # logits that a program looks at at once
_EDITS = 128  # edits that it looks at at once

_PENALISED = tl.constexpr(sampling.PENALISED)
_EDITED = tl.constexpr(sampling.EDITED)
_IN_PROMPT = tl.constexpr(sampling.IN_PROMPT)
_HEADER = tl.constexpr(sampling.HEADER)
_EDIT = tl.constexpr(sampling.EDIT)
_REPETITION = tl.constexpr(sampling.PENALTIES.index("repetition_penalty"))
_PRESENCE = tl.constexpr(sampling.PENALTIES.index("presence_penalty"))
_FREQUENCY = tl.constexpr(sampling.PENALTIES.index("frequency_penalty"))
_LOWEST = tl.constexpr(sampling.LOWEST)
_LOWEST_ALLOWED = tl.constexpr(sampling.LOWEST_ALLOWED)
_MASKED = tl.constexpr(sampling.MASKED)
_MASK_BITS = tl.constexpr(sampling.MASK_BITS)
_NOT_FINITE = tl.constexpr(sampling.NOT_FINITE)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _float(word):
    """The float32 whose bits an int32 has."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def _penalise(source, counts, guess, asked, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Penalise a block of logits of a sample; ``guess`` points at what its draft has before it."""
    at = first + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < SIZE, other=0.0)
    count = tl.load(counts + at, mask=at < SIZE, other=0)
    token = tl.load(guess)
    while token >= 0:
        count += (at == token).to(tl.int32)
        guess -= 1
        token = tl.load(guess)
    output = (count & (_IN_PROMPT - 1)).to(tl.float32)
    repetition = _float(asked + _REPETITION)
    y = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    y -= _float(asked + _FREQUENCY) * output
    y -= _float(asked + _PRESENCE) * (output > 0.0).to(tl.float32)
    y = tl.where(y != y, 0.0, tl.minimum(tl.maximum(y, _LOWEST), -_LOWEST))
    tl.store(source + at, y, mask=(count > 0) & _is_finite(x) & (at < SIZE))


@triton.jit
def _edit(source, asked, counter, low, high, EDITS: tl.constexpr):
    """Apply the edits of a sample to its logits of tokens in [low, high)."""
    number = tl.load(asked + _HEADER - 1)
    start = tl.zeros([], tl.int32)
    while start < number:
        at = start + tl.arange(0, EDITS)
        edit = asked + _HEADER + _EDIT * at
        token = tl.load(edit, mask=at < number, other=-1)
        here = (token >= low) & (token < high)
        x = tl.load(source + token, mask=here, other=0.0)
        value = tl.load(edit + 1, mask=here, other=0).to(tl.float32, bitcast=True)
        until = tl.load(edit + 2, mask=here, other=0)
        y = tl.where(counter < until, _LOWEST, x + value)
        tl.store(source + token, y, mask=here & _is_finite(x))
        start += EDITS


@triton.jit
def _mask(source, mask, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Forbid the tokens of a block of logits whose bits are not in a mask."""
    at = first + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < SIZE, other=0.0)
    word = tl.load(mask + at // _MASK_BITS, mask=at < SIZE, other=0)
    allowed = (word >> (at % _MASK_BITS)) & 1
    y = tl.where(allowed != 0, tl.maximum(x, _LOWEST_ALLOWED), _LOWEST)
    tl.store(source + at, y, mask=_is_finite(x) & (at < SIZE))


@triton.jit
def _process_logits(
    logits, stride, rows, counters, changes, guesses, asked, words, counts, masks, mask_words,
    SIZE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    sample, low = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    wanted = tl.load(changes + sample)
    if wanted != 0:
        row = tl.load(rows + sample)
        source = logits + sample * stride
        asked += row * words
        if (wanted & _PENALISED) != 0:
            for start in range(0, SPAN, BLOCK):
                _penalise(
                    source, counts + row * SIZE, guesses + sample, asked, low + start, SIZE, BLOCK
                )
        if (wanted & _EDITED) != 0:
            tl.debug_barrier()
            _edit(source, asked, tl.load(counters + sample), low, low + SPAN, EDITS)
        if (wanted & _MASKED) != 0:
            tl.debug_barrier()
            for start in range(0, SPAN, BLOCK):
                _mask(source, masks + row * mask_words, low + start, SIZE, BLOCK)


@triton.jit(do_not_specialize=["samples"])
def _verify_drafts(
    tokens, finite, rows, changes, guesses, counts, last_token, results, samples,
    SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    good = tl.load(finite + first) != 0
    token = tl.load(tokens + first)
    tl.store(results + 2 * first, tl.where(good, token, _NOT_FINITE))
    taken = tl.zeros([], tl.int64)
    if tl.load(guesses + first) < 0:
        row = tl.load(rows + first)
        counted = (tl.load(changes + first) & _PENALISED) != 0
        last = tl.where(good, token, 0)
        goes_on = good.to(tl.int32)
        while goes_on > 0:
            tl.atomic_add(counts + row * SIZE + last, 1, mask=counted, sem="relaxed")
            taken += 1
            at = first + taken
            guess = tl.load(guesses + at, mask=at < samples, other=-1)
            usual = tl.load(finite + at, mask=at < samples, other=0) != 0
            goes_on = ((guess == last) & usual).to(tl.int32)
            last = tl.where(goes_on > 0, tl.load(tokens + at, mask=at < samples, other=0), last)
        taken = tl.maximum(taken, 1)
        tl.store(last_token + row, last)
    tl.store(results + 2 * first + 1, taken)


def process_logits(logits: Tensor, samples: SampleBatch, state: RowState) -> None:
    """Apply penalties, edits and masks to logits; see ``reference_sampling.process_logits``.

    Raises:
        ValueError: the shapes or types cannot be served.
    """
    count, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or state.counts.shape[1] != size:
        raise ValueError(
            f"cannot adjust {list(logits.shape)} of {logits.dtype} by counts of "
            f"{state.counts.shape[1]} tokens"
        )
    if count == 0:
        return
    _process_logits[(count, triton.cdiv(size, _SPAN))](
        logits, logits.stride(0), samples.rows, samples.counters, samples.changes, samples.guesses,
        state.asked, state.asked.shape[1], state.counts, state.masks, state.masks.shape[1],
        SIZE=size, SPAN=_SPAN,
        BLOCK=min(_BLOCK, _SPAN), EDITS=_EDITS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def verify_drafts(
    tokens: Tensor, finite: Tensor, samples: SampleBatch, state: RowState, results: Tensor
) -> None:
    """Take the tokens that were chosen; see ``sampling.verify_drafts``."""
    if len(tokens) == 0:
        return
    _verify_drafts[(len(tokens),)](
        tokens, finite, samples.rows, samples.changes, samples.guesses, state.counts,
        state.last_token, results, len(tokens), SIZE=state.counts.shape[1], num_warps=1,
    )  # fmt: skip
