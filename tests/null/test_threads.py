"""Which cores the compute threads get, and which NUMA nodes their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import machine, write_machine
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.topology import read_topology
from weft.engine.threads import plan_threads

ON = EngineConfig(cpu_pinning="on")


@pytest.mark.parametrize("cores", [1, 2, 8, 15])
def test_nothing_is_pinned_where_request_planes_share_the_cores(tmp_path, cores):
    plan = plan_threads(EngineConfig(), machine(tmp_path, cores=cores))
    assert plan.threads == cores
    assert plan.cpus == ()
    assert plan.nodes == ()
    assert "no core is left over" in plan.describe()


def test_with_cores_left_over_each_thread_has_its_own(tmp_path):
    one = machine(tmp_path, cores=32)
    plan = plan_threads(EngineConfig(), one)
    assert plan.cpus == tuple(range(31))
    assert plan.describe() == (
        "31 threads, pinned: the engine has the machine, with cores left over for the request "
        "planes"
    )
    assert plan_threads(EngineConfig(threads=3), one).cpus == (0, 10, 21)
    assert plan_threads(EngineConfig(threads=32), one).cpus == ()
    alone = plan_threads(EngineConfig(threads=1), one)
    assert alone.cpus == ()
    assert alone.describe() == "1 thread, not pinned: only helpers of a first thread are"
    assert plan_threads(EngineConfig(threads=3, cpu_pinning="off"), one).cpus == ()


def test_threads_are_spread_over_nodes_and_neighbours_share_one(tmp_path):
    both = machine(tmp_path, sockets=2, cores=8, siblings=2)
    plan = plan_threads(EngineConfig(), both)
    assert (plan.threads, plan.nodes) == (15, (0,) * 8 + (1,) * 7)
    assert plan.cpus == (*range(8), *range(8, 15))
    assert plan.describe().endswith("the machine has 2 NUMA nodes; memory on NUMA nodes 0, 1")
    assert plan_threads(EngineConfig(threads=4), both).cpus == (0, 4, 8, 12)
    # second hardware threads only where cores do not suffice
    more = plan_threads(EngineConfig(threads=20), both).cpus
    assert set(range(16)) < set(more)
    assert sorted(cpu for cpu in more if cpu >= 16) == [16, 20, 24, 28]
    assert [cpu % 16 // 8 for cpu in more] == [0] * 10 + [1] * 10


def test_a_part_of_a_machine_or_of_its_time_may_be_shared(tmp_path):
    every = write_machine(tmp_path, sockets=2, cores=8)
    part = read_topology(tmp_path, every - {0})
    plan = plan_threads(EngineConfig(threads=4), part)
    assert plan.cpus == ()
    assert plan.nodes == (0, 0, 1, 1)  # halves of each matrix, whoever reads them
    assert "others may use" in plan.reason
    one = plan_threads(EngineConfig(threads=1), part)
    assert (one.nodes, one.spread) == ((0,), (0, 1))
    limited = replace(read_topology(tmp_path, every), quota=4.0)
    assert plan_threads(EngineConfig(), limited).cpus == ()
    assert plan_threads(EngineConfig(), limited).threads == 4
    assert len(plan_threads(ON, part).cpus) == 15


def test_memory_is_not_placed_where_a_node_has_none(tmp_path):
    both = replace(machine(tmp_path, sockets=2), memory_nodes=(1,))
    plan = plan_threads(EngineConfig(), both)
    assert (plan.nodes, plan.spread) == ((), ())


def test_too_many_threads_to_pin_are_refused(tmp_path):
    small = machine(tmp_path, cores=2, siblings=2)
    assert plan_threads(replace(ON, threads=4), small).cpus == (0, 1, 2, 3)
    assert plan_threads(replace(ON, threads=2), small).cpus == (0, 1)
    with pytest.raises(ConfigError, match="5 threads do not fit on 4 processors"):
        plan_threads(replace(ON, threads=5), small)
    assert plan_threads(EngineConfig(threads=5), small).cpus == ()


def test_each_rank_has_cores_and_memory_of_its_own(tmp_path):
    both = machine(tmp_path, sockets=2, cores=12)
    ranks = [plan_threads(EngineConfig(tensor_parallel=2), both, rank) for rank in (0, 1)]
    assert [plan.threads for plan in ranks] == [11, 11]
    assert ranks[0].cpus == tuple(range(11))
    assert ranks[1].cpus == tuple(range(12, 23))
    assert [plan.spread for plan in ranks] == [(0,), (1,)]
    assert ranks[1].describe().endswith("memory on NUMA node 1")


def test_threads_of_the_host_tier_have_cores_of_their_own(tmp_path):
    host = EngineConfig(scheduler="slo-piggyback", host_kv_memory=2**20)
    one = machine(tmp_path, cores=32)
    plan = plan_threads(replace(host, host_threads=4), one)
    assert (plan.threads, plan.host, len(plan.cpus)) == (27, 4, 27)
    assert plan.host_cpus == (27, 28, 29, 30)
    assert plan.describe().startswith("27 threads and 4 of the host tier, pinned: ")
    few = plan_threads(replace(host, threads=2), one)
    assert (few.cpus, few.host_cpus) == ((0, 10), (21,))
    assert plan_threads(replace(host, threads=1), one).host_cpus == (16,)


def test_each_rank_has_threads_of_the_host_tier_on_its_own_node(tmp_path):
    host = EngineConfig(scheduler="slo-piggyback", host_kv_memory=2**20, tensor_parallel=2)
    both = machine(tmp_path, sockets=2, cores=12)
    ranks = [plan_threads(replace(host, host_threads=3), both, rank) for rank in (0, 1)]
    assert [(plan.threads, plan.host) for plan in ranks] == [(8, 3), (8, 3)]
    assert [plan.cpus for plan in ranks] == [tuple(range(8)), tuple(range(12, 20))]
    assert [plan.host_cpus for plan in ranks] == [(8, 9, 10), (20, 21, 22)]
    with pytest.raises(ConfigError, match="100 threads do not fit on 24 processors"):
        plan_threads(replace(host, threads=49, cpu_pinning="on"), both)


def test_threads_of_the_host_tier_leave_one_to_the_device(tmp_path):
    host = EngineConfig(scheduler="slo-piggyback", host_kv_memory=2**20, host_threads=2)
    small = machine(tmp_path, cores=2)
    plan = plan_threads(host, small)
    assert (plan.threads, plan.host, plan.cpus, plan.host_cpus) == (1, 2, (), ())
    with pytest.raises(ConfigError, match="3 threads do not fit on 2 processors"):
        plan_threads(replace(host, cpu_pinning="on"), small)
    assert plan_threads(EngineConfig(), small).host == 0
