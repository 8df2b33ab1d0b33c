"""The classes in which a batch goes on that would miss its window, step by step."""

from __future__ import annotations

from collections.abc import Collection

BATCH_CLASS = "batch"
PROMOTIONS = ("flex", "interactive")  # in rising order


def next_class(present: str, highest: str, allowed: Collection[str]) -> str | None:
    """The class after the present one; None if there is none.

    Args:
        highest: the last one that a batch may get to; any other word lets it stay where it is.
        allowed: those that its key may use; others are left out.
    """
    steps = (BATCH_CLASS, *PROMOTIONS)
    most = steps.index(highest) if highest in steps else 0
    better = steps[steps.index(present) + 1 : most + 1] if present in steps else ()
    return next((name for name in better if name in allowed), None)
