"""Sinks receive the updates of requests; a sink that fails loses only its own requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from weft.core.plan import Update

Sink = Callable[[Seq[Update]], None]

logger = logging.getLogger("weft")


def deliver(
    batches: Mapping[Sink, Seq[Update]], sinks: dict[int, Sink], cancel: Callable[[int], None]
) -> None:
    """Call sinks; of one that fails, the requests in ``sinks`` are cancelled and go nowhere."""
    for sink, updates in batches.items():
        try:
            sink(updates)
        except Exception:
            logger.exception("A sink failed; its requests are cancelled.")
            for sequence_id in [i for i, owner in sinks.items() if owner is sink]:
                sinks[sequence_id] = _ignore
                cancel(sequence_id)


def _ignore(updates: Seq[Update]) -> None:
    """Takes the updates of requests whose sink has failed."""
