"""A checked request: the job that it asks for, and what makes the answer of the job's updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from weft.api.embeddings import waves
from weft.api.jobs import Job
from weft.core.errors import WeftError
from weft.core.plan import Update


class Whole(Protocol):
    """Gathers the updates of a job; ``push`` returns ids that a stop string has ended."""

    @property
    def done(self) -> bool: ...

    def push(self, updates: Seq[Update]) -> list[int]: ...

    def body(self) -> bytes: ...


class Streamed(Protocol):
    """Writes the events of a job; ``push`` also returns ids that a stop string has ended.

    The stream ends with ``last``, or with what ``failed`` makes of an error.
    """

    @property
    def done(self) -> bool: ...

    def push(self, updates: Seq[Update]) -> tuple[bytes, list[int]]: ...

    def last(self) -> bytes: ...

    def failed(self, error: WeftError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request.

    Attributes:
        whole: makes what gathers a whole answer.
        stream: makes what writes a stream; None where nothing is streamed.
    """

    job: Job
    whole: Callable[[], Whole]
    stream: Callable[[], Streamed] | None = None

    def parts(self) -> Iterator[Job]:
        """The job in pieces that are run one after the other; of texts there is one."""
        return waves(self.job) if self.job.pooled else iter((self.job,))
