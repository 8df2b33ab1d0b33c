"""Memory limits of control groups, made up and real, and deaths that they cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from groups import MIB, Tree, join, limited_group
from weft.core.memory import MemoryKills, available_memory, memory_groups, memory_limit

NONE_V1 = 2**63 - 4096  # how version 1 says that there is no limit
V1_POINT, V2_POINT = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def v2(tree: Tree, path: str) -> None:
    tree.mount("cgroup2", V2_POINT)
    tree.member(f"0::{path}")


def v1(tree: Tree, path: str) -> None:
    tree.mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu")
    tree.mount("cgroup", V1_POINT, options="rw,memory")
    tree.member("9:name=systemd:/elsewhere", f"4:memory:{path}", "1:cpu:/elsewhere")


def plain(tree: Tree, folder: str, limit: object, used: int, **more: object) -> None:
    """A group of version 1."""
    tree.group(folder, limit_in_bytes=limit, usage_in_bytes=used, **more)


def test_without_control_groups_the_machine_is_the_limit(tree, tmp_path):
    assert memory_groups(tmp_path / "nowhere") == []
    free = available_memory(tmp_path / "nowhere")
    assert free > 10 * MIB
    v2(tree, "/")
    tree.group(V2_POINT)
    assert available_memory(tree.root) > free / 2
    assert memory_limit(memory_groups(tree.root)) is None


def test_the_group_of_the_process_counts_and_not_the_root(tree):
    v2(tree, "/system.slice/weft.service")
    tree.group(V2_POINT)
    tree.group(f"{V2_POINT}/system.slice", max="max", current=50 * MIB)
    own = f"{V2_POINT}/system.slice/weft.service"
    tree.group(own, max=8 * MIB, current=7 * MIB)
    assert available_memory(tree.root) == MIB
    tree.group(own, {"anon": 5, "inactive_file": 4 * MIB}, max=8 * MIB, current=7 * MIB)
    assert available_memory(tree.root) == 5 * MIB
    files = {"inactive_file": MIB, "active_file": 4 * MIB, "shmem": 2 * MIB}
    tree.group(own, files, max=8 * MIB, current=7 * MIB)
    assert available_memory(tree.root) == 6 * MIB
    tree.group(own, max=8 * MIB, current=9 * MIB)
    assert available_memory(tree.root) == 0
    tree.group(own, max="max", current=9 * MIB)
    assert available_memory(tree.root) > 10 * MIB


def test_the_limit_at_which_processes_are_slowed_down_counts(tree):
    v2(tree, "/a")
    tree.group(f"{V2_POINT}/a", max="max", high=6 * MIB, current=2 * MIB)
    assert available_memory(tree.root) == 4 * MIB
    tree.group(f"{V2_POINT}/a", max=5 * MIB, high="max", current=2 * MIB)
    assert available_memory(tree.root) == 3 * MIB


@pytest.mark.parametrize("level", ["/a", "/a/b", "/a/b/c"])
def test_the_tightest_ancestor_counts(tree, level):
    v2(tree, "/a/b/c")
    for folder in ("/a", "/a/b", "/a/b/c"):
        tree.group(V2_POINT + folder, max=90 * MIB, current=3 * MIB)
    tree.group(V2_POINT + level, max=9 * MIB, current=2 * MIB)
    assert available_memory(tree.root) == 7 * MIB
    assert memory_limit(memory_groups(tree.root)) == 9 * MIB


@pytest.mark.parametrize("level", ["", "/a", "/a/b"])
def test_version_1(tree, level):
    v1(tree, "/a/b")
    for folder in ("", "/a", "/a/b"):
        plain(tree, V1_POINT + folder, NONE_V1, 3 * MIB)
    assert memory_limit(memory_groups(tree.root)) is None
    files = {"total_inactive_file": 2 * MIB}
    plain(tree, V1_POINT + level, 8 * MIB, 7 * MIB, stat=files)
    assert available_memory(tree.root) == 3 * MIB
    files |= {"active_file": MIB, "total_active_file": 3 * MIB, "total_shmem": MIB}
    plain(tree, V1_POINT + level, 8 * MIB, 7 * MIB, stat=files)
    assert available_memory(tree.root) == 6 * MIB


def test_version_1_names_a_limit_that_is_out_of_sight(tree):
    v1(tree, "/a")
    stat = {"hierarchical_memory_limit": 6 * MIB}
    plain(tree, f"{V1_POINT}/a", NONE_V1, 2 * MIB, stat=stat)
    assert available_memory(tree.root) == 4 * MIB


def test_version_1_may_keep_a_limit_from_groups_below(tree):
    v1(tree, "/a/b")
    plain(tree, f"{V1_POINT}/a", 8 * MIB, 7 * MIB, use_hierarchy=0)
    plain(tree, f"{V1_POINT}/a/b", 90 * MIB, 2 * MIB, use_hierarchy=0)
    assert available_memory(tree.root) == 88 * MIB


def test_both_versions_side_by_side(tree):
    tree.mount("cgroup", V1_POINT, options="rw,memory")
    tree.mount("cgroup2", "/sys/fs/cgroup/unified")
    tree.member("4:memory:/a", "0::/x/y")
    plain(tree, f"{V1_POINT}/a", 9 * MIB, 2 * MIB)
    tree.group("/sys/fs/cgroup/unified/x/y")
    assert available_memory(tree.root) == 7 * MIB


@pytest.mark.parametrize(
    ("inside", "path"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/1f", "/docker/1f"),  # the host's paths, and only its part is mounted
        ("/../..", "/"),  # mounted by somebody outside of the namespace
        ("/docker/1f", "/"),
        ("/", "/../sibling"),  # moved out of the namespace
    ],
)
def test_in_a_container_what_is_mounted_counts(tree, inside, path):
    tree.mount("cgroup2", V2_POINT, inside)
    tree.member(f"0::{path}")
    tree.group(V2_POINT, max=8 * MIB, current=2 * MIB)
    tree.group("/sys/fs/sibling", max=MIB, current=MIB)
    assert available_memory(tree.root) == 6 * MIB


def test_a_group_within_a_container(tree):
    tree.mount("cgroup", V1_POINT, "/docker/1f", options="rw,memory")
    tree.member("4:memory:/docker/1f/inner")
    plain(tree, V1_POINT, 90 * MIB, 2 * MIB)
    plain(tree, f"{V1_POINT}/inner", 8 * MIB, 2 * MIB)
    assert available_memory(tree.root) == 6 * MIB


def test_a_group_that_is_gone_leaves_the_limits_above_it(tree):
    v2(tree, "/a/b/c")
    tree.group(f"{V2_POINT}/a", max=8 * MIB, current=2 * MIB)
    assert available_memory(tree.root) == 6 * MIB


def test_a_mount_with_a_space_in_its_path(tree):
    tree.mount("cgroup2", "/my\\040groups")
    tree.member("0::/a b")
    tree.group("/my groups/a b", max=8 * MIB, current=2 * MIB)
    assert available_memory(tree.root) == 6 * MIB


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_is_told_by_the_counter_of_the_group(tree, version, monkeypatch):
    def count(kills: int) -> None:
        if version == 1:
            value = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}"
            plain(tree, f"{V1_POINT}/a", 600 * MIB, MIB, oom_control=value)
        else:
            value = f"low 0\nmax 9\noom 7\noom_kill {kills}\noom_group_kill 0"
            tree.group(f"{V2_POINT}/a", max=600 * MIB, current=MIB, events=value)

    (v1 if version == 1 else v2)(tree, "/a")
    count(3)
    kills = MemoryKills(tree.root)
    assert not kills.recent()
    count(4)
    assert kills.recent()
    assert kills.recent()  # of a second process that ends at the same time
    assert "600.00 MiB" in kills.explain()
    monkeypatch.setattr("weft.core.memory.RECENT_S", 0.0)
    assert not kills.recent()


def test_without_a_counter_of_the_group_the_machines_counts(tree):
    stat = tree.root / "proc/vmstat"
    v2(tree, "/")
    tree.group(V2_POINT)
    stat.write_text("pgfault 5\noom_kill 1\n")
    kills = MemoryKills(tree.root)
    stat.write_text("pgfault 5\noom_kill 2\n")
    assert kills.recent()
    assert "memory of this machine" in kills.explain()


def test_pages_of_files_in_use_are_free_in_a_real_group(tmp_path):
    """A file read again and again is active; one in shared memory cannot go."""
    file, shared = tmp_path / "weights", Path(f"/dev/shm/weft-test-{os.getpid()}")
    work = textwrap.dedent(f"""
        import os, pathlib
        from weft.core.memory import available_memory
        file = pathlib.Path({str(file)!r})
        with file.open("wb") as written:
            written.write(bytes(64 << 20))
            os.fsync(written.fileno())  # dirty pages might stay inactive
        for _ in range(4):
            file.read_bytes()
        print(available_memory())
        with open({str(shared)!r}, "wb") as kept:
            for _ in range(48):
                kept.write(bytes(1 << 20))
        print(available_memory())
    """)
    try:
        with limited_group(256 * MIB) as folder:
            command = [*join(folder), sys.executable, "-c", work]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        shared.unlink(missing_ok=True)
    free, less = map(int, done.stdout.split())
    assert 256 * MIB - free < 64 * MIB  # the process itself takes less than the file
    assert 40 * MIB < free - less < 56 * MIB


def test_a_real_group():
    ask = "from weft.core.memory import available_memory as a; print(a())"
    use = "x = bytearray(200 << 20)"
    with limited_group(128 * MIB) as folder:
        done = subprocess.run(
            [*join(folder), sys.executable, "-c", ask], capture_output=True, text=True, check=True
        )
        assert 64 * MIB < int(done.stdout) < 128 * MIB
        watch = (
            "import subprocess, sys; from weft.core.memory import MemoryKills; k = MemoryKills();"
            f"code = subprocess.run([sys.executable, '-S', '-c', {use!r}]).returncode;"
            "print(code, k.recent(), k.explain())"
        )
        done = subprocess.run(
            [*join(folder), sys.executable, "-c", watch], capture_output=True, text=True, check=True
        )
        assert done.stdout.split(maxsplit=2)[:2] == [str(-signal.SIGKILL), "True"]
        assert "128.00 MiB" in done.stdout
