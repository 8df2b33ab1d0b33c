"""Compiles the kernels of an engine in other processes while this one loads its weights."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from weft import __version__
from weft.core import errors
from weft.core.cache_folder import cache_folder
from weft.core.config import EngineConfig
from weft.core.errors import KernelError, WeftError
from weft.core.process import describe_exit, start_child
from weft.core.resolved import ResolvedConfig
from weft.engine.compile_process import CompileRequest
from weft.engine.devices import is_cpu
from weft.engine.machine import usable_cores
from weft.engine.model import Model
from weft.kernels.gpus import Gpu
from weft.kernels.kernel_folder import KernelFile, KernelFolder, digest
from weft.kernels.pool import DEADLINE_S

logger = logging.getLogger("weft")

MOST_WORKERS = 16
# Without a word, after which the process counts as lost: two deadlines of a task, and its start.
SILENCE_S = 2 * DEADLINE_S + 120.0
CODE = Path(__file__).parents[1]
LAUNCHING = ("exec", "kernels", "models")  # packages that decide what is launched


@dataclass
class Compiled:
    """What came of the kernels of a start.

    Attributes:
        kernels: that it needs.
        kept: those that were in the folder.
        compiled: tasks that were done: kernels, and host code that launches them.
        seconds: from the start of the process to its end.
    """

    folder: Path
    kernels: list[KernelFile] = field(default_factory=list)
    kept: int = 0
    compiled: int = 0
    workers: int = 0
    seconds: float = 0.0

    def is_kept(self) -> bool:
        """Whether all kernels are in the folder, so that later starts find them."""
        return KernelFolder(self.folder).has(self.kernels)

    def describe(self) -> str:
        """Return it as words."""
        count = len(self.kernels)
        new = count - self.kept
        words = f"{count} kernels, {self.kept} of them kept in {self.folder}"
        if new:
            words += f", {new} compiled in {self.seconds:.1f} s by {self.workers} processes"
        return words


def kernel_folder(config: EngineConfig) -> Path:
    """Return the folder of compiled kernels: as set, or Triton's own variable, or weft's."""
    named = config.kernel_cache or os.environ.get("TRITON_CACHE_DIR")
    return Path(named).expanduser().absolute() if named else cache_folder() / "kernels"


def spare_folder() -> Path:
    """Return a folder for what the other one does not take, which goes when this process ends."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent / f"weft-kernels-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(b"")


