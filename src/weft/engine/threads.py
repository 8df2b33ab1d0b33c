"""How many threads compute, on which cores, and on which NUMA nodes their memory lies.

Threads that attend on the host beside a device have cores of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError
from weft.core.topology import Topology


@dataclass(frozen=True)
class ThreadPlan:
    """The compute threads of a process.

    Attributes:
        cpus: the processor of each thread; none if they are not pinned.
        nodes: the NUMA node of each thread, near which the memory lies that it reads alone; none
            where the machine has one node.
        spread: NUMA nodes over which the memory is spread that all threads read; likewise.
        reason: why they are pinned or not.
        host: threads of the process that attend on the host.
        host_cpus: the processor of each of those; none if they are not pinned.
    """

    threads: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    spread: tuple[int, ...]
    reason: str
    host: int = 0
    host_cpus: tuple[int, ...] = ()

    def describe(self) -> str:
        """One line for people."""
        words = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        words += f" and {self.host} of the host tier" if self.host else ""
        words += f", {'pinned' if self.cpus else 'not pinned'}: {self.reason}"
        if not self.nodes:
            return words
        kind = "NUMA nodes " if len(self.spread) > 1 else "NUMA node "
        return f"{words}; memory on {kind}{', '.join(map(str, self.spread))}"


def compute_threads(config: EngineConfig, topology: Topology) -> int:
    """Threads of each rank, without those that attend on the host."""
    if config.threads:
        return config.threads
    return max(1, topology.compute_threads // config.processes - config.num_host_threads)


def plan_threads(config: EngineConfig, topology: Topology, rank: int = 0) -> ThreadPlan:
    """Return the compute threads of a rank, and those that attend on the host beside them.

    Raises:
        ConfigError: they are to be pinned, and there are more than processors.
    """
    threads, host = compute_threads(config, topology), config.num_host_threads
    each = threads + host
    total = each * config.processes
    pinned, reason = _whether_to_pin(config, topology, total)
    cpus: tuple[int, ...] = ()
    host_cpus: tuple[int, ...] = ()
    nodes = tuple(topology.nodes[i * len(topology.nodes) // threads] for i in range(threads))
    if pinned:
        mine = _spread(topology, total)[rank * each : (rank + 1) * each]
        nodes = tuple(node for node, _ in mine[:threads])
        cpus, host_cpus = (
            tuple(cpu for _, cpu in mine[:threads]),
            tuple(c for _, c in mine[threads:]),
        )
    spread = tuple(sorted(set(nodes))) if pinned else topology.nodes
    # A node may have cores and no memory, or none that this process may take.
    if len(topology.nodes) == 1 or not set(topology.nodes) <= set(topology.memory_nodes):
        nodes = spread = ()
    return ThreadPlan(threads, cpus, nodes, spread, reason, host, host_cpus)


def _whether_to_pin(config: EngineConfig, topology: Topology, total: int) -> tuple[bool, str]:
    fits = total <= topology.cpus
    if config.cpu_pinning == "on":
        if not fits:
            raise ConfigError(
                f"cpu_pinning is on, but {total} threads do not fit on {topology.cpus} "
                "processors; lower threads, or leave cpu_pinning out.",
                param="cpu_pinning",
            )
        return True, "as is set"
    if config.cpu_pinning == "off":
        return False, "as is set"
    if not topology.whole or (topology.quota is not None and topology.quota < topology.cpus):
        return False, "others may use the machine's cores, too"
    if len(topology.nodes) > 1 and total < topology.cpus:
        return True, f"the machine has {len(topology.nodes)} NUMA nodes"
    if total == config.processes < len(topology.cores):
        return False, "only helpers of a first thread are"
    if total < len(topology.cores):
        return True, "the engine has the machine, with cores left over for the request planes"
    return False, "no core is left over for the request planes"


def _spread(topology: Topology, count: int) -> list[tuple[int, int]]:
    """Return so many processors and their nodes, as alike a share of each node as can be.

    Within a node they lie as far apart as can be, since neighbouring cores often share a cache and
    a way to memory. Second hardware threads come after all cores are taken. Processors of a node
    follow each other, as a thread first helps out those that come next.
    """
    places = []
    for node in topology.nodes:
        cores = [core for core in topology.cores if core.node == node]
        for place, core in enumerate(cores):
            places += [(nth, place / len(cores), node) for nth in range(len(core.cpus))]
    chosen = Counter((nth, node) for nth, _, node in sorted(places)[:count])
    found = []
    for (nth, node), some in chosen.items():
        cores = [core for core in topology.cores if core.node == node and len(core.cpus) > nth]
        found += [(node, cores[i * len(cores) // some].cpus[nth]) for i in range(some)]
    return sorted(found)
