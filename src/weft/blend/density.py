"""Compute density: the ratio of a request's arithmetic to its use of memory bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import ProfileError

if TYPE_CHECKING:
    from weft.cost.fit import Fitted
    from weft.cost.hardware import Hardware
    from weft.cost.shape import ModelShape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of one model on one machine, from which every density is made.

    Attributes:
        token_s: arithmetic of the weights on one token, ``2 P / C``.
        square_s: arithmetic of prefill attention per squared prompt token, ``4 D L / C``.
        read_s: reading the KV of one token once, ``2 b H_kv L / B``.
        window: tokens that a sliding layer looks back.
        sliding: the share of layers that slide.
    """

    token_s: float
    square_s: float
    read_s: float
    window: float = math.inf
    sliding: float = 0.0

    @classmethod
    def of(
        cls, shape: ModelShape, hardware: Hardware, dtype: str | None = None, kv_bytes: float = 2.0
    ) -> Rates:
        """The rates of a model on a device by its data sheet (BlendServe section 4.1).

        Args:
            dtype: of the arithmetic; by default the device's usual one.
            kv_bytes: of one value of KV.

        Raises:
            ConfigError: the device does not compute in this dtype.
        """
        flops = hardware.peak(dtype or hardware.dtype)
        return cls(
            2 * shape.active_parameters / flops,
            4 * shape.hidden * shape.layers / flops,
            shape.kv_values_per_token * kv_bytes / hardware.bandwidth,
            math.inf if shape.window is None else shape.window,
            shape.window_layers / shape.layers,
        )

    @classmethod
    def of_profile(cls, fitted: Fitted) -> Rates:
        """The rates of an engine from its profile, as measured by ``weft profile``.

        A token costs what one does in the largest step that was measured, where reading the weights
        is shared by most. Sliding layers are in the price of a token of context, as far as the
        contexts that were measured outgrew their windows.

        Raises:
            ProfileError: the profile has no price for tokens, or none for reading their KV, as it
                happens where contexts were too short to be told from noise.
        """
        most = fitted.dense.tokens[-1]
        rates = cls(
            fitted.dense.at(most) / most,
            max(0.0, fitted.coefficients["prefill_area"]) / 2,  # a whole prompt is p * p / 2 pairs
            fitted.coefficients["decode_context"],
        )
        if rates.token_s <= 0 or rates.read_s <= 0:
            raise ProfileError(
                f"The profile of {fitted.key.model} cannot tell compute from memory: it has "
                f"{rates.token_s:.3g} s for a token and {rates.read_s:.3g} s for reading the KV of "
                "one."
            )
        return rates

    def compute_s(self, prompt: Any, output: Any) -> Any:
        """Seconds of arithmetic, ``T_comp``: scalars or arrays of tokens (BlendServe 4.1)."""
        squares = 2 * self._seen(0 * prompt, prompt) if self.sliding else prompt * prompt
        return self.token_s * (prompt + output) + self.square_s * squares

    def balanced_tokens(self, density: float, kv_tokens: int) -> int:
        """Tokens a step with which its arithmetic is to reading the full KV memory as the density.

        The engine's largest batch that lets a blend stay one: with a larger one prompts come in
        bursts. In whole multiples of 128 (BlendServe appendix A.2).
        """
        tokens = density * kv_tokens * self.read_s / self.token_s
        return BATCH * max(1, math.ceil(tokens / BATCH))

    def memory_s(self, prompt: Any, output: Any) -> Any:
        """Seconds of reading KV, ``T_mem``: each output token reads all before it.

        In a sliding layer no more than the window.
        """
        if self.sliding:
            return self.read_s * self._seen(prompt, output)
        return self.read_s * (prompt * output + output * output / 2)

    def _seen(self, first: Any, count: Any) -> Any:
        """Tokens that ``count`` ones after ``first`` look back on, averaged over the layers."""
        whole = first * count + count * count / 2
        upto, before = _within(first + count, self.window), _within(first, self.window)
        return (1 - self.sliding) * whole + self.sliding * (upto - before)


UNWEIGHED = Rates(1.0, 0.0, 1.0)  # for orders that weigh nothing


def _within(tokens: Any, window: float) -> Any:
    """Tokens within the window of each of so many, summed."""
    near = np.minimum(tokens, window)
    return near * near / 2 + near * (tokens - near)


BATCH = 128  # batches come in multiples of so many tokens (BlendServe appendix A.2)


def density(compute_s: Any, memory_s: Any, saved_s: Any = 0.0) -> Any:
    """Arithmetic over memory time of a set of requests, ``rho(S)`` (BlendServe section 5.1).

    Args:
        compute_s, memory_s: sums over the requests, each as if it ran alone.
        saved_s: arithmetic that sharing prefixes saves, ``s(S) * sum T_comp``. Sharing saves no
            reads of KV.
    """
    return (compute_s - saved_s) / memory_s
