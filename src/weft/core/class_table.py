"""The table of service classes: the default ones, changed and extended by a setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from weft.core.errors import ConfigError, suggest
from weft.core.settings import shortened
from weft.core.types import CLASS_OF_TIER, DEFAULT_CLASSES, ServiceClass

_CLASS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# Tiers of requests that stand for no class, or for one of another name.
_NO_CLASS_NAMES = {"auto"} | {tier for tier, name in CLASS_OF_TIER.items() if tier != name}


def with_targets(changes: Mapping[str, Any]) -> frozenset[str]:
    """Names of the classes whose targets a class table sets."""
    return frozenset(name for name, row in changes.items() if {"ttft_s", "tpot_s"} & set(row))


def class_table(changes: Mapping[str, Any]) -> tuple[ServiceClass, ...]:
    """The default classes, changed and extended by name. Raises ConfigError."""
    table = {row.name: row for row in DEFAULT_CLASSES}
    for name, given in changes.items():
        table[name] = _service_class(name, given, table.get(name))
    return tuple(sorted(table.values(), key=lambda row: row.priority))


def _service_class(name: Any, given: Any, default: ServiceClass | None) -> ServiceClass:
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name) or name in _NO_CLASS_NAMES:
        raise ConfigError(
            f"classes: {shortened(name)} cannot name a class: names have 1 to 64 letters, digits "
            f"and '_.-', and are none of {', '.join(sorted(_NO_CLASS_NAMES))}.",
            param="classes",
        )
    fields = {"priority": int, "ttft_s": (int, float), "tpot_s": (int, float)}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"classes: '{name}' must map to priority, ttft_s, tpot_s.", param="classes"
        )
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(
                f"classes: unknown key '{key}' of '{name}'.{suggest(str(key), fields)}",
                param="classes",
            )
        number = isinstance(value, fields[key]) and not isinstance(value, bool)  # type: ignore[arg-type]
        if not number or not 0 <= value < 2**31 or (key != "priority" and value == 0):
            raise ConfigError(
                f"classes: '{key}' of '{name}' must be a positive number, not {value!r}.",
                param="classes",
            )
    if default is None and "priority" not in given:
        raise ConfigError(f"classes: the new class '{name}' needs a priority.", param="classes")
    base = default or ServiceClass(name, 0)
    return replace(base, **given)


def target_words(ttft_s: float | None, tpot_s: float | None) -> str:
    """Targets in words; empty without any."""
    first = "" if ttft_s is None else f"first token in {ttft_s:g} s"
    each = "" if tpot_s is None else f"{1000 * tpot_s:g} ms a token"
    return ", ".join(filter(None, (first, each)))


def describe_targets(classes: Iterable[ServiceClass]) -> str:
    """The targets of the classes that have any, in words."""
    return ", ".join(
        f"{row.name}: {target_words(row.ttft_s, row.tpot_s)}" for row in classes if row.has_target
    )


def describe_classes(classes: Iterable[ServiceClass]) -> str:
    """The classes in the order in which they are served, with their targets."""
    return "; ".join(
        f"{row.name}: {target_words(row.ttft_s, row.tpot_s) or 'best effort'}"
        for row in sorted(classes, key=lambda row: row.priority)
    )
