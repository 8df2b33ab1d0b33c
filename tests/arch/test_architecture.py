"""Rules of the code: import table, torch-free imports, length of files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weft"

BELOW_ENGINE = "core kv cost sched blend ring text api kernels models exec attend"
MAY_IMPORT = {
    "core": "",
    "kv": "core",
    "cost": "core",
    "sched": "core kv cost",
    "blend": "core cost",
    "workload": "core",
    "ring": "core",
    "text": "core",
    "images": "core text",
    "api": "core text images",
    "server": "core ring text api batch",
    "batch": "core ring text api blend",
    "kernels": "core/kv_types.py core/errors.py core/process.py",
    "models": "core kernels",
    "exec": "core kernels models ring attend",
    "attend": "core kernels",
    "engine": BELOW_ENGINE,
    "engine/loop.py": "core",
    "cluster": "engine exec core",
    "tpu": "core models/spec.py",
    "sim": "core kv cost sched blend workload engine/loop.py",
    "bench": "core api workload",
    "chat": "core models/hub.py batch/http.py",
}
TORCH_FREE = ["core", "kv", "cost", "sched", "blend", "workload", "ring", "text", "api"]
TORCH_FREE += ["server", "batch", "sim", "bench", "models", "engine", "cli.py", "supervise.py"]
TORCH_FREE += ["attend", "chat", "generate.py", "offline.py", "engine_only.py", "frontend.py"]
TORCH_FREE += [
    "running_server.py",
    "status_command.py",
    "top_command.py",
    "doctor_command.py",
    "models_command.py",
]
TORCH_FREE += ["completion_command.py", "packed_command.py", "several.py", "kept_model.py"]
TORCH_FREE += ["kernels/cpu", "kernels/arrays.py", "kernels/interface.py", "kernels/ops.py"]
TORCH_FREE += ["kernels/measure.py", "kernels/sampling.py", "kernels/quantized.py"]
TORCH_FREE += ["images", "exec/eager.py", "exec/sample.py", "exec/store.py", "exec/inputs.py"]
LAZY = {"__init__.py", "cli.py", "supervise.py"}  # may import anything inside a function
LONGEST_FILE = 500


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def row_of(name: str) -> str | None:
    """The row of the table that a file stands in, or None for the files of the top folder."""
    if name in MAY_IMPORT:
        return name
    return name.split("/")[0] if "/" in name else None


def imported_files(path: Path, top_level_only: bool = False) -> set[str]:
    """Files of weft that a module imports, such as ``kv/pool.py``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = top_level(tree) if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {file for name in names if (file := file_of(name)) is not None}
    return found


def top_level(tree: ast.Module):
    """Statements that run on import: not inside functions, not under TYPE_CHECKING."""
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


def file_of(module: str) -> str | None:
    if not module.startswith("weft."):
        return None
    base = module.removeprefix("weft.").replace(".", "/")
    for candidate in (f"{base}.py", f"{base}/__init__.py"):
        if (SOURCE / candidate).is_file():
            return candidate
    return None


def test_imports_follow_the_table():
    wrong = []
    for path in modules():
        name = name_of(path)
        row = row_of(name)
        if row is None:
            continue
        assert row in MAY_IMPORT, f"package '{row}' is not in the import table"
        allowed = {row, *MAY_IMPORT[row].split()}
        for target in imported_files(path):
            own_package = target.split("/")[0] == row.split("/")[0] and "/" not in row
            permitted = own_package or target in allowed or target.split("/")[0] in allowed
            if not permitted:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_top_files_import_the_rest_lazily():
    for name in LAZY:
        path = SOURCE / name
        if path.is_file():
            eager = {t for t in imported_files(path, top_level_only=True) if "/" in t}
            assert {t.split("/")[0] for t in eager} <= {"core"}, f"{name} imports {eager} eagerly"


def test_the_import_check_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from weft.engine.loop import EngineLoop\n")
    assert imported_files(bad) == {"engine/loop.py"}
    assert imported_files(bad, top_level_only=True) == set()


BLOCK_TORCH = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


