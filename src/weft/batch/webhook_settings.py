"""Settings of webhooks: addresses, secrets, and whether private networks are allowed."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from weft.core.errors import ConfigError

MAX_URL_CHARS = 2048
SECRET_PREFIX = "whsec_"
SECRET_BYTES = (24, 64)  # as Standard Webhooks has them
MOST_SECRETS = 8
MAX_FILE_BYTES = 4096
_PRINTABLE = re.compile(r"[!-~]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Where events go.

    Attributes:
        secret_file: read again for each delivery, so that secrets can be replaced.
        allow_private: addresses that are not public may be told, too.
    """

    urls: tuple[str, ...] = ()
    secret_file: str = ""
    allow_private: bool = False

    @classmethod
    def of(cls, options: Any) -> WebhookSettings:
        """Those that the options of a server have.

        Raises:
            ConfigError: an address is malformed, or a setting stands alone.
        """
        urls, file = tuple(options.webhook_url), options.webhook_secret_file
        for name, given in (
            ("webhook_secret_file", file is not None),
            ("webhook_allow_private", options.webhook_allow_private),
        ):
            if given and not urls:
                raise ConfigError(f"{name} needs addresses: give webhook_url.", param=name)
        if urls and file is None:
            raise ConfigError(
                "webhook_url needs webhook_secret_file: without a signature nobody could tell "
                "weft's events from others.",
                param="webhook_secret_file",
            )
        if len(set(urls)) < len(urls):
            raise ConfigError("webhook_url has an address twice.", param="webhook_url")
        for url in urls:
            check_url(url, options.webhook_allow_private)
        path = "" if file is None else str(Path(file).absolute())
        return cls(urls, path, options.webhook_allow_private)


def check_url(url: str, allow_private: bool) -> None:
    """Raise ConfigError for an address that cannot be told anything."""
    try:
        parts = urlsplit(url)
        good = _is_sound(url, parts)
    except ValueError:  # of the port, or of brackets
        good = False
    if not good:
        raise ConfigError(
            f"webhook_url must be an address such as https://host.example/path, without user and "
            f"fragment, not '{url[:100]}'.",
            param="webhook_url",
        )
    address = _address_of(parts.hostname or "")
    if address is not None and not allow_private and not is_public(address):
        raise ConfigError(
            f"webhook_url: '{address}' is no public address; webhook_allow_private permits it.",
            param="webhook_url",
        )


def _is_sound(url: str, parts: SplitResult) -> bool:
    host = parts.hostname or ""
    return (
        len(url) <= MAX_URL_CHARS
        and _PRINTABLE.fullmatch(url) is not None
        and parts.scheme in ("http", "https")
        and "@" not in parts.netloc
        and "#" not in url
        and "\\" not in url
        and parts.port != 0
        and (_HOST_NAME.fullmatch(host) is not None or _address_of(host) is not None)
    )


def _address_of(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: IPAddress) -> bool:
    """Whether an address is one of the open internet, and leads to no other one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or address.is_loopback
        or address.is_link_local
        or address.is_private
    )


def read_secrets(path: str) -> list[bytes]:
    """The secrets of a file: a line for each, the newest first; the rest of lines are comments.

    Raises:
        ConfigError: it cannot be read, or a secret in it is malformed.
    """
    try:
        text = Path(path).read_bytes()[:MAX_FILE_BYTES].decode()
    except OSError as error:
        message = f"Cannot read the file of webhook secrets '{path}': {error.strerror}."
        raise ConfigError(message, param="webhook_secret_file") from None
    except UnicodeDecodeError:
        raise _wrong(path, "is not text") from None
    lines = [line.strip() for line in text.splitlines()]
    secrets = [_secret(path, line) for line in lines if line and not line.startswith("#")]
    if not 1 <= len(secrets) <= MOST_SECRETS:
        raise _wrong(path, f"has {len(secrets)} secrets, and must have 1 to {MOST_SECRETS}")
    return secrets


def _secret(path: str, line: str) -> bytes:
    low, high = SECRET_BYTES
    try:
        secret = base64.b64decode(line.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not line.startswith(SECRET_PREFIX) or not low <= len(secret) <= high:
        raise _wrong(
            path, f"has a line that is not {SECRET_PREFIX} and {low} to {high} bytes in base64"
        )
    return secret


def _wrong(path: str, what: str) -> ConfigError:
    message = f"The file of webhook secrets '{path}' {what}."
    return ConfigError(message, param="webhook_secret_file")
