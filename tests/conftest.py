"""The same examples in every run; which tests run, in which order, within which time.

Also: Ctrl-C as users send it, and Triton's interpreter before anything imports Triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

import budgets
import depth
import where

if TYPE_CHECKING:
    from live import Server

# Examples are the same in each run, but for those of deep tests that somebody runs by hand.
RANDOM = depth.DEEP and not os.environ.get("CI")
settings.register_profile("weft", derandomize=not RANDOM, deadline=None, print_blob=True)
settings.load_profile("weft")

# A shell that starts jobs in the background has them ignore SIGINT, and children inherit that; a
# handler is not inherited, so with one here the processes under test meet Ctrl-C as users do.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides when it is first imported whether the functions of its language are interpreted,
# and torch or transformers may import it before tests/triton is collected.
if not where.ON_GPU and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_configure(config: pytest.Config) -> None:
    if (complaint := where.complaint()) is not None:
        raise pytest.UsageError(complaint)
    state = tempfile.TemporaryDirectory(prefix="weft-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name  # of all servers of the tests
    os.environ["XDG_CACHE_HOME"] = f"{state.name}/cache"
    config.addinivalue_line("markers", f"deep: runs only with {depth.VARIABLE}=1")
    config.addinivalue_line("markers", f"deeper: does more with {depth.VARIABLE}=1")
    spins = budgets.Spins()
    config.pluginmanager.register(spins)
    if not hasattr(config, "workerinput"):  # of a process that runs tests for another
        config.pluginmanager.register(budgets.Budgets(config, spins))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the deep tests out; folders that take longest come first, so that none is last."""
    if not depth.DEEP:
        left_out = [item for item in items if item.get_closest_marker("deep") is not None]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.get_closest_marker("deep") is None]
    order = budgets.seconds()
    items.sort(key=lambda item: -order.get(budgets.folder_of(item.nodeid), 0.0))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Processes of tests that were interrupted, or failed, end with the one that ran the tests."""
    if config.getoption("numprocesses", None):  # its children run the tests, and end by themselves
        return
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server as it is without settings, for all tests that only send requests."""
    from live import serving  # most runs need none of it

    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running
