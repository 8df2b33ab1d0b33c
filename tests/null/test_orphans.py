"""Processes that are forked for an ancestor: its children to all intents; strangers are reaped."""

from __future__ import annotations

import subprocess
import sys
import textwrap

FORK = """
    import os, signal, subprocess, time
    import psutil
    from weft.core.process import Child, adopt_orphans, fork_orphan, reap_orphans

    def orphan(seconds):
        pid = fork_orphan()
        if pid is None:
            time.sleep(seconds)
            os._exit(7)
        return pid

    def eventually(condition):
        while not condition():
            time.sleep(0.01)

    def ended(pid):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    adopt_orphans()
"""


def run(code: str) -> None:
    """Run it in a process of its own, as it adopts orphans for good."""
    program = textwrap.dedent(FORK) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_orphan_is_a_child():
    run("""
        child = Child(orphan(60))
        assert psutil.Process(child.pid).ppid() == os.getpid()
        assert os.getsid(child.pid) == child.pid
        assert child.poll() is None
        try:
            child.wait(0.01)
            raise AssertionError("it lives")
        except subprocess.TimeoutExpired:
            pass
        child.kill()
        assert child.wait(60) == child.wait() == child.poll() == -signal.SIGKILL
        child.kill()  # whoever has the number now is not meant
        assert Child(orphan(0)).wait() == 7
        reaped = orphan(0)
        os.waitpid(reaped, 0)
        assert Child(reaped).wait() == 255
        assert not psutil.Process().children()
    """)


def test_strangers_are_reaped_and_nobody_else():
    run("""
        own, stranger, living = Child(orphan(0)), orphan(0), orphan(60)
        eventually(lambda: ended(own.pid) and ended(stranger))
        reap_orphans({own.pid})  # does nothing at most, while one's own has to be waited for
        assert own.wait() == 7
        reap_orphans({own.pid})
        assert [child.pid for child in psutil.Process().children()] == [living]
        Child(living).kill()
        eventually(lambda: ended(living))
        reap_orphans(())
        reap_orphans(())
        assert not psutil.Process().children()
    """)


def test_a_process_that_cannot_fork_says_so():
    run("""
        os.fork = lambda: (_ for _ in ()).throw(BlockingIOError())
        before = psutil.Process().num_fds()
        assert fork_orphan() == 0
        assert psutil.Process().num_fds() == before
    """)
