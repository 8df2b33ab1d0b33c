"""The batch process with the counts of a request plane.

    python -m weft.server.batch_process --ring FDS --parent PID --signs FD --board FD --number N

Lines are on ``/metrics`` and in the usage of keys as requests are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from weft.batch.process import main
from weft.core.plan import Update
from weft.core.ports import EngineClient
from weft.core.served import ServedModel
from weft.core.sinks import Sink
from weft.core.types import FinishReason, Request
from weft.ring.client import RingClient
from weft.server.counts import Board
from weft.server.metrics import Metrics
from weft.server.process import RingProbe
from weft.server.timer import JobTimer
from weft.server.usage_store import UsageStore


class LineCounts:
    """Counts on the board of the request planes and in the file of usage."""

    def __init__(
        self, client: RingClient, settings: Mapping[str, Any], arguments: argparse.Namespace
    ) -> None:
        served = ServedModel.from_json(settings["card"])
        names = (*settings["served_model_name"], served.name)
        probe = RingProbe(client, served)
        self._client = client
        self._metrics = Metrics(names[0], probe, classes=served.classes)
        self._metrics.share(Board(arguments.board, arguments.number))
        self._usage = UsageStore(settings["usage_db"], settings["usage_keep_days"])
        self._usage.start_from(self._metrics.uses())  # those of a predecessor

    def client_for(self, payer: str) -> EngineClient:
        return CountedClient(self._client, self._metrics, payer)

    def show(self) -> None:
        self._metrics.show()
        self._usage.keep(self._metrics.fresh_uses())

    def close(self) -> None:
        self._metrics.show()
        self._usage.close(self._metrics.fresh_uses())


class CountedClient:
    """A client whose sequences are counted for one key."""

    def __init__(self, client: EngineClient, metrics: Metrics, payer: str) -> None:
        self._client = client
        self._metrics = metrics
        self._payer = payer

    def submit(self, requests: Seq[Request], sink: Sink) -> None:
        def counted(updates: Seq[Update]) -> None:
            timer.saw(updates)
            sink(updates)

        self._client.submit(requests, counted)  # whose updates come later, on the same thread
        tokens = sum(len(request.prompt) for request in requests)
        timer = JobTimer(self._metrics, requests, tokens, self._payer)

    def cancel(self, sequence_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._client.cancel(sequence_id, reason)


if __name__ == "__main__":
    main(LineCounts)
