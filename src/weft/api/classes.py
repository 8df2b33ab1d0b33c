"""Which service class a request gets: by its tier, a header, its priority, and what its key may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.core.errors import ParameterError, WeftError, suggest
from weft.core.types import CLASS_OF_TIER, DEFAULT_CLASSES

CLASS_HEADER = "x-weft-class"
USUAL = "interactive"  # the class of whoever asks for none
USUAL_POOLED = "flex"  # that of vectors and scores: nobody reads along, so they fill what is left

_TIER_OF_CLASS: Mapping[str, str] = {USUAL: "default"}  # other classes are tiers by their own name
_SHOWN_CHARS = 100


class ClassNotAllowedError(WeftError):
    """The key of a request may not use the class that the request asks for."""

    http_status = 403
    code = "service_class_not_allowed"


@dataclass(frozen=True, slots=True)
class ClassRules:
    """What decides the class of one request, beside its body.

    Attributes:
        table: names of the class table.
        allowed: classes that the key may use, empty for all.
        default: the class of a request that asks for none.
        header: value of the request's ``x-weft-class``, which asks as ``service_tier`` does.
    """

    table: tuple[str, ...] = tuple(row.name for row in DEFAULT_CLASSES)
    allowed: tuple[str, ...] = ()
    default: str = USUAL
    header: str | None = None

    def choose(
        self, tier: str | None, priority: int | None = None, usual: str = USUAL
    ) -> tuple[str, str | None]:
        """Return the class of a request, and the tier to put into the answer.

        The answer names the tier where the request asks for one, and where another class than the
        usual one is used.

        Args:
            tier: ``service_tier`` of the body: one of OpenAI's, or the name of a class.
            priority: vLLM's, where lower numbers come first; 0 is the default.
            usual: the class of such requests where they ask for none, unless the key has another
                default, or may not use it.

        Raises:
            ParameterError: a tier is unknown, or two of the three ask for different classes.
            ClassNotAllowedError: the key may not use the class.
        """
        leaves_open = bool(priority) and tier == "default"
        asked = {
            "service_tier": self._named(None if leaves_open else tier, "service_tier"),
            "priority": None if not priority else "priority" if priority < 0 else "flex",
            CLASS_HEADER: self._named(self.header, CLASS_HEADER),
        }
        found = {param: name for param, name in asked.items() if name is not None}
        if len(set(found.values())) > 1 or (priority and asked["service_tier"]):
            first, *_, last = found
            raise ParameterError(f"Give either {first} or {last}.", param=last)
        default = self.default
        if default == USUAL and (not self.allowed or usual in self.allowed):
            default = usual
        param, name = next(iter(found.items()), ("service_tier", default))
        self.check(name, param)
        named = tier is not None or self.header is not None or name != USUAL
        return name, _TIER_OF_CLASS.get(name, name) if named else None

    def check(self, name: str, param: str | None = None) -> None:
        """Raise ClassNotAllowedError if the key may not use a class."""
        if self.allowed and name not in self.allowed:
            raise ClassNotAllowedError(
                f"This API key may not use the class '{name}', only {_listed(self.allowed)}.",
                param=param,
            )

    def _named(self, tier: str | None, param: str) -> str | None:
        """The class that a tier stands for, None where it leaves that open."""
        if tier is None or tier == "auto":
            return None
        name = CLASS_OF_TIER.get(tier, tier)
        if name not in self.table:
            known = list(dict.fromkeys(("auto", *CLASS_OF_TIER, *self.table)))
            raise ParameterError(
                f"{param} must be one of {', '.join(known)}, not '{tier[:_SHOWN_CHARS]}'."
                f"{suggest(tier[:_SHOWN_CHARS], known)}",
                param=param,
            )
        return name


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
