"""The interface of cost models: named terms of a sub-batch, and the time of a whole step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from weft.core.errors import InvariantError
from weft.cost.work import Work

# T_pb of OmniServe: 75 us for queues and to store residuals, 0.5 ms to load residuals, for 400
# piggybacked rows (section 5.3). Unless a profile knows better.
PIGGYBACK_LAYER_S = (75e-6 + 0.5e-3) / 400


class Terms(NamedTuple):
    """Seconds that each part of a step takes, over all layers.

    Attributes:
        kv_move: moves of KV that go on while the layers compute.
        piggybacked: queues and residuals of piggybacked rows, without their share of the dense
            layers.
        kv_stall: moves of KV for which computing waits.
        handover: what the device does to hand decodes to the host and to take their results.
        second: what is to be added if this is the second of two sub-batches; not in ``total``.
    """

    embedding: float = 0.0
    dense: float = 0.0
    prefill_attention: float = 0.0
    decode_attention: float = 0.0
    cpu_attention: float = 0.0
    kv_move: float = 0.0
    collectives: float = 0.0
    head: float = 0.0
    sampling: float = 0.0
    host: float = 0.0
    piggybacked: float = 0.0
    kv_stall: float = 0.0
    handover: float = 0.0
    second: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all terms, without overlap."""
        return sum(self[:-1])

    @property
    def linear(self) -> float:
        """The layers without attention: T_l of NEO, summed over the layers."""
        return self.dense + self.collectives + self.handover

    @property
    def attention(self) -> float:
        """Attention on the device: T_ga of NEO, summed over the layers."""
        return self.prefill_attention + self.decode_attention

    @property
    def outside(self) -> float:
        """The terms outside the layers, with what holds them up."""
        own = self.embedding + self.head + self.sampling + self.host
        return own + self.piggybacked + self.kv_stall

    @property
    def moving(self) -> float:
        """All moves of KV, whether or not computing waits for them."""
        return self.kv_move + self.kv_stall


class CostModel(Protocol):
    """Predicts what work costs."""

    @property
    def layers(self) -> int:
        """Layers of the model; ``terms`` are sums over them."""

    def terms(self, work: Work) -> Terms:
        """Seconds of each part; all zero for work without tokens and moves."""


def step_time(cost: CostModel, works: Seq[Work]) -> float:
    """Seconds of a step of one or two sub-batches.

    Within each layer (NEO section 3.1), the attention of one sub-batch on the host's CPU overlaps
    with the device's work on the other one:

        T = max(T_l0 + T_ga1, T_ca1) + max(T_l1 + T_ga0, T_ca0)

    (NEO's batch 1 has no attention on the device: T_ga1 = 0). With one sub-batch, T_l1 and T_ca1
    are 0. KV moves overlap with all that is computed in the layers, but for what stalls it.
    Embedding, head, sampling and host overhead are done once for both sub-batches, with nothing
    overlapped. So is what the second one adds.

    Raises:
        InvariantError: neither one nor two sub-batches.
    """
    if len(works) == 1:
        first = cost.terms(works[0])
        layers = first.linear + _slower(first.attention, first.cpu_attention)
        return max(layers, first.kv_move) + first.outside
    if len(works) != 2:
        raise InvariantError(f"a step has one or two sub-batches, not {len(works)}")
    first, second = cost.terms(works[0]), cost.terms(works[1])
    outside = cost.terms(works[0].joined(works[1])).outside
    layers = _slower(first.linear + second.attention, second.cpu_attention) + _slower(
        second.linear + first.attention, first.cpu_attention
    )
    return max(layers, first.kv_move + second.kv_move) + outside + second.second


def _slower(device: float, cpu: float) -> float:
    """The longer one; a fitted term of the device may be negative, and is kept without a CPU's."""
    return max(device, cpu) if cpu else device
