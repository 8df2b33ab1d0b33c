"""Declares a setting once: name, type, default, meaning and bounds in one field.

Validation, command-line flags, YAML files and the reference page all derive from the declaration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, cast

from weft.core.errors import ConfigError, ParameterError, WeftError

Kind = Literal["int", "float", "bool", "str", "bytes", "path", "strings", "ints", "lists", "map"]

_WORDS: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "bytes": "a size such as 512MiB, 8GB or a number of bytes",
    "path": "a path",
    "strings": "a list of strings",
    "ints": "a list of whole numbers",
    "lists": "a list of lists of whole numbers",
    "map": "a mapping",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
OFF = "off"
AUTO = "auto"
_SHOWN_CHARS = 60
_MAX_BYTES = 2**63 - 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting.

    Attributes:
        low, high: inclusive bounds of numbers (of lengths, for lists).
        above: whether ``low`` itself is excluded.
        choices: the only values allowed, if not empty.
        optional: whether None ("decide for me") is allowed.
        off: whether the word ``off`` may stand for 0.
        auto: whether the word ``auto`` may stand for None.
        neutral: of a sampling parameter, what None becomes where the model has no default either.
        everyday: whether ``--help`` shows it; the others are left to ``--help-all``.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    optional: bool = False
    off: bool = False
    auto: bool = False
    neutral: float | None = None
    everyday: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def bounds(self) -> str:
        """Bounds or choices in words, or an empty string."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.off:
            return f"or {OFF}"
        if self.low is None and self.high is None:
            return ""
        if self.low is None:
            return f"at most {_plain(self.high)}"
        if self.high is None:
            return f"{'above' if self.above else 'at least'} {_plain(self.low)}"
        if self.above:
            return f"above {_plain(self.low)}, at most {_plain(self.high)}"
        return f"{_plain(self.low)} to {_plain(self.high)}"

    def parse(self, text: str) -> Any:
        """Turn a command-line word into a value; bounds are checked by ``check``."""
        try:
            if self.off and text == OFF:
                return 0
            if self.auto and text == AUTO:
                return None
            if self.kind == "int":
                return int(text)
            if self.kind == "float":
                return float(text)
            if self.kind == "bytes":
                return parse_bytes(text)
            if self.kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if self.kind == "ints":
                return tuple(int(word) for word in text.split(","))
        except (ValueError, KeyError):
            raise self._error(text) from None
        return text

    def check(self, value: Any) -> Any:
        """Return the value in its canonical type, or raise ParameterError naming the setting."""
        if value is None or (self.auto and value == AUTO):
            if self.optional:
                return None
            raise self._error(value)
        value = self._typed(value)
        if self.choices and value not in self.choices:
            raise self._error(value)
        if self.kind in ("int", "float", "bytes"):
            self._check_number(value, value)
        elif self.kind in ("strings", "ints", "lists", "map"):
            self._check_number(len(value), value)
        return value

    def _typed(self, value: Any) -> Any:
        if self.off and value in (OFF, False):  # which YAML makes of the word
            return 0
        if self.kind == "bytes" and isinstance(value, str):
            return parse_bytes(value)
        if self.kind == "strings" and isinstance(value, str):
            return (value,)
        if self.kind == "lists":
            if not isinstance(value, (list, tuple)):
                raise self._error(value)
            return tuple(replace(self, kind="ints", high=None)._typed(item) for item in value)
        if self.kind in ("strings", "ints"):
            if not isinstance(value, (list, tuple)):
                raise self._error(value)
            inner = str if self.kind == "strings" else Integral
            items = [_builtin(item) if self.kind == "ints" else item for item in value]
            if not all(isinstance(item, inner) and not isinstance(item, bool) for item in items):
                raise self._error(value)
            return tuple(items)
        if self.kind == "path" and hasattr(value, "__fspath__"):
            return str(value)
        if self.kind in ("int", "bytes", "float"):
            value = _builtin(value)
        types: dict[Kind, Any] = {"int": int, "bytes": int, "float": (int, float), "bool": bool}
        types |= {"str": str, "path": str, "map": dict}
        wrong = not isinstance(value, types[self.kind])
        if wrong or (isinstance(value, bool) and self.kind != "bool"):
            raise self._error(value)
        return value

    def _check_number(self, number: float, value: Any) -> None:
        largest = _MAX_BYTES if self.kind == "bytes" else math.inf
        low = -math.inf if self.low is None else self.low
        high = largest if self.high is None else self.high
        if not low <= number <= high or (self.above and number == low):
            raise self._error(value)
        try:
            finite = self.kind != "float" or math.isfinite(number)
        except OverflowError:  # an integer that no float holds
            finite = False
        if not finite:
            raise self._error(value)

    def _error(self, value: Any) -> WeftError:
        shown = shortened(value)
        if self.kind in ("strings", "ints", "lists", "map") and self.high is not None:
            wanted = f"{_WORDS[self.kind]} with at most {_plain(self.high)} entries"
        else:
            bounds = self.bounds()
            wanted = _WORDS[self.kind] + (f", {bounds}" if bounds else "")
            if self.choices:
                wanted = bounds
        return ParameterError(f"{self.name} must be {wanted}, not {shown}.", param=self.name)


