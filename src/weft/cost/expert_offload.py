"""Predicted speed of a model whose routed experts lie on the host, before it is loaded.

The device waits for the host in each layer, so a step takes the sum of both parts:

    host    layers on the host * (bytes of active experts / rate of reads + arithmetic / rate)
    link    layers on the host * (time of an exchange + bytes of rows, both ways / rate of the link)
    device  bytes of what it reads / its bandwidth

Of E experts, k for a row, B rows choose ``E * (1 - (1 - k / E) ** B)`` on average if all are as
likely. Left out are attention over long contexts, and what the device computes while the host does
(the MLP beside experts of Gemma 4).
"""

from __future__ import annotations

from dataclasses import dataclass

# What the host's products reach of the rates at which it reads and multiplies, fitted to what
# benchmarks/host_experts.py measures on a core of Sapphire Rapids with AMX; float32 is taken to be
# as bfloat16.
READ_SHARE = {"float32": 0.8, "bfloat16": 0.8, "int8": 0.78, "int4": 0.7}
PRODUCT_SHARE = {"float32": 0.25, "bfloat16": 0.25, "int8": 0.1, "int4": 0.08}
EXCHANGE_S = 20e-6  # assumed: four copies, a wait and a copy back, on a PCIe link


@dataclass(frozen=True, slots=True)
class OffloadedModel:
    """What a step reads and computes.

    Attributes:
        layers, device_layers: with experts on the host, and on the device.
        experts, top_k: of a layer, and for a row.
        expert_bytes, device_expert_bytes: of an expert there and there.
        expert_flops: of a row at an expert.
        row_bytes: of a row, which go to the host in a layer and come back.
        device_bytes: that a step reads on the device, whatever its rows.
        kind: how experts are stored on the host, one of ``READ_SHARE``.
    """

    layers: int
    device_layers: int
    experts: int
    top_k: int
    expert_bytes: float
    device_expert_bytes: float
    expert_flops: float
    row_bytes: float
    device_bytes: float
    kind: str

    def active(self, rows: int) -> float:
        """Experts of a layer that so many rows choose, on average."""
        return float(self.experts * (1 - (1 - self.top_k / self.experts) ** rows))


@dataclass(frozen=True, slots=True)
class OffloadRates:
    """Rates of a machine, in bytes or operations a second.

    Attributes:
        host_read, host_flops: measured on the host.
        device_read: of the device's memory; 0 where it is not known, which leaves that part out.
        link: in one direction; 0 likewise.
    """

    host_read: float
    host_flops: float
    device_read: float = 0.0
    link: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadStep:
    """Predicted seconds of the parts of a step."""

    host_s: float
    link_s: float
    device_s: float

    @property
    def seconds(self) -> float:
        return self.host_s + self.link_s + self.device_s


def predict_step(model: OffloadedModel, rates: OffloadRates, rows: int) -> OffloadStep:
    """Predict a step of so many tokens, whether these are decodes or a prompt's."""
    active = model.active(rows)
    reading = active * model.expert_bytes / (rates.host_read * READ_SHARE[model.kind])
    products = (
        rows * model.top_k * model.expert_flops / (rates.host_flops * PRODUCT_SHARE[model.kind])
    )
    crossing = rows * model.row_bytes / rates.link if rates.link else 0.0
    device = model.device_bytes + model.device_layers * active * model.device_expert_bytes
    return OffloadStep(
        model.layers * (reading + products),
        model.layers * (EXCHANGE_S + crossing),
        device / rates.device_read if rates.device_read else 0.0,
    )
