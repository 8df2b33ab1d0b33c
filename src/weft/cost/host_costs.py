"""Costs of the host tier beside a device: attention, moves of KV, and rows that meet the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from weft.core.errors import ConfigError
from weft.cost.curves import Grid
from weft.cost.model import PIGGYBACK_LAYER_S


class MoveCost(NamedTuple):
    """Seconds for any move of KV in one direction, and for each token of it (all layers)."""

    step_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        """Seconds to move the KV of so many tokens; 0 for none."""
        return self.step_s + tokens * self.token_s if tokens else 0.0


class CarryCost(NamedTuple):
    """What piggybacked rows add to a step beside their dense part (T_pb, OmniServe section 3.3.4).

    Attributes:
        step_s: seconds of any step that carries such rows.
        row_layer_s: seconds of each row in each layer that it goes through; may be negative, where
            the dense part counts too much.
    """

    step_s: float
    row_layer_s: float

    def seconds(self, row_layers: float) -> float:
        """Seconds for so many layers, summed over the rows; 0 for none."""
        return self.step_s + row_layers * self.row_layer_s if row_layers else 0.0


PUBLISHED = CarryCost(0.0, PIGGYBACK_LAYER_S)


class WakeCost(NamedTuple):
    """Seconds of a round trip to the host in which nobody attends, summed over the layers.

    A worker without jobs sleeps. Most of this is the time until it runs again, which does not
    depend on what it is to attend to.

    Attributes:
        step_s: of any round trip.
        row_s: of each decode that is handed over with it.
    """

    step_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds for so many decodes at once; 0 for none."""
        return self.step_s + rows * self.row_s if rows else 0.0


AWAKE = WakeCost()


class OverlapCost(NamedTuple):
    """What steps of overlapped sub-batches take beside their parts (NEO section 3.1).

    All seconds are sums over the layers. Those of the device may be negative: a profile of whole
    steps counts in each sub-batch what is done once a step.

    Attributes:
        batch_s: seconds of the device for each sub-batch with decodes of the host.
        row_s: seconds of the device for each such decode, beside those of a decode of the device:
            what goes to the host and comes back.
        second_s: seconds of the device for a second sub-batch; that it reads the weights again is
            in its dense part.
        wait_s: seconds until the host attends and its results are seen. Not those of ``WakeCost``,
            as the worker hardly sleeps between two layers.
        drag: seconds that the device takes longer for each second of attention on the host, with
            which it shares caches and memory.
    """

    batch_s: float = 0.0
    row_s: float = 0.0
    second_s: float = 0.0
    wait_s: float = 0.0
    drag: float = 0.0

    def handover_s(self, rows: int, attention_s: float) -> float:
        """Seconds of the device for a sub-batch with so many decodes of the host."""
        return self.batch_s + rows * self.row_s + self.drag * attention_s


@dataclass(frozen=True)
class HostCosts:
    """Costs of one host tier, which were measured while the device computed, or are assumed.

    Attributes:
        attention: seconds that the host attends to decodes, summed over the layers; None where
            nobody does.
        out, back: moves to the host, and to the device.
        stall: the share of a move for which computing waits; 0 if a step hides it in its layers.
        duplex: whether moves of both directions go on at the same time.
        wake: what a round trip takes beside attention.
        overlap: what steps of overlapped sub-batches take beside their parts; None where no such
            steps were measured.
        assumed: where these numbers come from if nothing was measured; in no file.
    """

    attention: Grid | None
    out: MoveCost
    back: MoveCost
    stall: float = 0.0
    duplex: bool = True
    carry: CarryCost = PUBLISHED
    wake: WakeCost = AWAKE
    overlap: OverlapCost | None = None
    assumed: str = ""

    def move_s(self, out_tokens: int, in_tokens: int) -> float:
        """Seconds to move the KV of so many tokens in each direction with one step."""
        out_s, in_s = self.out.seconds(out_tokens), self.back.seconds(in_tokens)
        return max(out_s, in_s) if self.duplex else out_s + in_s

    def round_trip_s(self, decodes: int, context: int) -> float:
        """Seconds from the submission of decodes to their results, summed over the layers.

        Args:
            context: tokens of all of them together.

        Raises:
            ConfigError: nobody attends on the host.
        """
        if self.attention is None:
            raise ConfigError("the profile has no CPU attention")
        return self.attention.at(decodes, context) + self.wake.seconds(decodes)

    def attention_s(self, decodes: int, context: int) -> float:
        """T_ca of NEO: the same for decodes of a step that awaits them in each layer.

        Raises:
            ConfigError: nobody attends on the host.
        """
        if self.overlap is None or self.attention is None:
            return self.round_trip_s(decodes, context)
        return self.attention.at(decodes, context) + self.overlap.wait_s

    def to_json(self) -> dict[str, Any]:
        """As a profile file has it."""
        return {
            "attention": None if self.attention is None else asdict(self.attention),
            "out": self.out._asdict(),
            "back": self.back._asdict(),
            "stall": self.stall,
            "duplex": self.duplex,
            "carry": self.carry._asdict(),
            "wake": self.wake._asdict(),
            "overlap": None if self.overlap is None else self.overlap._asdict(),
        }

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> HostCosts:
        """Raises KeyError, TypeError or ValueError for anything else than ``to_json`` gives."""
        grid = read["attention"]
        return cls(
            grid
            and Grid(
                tuple(grid["decodes"]),
                tuple(grid["contexts"]),
                tuple(tuple(map(float, row)) for row in grid["seconds"]),
            ),
            MoveCost(float(read["out"]["step_s"]), float(read["out"]["token_s"])),
            MoveCost(float(read["back"]["step_s"]), float(read["back"]["token_s"])),
            float(read["stall"]),
            bool(read["duplex"]),
            CarryCost(float(read["carry"]["step_s"]), float(read["carry"]["row_layer_s"])),
            WakeCost(float(read["wake"]["step_s"]), float(read["wake"]["row_s"])),
            read["overlap"]
            and OverlapCost(*(float(read["overlap"][name]) for name in OverlapCost._fields)),
        )