def torch_free_modules() -> list[str]:
    names = []
    for path in modules():
        name = name_of(path)
        if any(name == entry or name.startswith(entry + "/") for entry in TORCH_FREE):
            names.append("weft." + name.removesuffix(".py").replace("/", "."))
    return [name.removesuffix(".__init__") for name in names]


def run_without_torch(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK_TORCH, *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torch_free_packages_import_without_torch():
    names = torch_free_modules()
    assert "weft.sched.policy_fcfs" in names
    assert "weft.cli" in names
    done = run_without_torch("weft", *names)
    assert done.returncode == 0, done.stderr


def test_the_torch_block_can_fail():
    assert "torch is blocked" in run_without_torch("weft.exec.graphs").stderr


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after some code."""
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = {"torch", "numpy", "jinja2", "tokenizers", "llguidance", "yaml", "tqdm", "asyncio"}
    assert not loaded_by("import weft") & (heavy | {"weft.core.types"})
    assert not loaded_by("import weft.cli") & (heavy | {"rich", "prompt_toolkit"})
    assert not loaded_by("from weft import SamplingParams") & heavy
    assert not loaded_by("from weft import LLM") & (heavy - {"asyncio"})
    late = {"torch", "numpy", "jinja2", "tqdm", "llguidance", "prometheus_client", "fastokens"}
    assert not loaded_by("import weft.server.process") & (late | {"importlib.metadata"})
    in_engines = loaded_by("import weft.engine.process, weft.engine.build")
    assert "numpy" in in_engines
    late = {"torch", "jinja2", "tokenizers", "yaml", "transformers", "asyncio", "llguidance"}
    assert not in_engines & (late | {"importlib.metadata"})


@pytest.mark.parametrize("words", [[], ["--help"], ["models"], ["status", "--help"], ["doctor"]])
def test_commands_that_compute_nothing_start_light(words, monkeypatch, tmp_path):
    """Where no model lies on the machine, whose fit takes numbers."""
    for name in ("HOME", "HF_HOME", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path))
    code = f"import sys, weft.cli\nsys.argv = ['weft', *{words}]\n"
    code += "try:\n    weft.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
    heavy = {"numpy", "torch", "asyncio", "yaml", "jinja2", "tokenizers", "rich", "httpx2"}
    assert not loaded_by(code) & heavy


def test_engines_import_torch_without_what_compilers_need():
    start = "from weft.engine.postpone import postpone\npostpone('torch._meta_registrations')\n"
    start += "import torch\nassert torch.ones(2).sum() == 2\n"
    without = loaded_by(start)
    asked = loaded_by(start + "assert torch._meta_registrations.register_meta")
    assert "torch._meta_registrations" in without
    assert "torch._decomp" in asked - without  # which that module imports


def test_files_stay_readable(capsys):
    """Prints lines per package; a file that outgrows the limit wants to be two files."""
    lines: dict[str, int] = {}
    for path in [*modules(), *SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.hpp")]:
        count = len(path.read_text(encoding="utf-8").splitlines())
        package = row_of(name_of(path)) or "(top)"
        lines[package.split("/")[0]] = lines.get(package.split("/")[0], 0) + count
        assert count <= LONGEST_FILE, f"{name_of(path)} has {count} lines"
    with capsys.disabled():
        print("\nlines per package: " + ", ".join(f"{k} {v}" for k, v in sorted(lines.items())))


def class_names(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_a_class_name_is_defined_once():
    places: dict[str, list[str]] = {}
    for path in modules():
        for name in class_names(path.read_text(encoding="utf-8")):
            places.setdefault(name, []).append(name_of(path))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, f"one word for one thing; rename all but one of {twice}"


def forbidden_calls(source: str) -> list[str]:
    """Imports and calls that would run code out of a file: pickle, torch.load, eval, exec."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in ("pickle", "dill", "marshal")]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in ("eval", "exec", "torch.load") else []
            found += [k.arg for k in node.keywords if k.arg == "trust_remote_code"]
    return found


def test_nothing_executes_what_it_loads():
    for path in modules():
        assert not forbidden_calls(path.read_text(encoding="utf-8")), path
    assert forbidden_calls("import pickle\neval('1')\ntorch.load(f)") == [
        "pickle",
        "eval",
        "torch.load",
    ]
