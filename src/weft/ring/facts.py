"""The facts of a model that a request plane on another machine needs: its card, and its text files.

The files are fetched over the link of the ring, checked against the digests that come with the
card, and kept in the cache folder by their content: a second start fetches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.cache_folder import cache_folder
from weft.core.errors import RingLinkError, RingRefusedError, short
from weft.core.sealed import SealedSocket
from weft.ring.link import LinkFrame, RingAccess, expect, open_link, pack_json, unpack_json

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
MODEL, TOKENIZER = "model", "tokenizer"  # folders of the files
MOST_FILES = 64
MOST_BYTES = 256 * 2**20  # of all files together
CHUNK_BYTES = 2**20
NAME = re.compile(rf"(?:{MODEL}|{TOKENIZER})/(?:{MORE_TEMPLATES}/)?[A-Za-z0-9_][\w.-]{{0,99}}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request plane knows of the model.

    Attributes:
        card: the engine's facts as JSON (``ServedModel``).
        folder: of its text files.
        tokenizer: the folder of the tokeniser where that is another one.
    """

    card: str
    folder: str
    tokenizer: str | None


# -- the engine's side -----------------------------------------------------------------------------


def text_files(folder: Path, tokenizer: Path | None, template: Path | None) -> dict[str, Path]:
    """The files that a request plane needs, by the names under which it gets them.

    Args:
        folder: of the model.
        tokenizer: folder of the tokeniser, if that is another one.
        template: a chat template that is to be used instead of the model's.
    """
    found = {f"{MODEL}/{name}": folder / name for name in (*TEXT_FILES, TEMPLATE)}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))[: MOST_FILES // 2]
    found |= {f"{MODEL}/{MORE_TEMPLATES}/{path.name}": path for path in more}
    if tokenizer is not None:
        found |= {f"{TOKENIZER}/{name}": tokenizer / name for name in TEXT_FILES}
    if template is not None:
        found = {name: path for name, path in found.items() if MORE_TEMPLATES not in name}
        found[f"{MODEL}/{TEMPLATE}"] = template
    return {n: p for n, p in found.items() if p.is_file() and NAME.fullmatch(n)}


def describe_facts(card: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """What a request plane is told at first: the card, and name, size and digest of each file."""
    listed = []
    for name, path in files.items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            listed.append({"name": name, "bytes": file.tell(), "sha256": digest})
    return {"card": card, "files": listed}


def send_files(link: SealedSocket, files: Mapping[str, Path]) -> None:
    """Send whatever file the other side asks for, until it closes the link: then RingLinkError."""
    while True:
        name = bytes(expect(link, LinkFrame.FILE)).decode(errors="replace")
        if name not in files:
            raise RingLinkError(f"There is no file '{short(name)}'.")
        with files[name].open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                link.send_frame(LinkFrame.FILE, chunk)
        link.send_frame(LinkFrame.FILE)


# -- the request plane's side ----------------------------------------------------------------------


def fetch_facts(access: RingAccess, *, with_files: bool) -> ModelFacts:
    """Ask an engine for its facts; waits while it starts.

    Args:
        with_files: also fetch the files of tokeniser and template.

    Raises:
        RingLinkError, RingRefusedError, ConfigError: as ``open_link``.
    """
    link, welcome = open_link(access, {"facts": True})
    try:
        while "card" not in welcome:
            welcome = unpack_json(expect(link, LinkFrame.WELCOME))
        card = welcome["card"]
        if not isinstance(card, str):
            raise RingLinkError("The engine sent no facts of its model.")
        folder = _fetch(link, _checked_list(welcome.get("files"))) if with_files else None
    finally:
        link.close()
    if folder is None:
        return ModelFacts(card, json.loads(card)["folder"], None)
    apart = folder / TOKENIZER
    return ModelFacts(card, str(folder / MODEL), str(apart) if apart.is_dir() else None)


def _checked_list(listed: Any) -> list[dict[str, Any]]:
    """The list of files, if names are harmless and all together are not too large."""
    if not isinstance(listed, list) or len(listed) > MOST_FILES:
        raise RingLinkError("The engine sent no list of the model's text files.")
    for entry in listed:
        good = isinstance(entry, dict) and NAME.fullmatch(str(entry.get("name")))
        if not good or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            raise RingLinkError(f"The engine names a file that no model has: {short(entry)}.")
        if not re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
            raise RingLinkError(f"The engine sent no digest of '{entry['name']}'.")
    if sum(entry["bytes"] for entry in listed) > MOST_BYTES:
        raise RingRefusedError(
            f"The model's text files are larger than {MOST_BYTES >> 20} MiB; copy them here and "
            "name their folder with --tokenizer."
        )
    return listed


def _fetch(link: SealedSocket, listed: list[dict[str, Any]]) -> Path:
    """The folder with these files, from the cache or the link."""
    digest = hashlib.sha256(pack_json(listed)).hexdigest()[:32]
    folder = cache_folder() / "frontend" / digest
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
            for entry in listed:
                path = Path(part) / "files" / entry["name"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_file(link, entry))
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(Path(part) / "files", folder)
    except OSError as error:
        raise RingRefusedError(
            f"The model's text files cannot be kept in '{folder.parent}': {error.strerror}; set "
            "XDG_CACHE_HOME, or copy them here and name their folder with --tokenizer."
        ) from None
    return folder


def _file(link: SealedSocket, entry: Mapping[str, Any]) -> bytes:
    """The content of a file. Raises RingLinkError unless it is what was announced."""
    link.send_frame(LinkFrame.FILE, entry["name"].encode())
    content = bytearray()
    while chunk := expect(link, LinkFrame.FILE):
        content += chunk
        if len(content) > entry["bytes"]:
            break
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise RingLinkError(f"'{entry['name']}' is not the file that the engine announced.")
    return bytes(content)
