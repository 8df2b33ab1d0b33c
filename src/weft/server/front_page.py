"""The page for browsers at ``/``: static files of the package, served from memory."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
ENTRY = "index.html"
UNDER = "/page"  # where the files lie; `ENTRY` is at / itself
NAMED = "/ui"  # leads to /
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_INLINE = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page; ``etag`` follows from its bytes."""

    data: bytes
    kind: str
    etag: str


def page_files() -> frozenset[str]:
    """The files of the page, as paths below its folder; others there are not served."""
    found = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return frozenset(path.relative_to(FOLDER).as_posix() for path in found)


def page_paths() -> frozenset[str]:
    """The paths that need no key: they say the same on every server of this version."""
    return frozenset({"/", NAMED, *(f"{UNDER}/{name}" for name in page_files())})


@functools.cache
def page_file(name: str) -> PageFile:
    """A file of the page; read once."""
    data = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return PageFile(data, TYPES[Path(name).suffix], etag)


@functools.cache
def page_headers() -> dict[str, str]:
    """Headers of every file: nothing from elsewhere is loaded, and no script of the text runs.

    The one inline script is the import map, which browsers take from nowhere else; it is allowed by
    its hash.
    """
    found = _INLINE.search(page_file(ENTRY).data.decode())
    digest = hashlib.sha256(found[1].encode()).digest() if found else b""
    rules = {
        "default-src": "'self'",
        "script-src": f"'self' 'sha256-{base64.b64encode(digest).decode()}'",
        "img-src": "'self' data: blob:",
        "object-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "cache-control": "no-cache",  # asked for again each time, and answered by 304
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def front_routes(shown: bool) -> list[Route]:
    """The route of ``/``, and with the page those of its files.

    Args:
        shown: there is a page; without one, ``/`` only says that weft runs.
    """
    if not shown:
        return [Route("/", _alive, methods=["GET"])]
    files = page_files()

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return _answer(request, page_file(name))

    return [
        Route("/", _front, methods=["GET"]),
        Route(NAMED, _renamed, methods=["GET"]),
        Route(f"{UNDER}/{{name:path}}", file, methods=["GET"]),
    ]


async def _alive(_: Request) -> Response:
    """The probe that Ollama's clients send first."""
    return PlainTextResponse("weft is running")


async def _front(request: Request) -> Response:
    """The page for browsers, a line for probes: only browsers ask for HTML."""
    wanted = "text/html" in request.headers.get("accept", "")
    answer = _answer(request, page_file(ENTRY)) if wanted else await _alive(request)
    answer.headers["vary"] = "Accept"
    return answer


async def _renamed(_: Request) -> Response:
    """Leads to the page; relative, because a proxy may have put a path before ours."""
    return RedirectResponse("./", 308)


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**page_headers(), "etag": file.etag}
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers={**headers, "content-type": file.kind})
