"""Made-up machines, as the kernel shows them below ``/sys``."""

from __future__ import annotations

from pathlib import Path

from weft.core.topology import Topology, read_topology


def write_machine(
    root: Path, sockets: int = 1, nodes: int = 1, cores: int = 4, siblings: int = 1
) -> frozenset[int]:
    """Write a machine with so many nodes a socket, cores a node and hardware threads a core.

    First hardware threads are numbered node after node, then second ones, as servers do.

    Returns:
        All of its processors.
    """
    devices = root / "sys/devices/system"
    count = sockets * nodes * cores
    for core in range(count):
        together = [core + count * sibling for sibling in range(siblings)]
        for cpu in together:
            folder = devices / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "core_cpus_list").write_text(",".join(map(str, together)) + "\n")
            (folder / "physical_package_id").write_text(f"{core // (nodes * cores)}\n")
    (devices / "cpu/online").write_text(f"0-{count * siblings - 1}\n")
    for node in range(sockets * nodes):
        folder = devices / f"node/node{node}"
        folder.mkdir(parents=True)
        first = [node * cores + count * sibling for sibling in range(siblings)]
        (folder / "cpulist").write_text(",".join(f"{a}-{a + cores - 1}" for a in first) + "\n")
    for name in ("online", "has_memory"):
        (devices / "node" / name).write_text(f"0-{sockets * nodes - 1}\n")
    return frozenset(range(count * siblings))


def machine(root: Path, **shape: int) -> Topology:
    """A machine of which the process may use everything."""
    return read_topology(root, write_machine(root, **shape))
