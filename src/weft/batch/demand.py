"""How much work the lines of a batch are, by a cheap estimate that needs no tokeniser.

Four bytes of a prompt count as a token. An output counts as the tokens that its line allows, times
``n``, or as ``UNLIMITED_TOKENS`` where the line names no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from weft.batch.ports import BatchLine

BYTES_PER_TOKEN = 4  # of English text, as OpenAI's help pages say
COMPLETION_TOKENS = 16  # that a completion has by default
UNLIMITED_TOKENS = 1024  # that an output counts as if its line has no limit
MOST_TOKENS, MOST_CHOICES = 2**24, 2**10  # of an output that count, and of a request
SAMPLED_BYTES = 2**18  # of a longer file, from all over it
PIECES = 64  # that the sample consists of
LONGEST_READ = 4 * 2**20  # of a longer line only so much is read
POOLED = ("/embeddings", "/rerank", "/score")  # urls of vectors and scores end so


class PromptFields(Struct):
    """The fields of a body, of any endpoint, that say how much work it is."""

    instructions: Raw = Raw(b"")
    system: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    input: Raw = Raw(b"")
    query: Raw = Raw(b"")
    documents: Raw = Raw(b"")
    text_1: Raw = Raw(b"")
    text_2: Raw = Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None

    @property
    def text(self) -> bytes:
        """The JSON of what the model reads."""
        parts = (self.instructions, self.system, self.prompt, self.messages, self.input)
        pairs = (self.query, self.documents, self.text_1, self.text_2)
        return b"".join(bytes(raw) for raw in (*parts, *pairs))

    @property
    def choices(self) -> int:
        """Outputs beside each other; more than any request may have count as so many."""
        return min(max(1, self.n or 1), MOST_CHOICES)

    def longest(self, url: str) -> int | None:
        """The most tokens of each output; None without a limit. No model has ``MOST_TOKENS``."""
        bounds = (self.max_output_tokens, self.max_completion_tokens, self.max_tokens)
        longest = next((bound for bound in bounds if bound is not None), None)
        if longest is None and url.endswith("/v1/completions"):
            longest = COMPLETION_TOKENS
        return None if longest is None else min(max(1, longest), MOST_TOKENS)


BODIES = msgspec.json.Decoder(PromptFields)
TOKEN_IDS = msgspec.json.Decoder(list[int])
_lines = msgspec.json.Decoder(BatchLine)


@dataclass(frozen=True, slots=True)
class Demand:
    """Estimated work.

    Attributes:
        input_tokens: of the prompts.
        output_tokens: that the outputs may have.
    """

    lines: float = 0
    input_tokens: float = 0
    output_tokens: float = 0

    @property
    def tokens(self) -> float:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.lines + other.lines,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
        )

    def __mul__(self, factor: float) -> Demand:
        return Demand(self.lines * factor, self.input_tokens * factor, self.output_tokens * factor)


def demand_of(line: BatchLine) -> Demand:
    """What one line asks for; a body that is not as its endpoint takes it counts by its bytes."""
    try:
        body = BODIES.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Demand(1, len(bytes(line.body)) // BYTES_PER_TOKEN)
    read = _ids(bytes(body.prompt))
    if read is None:
        read = -(-len(body.text) // BYTES_PER_TOKEN)
    if line.url.endswith(POOLED):
        return Demand(1, read)
    longest = body.longest(line.url)
    return Demand(1, read, (UNLIMITED_TOKENS if longest is None else longest) * body.choices)


def _ids(prompt: bytes) -> int | None:
    """How many token ids a prompt is; None if it is text."""
    if prompt[:1] != b"[":
        return None
    try:
        return len(TOKEN_IDS.decode(prompt))
    except msgspec.DecodeError:
        return None


def sample_demand(path: Path) -> Demand:
    """What the lines of a file ask for, judged by some of them if it is long.

    The sample is spread evenly, and scaled by bytes. Lines that are none count as lines.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    pieces = PIECES if size > SAMPLED_BYTES else 1
    sum_, seen = Demand(), 0
    with path.open("rb") as file:
        for piece in range(pieces):
            file.seek(piece * size // pieces)
            if piece:
                file.readline(LONGEST_READ)  # the rest of a line that began before
            left = SAMPLED_BYTES // pieces
            while left > 0 and (data := file.readline(LONGEST_READ)):
                left -= len(data)
                seen += len(data)
                sum_ += _read(data)
    return sum_ * (size / seen) if seen and pieces > 1 else sum_


def _read(data: bytes) -> Demand:
    if not data.strip():
        return Demand()
    try:
        return demand_of(_lines.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Demand(1)
