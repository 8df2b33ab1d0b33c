"""Matrix products whose rows depend neither on how many rows there are nor on their place.

A library picks its kernel, and with it the order of its sums, by the shape of a product. So only a
few row counts are ever computed (others are split and padded), and of these only the ones that
were seen to agree bit for bit, for the very weight shape, on this machine (compare He 2025,
"Defeating nondeterminism in LLM inference").
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft.kernels.unavailable import KernelUnavailable

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
LARGEST = ROW_COUNTS[-1]
ALIGNMENT = 64  # bytes; kernels may treat the start of unaligned memory in another way
_Key = tuple[torch.Size, torch.dtype, torch.device, bool, int]


class InvariantLinear:
    """``functional.linear`` for the row counts that agree; implements ``ops.Linear``."""

    def __init__(self) -> None:
        self._agreeing: dict[_Key, tuple[int, ...]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
        rows = x.shape[0]
        if x.data_ptr() % ALIGNMENT or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        counts = self.row_counts(weight, bias)
        if rows in counts or rows == 0:
            return functional.linear(x, weight, bias)
        whole = rows - rows % LARGEST
        parts = [
            functional.linear(x[i : i + LARGEST], weight, bias) for i in range(0, whole, LARGEST)
        ]
        if whole < rows:
            rest = rows - whole
            padded = x.new_zeros(next(count for count in counts if count >= rest), x.shape[1])
            padded[:rest] = x[whole:]
            parts.append(functional.linear(padded, weight, bias)[:rest])
        return torch.cat(parts)

    def row_counts(self, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
        """Return the row counts that are computed with a weight of this shape, ascending.

        Raises:
            KernelUnavailable: the library treats the rows of one product differently.
        """
        threads = torch.get_num_threads()
        key = (weight.shape, weight.dtype, weight.device, bias is None, threads)
        if key not in self._agreeing:
            self._agreeing[key] = _agreeing(weight, bias)
        return self._agreeing[key]


def _agreeing(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Row counts whose rows equal those of ``LARGEST`` rows, at every place in either."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (LARGEST, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    truth = functional.linear(x, weight, bias)
    turned = functional.linear(x.roll(1, 0), weight, bias).roll(-1, 0)
    if not torch.equal(truth, turned):
        raise KernelUnavailable(
            f"no matrix product of {weight.dtype} with a weight of {tuple(weight.shape)} is "
            "batch-invariant on this machine; turn batch_invariant off, or choose another dtype"
        )
    return tuple(
        count
        for count in ROW_COUNTS
        if all(
            torch.equal(
                functional.linear(x[i : i + count].clone(), weight, bias), truth[i : i + count]
            )
            for i in range(0, LARGEST, count)
        )
    )
