"""Prints the map of files, a line each: ``python tools/map_page.py > docs/map.md``."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAPPED = re.compile(
    r"\.(py|pyi|cpp|hpp|cu|cuh|sh|md|json|txt|toml|js|mjs|jinja|safetensors|ya?ml|service)$"
)
MAPPED_NAMES = {"Makefile", ".ci/run", "LICENSE", ".dockerignore", "deploy/Dockerfile"}
UNMAPPED = re.compile(r"^benchmarks/results/|.*/package-lock\.json$|.*/page/vendor/.*/")
READING_ORDER = (  # a folder stands before those below it that are not named here
    ".",
    "docs",
    "src/weft/core",
    "src/weft/kv",
    "src/weft/cost",
    "src/weft/workload",
    "src/weft/sched",
    "src/weft/blend",
    "src/weft/ring",
    "src/weft/text",
    "src/weft/api",
    "src/weft/batch",
    "src/weft/server",
    "src/weft/kernels",
    "src/weft/models",
    "src/weft/builtin",
    "src/weft/attend",
    "src/weft/exec",
    "src/weft/engine",
    "src/weft",
    "src/weft/chat",
    "src/weft/sim",
    "src/weft/bench",
    "tools",
    "scripts",
    "deploy",
    ".ci",
    "benchmarks",
    "tests",
)
BY_HAND = {
    "LICENSE": "Apache-2.0.",
    "pyproject.toml": "Package, dependencies, and the settings of build, lint, types and tests.",
    "CMakeLists.txt": "Builds the native extensions.",
    "docs/map.md": "This page.",
    "deploy/grafana/weft.json": "Grafana's dashboard of weft.",
    "benchmarks/published.json": "Other systems' measurements, with where they are printed.",
    "src/weft/builtin/card.json": "The built-in model's facts, read by the test of its weights.",
    "src/weft/builtin/config.json": "Architecture of the built-in model.",
    "src/weft/builtin/generation_config.json": "Sampling defaults of the built-in model.",
    "src/weft/builtin/heldout.txt": "Text the built-in model never saw, for its perplexity.",
    "src/weft/builtin/heldout.LICENSE.txt": "Licence of the held-out text.",
    "src/weft/builtin/model.safetensors": "Weights of the built-in model.",
    "src/weft/builtin/tokenizer.json": "Tokeniser of the built-in model.",
    "src/weft/builtin/tokenizer_config.json": "Control tokens and chat template.",
    "src/weft/server/page/vendor/versions.json": "Libraries of the page, with digests.",
    "tests/null/recorded_plans.json": "Digests of the plans of all schedulers in fixed scenarios.",
    "tests/numeric/golden.json": "Hashes of golden logits, by instruction set.",
}


def files() -> list[str]:
    """Files of the project that have a line, in the order in which one reads."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [
        name
        for name in listed.stdout.splitlines()
        if (MAPPED.search(name) or name in MAPPED_NAMES)
        and not UNMAPPED.match(name)
        and (ROOT / name).is_file()
        and ((ROOT / name).stat().st_size or name == "docs/map.md")
    ]
    return sorted(found, key=lambda name: (_place(name), str(Path(name).parent), name))


def _place(name: str) -> int:
    """The place of a file's group in the reading order."""
    folder = Path(name).parent
    for group in (folder, *folder.parents):
        if str(group) in READING_ORDER and (str(group) != "." or folder == group):
            return READING_ORDER.index(str(group))
    raise SystemExit(f"READING_ORDER has no place for {folder}; put the folder where one reads it.")


def describe(name: str) -> str:
    """What a file says about itself in its first sentence; an empty string if it says nothing."""
    if name in BY_HAND:
        return BY_HAND[name]
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if name.endswith((".py", ".pyi")):
        said = ast.get_docstring(ast.parse(text)) or ""
    elif name.endswith(".md"):
        said = next((line[2:] for line in text.splitlines() if line.startswith("# ")), "")
    elif path.name == "package.json":
        said = json.loads(text)["description"]
    else:
        said = _first_comment(text)
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])|\n\n", said.strip(), maxsplit=1)[0]
    return " ".join(sentence.split())


def _first_comment(text: str) -> str:
    """The comment at the top of the file, before any code."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"(?://|#(?!!|pragma|include|if))\s*(.*)", line)
        if match:
            lines.append(match[1])
        elif lines or not line.startswith(("#!", "#pragma")):
            break
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    lines = [
        "# Map",
        "",
        "One line a file: the first sentence that the file says about itself",
        "(`python tools/map_page.py > docs/map.md`). Groups come in the order in which one reads:",
        "overview, foundations, scheduling, the request's way in, the model, the processes, then",
        "simulation, tools and tests. [Architecture](architecture.md) shows how they fit together.",
    ]
    folder = None
    for name in files():
        if (parent := str(Path(name).parent)) != folder:
            folder = parent
            lines += ["", f"## {'top' if folder == '.' else folder}", ""]
        lines.append(f"- `{name}`: {describe(name)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
