"""The parts of ``scripts/gpu_check.sh`` in the order in which they run, the most valuable first.

To add a part, write a script beside this one that prints figures with ``figures.figure``, and add a
line to ``PARTS``. Give it a limit in seconds, the ``dry`` options with which it runs in seconds
where there is no GPU (``--device cpu`` and tiny shapes), and what it ``needs``. Without ``dry`` a
dry run pretends it. Goals stand in ``goals.py``. All limits before "tests" must add up to less than
``TOTAL_S``; what follows shares what they leave.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "gpu"
TOTAL_S = 560.0  # of a run; machines with GPUs are often lent for ten minutes
DRY_S = 150.0  # of a part in a dry run, whose machine may be busy with other things
# In a command: the folder of the results. Keep them to few files of at most 15 MiB: others fetch
# them by hand.
OUT = "{out}"


@dataclass(frozen=True)
class Part:
    """A command in a process group of its own, with the seconds that it may take.

    Attributes:
        least_s: with less time left it does not begin.
        needs: parts that must have passed before.
        modules: packages of Python that it needs.
        beside: the following parts that do not need it run meanwhile.
        asked: it runs only if ``--only`` names it.
        dry: the command of a dry run; empty: it is pretended.
        ends: how it must end in a dry run.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    least_s: float = 8.0
    needs: Sequence[str] = ()
    modules: Sequence[str] = ()
    beside: bool = False
    asked: bool = False
    dry: Sequence[str] = field(default=(), repr=False)
    ends: str = "passed"


def part(
    name: str,
    limit_s: float,
    command: str,
    dry: str | None = None,
    *,
    needs: str = "",
    modules: str = "",
    beside: bool = False,
    asked: bool = False,
) -> Part:
    """A part by its script in this folder with options, as words; ``dry`` are other options."""
    script, *options = command.split()
    start = [sys.executable, str(HERE / script)]
    return Part(
        name,
        [*start, *options],
        limit_s,
        needs=needs.split(),
        modules=modules.split(),
        beside=beside,
        asked=asked,
        dry=() if dry is None else [*start, *dry.split()],
    )


TINY = "--device cpu --model tiny --batch 2"
HOSTED = f"{TINY} --rows 3 --context 40 --threads 1 --steps 2"
PYTEST = "numpy pytest hypothesis psutil"


def tests(name: str, limit_s: float, *words: str, dry: Sequence[str]) -> Part:
    """Tests, whose failures are told at once, by as many workers as help."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tell_failures", "--tb=short"]
    wide = list(command)
    if importlib.util.find_spec("pytest_timeout") is not None:
        wide += ["--timeout", "60"]
    if importlib.util.find_spec("xdist") is not None:  # most of the time goes to compiling kernels
        wide += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]
    return Part(
        name,
        [*wide, *words],
        limit_s,
        needs=["build"],
        modules=PYTEST.split(),
        dry=[*command, *dry],
    )


COMPILE = ("compile", "compile_ahead", "cost_sheet", "resources", "variants")  # for absent GPUs
COMPILE += ("triton_tuning", "triton_tuning_attention")
ABSENT = [f"--ignore=tests/triton/test_{name}.py" for name in COMPILE]
ONE_TEST = ["tests/gpu/test_gpu_device.py", "-k", "fork"]
ONE_KERNEL = ["tests/triton/test_triton_ops.py", "-k", "test_softcap"]
TRACES = f"--traces {OUT}/traces.tar"

PARTS = (
    part("facts", 25, "facts.py", "--device cpu"),
    part("build", 150, f"build.py {BUILD}", beside=True),
    part("warm", 50, "warm.py", "--device cpu"),
    part("smoke", 45, "smoke.py", "--device cpu", needs="build"),
    part(
        "decode", 120, f"decode.py --model qwen2.5-7b --seconds 100 {TRACES}",
        f"{TINY} --output 6 {TRACES} --every-trace", needs="build",
    ),
    part(
        "sweep", 100, f"sweep.py --seconds 92 {TRACES}",
        f"--device cpu --quick --seconds 12 {TRACES} --every-trace",
    ),
    part("counters", 40, "counters.py", "--device cpu"),
    part("probes", 45, "probes.py --seconds 42", needs="build"),
    part("sanitizer", 60, "sanitize.py --seconds 56", "--device cpu", needs="build"),
    tests("tests", 90, "tests/gpu", dry=ONE_TEST),
    part("leases", 66, "leases.py --limit 21 --layers 8", f"{TINY} --steps 5", needs="build"),
    part("models", 90, f"decode.py --others --seconds 75 {TRACES}", needs="build"),
    part(
        "nano", 50, "nano.py",
        "--device cpu --model tiny --quantize none --rows 8 --context 40 --chunk 16 --repeats 2",
        needs="build",
    ),
    part("lanes", 24, "lanes.py", HOSTED, needs="build"),
    part("overlap", 20, "overlap.py", HOSTED, needs="build"),
    part(
        "experts", 60, "experts.py",
        "--device cpu --model tiny-moe --layers 2 --batches 1 --output 4 --quantize none",
        needs="build",
    ),
    part("ranks", 45, "ranks.py --limit 40", "--device cpu --limit 50", needs="build"),
    part("recurrent", 60, "recurrent.py", "--device cpu"),
    part("transformers", 60, "transformers_decode.py", modules="transformers", asked=True),
    tests("kernels", 400, "tests/triton", *ABSENT, dry=ONE_KERNEL),
    part("pack", 12, f"pack.py --out {OUT}", f"--out {OUT}"),
)  # fmt: skip
LAST = "pack"  # for which time is kept
TROUBLE = {  # what a dry run pretends beside them, and how that must end
    "crash": "failed", "hang": "too long", "deaf": "too long", "garbage": "passed",
    "half": "failed", "flood": "passed",
}  # fmt: skip


def dry_run(every: Sequence[Part]) -> list[Part]:
    """The parts as they run without a GPU, and others that fail in every way a part may."""
    pretend = [sys.executable, str(HERE / "pretend.py")]
    found = [
        replace(each, command=each.dry or [*pretend, "figure", each.name], limit_s=DRY_S)
        for each in every
    ]
    trouble = [
        Part(
            f"pretended {kind}",
            [*pretend, kind],
            3.0 if ends == "too long" else 20.0,
            1.0,
            ends=ends,
        )
        for kind, ends in TROUBLE.items()
    ]
    at = next((i for i, each in enumerate(found) if each.name == LAST), len(found))
    return [*found[:at], *trouble, *found[at:]]


def select(every: Sequence[Part], only: str) -> list[Part]:
    """The parts of the given names; for none all but those that must be asked for.

    Raises:
        SystemExit: an unknown name.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = set(names) - {part.name for part in every}
    if unknown:
        known = ", ".join(part.name for part in every)
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; they are: {known}")
    return [part for part in every if (part.name in names if names else not part.asked)]
