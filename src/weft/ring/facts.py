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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.cache_folder import cache_folder
from weft.core.errors import ConfigError, RingLinkError, RingRefusedError, short
from weft.core.sealed import SealedSocket
from weft.core.served import VARYING, ServedModel
from weft.ring.link import LinkFrame, RingAccess, expect, open_link, pack_json, unpack_json

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
MODEL, TOKENIZER = "model", "tokenizer"  # folders of the files
MOST_FILES, MOST_TEMPLATES = 64, 32
MOST_BYTES = 256 * 2**20  # of all files together
CHUNK_BYTES = 2**20
NAME = re.compile(rf"(?:{MODEL}|{TOKENIZER})/(?:{MORE_TEMPLATES}/)?[A-Za-z0-9_][\w. -]{{0,99}}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request plane knows of the model.

    Attributes:
        card: the engine's facts as JSON (``ServedModel``).
        folder: of its text files; empty if they were not fetched.
        tokenizer: the folder of the tokeniser where that is another one.
        digest: of all of it, by which the engine tells whether it is still so.
    """

    card: str
    folder: str
    tokenizer: str | None
    digest: str

    @property
    def served(self) -> ServedModel:
        """The card, with the folder here. Raises RingRefusedError if it is malformed."""
        try:
            return replace(ServedModel.from_json(self.card), folder=self.folder)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RingRefusedError(
                f"The engine's facts of its model are malformed: {short(repr(error))}."
            ) from None


# -- the engine's side -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an agent tells of a model: always the same, whatever becomes of the files meanwhile.

    Attributes:
        told: the card; name, size and digest of each file; and the digest of all of it.
        contents: of the files, by name; empty if they are too large for the link.
    """

    told: Mapping[str, Any]
    contents: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Tells a model and its text files from others."""
        return str(self.told["digest"])


def text_files(folder: Path, tokenizer: Path | None, template: Path | None) -> dict[str, Path]:
    """The files that a request plane needs, by the names under which it gets them.

    Args:
        folder: of the model.
        tokenizer: folder of the tokeniser, if that is another one.
        template: a chat template that is to be used instead of the model's.

    Raises:
        ConfigError: templates cannot be sent: their names are odd, or they are too many.
    """
    found = {f"{MODEL}/{name}": folder / name for name in (*TEXT_FILES, TEMPLATE)}
    if tokenizer is not None:
        found |= {f"{TOKENIZER}/{name}": tokenizer / name for name in TEXT_FILES}
    if template is not None:
        found[f"{MODEL}/{TEMPLATE}"] = template
    else:
        found |= _more_templates(folder / MORE_TEMPLATES)
    return {name: path for name, path in found.items() if path.is_file()}


def _more_templates(folder: Path) -> dict[str, Path]:
    found = {f"{MODEL}/{MORE_TEMPLATES}/{path.name}": path for path in folder.glob("*.jinja")}
    odd = [path.name for name, path in found.items() if not NAME.fullmatch(name)]
    if odd:
        raise ConfigError(
            f"Request planes elsewhere cannot be sent the chat template '{short(odd[0])}' of the "
            "model: rename it, with letters, digits, spaces, '_', '.' and '-', at most 100.",
            param="model",
        )
    if len(found) > MOST_TEMPLATES:
        raise ConfigError(
            f"The model has {len(found)} more chat templates in '{folder}', and request planes "
            f"elsewhere are sent {MOST_TEMPLATES} at most; remove some.",
            param="model",
        )
    return dict(sorted(found.items()))


def describe_facts(card: str, files: Mapping[str, Path]) -> EngineFacts:
    """Read the facts of a model. Raises OSError, and ValueError if the card is none."""
    contents = {name: path.read_bytes() for name, path in files.items()}
    listed = [
        {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
    ]
    lasting = {name: value for name, value in json.loads(card).items() if name not in VARYING}
    text = json.dumps([lasting, listed], sort_keys=True)
    told = {"card": card, "files": listed, "digest": hashlib.sha256(text.encode()).hexdigest()}
    if sum(map(len, contents.values())) > MOST_BYTES:
        contents = {}  # the other side refuses the list
    return EngineFacts(told, contents)


def send_files(link: SealedSocket, contents: Mapping[str, bytes]) -> None:
    """Send whatever file the other side asks for, until it closes the link: then RingLinkError."""
    while True:
        name = bytes(expect(link, LinkFrame.FILE)).decode(errors="replace")
        if name not in contents:
            raise RingLinkError(f"There is no file '{short(name)}'.")
        content = memoryview(contents[name])
        for at in range(0, len(content), CHUNK_BYTES):
            link.send_frame(LinkFrame.FILE, content[at : at + CHUNK_BYTES])
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
        card, digest = welcome["card"], welcome.get("digest")
        if not isinstance(card, str) or not isinstance(digest, str) or not digest:
            raise RingLinkError("The engine sent no facts of its model.")
        folder = _fetch(link, _checked_list(welcome.get("files"))) if with_files else None
    finally:
        link.close()
    if folder is None:
        return ModelFacts(card, "", None, digest)
    apart = folder / TOKENIZER
    return ModelFacts(card, str(folder / MODEL), str(apart) if apart.is_dir() else None, digest)


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
