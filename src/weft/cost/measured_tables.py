"""Reads the measured kernel times of aiconfigurator-core: parquet files, by machine and engine."""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from math import exp, log
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError

BACKENDS = ("vllm", "sglang", "trtllm")


class Tables:
    """The tables of one machine as one engine's kernels were measured on it; times in seconds.

    Of an engine's measurements the version is taken that the package names as current.

    Args:
        system: a machine of the package, such as ``h100_sxm``.
        backend: whose kernels: vllm, sglang or trtllm.

    Raises:
        ConfigError: the package is not installed, or has no such machine or engine.
    """

    def __init__(self, system: str, backend: str = "vllm") -> None:
        found = importlib.util.find_spec("aiconfigurator_core")
        if found is None or found.origin is None:
            raise ConfigError("Measured kernel times need: pip install 'weft[sim]'")
        import yaml

        self.root = Path(found.origin).parent / "systems"
        if backend not in BACKENDS:
            raise ConfigError(f"unknown engine '{backend}'; known: {', '.join(BACKENDS)}")
        sheet, versions = self.root / f"{system}.yaml", self.root / "query_versions.yaml"
        if not sheet.is_file():
            raise ConfigError(f"aiconfigurator-core has no machine '{system}'")
        self.gpu: Mapping[str, Any] = yaml.safe_load(sheet.read_text("utf-8"))["gpu"]
        known = yaml.safe_load(versions.read_text("utf-8"))
        chosen = known["defaults"] | (known["overrides"].get(system) or {})
        self.system, self.backend = system, backend
        self.version: str = chosen[backend]["current"]

    def read(
        self, family: str, file: str, columns: Seq[str], **where: Any
    ) -> list[tuple[Any, ...]]:
        """Rows of a table: the columns asked for, and seconds; where a column must have a value.

        Of several kernels measured for the same, the fastest counts.

        Raises:
            ConfigError: there is no such table, or nothing in it that fits.
        """
        path = self.root / "data" / self.system / family / self.backend / self.version / file
        if not path.is_file():
            raise ConfigError(
                f"aiconfigurator-core has no {family} of {self.backend} {self.version} on "
                f"{self.system}"
            )
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(path).names
        where = {name: value for name, value in where.items() if name in schema}
        table = pyarrow.parquet.read_table(
            path,
            columns=[*columns, "latency"],
            filters=[(name, "=", value) for name, value in where.items()] or None,
        )
        fastest: dict[tuple[Any, ...], float] = {}
        for *key, milliseconds in zip(
            *(table[name].to_pylist() for name in (*columns, "latency")), strict=True
        ):
            known = fastest.get(tuple(key), float("inf"))
            fastest[tuple(key)] = min(known, milliseconds / 1e3)
        if not fastest:
            asked = ", ".join(f"{name} {value}" for name, value in where.items())
            raise ConfigError(f"aiconfigurator-core has no {family} on {self.system} with {asked}")
        return [(*key, seconds) for key, seconds in sorted(fastest.items())]


class MeasuredCurve:
    """Seconds over one size, a power law between measured sizes.

    Beyond the last one, time grows as the size does; below the first it stays.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self.sizes = sorted(points)
        self._x = [log(size) for size in self.sizes]
        self._y = [log(points[size]) for size in self.sizes]

    def at(self, size: float) -> float:
        x = log(size)
        if x >= self._x[-1]:
            return exp(self._y[-1] + x - self._x[-1])
        if x <= self._x[0]:
            return exp(self._y[0])
        left = bisect_right(self._x, x) - 1
        share = (x - self._x[left]) / (self._x[left + 1] - self._x[left])
        return exp(self._y[left] + share * (self._y[left + 1] - self._y[left]))


class Surface:
    """Seconds over two sizes: a line over the second for each measured first, and between them."""

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        by_first: dict[int, dict[int, float]] = {}
        for (first, second), seconds in points.items():
            by_first.setdefault(first, {})[second] = seconds
        self.lines = {first: MeasuredCurve(line) for first, line in sorted(by_first.items())}

    def at(self, first: float, second: float) -> float:
        return MeasuredCurve({size: line.at(second) for size, line in self.lines.items()}).at(first)
