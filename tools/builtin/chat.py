"""Chat examples synthesised from the standard library: questions whose answers are its text."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

from builtin.corpus import Document, module_name

Message = tuple[str, str]  # role, content
Chat = list[Message]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant for Python programmers.",
    "Answer questions about Python.",
)
SYSTEM_SHARE = 0.3
MIN_SOURCE, MAX_SOURCE = 60, 1800  # characters
MIN_DOC, MAX_DOC = 30, 1500  # characters

# C modules that every build has: their docstrings are not in any source file.
C_MODULES = (
    *("builtins", "_collections", "_functools", "_io", "_operator", "_random", "_sre"),
    *("_struct", "_thread", "array", "binascii", "cmath", "gc", "itertools", "marshal"),
    *("math", "select", "sys", "time", "zlib"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _code(source: str) -> str:
    return f"```python\n{source}\n```"


def _first_sentence(doc: str) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(doc.split("\n\n")[0].split())


def _write_chat(rng: random.Random, node: Function, doc: str, source: str) -> Chat:
    signature = f"{node.name}({ast.unparse(node.args)})"
    question = rng.choice(
        (
            "Write a Python function `{0}`: {1}",
            "Write a function `{0}` in Python. {1}",
            "Implement `{0}` in Python: {1}",
        )
    )
    return [
        ("user", question.format(signature, _first_sentence(doc))),
        ("assistant", _code(source)),
    ]


def _explain_chat(rng: random.Random, name: str, doc: str) -> Chat:
    question = rng.choice(
        ("What does `{0}` do?", "Explain `{0}`.", "What is `{0}` in Python?", "Describe `{0}`.")
    )
    return [("user", question.format(name)), ("assistant", doc)]


def _document_chat(node: Function, doc: str) -> Chat:
    """Given the code without its docstring, answer with the docstring."""
    bare = type(node)(**{**vars(node), "body": node.body[1:] or [ast.Pass()]})
    return [
        ("user", f"Write a docstring for this function:\n{_code(ast.unparse(bare))}"),
        ("assistant", doc),
    ]


def _function_chat(rng: random.Random, node: Function, name: str, text: str) -> Chat | None:
    doc = ast.get_docstring(node)
    source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    if not doc or not MIN_DOC <= len(doc) <= MAX_DOC:
        return None
    if not MIN_SOURCE <= len(source) <= MAX_SOURCE:
        return _explain_chat(rng, name, doc)
    kind = rng.random()
    if kind < 0.5:
        return _write_chat(rng, node, doc, source)
    if kind < 0.75:
        return _explain_chat(rng, name, doc)
    if kind < 0.85:
        return _document_chat(node, doc)
    follow_up: Chat = [("user", "Show me the code."), ("assistant", _code(source))]
    return _explain_chat(rng, name, doc) + follow_up


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Top-level functions and classes, and the methods of those classes, by dotted name."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            for child in node.body:
                if isinstance(child, Function):
                    yield f"{node.name}.{child.name}", child


def _file_chats(rng: random.Random, document: Document) -> Iterator[Chat]:
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    module = module_name(Path(document.name))
    module_doc = ast.get_docstring(tree)
    if module_doc and len(module_doc) >= MIN_DOC:
        short = module_doc if len(module_doc) <= MAX_DOC else module_doc.split("\n\n")[0]
        yield [("user", f"What is the module `{module}` for?"), ("assistant", short)]
    for name, node in _definitions(tree):
        if isinstance(node, Function):
            chat = _function_chat(rng, node, f"{module}.{name}", document.text)
            if chat:
                yield chat
        elif isinstance(node, ast.ClassDef):
            doc = ast.get_docstring(node)
            if doc and MIN_DOC <= len(doc) <= MAX_DOC:
                yield _explain_chat(rng, f"{module}.{name}", doc)


def _topic_chats(document: Document) -> Iterator[Chat]:
    """The first paragraphs of a section of the language reference."""
    name = document.name.removeprefix("topics/")
    title, _, body = document.text.partition("\n")
    answer = body.lstrip("*=-\n ")[:MAX_DOC]
    answer = answer[: answer.rfind("\n\n")] if "\n\n" in answer else answer
    yield [("user", f"Explain {title.strip().lower()} in Python."), ("assistant", answer)]
    yield [("user", f"Tell me about `{name}`."), ("assistant", answer)]


def _c_chats(rng: random.Random) -> Iterator[Chat]:
    """Docstrings of functions, types and methods written in C."""
    for module_label in C_MODULES:
        module = builtins if module_label == "builtins" else importlib.import_module(module_label)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or inspect.ismodule(value):
                continue
            members = sorted(vars(value).items()) if isinstance(value, type) else []
            prefix = "" if module is builtins else module_label.lstrip("_") + "."
            named = [(prefix + name, value)] + [(f"{prefix}{name}.{m}", v) for m, v in members]
            for label, item in named:
                doc = inspect.getdoc(item) if callable(item) else None
                if doc and MIN_DOC <= len(doc) <= MAX_DOC and "__" not in label:
                    yield _explain_chat(rng, label, doc)


def chats(documents: list[Document], seed: int) -> list[Chat]:
    """Every chat that `documents` and the C modules give, without repetitions, shuffled."""
    rng = random.Random(seed)
    found: list[Chat] = []
    for document in documents:
        if document.name.startswith("topics/"):
            found.extend(_topic_chats(document))
        else:
            found.extend(_file_chats(rng, document))
    found.extend(_c_chats(rng))
    unique = list({tuple(chat): chat for chat in found}.values())
    rng.shuffle(unique)
    return [_with_system(rng, chat) for chat in unique]


def _with_system(rng: random.Random, chat: Chat) -> Chat:
    if rng.random() >= SYSTEM_SHARE:
        return chat
    return [("system", rng.choice(SYSTEM_PROMPTS)), *chat]
