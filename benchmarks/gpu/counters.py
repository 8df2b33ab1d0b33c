"""Hardware counters of the kernels of a step, by NVIDIA's profiler ncu where it is installed.

A step of a model of one layer runs under it (``warm.py --step``). The clock is left as it is.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from figures import figure, note

HERE = Path(__file__).resolve().parent
METRICS = {  # ncu's name -> ours
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of the DRAM bandwidth",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "of the multiprocessors",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "of the warps active",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "programs",
}
KERNELS = "regex:^(gemm|decode_kernel|_act_mul|_round|_add_norm|_rotate|_sample)"
STEPS = {"128 rows": 0, "1 row": 1}  # of ``warm.STEPS``
LIMIT_S = 18.0  # of a step


def readings(text: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Yield each kernel of ncu's raw page as CSV: its name, and value and unit of each metric."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    if len(rows) < 3:
        return
    names, units = rows[0], rows[1]
    for row in rows[2:]:
        if len(row) == len(names):
            columns = zip(names, row, units, strict=True)
            found = {name: (value, unit) for name, value, unit in columns}
            yield found.get("Kernel Name", ("?", ""))[0], found


def tell(step: str, text: str) -> int:
    """Print the figures of a step; return how many kernels there are."""
    count = 0
    for kernel, found in readings(text):
        count += 1
        for metric, label in METRICS.items():
            value, unit = found.get(metric, ("", ""))
            try:
                number = float(value.replace(",", ""))
            except ValueError:
                continue
            figure(f"{step}, {count}. {kernel[:40]}: {label}", number, unit)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cpu" or shutil.which("ncu") is None:
        note("no hardware counters: there is no ncu, or no GPU to count on")
        return 0
    failed = 0
    for name, step in STEPS.items():
        command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "-k", KERNELS]
        command += ["--metrics", ",".join(METRICS), "--target-processes", "all"]
        command += [sys.executable, str(HERE / "warm.py"), "--step", str(step)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            note(f"ncu takes longer than {LIMIT_S:.0f} s for a step of {name}")
            failed += 1
            continue
        print(done.stdout)
        if tell(name, done.stdout) == 0:
            lines = [x for x in (done.stdout + done.stderr).splitlines() if "ERROR" in x]
            note(
                f"ncu has counted nothing in a step of {name}: {(lines or ['no reason'])[0][:200]}"
            )
            failed += 1
    return int(failed == len(STEPS))


if __name__ == "__main__":
    sys.exit(main())
