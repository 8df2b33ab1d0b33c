"""Posts to addresses of the open internet: a name is looked up once, checked, and connected to.

Whoever owns a name decides where it leads, at each look-up anew. So the connection goes to the
address that was checked, and a name that leads to several is refused if one of them is private.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from typing import Any

import httpcore
import httpx

from weft.batch.webhook_settings import is_public
from weft.core.errors import WeftError

TIMEOUT_S = 15.0  # of all of it
MOST_ADDRESSES = 8  # that are tried of one name
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)


class NotDeliveredError(WeftError):
    """The other side was not told, or has not confirmed."""


class OutwardClient:
    """Posts to one address after the other; answers are not read beyond their headers.

    Args:
        allow_private: connect to any address.
        context: checks certificates; by default those of the system, or of httpx.
    """

    def __init__(self, allow_private: bool, context: ssl.SSLContext | None = None) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context or httpx.create_ssl_context(),
            max_connections=None,
            max_keepalive_connections=0,  # each request is checked anew
            network_backend=_CheckedNetwork(allow_private),
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        """Post to an address.

        Raises:
            NotDeliveredError: it may not be reached, there is no answer in time, or one with a
                status other than 2xx; redirections are not followed.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self._status_of(url, headers, body)
        except TimeoutError:
            raise NotDeliveredError(f"no answer within {TIMEOUT_S:g} s") from None
        except _FAILURES as error:
            raise NotDeliveredError(str(error) or type(error).__name__) from None
        if not 200 <= status < 300:
            raise NotDeliveredError(f"it answered {status}")

    async def _status_of(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        async with self._pool.stream("POST", url, headers=given, content=body) as response:
            return response.status

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Looks names up, and connects if every address that they lead to may be reached."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError(f"'{host}' has no address")
        for address in (await self._addresses(host, port))[:MOST_ADDRESSES]:
            try:
                return await self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises ConnectError if one of them may not be reached."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"'{host}' is not known ({error})") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for address in addresses:
            if not self._allow_private and not is_public(_plain(address)):
                raise httpcore.ConnectError(f"'{host}' leads to {address}, which is not public")
        return addresses


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address without the interface that it is reached by."""
    return ipaddress.ip_address(address.partition("%")[0])
