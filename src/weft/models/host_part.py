"""The part of a model that stays on the host beside a device: routed experts of some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.kernels.hosted import HostedExperts
from weft.kernels.interface import OpTable
from weft.kernels.storage import Storage
from weft.models.spec import ModelSpec

MATRICES = ("expert_gate_up", "expert_down")
BIASES = ("expert_gate_up_bias", "expert_down_bias")


@dataclass(frozen=True)
class HostPart:
    """Which layers have their experts on the host, and who computes these there.

    Attributes:
        layers: their numbers.
        ops: of the CPU; they pack the weights.
        rounding: how a parameter is rounded to integers, by its name; None: it is not.
        quantize: the name of that, as in the settings.
    """

    layers: frozenset[int]
    ops: OpTable
    rounding: Callable[[str], Storage | None]
    quantize: str = "none"

    def has(self, parameter: str) -> bool:
        """Whether a parameter, by its name, stays on the host."""
        return in_layers(parameter, self.layers)

    def hosted(self, spec: ModelSpec, weights: Mapping[str, Any]) -> dict[str, HostedExperts]:
        """Return what stands for the weights of these layers, by the names of both matrices."""
        found: dict[str, HostedExperts] = {}
        for number in sorted(self.layers):
            gate_up, down = (f"layers.{number}.{name}" for name in MATRICES)
            first, second = (weights.get(f"layers.{number}.{name}") for name in BIASES)
            activation = spec.expert_activation(spec.layers[number])
            experts = HostedExperts(weights[gate_up], weights[down], activation, (first, second))
            found |= {gate_up: experts, down: experts}
        return found


def in_layers(parameter: str, layers: frozenset[int]) -> bool:
    """Whether a parameter is one of the matrices or biases of routed experts in some layers."""
    prefix, _, name = parameter.rpartition(".")
    return name in MATRICES + BIASES and int(prefix.removeprefix("layers.")) in layers
