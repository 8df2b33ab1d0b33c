"""Hardware sheets: arithmetic, memory, links and the host of a machine, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.core.errors import ConfigError, look_up

GiB = 2**30
MiB = 2**20
GB = 10**9
TERA = 10**12

# Usable bytes/s in one direction of 16 PCIe lanes: transfer rate * 16 * 128/130 / 8 (PCIe base
# specification, line coding of generations 3 to 5).
PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB


@dataclass(frozen=True, slots=True)
class HostSheet:
    """The CPU side of a machine: cores, memory bandwidth (B/s), float32 FLOP/s, memory (bytes)."""

    name: str
    cores: int
    bandwidth: float
    flops: float
    memory: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device (of several equal ones, under tensor parallelism) and the host beside it.

    Attributes:
        flops: peak dense FLOP/s by dtype.
        bandwidth: device memory, B/s.
        memory: bytes that a process finds, as the driver reports them.
        link: B/s between device and host in one direction; 0 for a CPU.
        collective: B/s in one direction from one device to the others; 0 where there is only one.
        host: the host's share of this machine; None for a CPU, which is its own.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    link: float = 0.0
    collective: float = 0.0
    host: HostSheet | None = None

    @property
    def dtype(self) -> str:
        """The dtype in which models are usually served here: bf16, or fp16 without it."""
        return next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in self.flops)

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype.

        Raises:
            ConfigError: the device does not compute in it; the message names those it has.
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError(f"{self.name} does not compute in {dtype}, but in: {known}")
        return self.flops[dtype]


def _host(
    name: str, cores: int, ghz: float, per_cycle: int, bandwidth_gb: float, memory: int
) -> HostSheet:
    """A host whose cores do ``per_cycle`` float32 operations at base frequency."""
    return HostSheet(name, cores, bandwidth_gb * GB, cores * ghz * GB * per_cycle, memory)


# Cores, base frequency and memory channels: the makers' product pages (AMD EPYC 7R32 is AWS's own
# 48-core Rome; TechPowerUp). Bandwidth: channels * 8 B * transfer rate. Operations per cycle: two
# fused multiply-adds of 8 (AVX2) or 16 (AVX-512) floats.
#   EPYC 7R32            48 cores, 2.8 GHz, 8 x DDR4-3200 = 204.8 GB/s
#   Xeon Platinum 8259CL 24 cores, 2.5 GHz, 6 x DDR4-2933 = 140.8 GB/s
#   Xeon Platinum 8462Y+ 32 cores, 2.8 GHz, 8 x DDR5-4800 = 307.2 GB/s
#   Xeon Gold 6342       24 cores, 2.8 GHz, 8 x DDR4-3200 = 204.8 GB/s
#   Xeon Gold 6336Y      24 cores, 2.4 GHz, 8 x DDR4-3200 = 204.8 GB/s
#   EPYC 7763            64 cores, 2.45 GHz, 8 x DDR4-3200 = 204.8 GB/s
#   Graviton4            96 cores, 2.8 GHz, 12 x DDR5-5600 = 537.6 GB/s; 4 units of 4 floats
# A cloud instance has its share of the socket's bandwidth by cores. NEO section 5.6 says of the
# g5 ones: 16x has about twice the bandwidth of 8x, that twice that of 4x, and 2x nearly that of 4x.
# Cores and memory of NEO's machines: its table 1; it gives each pair of H100 one NUMA node of four.
HOSTS: Mapping[str, HostSheet] = {
    host.name: host
    for host in (
        _host("g5.2xlarge", 4, 2.8, 32, 204.8 * 8 / 48, 32 * GiB),
        _host("g5.4xlarge", 8, 2.8, 32, 204.8 * 8 / 48, 64 * GiB),
        _host("g5.8xlarge", 16, 2.8, 32, 204.8 * 16 / 48, 128 * GiB),
        _host("g5.16xlarge", 32, 2.8, 32, 204.8 * 32 / 48, 256 * GiB),
        _host("g4dn.4xlarge", 8, 2.5, 64, 140.8 * 8 / 24, 64 * GiB),
        _host("xeon-8462y", 32, 2.8, 64, 307.2, 1024 * GiB),
        _host("xeon-8462y-numa", 16, 2.8, 64, 307.2 / 2, 512 * GiB),
        _host("xeon-6342", 24, 2.8, 64, 204.8, 400 * GiB),
        _host("xeon-6336y", 24, 2.4, 64, 204.8, 128 * GiB),
        _host("epyc-7763", 64, 2.45, 32, 204.8, 1024 * GiB),
        _host("graviton4", 96, 2.8, 32, 537.6, 768 * GiB),
    )
}


def _gpus() -> dict[str, Hardware]:
    """The catalogue.

    FLOP/s are dense (without sparsity), bandwidth and NVLink those of NVIDIA's data sheets: H200
    (2024), H100 SXM5 (2022), A100 80GB SXM4 (2021), A10G (AWS G5, 2021), T4 (2019), L40S (2023).
    Memory is the total that nvidia-smi reports.
    """
    hopper = {"bf16": 989.4 * TERA, "fp16": 989.4 * TERA, "fp8": 1978.9 * TERA, "fp32": 66.9 * TERA}
    ampere = {"bf16": 312 * TERA, "fp16": 312 * TERA, "int8": 624 * TERA, "fp32": 19.5 * TERA}
    a10g = {"bf16": 70 * TERA, "fp16": 70 * TERA, "int8": 140 * TERA, "fp32": 35 * TERA}
    turing = {"fp16": 65 * TERA, "int8": 130 * TERA, "fp32": 8.1 * TERA}
    ada = {
        "bf16": 362.05 * TERA,
        "fp16": 362.05 * TERA,
        "fp8": 733 * TERA,
        "int8": 733 * TERA,
        "fp32": 91.6 * TERA,
    }
    h100 = Hardware("h100", hopper, 3350 * GB, 81559 * MiB, PCIE5, 450 * GB, HOSTS["xeon-8462y"])
    a100 = Hardware("a100", ampere, 2039 * GB, 81920 * MiB, PCIE4, 300 * GB, HOSTS["epyc-7763"])
    a10g_gpu = Hardware("a10g", a10g, 600 * GB, 23028 * MiB, PCIE4, 0.0, HOSTS["g5.4xlarge"])
    t4 = Hardware("t4", turing, 320 * GB, 15360 * MiB, PCIE3, 0.0, HOSTS["g4dn.4xlarge"])
    gpus = [
        replace(h100, name="h200", bandwidth=4800 * GB, memory=143771 * MiB),
        h100,
        # Blink table 5: one H100 of 96 GB; its bandwidth as of the 80 GB part (5 stacks of HBM3).
        replace(h100, name="blink-h100", memory=97871 * MiB, host=HOSTS["xeon-6336y"]),
        # NEO section 5.1: each pair of H100 is held to one NUMA node.
        replace(h100, name="neo-h100", host=HOSTS["xeon-8462y-numa"]),
        a100,
        # OmniServe section 5.1: four A100 joined by PCIe, one Xeon Gold 6342 a host.
        replace(a100, name="omniserve-a100", collective=PCIE4, host=HOSTS["xeon-6342"]),
        a10g_gpu,
        *(
            replace(a10g_gpu, name=f"g5.{size}xlarge", host=HOSTS[f"g5.{size}xlarge"])
            for size in (2, 4, 8, 16)
        ),
        t4,
        replace(t4, name="g4dn.4xlarge"),
        Hardware("l40s", ada, 864 * GB, 46068 * MiB, PCIE4, PCIE4, HOSTS["epyc-7763"]),
    ]
    return {gpu.name: gpu for gpu in gpus}


def _cpus() -> dict[str, Hardware]:
    """Each host on its own, computing in float32 whatever the weights are stored in."""
    return {
        host.name: Hardware(
            host.name,
            dict.fromkeys(("bf16", "fp16", "fp32"), host.flops),
            host.bandwidth,
            host.memory,
        )
        for host in HOSTS.values()
    }


HARDWARE: Mapping[str, Hardware] = {**_cpus(), **_gpus()}


def hardware(name: str) -> Hardware:
    """A catalogued machine: a GPU, one of a paper's testbeds, or a CPU.

    Raises:
        ConfigError: no such name; the message lists the known ones.
    """
    return look_up(name, HARDWARE, "hardware")
