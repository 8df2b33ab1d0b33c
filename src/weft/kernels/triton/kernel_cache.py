"""A folder of compiled kernels that can be copied to another place, and that need not be writable.

Triton keeps a compiled kernel in a folder of its own by a key: a hash of Triton itself, of the
kernel's source, of its types and constants, and of the compiler's options. Its own cache names
files by their whole path, so that a copy elsewhere has nothing, and it fails where it cannot write.
This one finds files beside each other, wherever they are, and writes what the folder does not take
to a spare one, for as long as the process lives. Files are replaced at once, so several processes
may use a folder together.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import FileCacheManager, get_cache_key, triton_key

from weft import __version__
from weft.kernels.gpus import Gpu
from weft.kernels.kernel_folder import GROUP, digest
from weft.kernels.pool import CompileTask
from weft.kernels.triton.launches import WARP, Variant
from weft.kernels.tuning import source_hash

LOCK = "weft.lock"

_folders: list[Path] = []


def use_folders(folder: Path, spare: Path) -> None:
    """Have Triton find and keep compiled kernels in a folder from now on.

    Args:
        spare: takes what the folder cannot; it need not exist.
    """
    _folders[:] = [folder, spare]
    triton.knobs.cache.manager_class = KernelFiles
    triton.knobs.compilation.store_binary_only = True  # what lies between is ten times as large


class KernelFiles(FileCacheManager):  # type: ignore[misc]
    """The files of one key; implements Triton's ``CacheManager``."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:
            super().__init__(key, override, dump)
            return
        self.key = key
        self.cache_dir = str(_folders[0] / key)
        self.lock_path = os.path.join(self.cache_dir, "lock")

    def get_file(self, filename: str) -> str | None:
        for folder in _folders:
            path = folder / self.key / filename
            with contextlib.suppress(OSError):
                if path.stat().st_size:
                    return str(path)
        return None

    def has_file(self, filename: str) -> bool:
        return self.get_file(filename) is not None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a kernel by name; None if one of them is missing."""
        path = self.get_file(GROUP + filename)
        if path is None:
            return None
        try:
            names = json.loads(Path(path).read_bytes())["child_paths"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = {name: self.get_file(name) for name in names}
        return None if None in found.values() else found  # type: ignore[return-value]

    def put(self, data: Any, filename: str, binary: bool = True) -> str:  # noqa: ARG002
        """Write a file; return its path. Raises OSError: not even the spare folder takes it."""
        content = data if isinstance(data, bytes) else str(data).encode()
        with contextlib.suppress(OSError):
            return _write(_folders[0] / self.key / filename, content)
        return _write(_folders[1] / self.key / filename, content)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from compiling this kernel meanwhile, where the folder allows it."""
        handle = -1
        with contextlib.suppress(OSError):
            folder = _folders[0] / self.key
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if handle >= 0:
                os.close(handle)


def note_late() -> list[str]:
    """Return a list that gets the name of each kernel which this process compiles from now on."""
    late: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            late.append(src.name)

    triton.knobs.compilation.listener = note
    return late


def _write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return str(path)


@cache
def _invalidating() -> dict[str, str]:
    return dict(get_cache_invalidating_env_vars())


def target_of(gpu: Gpu) -> GPUTarget:
    """Return a GPU as Triton's compiler knows it."""
    return GPUTarget("cuda", gpu.arch, WARP)


def maker(gpu: Gpu) -> dict[str, str]:
    """Return the versions that compile now; see ``kernel_folder.KernelFolder``."""
    return {
        "weft": f"{__version__} ({source_hash()[:8]})",
        "Triton": f"{triton.__version__} ({digest(triton_key())[:8]})",
        "for": gpu.sm,
    }


def compiler_key(target: GPUTarget) -> str:
    """Return a hash of the compiler: Triton, its assembler, and variables that change its code."""
    return digest(f"{triton_key()} {make_backend(target).hash()} {sorted(_invalidating().items())}")


def files_of(variant: Variant, target: GPUTarget) -> KernelFiles:
    """Return where a variant is kept, compiled or not: under the key that Triton gives it."""
    backend = make_backend(target)
    options = backend.parse_options(dict(variant.options))
    key = get_cache_key(variant.source(), backend, options, env_vars=_invalidating())
    return KernelFiles(key_of(key.encode()))


def key_of(content: bytes) -> str:
    """Return the name of the folder of what Triton hashes."""
    return base64.b32encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def metadata_name(variant: Variant) -> str:
    """Return the name of the file that describes a compiled variant."""
    return f"{variant.name[:150]}.json"


def compile_tasks(
    variants: Iterable[Variant], target: GPUTarget, why: str = ""
) -> list[CompileTask]:
    """Return tasks that compile what is not there of variants, the longest sources first.

    Args:
        why: comes before their names.
    """
    return [
        CompileTask(
            f"{why}{variant.name} for sm_{target.arch}", partial(compile_variant, variant, target)
        )
        for variant in sorted(variants, key=lambda variant: -len(variant.kernel.src))
        if files_of(variant, target).get_group(metadata_name(variant)) is None
    ]


def compile_variant(variant: Variant, target: GPUTarget, alone: bool = False) -> None:
    """Compile a variant into the folder, unless another process does.

    Args:
        alone: wait for no other process.

    Raises:
        OSError: neither folder takes it.
        Exception: what Triton raises of a kernel that does not compile.
    """
    files = files_of(variant, target)
    with contextlib.nullcontext() if alone else files.locked():
        if files.get_group(metadata_name(variant)) is None:
            triton.compile(variant.source(), target=target, options=dict(variant.options))
