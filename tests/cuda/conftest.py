"""Makes the modules of ``benchmarks/gpu`` importable, and ``report``, which they use."""

import sys
from pathlib import Path

import interpreted

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
interpreted.prepare()