class Compilation:
    """A process that compiles, until ``wait`` returns or nobody refers to it any more.

    Args:
        tell: is called with each task that has ended: its place, how many there are, and words.
    """

    def __init__(
        self, request: CompileRequest, tell: Callable[[int, int, str], None] = lambda *_: None
    ) -> None:
        """Start it.

        Raises:
            KernelError: it cannot be started.
        """
        self._request, self._tell = request, tell
        self._began = time.monotonic()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        command = [sys.executable, "-m", "weft.engine.compile_process"]
        command += ["--parent", str(os.getpid())]
        # It must not take memory of a GPU, nor threads that its own processes would lack.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        pipe = subprocess.PIPE
        try:
            self._process = start_child(
                command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            raise KernelError(f"Kernels cannot be compiled ahead: {error.strerror}.") from None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # it has ended
            stdin.write(json.dumps(asdict(request)).encode())
        self._finalizer = weakref.finalize(self, _end, self._process)
        reading = self._process.stdout, self._lines  # the thread must not keep ``self`` alive
        threading.Thread(target=_read, args=reading, name="weft-compile", daemon=True).start()

    def wait(self, failed: list[str] | None = None) -> Compiled:
        """Wait until everything is compiled.

        Args:
            failed: gets the names of what cannot be compiled, which else is an error.

        Raises:
            KernelError: a kernel does not compile, its compilation crashes or hangs, or there is no
                room for it. ``LostCompilerError``: the process ended without a word.
            WeftError: what is wrong with settings or model.
        """
        found = Compiled(Path(self._request.folder), workers=self._request.workers)
        tasks, errors_found = 0, list[dict[str, Any]]()
        try:
            while "ended" not in (event := self._next()):
                if "error" in event and isinstance(event["error"], dict):
                    kind = getattr(errors, event["error"]["type"], WeftError)
                    raise kind(event["error"]["message"])
                if "kernels" in event:
                    found.kernels, found.kept = event["kernels"], event["kept"]
                    tasks = event["tasks"]
                    continue
                found.compiled += 1
                errors_found += [event] if event["error"] else []
                words = event["error"] or f"{event['seconds']:.1f} s"
                self._tell(found.compiled, tasks, f"{event['name']}: {words}")
        finally:
            self._finalizer()
        found.seconds = time.monotonic() - self._began
        if failed is not None:
            failed += [event["name"] for event in errors_found]
        elif errors_found:
            raise KernelError(_explain(errors_found, self._request))
        return found

    def _next(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=SILENCE_S)
        except queue.Empty:
            raise LostCompilerError(f"it has said nothing for {SILENCE_S:.0f} s") from None
        if not line:
            raise LostCompilerError(describe_exit(self._process.wait()))
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise LostCompilerError(f"it said {line[:80]!r}")
        return event


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and with it those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class LostCompilerError(KernelError):
    """The process that compiles has ended, or hangs, for a reason of its own."""


def _explain(failed: list[dict[str, Any]], request: CompileRequest) -> str:
    first, more = failed[0], len(failed) - 1
    others = f" {more} others failed, too." if more else ""
    if first["full"]:
        return (
            f"Compiled kernels cannot be kept in {request.folder} nor in {request.spare}: "
            f"{first['error']}.{others} Free some room, or name another folder with kernel_cache."
        )
    return f"The kernel {first['name']} cannot be compiled: {first['error']}.{others}"


@dataclass
class KernelsAhead:
    """The kernels of a start.

    Attributes:
        maker: versions that compile.
        start: ``start_key``.
        named: whether the folder is set.
        foreign: versions that have filled the folder before, if those of ``maker`` have not.
        late: kernels that this process has compiled itself.
        compiled: what came of them, once ``wait`` has returned; None where nothing is captured.
    """

    folder: KernelFolder
    maker: dict[str, str]
    start: str
    named: bool
    foreign: list[str]
    late: list[str]
    compiled: Compiled | None = None
    compilation: Compilation | None = None

    def wait(self) -> None:
        """Wait until kernels are compiled; without a process that could do it, say so.

        Raises:
            KernelError: see ``Compilation.wait``.
        """
        if self.compilation is None:
            return
        try:
            self.compiled = self.compilation.wait()
        except LostCompilerError as error:
            logger.warning(
                "The process that compiles kernels ahead is lost (%s); they are compiled one by "
                "one when they are first launched.",
                error.message,
            )
            return
        new = len(self.compiled.kernels) - self.compiled.kept
        if new and self.compiled.kept == 0 and self.foreign:
            log = logger.warning if self.named else logger.info
            log(
                "The kernels in %s are of other versions (%s), so all are compiled anew for %s.",
                self.folder.path,
                "; ".join(self.foreign[:3]),
                ", ".join(f"{name} {value}" for name, value in self.maker.items()),
            )
        elif new and self.named:
            logger.warning(
                "%s lacked %d of %d kernels, which took %.1f s to compile; weft compile does it "
                "beforehand.",
                self.folder.path, new, len(self.compiled.kernels), self.compiled.seconds,
            )  # fmt: skip
        self.folder.note_start(self.start, self.compiled.kernels)
        if not self.compiled.is_kept():
            logger.warning(
                "%s does not take compiled kernels, so the next start compiles them again.",
                self.folder.path,
            )

    def describe(self) -> str:
        """Return where the kernels came from, as words; for after the capture."""
        words = "" if self.compiled is None else self.compiled.describe()
        if self.late:
            words += f"{', ' * bool(words)}{len(self.late)} compiled one by one"
        return words


def compile_ahead(
    config: EngineConfig, resolved: ResolvedConfig, model: Model, rank: int = 0
) -> KernelsAhead | None:
    """Begin to compile what an engine on a GPU will launch; None for other engines."""
    if is_cpu(model.device) or model.ops.names["paged_attention"] != "triton":
        return None
    import torch

    from weft.kernels.triton import kernel_cache
    from weft.kernels.triton.device import gpu_at

    gpu = gpu_at(torch.device(model.device))
    assert gpu is not None
    request = request_for(config, gpu, resolved, model, rank)
    kernel_cache.use_folders(Path(request.folder), Path(request.spare))
    compiler = kernel_cache.compiler_key(kernel_cache.target_of(gpu))
    found = KernelsAhead(
        KernelFolder(Path(request.folder)),
        kernel_cache.maker(gpu),
        start_key(request, compiler, repr(model.spec)),
        config.kernel_cache is not None,
        KernelFolder(Path(request.folder)).foreign(kernel_cache.maker(gpu)),
        kernel_cache.note_late(),
    )
    # What waits for the host or for another stage is found as it runs.
    if not config.graphs or model.host is not None or model.layers:
        return found
    kept = found.folder.kept(found.start)
    if kept is not None:
        found.compiled = Compiled(found.folder.path, [()] * kept, kept)
        return found
    try:
        found.compilation = Compilation(request)
    except KernelError as error:
        logger.warning("%s They are compiled one by one.", error.message)
    return found


def request_for(
    config: EngineConfig,
    gpu: Gpu,
    resolved: ResolvedConfig | None = None,
    model: Model | None = None,
    rank: int = 0,
) -> CompileRequest:
    """Return what another process compiles of an engine.

    Args:
        resolved, model: as the engine has them, if there is one.
    """
    if model is not None and resolved is not None:
        config = replace(
            config,
            model=str(model.source),
            revision=None,
            dtype=model.dtype,
            max_model_len=resolved.max_model_len,
        )
    # Classes and files of a server change no kernel.
    config = replace(config, classes={}, tokenizer=None, chat_template=None, profile=None)
    return CompileRequest(
        asdict(config),
        None if resolved is None else asdict(resolved),
        asdict(gpu),
        str(kernel_folder(config)),
        str(spare_folder()),
        max(1, min(MOST_WORKERS, usable_cores() // config.tensor_parallel)),
        rank,
    )


def start_key(request: CompileRequest, compiler: str, spec: str) -> str:
    """Return a hash of all that decides which kernels a start launches, and by what they compile.

    Args:
        compiler: ``kernel_cache.compiler_key``.
        spec: of the model.
    """
    asked = asdict(replace(request, folder="", spare="", workers=0))
    return digest(json.dumps([asked, compiler, spec, __version__, _code_hash()]))


def _code_hash() -> str:
    found = []
    for package in LAUNCHING:
        for path in sorted((CODE / package).rglob("*.py")):
            found.append(f"{path.relative_to(CODE)} {digest(path.read_text(encoding='utf-8'))}")
    return digest("\n".join(found))


def check_compiler() -> None:
    """Raise KernelError if torch or Triton are not installed."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            raise KernelError(
                f"Kernels are compiled with {package}, which is not installed: pip install "
                "'weft[cuda]'"
            )