def setting(
    kind: Kind,
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: bool = False,
    choices: tuple[str, ...] = (),
    off: bool = False,
    auto: bool = False,
    neutral: float | None = None,
    everyday: bool = False,
) -> Any:
    """Declare a setting as a dataclass field. A default of None makes it optional."""
    metadata = {
        "setting": {
            "kind": kind,
            "help": help,
            "low": low,
            "high": high,
            "above": above,
            "choices": choices,
            "optional": default is None,
            "off": off,
            "auto": auto,
            "neutral": neutral,
            "everyday": everyday,
        }
    }
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(cls: Any) -> dict[str, Setting]:
    """Return the settings that a dataclass declares, by name, in order."""
    return _settings_of(cast(Hashable, cls))


@cache
def _settings_of(cls: Any) -> dict[str, Setting]:
    found = {}
    for f in fields(cls):
        if "setting" in f.metadata:
            default = f.default if f.default is not MISSING else {}
            found[f.name] = Setting(name=f.name, default=default, **f.metadata["setting"])
    return found


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise a ParameterError of the block as a ConfigError: the user has set it, no request."""
    try:
        yield
    except ParameterError as error:
        raise ConfigError(error.message, param=error.param) from None


def check_settings(instance: Any) -> None:
    """Validate every declared field of a frozen dataclass, storing canonical values."""
    for declared in settings_of(type(instance)).values():
        value = getattr(instance, declared.name)
        canonical = declared.check(value)
        if canonical is not value:
            object.__setattr__(instance, declared.name, canonical)


def parse_bytes(text: str) -> int:
    """Parse ``512MiB``, ``8GB``, ``1.5g`` or a plain number of bytes."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
    if size > _MAX_BYTES:
        raise ParameterError(f"{shortened(text)} is not a size; write for example 512MiB or 8GB.")
    return int(size)


def shortened(value: Any) -> str:
    """``repr`` of a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a number of thousands of digits"
    if len(text) <= _SHOWN_CHARS:
        return text
    cut = text[: _SHOWN_CHARS - 3] + "..."
    return f"{cut} ({len(text.lstrip('-'))} digits)" if isinstance(value, int) else cut


def _builtin(value: Any) -> Any:
    """Return a number of another library, such as numpy, as Python's own; else the value."""
    if type(value) in (int, float, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:
        return math.inf


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit, such as ``1.5 GiB``."""
    for unit in _binary_units():
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _binary_units() -> Iterator[str]:
    yield from ("B", "KiB", "MiB", "GiB", "TiB")


def _plain(number: float | None) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def load_config_file(path: str) -> dict[str, Any]:
    """Read a YAML file of settings.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml  # most starts need none

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read config file '{path}': {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"Config file '{path}' is not valid YAML: {detail}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"Config file '{path}' must be a mapping of setting names to values.")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}
