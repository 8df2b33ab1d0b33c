"""Metrics of remote places that attend, each by its address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from weft.ring.layout import EngineInfo

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FAMILIES: Mapping[str, tuple[str, str]] = {
    "place_up": ("gauge", "1 while the remote place is connected"),
    "place_kv_blocks": ("gauge", "KV blocks of the place, of its fullest group of layers"),
    "place_kv_blocks_free": ("gauge", "Those of them that no sequence holds"),
    "place_jobs": ("counter", "Rows that the place has attended to, one for each layer"),
    "place_round_trip_seconds": (
        "counter",
        "Sum over the rows of the time from submission to result",
    ),
    "place_sent_bytes": ("counter", "Bytes of KV, queries and block tables sent to the place"),
    "place_connections": ("counter", "Connections to the place"),
}


def places_of(addresses: Seq[str], info: EngineInfo) -> dict[str, dict[str, float]]:
    """Values of ``FAMILIES`` by the address of each place."""
    return {
        address: {
            "place_up": getattr(info, f"place_up_{index}"),
            "place_kv_blocks": getattr(info, f"place_blocks_{index}"),
            "place_kv_blocks_free": getattr(info, f"place_free_blocks_{index}"),
            "place_jobs": getattr(info, f"place_jobs_{index}"),
            "place_round_trip_seconds": getattr(info, f"place_round_trip_us_{index}") / 1e6,
            "place_sent_bytes": getattr(info, f"place_sent_bytes_{index}"),
            "place_connections": getattr(info, f"place_sessions_{index}"),
        }
        for index, address in enumerate(addresses)
    }


def place_families(model: str, places: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """The families; none without places."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, (kind, text) in FAMILIES.items() if places else ():
        made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        family = made(f"weft:{name}", text, labels=["model_name", "place"])
        for address, values in places.items():
            family.add_metric([model, address], values[name])
        yield family
