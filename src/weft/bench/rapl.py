"""Joules by RAPL, the energy counters of Intel's and AMD's processors, where they can be read."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path("/sys/class/powercap")
# Of a whole package; and of memory beside it, which packages of servers do not count.
_PACKAGE = re.compile(r"intel-rapl:\d+")
_PART = re.compile(r"intel-rapl:\d+:\d+")


class Rapl:
    """The energy of all packages of this machine and of the memory that they count apart.

    A counter begins again from 0 when it is full, after some minutes at full power; so it has to be
    read now and then.

    Attributes:
        missing: why nothing can be measured; empty if something can.
        zones: names of what is counted, such as ``package-0``.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.missing = ""
        self.zones: list[str] = []
        self._zones: list[_Zone] = []
        found = sorted(folder.glob("intel-rapl:*"))
        try:
            for path in found:
                name = (path / "name").read_text().strip()
                package = _PACKAGE.fullmatch(path.name) and name.startswith("package")
                memory = _PART.fullmatch(path.name) and name == "dram"
                if package or memory:  # no core or GPU, which packages count, nor a whole platform
                    self._zones.append(_Zone(path))
                    self.zones.append(name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no number"
            self.missing = f"{path} cannot be read: {reason}"
            self._zones, self.zones = [], []
        if not found:
            self.missing = f"this machine shows no counters of energy in {folder}"
        elif not self._zones and not self.missing:
            self.missing = f"there is no package among the counters of energy in {folder}"

    def joules(self) -> float:
        """Joules since this was made. Raises OSError for a counter that has gone."""
        return sum(zone.read() for zone in self._zones)


class _Zone:
    """One counter. Raises OSError or ValueError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = path / "energy_uj"
        self._range = int((path / "max_energy_range_uj").read_text())
        self._last, self._sum = self._now(), 0

    def _now(self) -> int:
        return int(self._file.read_text())

    def read(self) -> float:
        now = self._now()
        step = now - self._last
        self._sum += step if step >= 0 else step + self._range
        self._last = now
        return self._sum / 1e6
