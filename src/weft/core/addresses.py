"""Addresses of sockets as text, and whether other machines can reach them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from weft.core.errors import ConfigError, short

DEFAULT_PORT = 8000  # of a server
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"


def parse_address(text: str, param: str | None = None) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ConfigError."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(
            f"'{short(text, 60)}' is no address; write HOST:PORT, or [HOST]:PORT for IPv6.",
            param=param,
        )
    return host, int(port)


def format_address(address: tuple[Any, ...]) -> str:
    """Host and port of a socket's address as ``parse_address`` reads them."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(url: str) -> tuple[str, int]:
    """Host and port of a server's URL. Raises ConfigError for one that is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"'{url}' is not a server's address, such as http://127.0.0.1:8000.", param="url"
        )
    return host, port or (443 if parts.scheme == "https" else 80)


def base_of(url: str) -> str:
    """The address of a server without ``/v1``. Raises ConfigError."""
    host_of(url)
    return url.rstrip("/").removesuffix("/v1")


def leads_to_loopback(host: str) -> bool:
    """Whether a server that listens on ``host`` can be reached from this machine only."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return is_loopback(str(found[0][4][0]))
    return False


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine's loopback; a name is none."""
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(address)
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return (mapped or ip).is_loopback
    return False
