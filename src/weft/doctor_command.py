"""``weft doctor``: checks what weft needs on this machine, and says what to do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.addresses import DEFAULT_PORT
from weft.core.cache_folder import cache_folder
from weft.core.errors import WeftError
from weft.core.memory import available_memory, memory_groups, memory_limit
from weft.core.settings import format_bytes
from weft.core.topology import this_machine

LITTLE_MEMORY, LITTLE_DISK = 2 * 2**30, 5 * 2**30
FEW_FILES = 8192  # that a server may open: connections, and what it stores
FOR_WEIGHTS = 0.6  # of the free memory; the rest is for KV, and other programs
ASK_S = 2.0
MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        state: ``ok``; ``note`` where weft works, but not as well as it could; ``bad``.
        found: what there is.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.set_defaults(run=run_doctor, parser=parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port that a server is to have (default {DEFAULT_PORT})",
    )


def run_doctor(options: Mapping[str, Any]) -> int:
    """Print every finding; the exit status: 0 where weft can serve, else 1."""
    findings = check_machine(options["port"])
    bad = [finding for finding in findings if finding.state == "bad"]
    if options["json"]:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return 1 if bad else 0
    for finding in findings:
        print(f"{MARKS[finding.state]}  {finding.name:12} {finding.found}")
        if finding.advice:
            print(f"      -> {finding.advice}")
    if bad:
        print(f"\nweft cannot serve here: {', '.join(finding.name for finding in bad)}")
        return 1
    print("\nweft can serve here: weft serve MODEL; without MODEL it serves a small built-in one")
    return 0


def check_machine(port: int) -> list[Finding]:
    """Check everything; no check raises an error."""
    return [
        _version(),
        _cpu(),
        _instructions(),
        _memory(),
        _gpu(),
        _port(port),
        _files(),
        _folder("cache", cache_folder(), "set XDG_CACHE_HOME: packed weights are not kept without"),
        _folder("models", _hub_folder(), "set HF_HOME: models cannot be downloaded without"),
        _hub(),
        _shared_memory(),
    ]


def _version() -> Finding:
    return Finding("weft", "ok", f"{__version__}, Python {platform.python_version()}")


def _cpu() -> Finding:
    from weft.engine.machine import cpu_name, usable_cores

    return Finding(
        "cpu", "ok", f"{cpu_name()}: {usable_cores()} cores to use; {this_machine().describe()}"
    )


def _instructions() -> Finding:
    """The instruction set of the native kernels, and whether there are any."""
    name = "kernels"
    try:
        from weft.kernels.cpu import _native
        from weft.kernels.cpu.isa import chosen_isa
        from weft.kernels.unavailable import KernelUnavailable
    except ImportError as error:
        again = "build weft again: make setup, or pip install --force-reinstall weft"
        return Finding(name, "bad", f"the native parts do not load: {error}", again)
    try:
        isa = chosen_isa()
    except KernelUnavailable as error:
        return Finding(name, "bad", str(error), "unset WEFT_ISA, or set it to one of these")
    widest = _native.machine_isas()[0]
    if isa == widest:
        return Finding(name, "ok", f"instruction set {isa}, the widest of this machine")
    advice = "unset WEFT_ISA"
    if "WEFT_ISA" not in os.environ:
        advice = "build weft for this machine: make setup"
    return Finding(name, "note", f"instruction set {isa}; this machine has {widest}", advice)


def _memory() -> Finding:
    free, limit = available_memory(), memory_limit(memory_groups())
    within = "" if limit is None else f", within a limit of {format_bytes(limit)}"
    most = FOR_WEIGHTS * free / 1e9  # int8 has a byte a weight, bfloat16 two, int4 half
    found = (
        f"{format_bytes(free)} free{within}: for models of up to some {most / 2:.1f} billion "
        f"weights in bfloat16, {most:.1f} in int8, {2 * most:.1f} in int4"
    )
    if free < LITTLE_MEMORY:
        return Finding("memory", "note", found, "end other programs, or raise the limit")
    return Finding("memory", "ok", found)


def _gpu() -> Finding:
    from weft.engine.driver import has_driver

    if not has_driver():
        return Finding("gpu", "ok", "no NVIDIA driver: the CPU computes")
    if find_spec("torch") is None:
        install = "pip install 'weft[cuda]' for the GPU; until then the CPU computes"
        return Finding("gpu", "note", "there is an NVIDIA driver, but no torch", install)
    import torch

    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        advice = "install a torch with CUDA that fits the driver (nvidia-smi shows it)"
        return Finding("gpu", "note", f"torch {torch.__version__} {built}", advice)
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    found = ", ".join(f"{one.name} ({format_bytes(one.total_memory)})" for one in devices)
    if find_spec("triton") is None:
        return Finding("gpu", "note", f"{found}, but no Triton", "pip install 'weft[cuda]'")
    return Finding("gpu", "ok", f"{found}, torch {torch.__version__}")


def _port(port: int) -> Finding:
    name = "port"
    if not 0 <= port <= 65535:
        return Finding(name, "bad", f"{port} is no port", "choose one from 0 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return Finding(name, "bad", f"{port} is reserved for root", "choose one above 1023")
        except OSError:
            pass
        else:
            return Finding(name, "ok", f"{port} is free")
    if _is_weft(port):
        other = f"a second server needs another --port; weft status --url http://127.0.0.1:{port}"
        return Finding(name, "note", f"a weft server has {port} already", other)
    other = "choose another one: weft serve --port 8001, weft chat --url http://127.0.0.1:8001"
    return Finding(name, "note", f"another program has {port}", other)


def _is_weft(port: int) -> bool:
    from weft.running_server import RunningServer

    try:
        return bool(RunningServer(f"http://127.0.0.1:{port}", None, timeout_s=ASK_S).state())
    except WeftError:
        return False


def _files() -> Finding:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= FEW_FILES:
        return Finding("open files", "ok", "no limit" if most < 0 else f"{most} at most")
    return Finding(
        "open files", "note", f"{most} at most", f"raise the limit: ulimit -n {FEW_FILES}"
    )


def _folder(name: str, folder: Path, without: str) -> Finding:
    """Whether a folder can be written, or made, and the room on its disk."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "note", f"{folder} cannot be written", without)
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    found = f"{folder}, {format_bytes(free)} free on its disk"
    if free < LITTLE_DISK:
        make_room = "make room: weft models remove NAME, weft cache clear"
        return Finding(name, "note", found, make_room)
    return Finding(name, "ok", found)


def _hub_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub() -> Finding:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        advice = "unset HF_HUB_OFFLINE to download models"
        return Finding("hub", "note", f"offline; what is in {_hub_folder()} is served", advice)
    known = _has_token(Path(constants.HF_TOKEN_PATH))
    token = "with a token" if known else "without a token, which only gated models need"
    return Finding("hub", "ok", f"{constants.ENDPOINT}, {token}")


def _has_token(file: Path) -> bool:
    """Whether there is one where the hub's library looks, which itself may ask a server for it."""
    if any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if folder.is_dir() and os.access(folder, os.W_OK):
        disk = os.statvfs(folder)
        return Finding("/dev/shm", "ok", f"{format_bytes(disk.f_bavail * disk.f_frsize)} free")
    advice = "give containers --shm-size, or name files: --responses-db FILE --usage-db FILE"
    return Finding("/dev/shm", "note", "cannot be written: stored responses stay apart", advice)
