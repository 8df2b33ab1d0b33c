"""The listening socket, bound before anything slow starts."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Sequence as Seq

from weft.batch.webhook_settings import read_secrets
from weft.core.errors import ConfigError
from weft.server.keyfile import read_keys
from weft.server.options import ServerOptions

BACKLOG = 2048


def listen(options: ServerOptions, classes: Seq[str] | None = None) -> socket.socket:
    """Return a socket that is bound and listens.

    Args:
        classes: the class table, which the file of keys may name; not checked without it.

    Raises:
        ConfigError: the address is in use, or cannot be had; or a file that the options name (of
            keys, of TLS, of stored responses, of usage, of secrets) cannot be used.
    """
    _check_files(options, classes)  # before anything slow starts
    return _unix(options.uds) if options.uds is not None else _tcp(options.host, options.port)


def _check_files(options: ServerOptions, classes: Seq[str] | None) -> None:
    tls_context(options)
    names = {key.name for key in read_keys(options.api_key, options.api_key_file, classes)}
    for setting in ("metrics_key", "admin_key"):
        for name in getattr(options, setting):
            if name not in names:
                raise ConfigError(f"{setting}: no key has the name '{name}'.", param=setting)
    if options.webhook_secret_file is not None:
        read_secrets(options.webhook_secret_file)
    if options.responses_db is not None:
        from weft.server.response_store import check_store  # most starts need none

        check_store(options.responses_db)
    if options.usage_db is not None:
        from weft.server.usage_store import check_usage_store

        check_usage_store(options.usage_db)


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """The TLS context; None without HTTPS. Raises ConfigError if a file cannot be used."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"TLS cannot use '{options.tls_cert}' with '{options.tls_key}': {reason}.",
            param="tls_cert",
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    """The address to show, as ``http://host:port`` or ``unix:path``."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{scheme}://{host}:{name[1]}"


def _tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The host '{host}' is not known: {error}.", param="host") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}; choose another port with --port.",
            param="port",
        ) from None
    return sock


def _unix(path: str) -> socket.socket:
    """A socket that only its owner may connect to; a dead one of the same name is replaced."""
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"Cannot listen on '{path}': {error.strerror}.", param="uds") from None
    finally:
        os.umask(mask)
    return sock


def _remove_dead(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"'{path}' exists and is not a socket.", param="uds")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            try:
                trial.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
        raise ConfigError(f"Another server listens on '{path}'.", param="uds")
