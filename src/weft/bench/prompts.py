"""Prompts of a given length in tokens, all different, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.workload.trace import BLOCK_TOKENS

Prompt = str | list[int]

FIRST_ID = 100  # ids below it are often control tokens
# Short and common, so that nearly every tokeniser has each as one token.
WORDS = (  # noqa: SIM905 - a text is easier to read
    "the of and to in is was for that on with as by at from it an are be this which or his has "
    "had not were but have one new first also after who they two her she been other when time "
    "all school there out between some over year most city would world state where during about "
    "later up more known into can only national while used then people made under early three"
).split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of words, or of token ids.

    Attributes:
        token_ids: ids are drawn below this number; None makes text.
        tokens_per_word: of the server's tokeniser.
        extra_tokens: what the server puts around every prompt.
        shared_tokens: with which all prompts begin.
    """

    seed: int
    token_ids: int | None = None
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0
    shared_tokens: int = 0

    def make(self, number: int, tokens: int, blocks: Seq[int] = ()) -> Prompt:
        """Prompt ``number`` of a run with about that many tokens, shared ones not counted.

        Args:
            blocks: equal ones give equal text, ``BLOCK_TOKENS`` each, in place of other text.
        """
        sources = [(f"shared {self.seed}", self.shared_tokens)] if self.shared_tokens else []
        left = max(1, tokens - round(self.extra_tokens))
        for block in blocks:
            if left > 0:
                sources.append((f"block {self.seed} {block}", min(left, BLOCK_TOKENS)))
                left -= BLOCK_TOKENS
        if left > 0:
            sources.append((f"own {self.seed} {number}", left))
        parts = [self._units(random.Random(name), count) for name, count in sources]
        if self.token_ids is not None:
            return [int(unit) for part in parts for unit in part]
        return " ".join(str(unit) for part in parts for unit in part)

    def _units(self, draw: random.Random, tokens: int) -> Seq[int | str]:
        if self.token_ids is not None:
            return draw.choices(range(FIRST_ID, self.token_ids), k=tokens)
        return draw.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word)))
