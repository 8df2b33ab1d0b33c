"""CUDA sources compile for the GPUs that they are meant for, with the test packages' compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import builds
from cuda_toolkit import toolkit

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
ARCHITECTURES = ("sm_80", "sm_90")


def compile_cuda(source: Path, architecture: str, *options: str) -> Path:
    cuda = toolkit()
    words = ["-std=c++17", f"-arch={architecture}", "-Werror", "all-warnings"]
    words += [f"-I{cuda / 'include'}", *options]
    return builds.compiled(str(cuda / "bin" / "nvcc"), [*words, source], [source])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flags_compile(architecture):
    assert compile_cuda(GPU / "flags.cu", architecture, "-c").stat().st_size > 0


def test_kernels_of_the_probes_compile():
    sys.path.insert(0, str(GPU))
    try:
        import probes
    finally:
        sys.path.remove(str(GPU))
    compile_cuda(builds.source(probes.KERNELS, ".cu"), "sm_90", "-rdc=true", "-cubin")


def test_an_error_in_a_source_is_found():
    source = builds.source("__global__ void k(int* p) { *p = missing; }\n", ".cu")
    with pytest.raises(builds.CompileError, match="missing"):
        compile_cuda(source, "sm_90", "-c")
