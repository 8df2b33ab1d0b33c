"""A ring's two descriptors: anonymous memory and a wake-up counter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.core.errors import ParameterError
from weft.ring import _native
from weft.ring.codec import SAMPLING

if TYPE_CHECKING:
    from weft.core.config import EngineConfig

DEFAULT_SLOTS = 512
DEFAULT_MEMORY = 64 * 2**20
# The arena, of which only pages in use are memory, is so many times larger: outputs of requests
# that were taken may grow beyond the memory.
ARENA_PER_MEMORY = 64
MOST_ARENA = 2**44


@dataclass(frozen=True, slots=True)
class RingFds:
    """Descriptors of one ring, to be inherited by the engine and by one request plane.

    Neither has a name in any file system, so nothing can be left behind: the kernel frees both
    when the last process that holds them is gone, however it went.

    Attributes:
        memory: an anonymous memory file.
        wake: an eventfd that the engine writes when the sleeping request plane has news.
    """

    memory: int
    wake: int

    @property
    def pass_fds(self) -> tuple[int, int]:
        """For ``subprocess.Popen(pass_fds=...)``; the numbers are the same in the child."""
        return self.memory, self.wake

    def __str__(self) -> str:
        return f"{self.memory},{self.wake}"

    @classmethod
    def parse(cls, text: str) -> RingFds:
        """Read what ``str`` wrote, as a child process finds it among its arguments."""
        try:
            memory, wake = map(int, text.split(","))
        except ValueError:
            raise ParameterError(f"{text!r} does not name a ring's two descriptors.") from None
        return cls(memory, wake)

    def close(self) -> None:
        """Close the descriptors in this process; mappings of the memory stay."""
        os.close(self.memory)
        os.close(self.wake)


def create_ring(
    slots: int = DEFAULT_SLOTS, memory_bytes: int = DEFAULT_MEMORY, arena_bytes: int | None = None
) -> RingFds:
    """Make an empty ring. The memory is taken page by page as it is first used.

    Args:
        slots: requests in flight at most, 1 to 65535.
        memory_bytes: of prompts and outputs, beyond which no request is taken; the outputs of those
            that were taken may go beyond it.
        arena_bytes: addresses for prompts and outputs; an output that finds no room there fails.
            Unset is 64 times the memory.

    Raises:
        ParameterError: a size is out of bounds.
    """
    with attached():
        if arena_bytes is None:
            arena_bytes = min(ARENA_PER_MEMORY * memory_bytes, MOST_ARENA)
        memory = _native.create(slots, arena_bytes, SAMPLING, memory_bytes)
    return RingFds(memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def ring_of(config: EngineConfig, requests: int = 0) -> RingFds:
    """Make the ring between an engine and one request plane, of the sizes of the configuration.

    Args:
        requests: that are to be in flight at once, for which there are slots if none are set.
    """
    slots, memory = config.ring_sizes(requests)
    return create_ring(slots, memory)


@contextmanager
def attached() -> Iterator[None]:
    """Turn what the native part finds wrong with a ring into a typed error."""
    try:
        yield
    except ValueError as error:
        raise ParameterError(f"The ring cannot be used: {error}.") from None
