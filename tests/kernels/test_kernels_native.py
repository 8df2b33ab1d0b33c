"""The native kernels without Python, under the address and the thread sanitizer."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

import builds
from depth import deep

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "weft" / "kernels" / "cpu"
RING = SOURCES.parents[1] / "ring"  # the mailbox sleeps and wakes as the ring does
NAMES = ("sample", "delta", "dispatch", "experts", "latent", "layer", "matrix", "mixers")
NAMES += ("ops", "panel", "pool", "post", "quant", "quant_tile", "rate", "scan")
FLAGS = ["-std=c++20", "-O1", "-g", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]


def built(main: str, names: tuple[str, ...], *flags: str) -> Path:
    files = [HERE / main, *(SOURCES / f"{name}.cpp" for name in names)]
    return builds.program([*FLAGS, *flags, f"-I{SOURCES}", *files], [HERE, SOURCES, RING])


def check(program: Path, rounds: int) -> None:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [str(program), str(rounds)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **options},
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is unknown to libtsan")
    assert done.stdout == "good\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_integers_with_a_modelled_avx_vnni_are_those_of_plain_code() -> None:
    """Also where no machine has it: its loops run with the instruction in C++."""
    copies = []
    for name, flags in (
        ("baseline", ()),
        ("other", ("-mavx2", "-mfma", "-include", HERE / "modelled_vnni.hpp")),
    ):
        source = ["-ffp-contract=off", f"-DWEFT_ISA={name}", *flags, f"-I{SOURCES}"]
        compiled = [*FLAGS, *source, "-c", SOURCES / "quant_tile.cpp"]
        copies.append(builds.program(compiled, [HERE, SOURCES]))
    files = [HERE / "quant_forms.cpp", SOURCES / "quant.cpp", *copies]
    check(builds.program([*FLAGS, f"-I{SOURCES}", *files], [HERE, SOURCES]), 0)


@pytest.fixture(scope="module", params=["-march=x86-64", "-march=native"])
def tile_products(request) -> Path:
    """Products by AMX tiles, by a model of the instructions, which runs on any machine."""
    flags = [*FLAGS, "-ffp-contract=off", "-DWEFT_X86", "-DWEFT_TILES", f"-I{SOURCES}"]
    wide = [f"-m{name}" for name in BF16]
    copies = [
        ("quant_tile", "baseline", []),
        ("quant_tile", "avx512bf16", wide),
        ("panel", "avx512bf16", wide),
        ("amx", "amx", [f"-m{name}" for name in TILES]),
    ]
    files = [
        builds.program(
            [*flags, f"-DWEFT_ISA={isa}", *more, "-c", SOURCES / f"{name}.cpp"], [SOURCES]
        )
        for name, isa, more in copies
    ]
    files += [HERE / "tile_products.cpp", SOURCES / "quant.cpp", SOURCES / "dispatch.cpp"]
    sanitized = [*flags, request.param, "-fsanitize=address"]
    return builds.program([*sanitized, *files], [HERE, SOURCES])


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are an x86 matter")


@X86
@pytest.mark.parametrize("part", ["checks", "integers", "pairs"])
def test_products_by_modelled_tiles_are_those_of_their_definitions(tile_products, part) -> None:
    done = subprocess.run([tile_products, part], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


@X86
@pytest.mark.parametrize(
    ("part", "needs"),
    [
        # If these had the bits of tiles, `amxbf16` need not be a set of its own.
        pytest.param("vectors", "AVX-512 with bfloat16", id="other-definition"),
        pytest.param("machine", "AMX", id="tiles"),
    ],
)
def test_instructions_of_this_machine_are_what_is_said_of_them(tile_products, part, needs) -> None:
    done = subprocess.run([tile_products, part], capture_output=True, text=True, check=False)
    if done.stdout == "none\n":
        pytest.skip(f"this machine has no {needs}")
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


@X86
@pytest.mark.parametrize("tiles", ["modelled", "machine"])
def test_attention_by_tiles_gives_a_query_the_same_bits_in_any_company(tiles) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if "avx512_bf16" not in flags or (tiles == "machine" and "amx_bf16" not in flags):
        pytest.skip(f"this machine has no AVX-512 with bfloat16 ({tiles} tiles)")
    wide = [f"-m{name}" for name in TILES]
    words = ["-std=c++20", "-O1", "-g", "-Wno-psabi", "-fsanitize=address", *wide]
    words += [f"-I{SOURCES}", HERE / "tile_attention.cpp"]
    program = builds.program(words, [HERE, SOURCES])
    done = subprocess.run([program, tiles], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


BEFORE = ("avx2", "fma")
WIDE = (*BEFORE, "avx512f", "avx512bw", "avx512dq", "avx512vl")
BF16 = (*WIDE, "avx512vnni", "avx512bf16")
TILES = (*BF16, "amx-tile", "amx-int8", "amx-bf16")
BEFORE_TILES = "avx512bf16 avx512vnni avx512 avx2 baseline"


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), "baseline"),
        (("avx2",), "baseline"),
        (BEFORE, "avx2 baseline"),
        ((*BEFORE, "avxvnni"), "avxvnni avx2 baseline"),
        (("avxvnni",), "baseline"),
        (WIDE, "avx512 avx2 baseline"),
        ((*WIDE, "avx512vnni"), "avx512vnni avx512 avx2 baseline"),
        (
            (*BF16, "avxvnni"),
            "avx512bf16 avx512vnni avx512 avxvnni avx2 baseline",
        ),
        ((*BF16, "amx-tile", "amx-bf16", "given"), BEFORE_TILES),
    ],
)
def test_a_cpu_runs_the_widest_set_that_it_has(features, expected) -> None:
    assert selection(features) == [*expected.split(), "0"]


def test_tiles_are_used_if_linux_gives_them_and_it_is_asked_once() -> None:
    assert selection(TILES) == [*BEFORE_TILES.split(), "1"]
    assert selection((*TILES, "given")) == f"amxbf16 amx {BEFORE_TILES} 1 amxbf16".split()


def test_a_build_of_one_set_runs_it_or_the_baseline() -> None:
    assert selection(BF16, "-DWEFT_ONLY=avx512") == ["avx512", "baseline", "0"]
    assert selection(BEFORE, "-DWEFT_ONLY=avx512") == ["baseline", "0"]
    tiles = ("-DWEFT_ONLY=avx512bf16", "-DWEFT_TILES")
    words = "amxbf16 amx avx512bf16 baseline 1 amxbf16"
    assert selection((*TILES, "given"), *tiles) == words.split()


def selection(features: tuple[str, ...], *more: str) -> list[str]:
    flags = [*FLAGS, "-DWEFT_X86", *(more or ("-DWEFT_TILES",)), f"-I{SOURCES}"]
    program = builds.program([*flags, HERE / "selection.cpp"], [HERE, SOURCES])
    done = subprocess.run([program, *features], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_pool_under_the_thread_sanitizer() -> None:
    check(built("pool.cpp", ("pool",), "-fsanitize=thread"), 100)


def test_every_interleaving_of_a_job_with_its_abort_and_the_death_of_its_worker() -> None:
    done = explored()
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" 0 violations") == 2
    torn = explored("-DTORN_EXCHANGE")
    assert (torn.returncode, torn.stdout.count("two owners at once")) == (1, 1), "it can fail"


def explored(*flags: str) -> subprocess.CompletedProcess[str]:
    words = [*FLAGS, "-Werror", *flags, f"-I{SOURCES}", HERE / "job_states.cpp"]
    program = builds.program(words, [HERE, HERE.parent / "ring", SOURCES, RING])
    return subprocess.run([program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("sanitizer", [pytest.param("address,undefined", marks=deep), "thread"])
def test_a_mailbox_and_its_workers_under_a_sanitizer(sanitizer) -> None:
    names = ("check", "courier", "host", "mailbox", "pool")
    check(built("host_worker.cpp", names, f"-fsanitize={sanitizer}"), 2000)


@deep
@pytest.mark.parametrize(
    ("sanitizer", "isa", "rounds"),
    [
        ("address,undefined", "-march=native", 60),
        ("address,undefined", "-march=haswell", 20),
        ("thread", "-march=x86-64", 25),
    ],
)
def test_pool_and_layers_under_a_sanitizer(sanitizer, isa, rounds) -> None:
    """The widest vectors and AVX2; vectors are no matter of the thread sanitizer, which is slow."""
    flags = (f"-fsanitize={sanitizer}", isa, "-DWEFT_ISA=baseline")
    check(built("layers.cpp", NAMES, *flags), rounds)
