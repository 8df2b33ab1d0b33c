"""Training and held-out text from the running Python's standard library, chosen by name."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

HELDOUT_MODULES = ("fractions", "graphlib", "heapq", "sched", "shlex", "textwrap")
HELDOUT_TOPICS = (
    "assert",
    "calls",
    "comparisons",
    "import",
    "lambda",
    "raise",
    "slicings",
    "yield",
)
# Topics that repeat a held-out one: they are in neither text.
SHADOW_TOPICS = ("in",)

# Tests, tables, generated files, frozen old tools, and what only some installs have.
SKIPPED_FOLDERS = frozenset(
    {
        *("__phello__", "__pycache__", "_pyrepl", "distutils", "encodings", "ensurepip"),
        *("idlelib", "lib2to3", "msilib", "pydoc_data", "site-packages", "test", "tests"),
        "turtledemo",
    }
)
SKIPPED_FILES = frozenset(
    {
        *("_opcode_metadata.py", "html/entities.py", "keyword.py", "nturl2path.py"),
        *("re/_casefix.py", "stringprep.py", "this.py"),
    }
)
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "_sysconfig_vars")
MAX_NON_ASCII = 0.02


@dataclass(frozen=True)
class Document:
    """One training document: `name` says where it comes from, e.g. `json/decoder.py`."""

    name: str
    text: str


def _wanted(relative: Path) -> bool:
    parts = relative.parts
    return not (
        SKIPPED_FOLDERS.intersection(parts)
        or relative.as_posix() in SKIPPED_FILES
        or any(part.startswith(SKIPPED_PREFIXES) for part in parts)
    )


def module_name(relative: Path) -> str:
    """`json/decoder.py` -> `json.decoder`, `json/__init__.py` -> `json`."""
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(path: Path) -> str | None:
    """The file's text, or None if it is not UTF-8 or has much beyond ASCII."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    other = sum(ord(c) > 127 for c in text)
    return None if other > MAX_NON_ASCII * len(text) else text.strip() + "\n"


def library_documents() -> list[Document]:
    """Every wanted source file of the standard library, sorted by name, the held-out included."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
    documents = []
    for path in files:
        relative = path.relative_to(root)
        text = _read(path) if _wanted(relative) else None
        if text is not None and len(text) > 100:
            documents.append(Document(relative.as_posix(), text))
    return documents


def topic_documents() -> list[Document]:
    """The language reference's sections, sorted by name, less those inside a longer one."""
    kept: list[str] = []
    for name in sorted(topics, key=lambda n: (-len(topics[n]), n)):
        paragraphs = [p for p in topics[name].split("\n\n") if len(p) > 60]
        repeated = any(2 * sum(p in topics[k] for p in paragraphs) > len(paragraphs) for k in kept)
        if not repeated or name in HELDOUT_TOPICS:
            kept.append(name)
    return [Document(f"topics/{n}", topics[n].strip() + "\n") for n in sorted(kept)]


def _held_out(document: Document) -> bool:
    if document.name.startswith("topics/"):
        return document.name.removeprefix("topics/") in HELDOUT_TOPICS
    return module_name(Path(document.name)) in HELDOUT_MODULES


def training_documents() -> list[Document]:
    """All documents but the held-out ones and exact repetitions, in name order."""
    seen: set[str] = set()
    result = []
    for document in library_documents() + topic_documents():
        digest = hashlib.sha256(document.text.encode()).hexdigest()
        shadow = document.name.removeprefix("topics/") in SHADOW_TOPICS
        if digest not in seen and not shadow and not _held_out(document):
            seen.add(digest)
            result.append(document)
    return result


def heldout_text() -> str:
    """The held-out documents of this Python, joined by blank lines, in name order."""
    documents = [d for d in library_documents() + topic_documents() if _held_out(d)]
    return "\n\n".join(d.text for d in documents)


def licence_text() -> str:
    """The licence of this Python, which excerpts of it are distributed with."""
    return (Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text(encoding="utf-8")


def repeated_share(heldout: str, documents: list[Document]) -> float:
    """Share of the held-out lines of over 40 characters that some training document also has."""
    lines = [s for line in heldout.splitlines() if len(s := line.strip()) > 40]
    known = {line.strip() for d in documents for line in d.text.splitlines()}
    return sum(line in known for line in lines) / len(lines)


def digest(documents: list[Document]) -> str:
    """SHA-256 over names and texts: equal digests mean equal training text."""
    h = hashlib.sha256()
    for d in documents:
        h.update(f"{d.name}\0{d.text}\0".encode())
    return h.hexdigest()
