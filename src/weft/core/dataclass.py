"""The decorator of weft's data classes: the standard library's, but quick to import.

``dataclasses.dataclass`` compiles six functions for a frozen class, and most processes call few of
them: half of the time of weft's imports. Here the functions that compare, hash and show instances
are closures, and the standard library makes ``__init__`` when a class gets its first instance. Type
checkers see its decorator, and ``fields``, ``replace`` and ``asdict`` work.
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

ORDER = ("lt", "le", "gt", "ge")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, slots=False, kw_only=False, **options):
        """As the decorator of the standard library; options are ``frozen``, ``eq``, ``order``."""

        def decorate(cls: type) -> type:
            own = frozenset(vars(cls))
            cls.__doc__ = cls.__doc__ or cls.__name__  # or the library writes a signature into it
            declare = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
            )
            return _complete(declare(cls), own, **options)

        return decorate if cls is None else decorate(cls)


def _complete(
    cls: type, own: frozenset[str], frozen: bool = False, eq: bool = True, order: bool = False
) -> type:
    """Add the methods that a class does not define on its own."""
    methods: dict[str, Any] = {"__init__": _late_init(cls, frozen), "__repr__": _repr(cls)}
    if eq:
        methods |= _comparisons(cls, ("eq", *ORDER) if order else ("eq",))
        methods["__hash__"] = _hash(cls) if frozen else None
    if frozen:
        methods |= _writes_refused(cls)
        if "__slots__" in vars(cls):
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in own or (name == "__hash__" and cls.__hash__ is None):
            setattr(cls, name, method)
    return cls


def _late_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """An ``__init__`` that replaces itself by one that the standard library makes."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = ("default", "default_factory", "init", "kw_only")
        columns = [
            (row.name, Any, dataclasses.field(**{name: getattr(row, name) for name in given}))
            for row in dataclasses.fields(cls)
        ]
        after = getattr(cls, "__post_init__", None)
        made: Any = dataclasses.make_dataclass(
            cls.__name__,
            columns,
            namespace={"__doc__": cls.__name__, **({"__post_init__": after} if after else {})},
            repr=False,
            eq=False,
            frozen=frozen,
            slots="__slots__" in vars(cls),
        )
        made.__init__.__qualname__ = f"{cls.__qualname__}.__init__"  # which errors show
        cls.__init__ = made.__init__
        cls.__init__(self, *args, **kwargs)

    return init


def _repr(cls: Any) -> Callable[[Any], str]:
    names = [row.name for row in dataclasses.fields(cls) if row.repr]

    @reprlib.recursive_repr()
    def show(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({shown})"

    return show


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What gives the values of some fields as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda instance: tuple(getattr(instance, name) for name in names)


def _comparisons(cls: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    values = _values([row.name for row in dataclasses.fields(cls) if row.compare])

    def comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def method(self: Any, other: Any) -> Any:
            if other.__class__ is not self.__class__:
                return NotImplemented
            return compare(values(self), values(other))

        return method

    return {f"__{kind}__": comparing(getattr(operator, kind)) for kind in kinds}


def _hash(cls: Any) -> Callable[[Any], int]:
    values = _values(
        [
            row.name
            for row in dataclasses.fields(cls)
            if (row.compare if row.hash is None else row.hash)
        ]
    )

    def hash_of(self: Any) -> int:
        return hash(values(self))

    return hash_of


def _writes_refused(cls: Any) -> dict[str, Any]:
    names = {row.name for row in dataclasses.fields(cls)}

    def refuse(self: Any, name: str, verb: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {verb} field {name!r}")

    def assign(self: Any, name: str, value: Any) -> None:
        refuse(self, name, "assign to")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        refuse(self, name, "delete")
        super(cls, self).__delattr__(name)

    return {"__setattr__": assign, "__delattr__": delete}


def _state(self: Any) -> list[Any]:
    """What is pickled: values are set by ``_set_state``, as those of a frozen one can be."""
    return [getattr(self, row.name) for row in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for row, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, row.name, value)
