"""Sockets, nodes and cores, of made-up machines and of this one."""

from __future__ import annotations

import os

import pytest

from groups import Tree
from machines import machine, write_machine
from weft.core.topology import Topology, read_topology, this_machine
from weft.engine.machine import usable_cores


def test_two_sockets_with_second_hardware_threads(tmp_path):
    found = machine(tmp_path, sockets=2, nodes=2, cores=8, siblings=2)
    assert (found.sockets, found.nodes, len(found.cores), found.cpus) == (2, (0, 1, 2, 3), 32, 64)
    assert found.cores[9].cpus == (9, 41)
    assert (found.cores[9].node, found.cores[9].socket) == (1, 0)
    assert (found.cores[31].node, found.cores[31].socket) == (3, 1)
    assert found.whole
    assert found.memory_nodes == (0, 1, 2, 3)
    text = "32 cores with 64 hardware threads, 2 sockets, 4 NUMA nodes"
    assert found.describe() == text


def test_only_allowed_processors_count(tmp_path):
    write_machine(tmp_path, sockets=2, cores=4, siblings=2)
    found = read_topology(tmp_path, frozenset({4, 5, 12, 7}))
    assert [core.cpus for core in found.cores] == [(4, 12), (5,), (7,)]
    assert found.nodes == (1,)
    assert not found.whole
    assert "a part of the machine's, 1 socket, 1 NUMA node" in found.describe()


def test_a_machine_without_these_files_has_one_node(tmp_path):
    found = read_topology(tmp_path / "nowhere", frozenset({0, 1, 5}))
    assert [core.cpus for core in found.cores] == [(0,), (1,), (5,)]
    assert (found.nodes, found.sockets, found.memory_nodes) == ((0,), 1, (0,))
    assert found.whole
    assert found.quota is None


def test_processors_that_are_offline_are_not_missed(tmp_path):
    every = write_machine(tmp_path, cores=4)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1,3\n")
    assert read_topology(tmp_path, every - {2}).whole


def test_files_of_older_kernels_and_unknown_sockets(tmp_path):
    every = write_machine(tmp_path, cores=2, siblings=2)
    for cpu in every:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")
        (folder / "physical_package_id").write_text("-1\n")
    found = read_topology(tmp_path, every)
    assert [core.cpus for core in found.cores] == [(0, 2), (1, 3)]
    assert found.sockets == 1


def test_nodes_without_cores_or_of_others_get_no_memory(tmp_path):
    tree = Tree(tmp_path)
    every = write_machine(tmp_path, sockets=2)
    (tmp_path / "sys/devices/system/node/has_memory").write_text("0-2\n")
    (tree.root / "proc/self/status").write_text("Name:\tx\nMems_allowed_list:\t1-2\n")
    assert read_topology(tmp_path, every).memory_nodes == (1, 2)


@pytest.mark.parametrize(
    ("cores", "siblings", "threads"), [(1, 1, 1), (2, 1, 2), (2, 2, 2), (15, 1, 15), (16, 2, 15)]
)
def test_one_thread_for_each_core_and_one_spare_where_there_are_many(
    tmp_path, cores, siblings, threads
):
    assert machine(tmp_path, cores=cores, siblings=siblings).compute_threads == threads


class TestQuota:
    def of(self, tree: Tree, cores: int = 64) -> Topology:
        return machine(tree.root, cores=cores)

    def test_of_version_two_the_lowest_of_all_ancestors_holds(self, tmp_path):
        tree = Tree(tmp_path)
        tree.mount("cgroup2", "/sys/fs/cgroup")
        tree.member("0::/a/b")
        for folder, text in (("a/b", "350000 100000"), ("a", "250000 100000"), ("", "max 100000")):
            place = tmp_path / "sys/fs/cgroup" / folder
            place.mkdir(parents=True, exist_ok=True)
            (place / "cpu.max").write_text(text + "\n")
        found = self.of(tree)
        assert found.quota == 2.5
        assert found.compute_threads == 2
        assert found.describe().endswith(", a CPU limit of 2.5")

    @pytest.mark.parametrize(("quota", "threads"), [(-1, 63), (50_000, 1), (800_000, 8)])
    def test_of_version_one(self, tmp_path, quota, threads):
        tree = Tree(tmp_path)
        tree.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
        tree.mount("cgroup", "/sys/fs/cgroup/cpu,cpuacct", options="rw,cpu,cpuacct")
        tree.member("4:memory:/elsewhere", "3:cpu,cpuacct:/mine")
        place = tmp_path / "sys/fs/cgroup/cpu,cpuacct/mine"
        place.mkdir(parents=True)
        (place / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (place / "cpu.cfs_period_us").write_text("100000\n")
        assert self.of(tree).compute_threads == threads


def test_this_machine():
    found = this_machine()
    assert {cpu for core in found.cores for cpu in core.cpus} == os.sched_getaffinity(0)
    assert 1 <= found.compute_threads <= usable_cores() <= found.cpus
