"""Requests to be ordered, and the engine that they are ordered for."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from weft.core.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Jobs:
    """Requests to be ordered.

    Attributes:
        prompts: token ids, at least one each.
        longest: bound of each output in tokens (its ``max_tokens``), or None where there is none.
        done: output tokens by number of those that an earlier run finished: they are not handed
            out, but tell about the others.
        choices: outputs that each has beside each other; all lengths are those of one of them.
    """

    prompts: Seq[Seq[int]]
    longest: Seq[int | None] | None = None
    done: Mapping[int, int] = field(default_factory=dict)
    choices: Seq[int] | None = None

    def __post_init__(self) -> None:
        count = len(self.prompts)
        if self.longest is not None and len(self.longest) != count:
            raise ParameterError(
                f"There are {count} prompts, but {len(self.longest)} bounds of outputs.",
                param="longest",
            )
        if self.choices is not None and len(self.choices) != count:
            raise ParameterError(
                f"There are {count} prompts, but {len(self.choices)} numbers of choices.",
                param="choices",
            )
        for number in self.done:
            if not 0 <= number < count:
                raise ParameterError(f"There is no prompt {number}.", param="done")


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of the engine behind the order.

    Attributes:
        kv_tokens: tokens that its KV memory holds.
        requests: requests that may be submitted and not ended.
        block_size: tokens of a KV block; prefixes are shared in whole ones.
    """

    kv_tokens: int
    requests: int
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "requests", "block_size"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be at least 1.", param=name)
