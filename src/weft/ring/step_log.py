"""Writes committed steps into the log of the rings, with their rows counted by class."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import add

from weft.core.plan import CommittedStep
from weft.core.types import Sequence
from weft.ring import _native
from weft.ring.layout import COUNTED_CLASSES, places_of_classes


class EngineLog:
    """The engine's end of the log.

    Most steps decode what the step before has decoded, and count that no more: they know the
    sequences at their head.

    Args:
        classes: names of the service classes.
    """

    def __init__(self, engine: _native.Engine, classes: Seq[str]) -> None:
        self._engine = engine
        self._places = places_of_classes(classes)
        self._head: list[Sequence] = []  # decoded by the latest step
        self._of_head = [0] * COUNTED_CLASSES

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
        self._head = []
        self._of_head = [0] * COUNTED_CLASSES

    def _count(self, sequences: list[Sequence], counts: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of prompts, and rows that decode, of each class."""
        known = len(self._head)
        if sequences[:known] != self._head or counts[:known].count(1) != known:
            known = 0
            self.forget()
        prefill, others, head = [0] * COUNTED_CLASSES, [0] * COUNTED_CLASSES, known
        for row in range(known, len(sequences)):
            sequence, count = sequences[row], counts[row]
            place = self._places[sequence.request.service_class]
            if count > 1 or len(sequence.tokens) <= sequence.num_prompt + 1:  # with its new token
                prefill[place] += count
            elif row > head:
                others[place] += 1
            else:
                self._of_head[place] += 1
                head += 1
        if head > known:
            self._head = sequences[:head]
        return prefill, list(map(add, self._of_head, others))
