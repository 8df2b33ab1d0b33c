"""Chooses the order of a batch's lines by what the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ChosenOrder(NamedTuple):
    """An order, and why it is that one.

    Attributes:
        forecast: whether no more is started than the KV memory will hold.
    """

    kind: str
    forecast: bool
    why: str

    def __str__(self) -> str:
        return f"order {self.kind}: {self.why}"


def choose_order(
    asked: str, engine: Mapping[str, Any], *, forecast: bool, weighed: bool
) -> ChosenOrder:
    """The order that is asked for, or for ``auto`` the one that gains most.

    Blending gains by steps whose arithmetic overlaps with reads of KV; where they do not, all that
    is left of its gain is the forecast of the memory, which depth first has as well.

    Args:
        engine: what is known of it, by the names of ``ServedModel``.
        forecast: whether what its KV memory will hold can be forecast.
        weighed: whether compute can be weighed against memory.
    """
    if asked != "auto":
        return ChosenOrder(asked, asked == "blend" or (forecast and asked == "dfs"), "as asked for")
    held = (
        "no more lines start than the KV memory will hold"
        if forecast
        else "what the KV memory will hold is left to the engine"
    )
    if not engine.get("overlaps"):
        why = f"steps do not overlap compute with memory, so prefixes count; {held}"
    elif not (weighed and forecast):
        lack = "no profile to weigh them by" if forecast else "no forecast of the KV memory"
        why = f"steps overlap compute with memory, but there is {lack}; {held}"
    else:
        why = "steps overlap compute with memory, so lines that need either are mixed"
        return ChosenOrder("blend", True, why)
    return ChosenOrder("dfs", forecast, why)
