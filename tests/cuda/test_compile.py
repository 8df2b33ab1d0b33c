"""CUDA sources compile for the GPUs that they are meant for, with the test packages' compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
ARCHITECTURES = ("sm_80", "sm_90")


def toolkit() -> Path:
    """Where the packages nvidia-cuda-nvcc and its companions put the compiler."""
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None, "the packages of the extra 'test' bring nvcc; install them"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def compile_cuda(source: Path, architecture: str, out: Path, *options: str) -> None:
    cuda = toolkit()
    command = [str(cuda / "bin" / "nvcc"), "-std=c++17", f"-arch={architecture}", "-Werror"]
    command += ["all-warnings", f"-I{cuda / 'include'}", *options, str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flags_compile(architecture, tmp_path):
    compile_cuda(GPU / "flags.cu", architecture, tmp_path / "flags.o", "-c")
    assert (tmp_path / "flags.o").stat().st_size > 0


def test_kernels_of_the_probes_compile(tmp_path):
    sys.path.insert(0, str(GPU))
    try:
        import probes
    finally:
        sys.path.remove(str(GPU))
    source = tmp_path / "probes.cu"
    source.write_text(probes.KERNELS)
    compile_cuda(source, "sm_90", tmp_path / "probes.cubin", "-rdc=true", "-cubin")


def test_an_error_in_a_source_is_found(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void k(int* p) { *p = missing; }\n")
    with pytest.raises(AssertionError, match="missing"):
        compile_cuda(source, "sm_90", tmp_path / "wrong.o", "-c")
