"""The same hypothesis examples each time in continuous integration; Ctrl-C as users send it."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

# A shell that starts jobs in the background has them ignore SIGINT, and children inherit that; a
# handler is not inherited, so with one here the processes under test meet Ctrl-C as users do.
signal.signal(signal.SIGINT, signal.default_int_handler)
