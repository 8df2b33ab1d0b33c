"""What the machine is and has: GPU, driver, compilers, packages, profilers."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

from figures import figure, note

PACKAGES = ("torch", "triton", "numpy", "nanobind", "cmake", "ninja", "pytest", "transformers")
TOOLS = {
    "nvcc": "the flags between CPU and GPU are not timed",
    "ncu": "kernels have no hardware counters",
    "compute-sanitizer": "memory errors are not looked for",
    "cmake": "the native parts are not built",
    "ninja": "the native parts are not built",
}
QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def driver_says() -> None:
    """What nvidia-smi tells, as it is there before torch has talked to the driver."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=8)
        figure("nvidia-smi", (done.stdout or done.stderr).strip()[:300])
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"nvidia-smi does not answer: {error}")


def torch_says() -> None:
    """The GPU as torch sees it. Raises SystemExit where it sees none."""
    started = time.perf_counter()
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"no torch: {error}; set PYTHON to an interpreter that has it") from None
    figure("import of torch", time.perf_counter() - started, "s")
    figure("CUDA of torch", str(torch.version.cuda))
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no NVIDIA GPU; install a torch for CUDA and a driver for it")
    started = time.perf_counter()
    torch.ones(1, device="cuda").sum().item()
    figure("first kernel", time.perf_counter() - started, "s")
    facts = torch.cuda.get_device_properties(0)
    figure("GPU", facts.name)
    figure("GPUs", torch.cuda.device_count())
    figure("compute capability", f"{facts.major}.{facts.minor}")
    figure("multiprocessors", facts.multi_processor_count)
    figure("memory", facts.total_memory / 2**30, "GiB")
    figure("L2 cache", facts.L2_cache_size / 2**20, "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    figure("CPU", f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores")
    figure("Python", platform.python_version())
    figure("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    lacking = [f"no {tool}: {what}" for tool, what in TOOLS.items() if shutil.which(tool) is None]
    if lacking:
        note("; ".join(lacking))
    if options.device == "cuda":
        driver_says()
        torch_says()


if __name__ == "__main__":
    main()
