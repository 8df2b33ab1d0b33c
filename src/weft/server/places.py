"""Limits the connections of a request plane by the limit of open files."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace

from weft.server.options import ServerOptions

OWN_FILES = 32  # that a request plane has open beside its connections
MOST_RESERVED = 64

logger = logging.getLogger("weft.server")


def fit_file_limit(options: ServerOptions) -> ServerOptions:
    """The options with no more connections than a process may open files; a lower number is said.

    The hard limit counts: a request plane raises its soft limit to that.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.max_connections
    if files == resource.RLIM_INFINITY or OWN_FILES + wanted + num_reserved(wanted) <= files:
        return options
    room = files - OWN_FILES
    fitting = max(1, room - min(MOST_RESERVED, max(2, room // 9)))
    logger.warning(
        "A process may open %d files here (ulimit -Hn), so a request plane takes %d connections "
        "at once, not %d (max_connections).",
        *(files, fitting, wanted),
    )
    return replace(options, max_connections=fitting)


def num_reserved(max_connections: int) -> int:
    """Connections allowed beyond the limit, for health checks."""
    return min(MOST_RESERVED, max(2, max_connections // 8))
