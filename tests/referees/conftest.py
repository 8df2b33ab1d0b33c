"""Makes the scripts that tests here use importable."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "clients" / "common"), str(HERE.parent / "server")]
