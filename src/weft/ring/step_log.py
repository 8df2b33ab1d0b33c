"""Writes committed steps into the log of the rings, with their rows counted by class."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import repeat

from weft.core.plan import CommittedStep
from weft.core.types import Sequence
from weft.ring import _native
from weft.ring.layout import COUNTED_CLASSES, places_of_classes

_UNKNOWN = 255


class StepWriter:
    """The engine's end of the log.

    Most steps decode what the step before has decoded, and are not counted again. Of the others,
    most rows are of sequences that have been seen to decode, and whose class is known from then.

    Args:
        classes: names of the service classes.
    """

    def __init__(self, engine: _native.Engine, classes: Seq[str]) -> None:
        self._engine = engine
        self._places = places_of_classes(classes)
        self._used = range(1 + max(self._places.values(), default=0))
        self._unused = [0] * (COUNTED_CLASSES - len(self._used))
        self.forget()

    def write(self, step: CommittedStep) -> None:
        """Append a step."""
        prefill, decode = self._count(step.sequences, step.counts)
        began_ns, ended_ns = int(step.began_s * 1e9), int(step.ended_s * 1e9)
        self._engine.log_step(
            [
                step.step_id, began_ns, ended_ns, int(step.predicted_s * 1e9), step.steps,
                step.split, step.drafts, step.host_tokens, *prefill, *decode,
            ]
        )  # fmt: skip

    def forget(self) -> None:
        """Hold on to no sequence while there is nothing to compute."""
        self._decoding: dict[Sequence, int] = {}  # places of the classes of those that do
        self._latest: list[Sequence] = []  # of a step in which all rows decoded
        self._of_latest: list[int] = []  # the rows of each class of it

    def _count(self, sequences: list[Sequence], counts: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of prompts, and rows that decode, of each class."""
        prefill = [0] * COUNTED_CLASSES
        single = counts.count(1) == len(counts)
        if single and sequences == self._latest and self._latest:
            return prefill, self._of_latest
        if len(self._decoding) > 2 * len(sequences):  # most of them have ended
            self._decoding = {}
        decoding = self._decoding
        found = bytearray(map(decoding.get, sequences, repeat(_UNKNOWN)))
        if not single or _UNKNOWN in found:
            for row, count in enumerate(counts):
                if count > 1 or found[row] == _UNKNOWN:
                    found[row] = self._look_at(sequences[row], count, prefill)
        decode = [found.count(place) for place in self._used] + self._unused
        self._latest = [] if any(prefill) else sequences
        self._of_latest = decode
        return prefill, decode

    def _look_at(self, sequence: Sequence, count: int, prefill: list[int]) -> int:
        """The place of a row that decodes; the tokens of another one are added to ``prefill``."""
        place = self._places[sequence.request.service_class]
        if count == 1 and len(sequence.tokens) > sequence.num_prompt + 1:  # with its new token
            self._decoding[sequence] = place
            return place
        prefill[place] += count
        return _UNKNOWN
