"""Checks the ``Host`` of requests against DNS rebinding by web pages."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.core.addresses import is_loopback, leads_to_loopback
from weft.core.errors import WeftError
from weft.core.settings import shortened
from weft.server.auth import OPEN_PATHS
from weft.server.errors import error_response
from weft.server.exchange import inner_path
from weft.server.options import ServerOptions

CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal")  # of Docker and Podman

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::\d*)?", re.IGNORECASE)


class HostNotAllowedError(WeftError):
    """The Host header names another host."""

    http_status = 403
    code = "host_not_allowed"


def hosts_checked(options: ServerOptions) -> bool:
    """Whether requests must have an allowed ``Host``.

    A browser lets every web page call a server on the page's own host, and the owner of the page
    decides to which address that name resolves. Where only this machine can connect and no key is
    needed, only the name in the request distinguishes such a page from a local program.
    """
    if options.allowed_host:
        return True
    keyed = bool(options.api_key) or options.api_key_file is not None
    return options.uds is None and not keyed and leads_to_loopback(options.host)


class CheckHost:
    """Lets requests pass whose ``Host`` is this machine's loopback, or one of those allowed.

    ``OPEN_PATHS`` are not checked: health checks may send any host, and reveal nothing.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        names = (*options.allowed_host, options.host, *CONTAINER_HOSTS)
        self._allowed = frozenset(map(_bare, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and inner_path(scope) not in OPEN_PATHS:
            host = Headers(scope=scope).get("host", "")
            if not self._is_allowed(host):
                await error_response(_refusal(host))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _bare(match[1])
        local = name == "localhost" or name.endswith(".localhost") or is_loopback(name)
        return local or name in self._allowed or "*" in self._allowed


def _bare(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def _refusal(host: str) -> HostNotAllowedError:
    named = f"names the host {shortened(host)}" if host else "names no host"
    return HostNotAllowedError(
        f"The request {named}, which this server does not answer to, so that no web page can call "
        "it under a name of its own. Ask for localhost, or start the server with "
        "--allowed-host NAME or --api-key KEY."
    )
