"""Costs of the host tier beside a device: its attention, moves of KV, and piggybacked rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class HostCosts:
    """Costs of one host tier, which were measured while the device computed, or are assumed.

    Attributes:
        attention: T_ca of NEO: seconds from the submission of decodes until their results can be
            taken, summed over the layers; None where nobody attends on the host.
        out, back: moves to the host, and to the device.
        stall: the share of a move for which computing waits; 0 if a step hides it in its layers.
        duplex: whether moves of both directions go on at the same time.
        assumed: where these numbers come from if nothing was measured; in no file.
    """

    attention: Grid | None
    out: MoveCost
    back: MoveCost
    stall: float = 0.0
    duplex: bool = True
    carry: CarryCost = PUBLISHED
    assumed: str = ""

    def move_s(self, out_tokens: int, in_tokens: int) -> float:
        """Seconds to move the KV of so many tokens in each direction with one step."""
        out_s, in_s = self.out.seconds(out_tokens), self.back.seconds(in_tokens)
        return max(out_s, in_s) if self.duplex else out_s + in_s

    def to_json(self) -> dict[str, Any]:
        """As a profile file has it."""
        return {
            "attention": None if self.attention is None else asdict(self.attention),
            "out": self.out._asdict(),
            "back": self.back._asdict(),
            "stall": self.stall,
            "duplex": self.duplex,
            "carry": self.carry._asdict(),
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
        )
