"""Turns the token ids of one sequence into text deltas, ended by stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from weft.text.detokenize import Detokenizer
from weft.text.forms import MARK
from weft.text.stop import StopMatcher
from weft.text.tokenizer import Tokenizer


class TextStream:
    """Detokeniser and stop strings of one sequence.

    Attributes:
        stopped_by: the stop string that ended the text, or None.
        token_count: ids that belong to the text: all pushed so far, or those up to and including
            the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        markers: Mapping[int, str] | None = None,
        after: Sequence[int] = (),
    ) -> None:
        """Start an empty text that continues the ids ``after``.

        Args:
            markers: tokens with their texts that the text shows, special or not, ``MARK`` before
                each; nowhere else the text has it.

        Raises:
            ParameterError: a stop string is empty.
        """
        self.stopped_by: str | None = None
        self.token_count = 0
        self._markers = markers or {}
        shown = frozenset(self._markers)
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=shown, after=after
        )
        if self._markers:  # a marker ends the text whether it comes as a token or is spelled
            stops = [*stops, *(self._marked(stop) for stop in stops)]
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Append tokens; return the new text, and whether a stop string has ended it.

        Ids after the one that completed a stop string are not counted and give no text.
        """
        if self._matcher is None:
            self.token_count += len(token_ids)
            return self._text(token_ids), False
        out = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            out.append(self._push_one(token_id, self._matcher))
        return "".join(out), self.stopped_by is not None

    def flush(self) -> str:
        """Return the rest of the text, when the sequence ended without a stop string.

        The rest may itself complete one (an incomplete character became U+FFFD); `stopped_by` says
        so.
        """
        if self._matcher is None:
            return self._detokenizer.flush()
        if self.stopped_by is not None:
            return ""
        text = self._matched(self._matcher, self._detokenizer.flush())
        return text + self._matcher.flush()

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of more tokens, with ``MARK`` before markers."""
        markers = self._markers
        if not markers:
            return self._detokenizer.push(token_ids)
        out = []
        for marker, run in itertools.groupby(token_ids, markers.get):
            for ids in [[token] for token in run] if marker else [list(run)]:
                text = self._detokenizer.push(ids).replace(MARK, "")
                if marker and text.endswith(marker):
                    text = f"{text.removesuffix(marker)}{MARK}{marker}"
                out.append(text)
        return "".join(out)

    def _marked(self, stop: str) -> str:
        for marker in self._markers.values():
            stop = stop.replace(marker, MARK + marker)
        return stop

    def _matched(self, matcher: StopMatcher, text: str) -> str:
        text, stopped_by = matcher.push(text)
        self.stopped_by = stopped_by and stopped_by.replace(MARK, "")
        return text

    def _push_one(self, token_id: int, matcher: StopMatcher) -> str:
        self.token_count += 1
        text = self._matched(matcher, self._text([token_id]))
        tail = self._detokenizer.tail() if self.stopped_by is None else ""
        if tail and matcher.would_stop(tail):
            text += self._matched(matcher, self._detokenizer.flush())
        return text
