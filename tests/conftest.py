"""The same hypothesis examples each time in continuous integration; Ctrl-C as users send it."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

import where

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

# A shell that starts jobs in the background has them ignore SIGINT, and children inherit that; a
# handler is not inherited, so with one here the processes under test meet Ctrl-C as users do.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides when it is first imported whether the functions of its language are interpreted,
# and torch or transformers may import it before tests/triton is collected.
if not where.ON_GPU and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_configure() -> None:
    if (complaint := where.complaint()) is not None:
        raise pytest.UsageError(complaint)
