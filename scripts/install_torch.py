"""Install torch into the environment whose Python runs this, where weft needs it.

On a machine with an NVIDIA GPU that is the extra ``cuda``. Without one weft runs on numpy and its
native kernels, and torch is installed for tests alone (``--required``): a CPU build, since CUDA
builds are several gigabytes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from requirements import requirements

MINIMUM = (2, 11)
PINNED = "torch==2.13.0"
# Older ones download whole wheels to answer a dry run.
MINIMUM_PIP = (24, 0)
HELP = (
    f"No CPU build of {PINNED} could be installed for Python "
    f"{sys.version_info.major}.{sys.version_info.minor}, and a CUDA build is not installed unasked "
    "on a machine without a GPU. Check the network, name another package index "
    "(make PIP_ARGS='--extra-index-url URL'), or name the build that you want "
    "(make TORCH_SPEC='torch==2.13.0' takes whatever pip finds for it)."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="what weft is to run on; auto: the GPU if there is one",
    )  # fmt: skip
    parser.add_argument("--required", action="store_true", help="install torch without a GPU, too")
    parser.add_argument("--spec", default="", help="install this requirement, whatever it brings")
    parser.add_argument("--pip-args", default="", help="more arguments for pip install")
    options = parser.parse_args()
    pip_args = options.pip_args.split()

    if options.spec:
        return pip("install", *options.spec.split(), *pip_args)
    version = installed("torch")
    if version >= MINIMUM:
        print(f"torch {importlib.metadata.version('torch')} is there already")
        return 0
    if options.device == "cuda" or (options.device == "auto" and has_gpu()):
        print("installing torch with CUDA", flush=True)
        return pip("install", *requirements("cuda"), *pip_args)
    if not options.required:
        print("weft will run on the CPU, without torch (make DEVICE=cuda installs it)")
        return 0
    return install_cpu_build(pip_args)


def install_cpu_build(pip_args: list[str]) -> int:
    """Install a torch that brings no CUDA, or say on stderr what to do."""
    if installed("pip") < MINIMUM_PIP:
        pip("install", "--quiet", "--upgrade", "pip", *pip_args)  # if it fails, the old one serves
    print("installing a CPU build of torch", flush=True)
    if pip_would_install_cpu_build(pip_args) and pip("install", PINNED, *pip_args) == 0:
        return 0
    if install_with_uv(pip_args):
        return 0
    print(HELP, file=sys.stderr)
    return 1


def installed(package: str) -> tuple[int, ...]:
    """Return the first two numbers of the installed version, () if there is none."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def has_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def pip(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


def pip_would_install_cpu_build(pip_args: list[str]) -> bool:
    """Ask pip what it would install, without downloading it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    answer = subprocess.run([*command, PINNED, *pip_args], capture_output=True, check=False)
    if answer.returncode != 0:
        return False
    plans = json.loads(answer.stdout)["install"]
    return not any(is_cuda(plan["metadata"]["name"], plan["metadata"]["version"]) for plan in plans)


def is_cuda(name: str, version: str) -> bool:
    return name.lower().startswith(("nvidia", "cuda")) or "+cu" in version


def install_with_uv(pip_args: list[str]) -> bool:
    """Use uv, which knows where the CPU builds of torch are kept."""
    if pip("install", "--quiet", "uv", *pip_args) != 0:
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    return subprocess.run([*command, "--torch-backend=cpu", PINNED], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
