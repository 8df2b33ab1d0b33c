"""Makes the helper modules of this folder and of the ring tests importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.extend([str(HERE), str(HERE.parent / "ring")])
